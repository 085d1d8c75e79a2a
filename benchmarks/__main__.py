# SPDX-License-Identifier: Apache-2.0
"""One entry point for every benchmark."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import (
    audit,
    cuda_build,
    divergence,
    divergence_cuda,
    each_kernel,
    gpu_check,
    record,
    sass,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cases = verbs.add_parser("divergence", help="exact KL against other ways to compute it")
    divergence.add_arguments(cases)
    divergence_cuda.add_arguments(cases)
    sass.add_arguments(verbs.add_parser("sass", help="what the compiled kernels cost per pair"))
    builds = verbs.add_parser("cuda-build", help="time and size of a build from nothing")
    cuda_build.add_arguments(builds)
    small = verbs.add_parser("each-kernel", help="one small call of each kernel")
    each_kernel.add_arguments(small)
    gpu_check.add_arguments(verbs.add_parser("gpu-check", help="steps of gpu_check.sh"))
    files = verbs.add_parser("audit", help="trm audit of a large file: time and peak memory")
    audit.add_arguments(files)
    compare = verbs.add_parser("compare", help="which differences of two results exceed the noise")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "divergence":
        here = divergence_cuda if arguments.device == "cuda" else divergence
        return here.run(arguments)
    runs = {
        "audit": audit.run,
        "sass": sass.run,
        "cuda-build": cuda_build.run,
        "each-kernel": each_kernel.run,
        "gpu-check": gpu_check.run,
    }
    if arguments.verb in runs:
        return runs[arguments.verb](arguments)
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    record.compare(before, after, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
