# SPDX-License-Identifier: Apache-2.0
"""A figure as a text prints it, and the values that print so."""

from decimal import Decimal
from typing import Any

import pytest


def quoted(figure: str) -> Any:
    """Equals a value that is the figure to half a unit of its last digit, such as "0.031".

    >>> 0.0314 == quoted("0.031"), 0.0316 == quoted("0.031"), 6.66e-6 == quoted("6.7e-6")
    (True, False, True)
    """
    unit = Decimal(figure).as_tuple().exponent
    # A figure that ends in a 5 one digit on was rounded either way: float64's rounding on top.
    return pytest.approx(float(figure), rel=0, abs=0.5 * 10.0 ** int(unit) * (1 + 1e-9))
