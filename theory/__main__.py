# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``python -m theory``."""

import os
import sys

from theory.cli import main

if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
