"""Check numbers that a caller in Python gives, as the command line checks its own."""

import math
import operator
from typing import Any

from eagleray.base.errors import UserError


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number within bounds. Raises UserError, which names the argument, for anything else."""
    try:
        number = operator.index(value)  # also of NumPy
    except TypeError:
        raise UserError(f"{name}={value!r}: expected a whole number") from None
    if isinstance(value, bool) or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" from {least} on" if most is None else f" from {least} to {most}"
        raise UserError(f"{name}={value!r}: expected a whole number{bounds}")
    return number


def share(name: str, value: Any) -> float:
    """Return a number above 0, up to 1. Raises UserError, which names the argument, for anything else."""
    try:
        number = math.nan if isinstance(value, str) else float(value)  # also of NumPy
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= 1:
        raise UserError(f"{name}={value!r}: expected a number above 0, up to 1")
    return number
