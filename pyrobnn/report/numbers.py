"""How numbers are written: as many digits as they deserve, with a real minus sign."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 3) -> str:
    """A number to so many significant digits.

    >>> significant(-0.09017), significant(53.0), significant(1234.5), significant(2.5e-7)
    ('−0.0902', '53', '1234', '2.5e−07')
    """
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}".replace("-", "−")
    if abs(value) >= 10**digits:
        return f"{value:.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def with_error(value: float, error: float) -> tuple[str, str]:
    """A number and its standard error, to the error's second significant digit.

    >>> with_error(-0.09017, 0.0971), with_error(123.4, 25.0)
    (('−0.090', '0.097'), ('123', '25'))
    """
    if not error > 0:
        return significant(value), significant(error)
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f}".replace("-", "−"), f"{error:.{decimals}f}"
