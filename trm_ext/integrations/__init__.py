# SPDX-License-Identifier: Apache-2.0
"""Adapters, one file each; none is imported unless asked for."""
