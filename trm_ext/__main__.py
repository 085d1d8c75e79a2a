# SPDX-License-Identifier: Apache-2.0
"""``python -m trm_ext`` is ``trm``."""

import sys

from trm_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
