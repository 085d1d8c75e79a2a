# SPDX-License-Identifier: Apache-2.0
"""One entry point for every benchmark."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import audit, divergence, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cases = verbs.add_parser("divergence", help="exact KL against other ways to compute it")
    divergence.add_arguments(cases)
    files = verbs.add_parser("audit", help="trm audit of a large file: time and peak memory")
    audit.add_arguments(files)
    compare = verbs.add_parser("compare", help="which differences of two results exceed the noise")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "divergence":
        return divergence.run(arguments)
    if arguments.verb == "audit":
        return audit.run(arguments)
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    record.compare(before, after, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
