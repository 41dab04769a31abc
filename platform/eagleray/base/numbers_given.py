"""Check numeric arguments of the Python API, as the command line checks its options."""

from numbers import Integral, Real  # base classes of NumPy's numbers, too
from typing import Any

from eagleray.base.errors import UserError


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `value` as an int. Raises UserError, which names the argument, unless it is an integer from `least` to
    `most`. None: no bound."""
    if not isinstance(value, Integral):
        raise UserError(f"{name}={value!r}: expected a whole number")
    number = int(value)
    if isinstance(value, bool) or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f" from {least} on" if most is None else f" from {least} to {most}"
        raise UserError(f"{name}={value!r}: expected a whole number{bounds}")
    return number


def share(name: str, value: Any) -> float:
    """Return `value` as a float. Raises UserError, which names the argument, unless it is above 0 and at most 1."""
    if not (isinstance(value, Real) and 0 < float(value) <= 1):
        raise UserError(f"{name}={value!r}: expected a number above 0, up to 1")
    return float(value)
