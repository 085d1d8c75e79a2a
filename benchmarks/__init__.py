# SPDX-License-Identifier: Apache-2.0
"""Performance, measured: ``python -m benchmarks --help``. Ratios come from one run, interleaved."""
