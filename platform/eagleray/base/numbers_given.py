"""Check numbers that a caller in Python gives, as the command line checks its own."""

from numbers import Integral, Real  # also those of NumPy
from typing import Any

from eagleray.base.errors import UserError


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number within bounds. Raises UserError, which names the argument, for anything else."""
    if not isinstance(value, Integral):
        raise UserError(f"{name}={value!r}: expected a whole number")
    number = int(value)
    if isinstance(value, bool) or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" from {least} on" if most is None else f" from {least} to {most}"
        raise UserError(f"{name}={value!r}: expected a whole number{bounds}")
    return number


def share(name: str, value: Any) -> float:
    """Return a number above 0, up to 1. Raises UserError, which names the argument, for anything else."""
    if not (isinstance(value, Real) and 0 < float(value) <= 1):
        raise UserError(f"{name}={value!r}: expected a number above 0, up to 1")
    return float(value)
