"""Turn settings given in Python into `a.b=value` overrides, which recipes and sweeps read."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from eagleray.base.errors import UserError
from eagleray.config import yaml_text

Overrides = Mapping[str, Any] | Sequence[str]


def overrides_of(given: Overrides | None, **keys: Any) -> list[str]:
    """Return `a.b=value` overrides from `given`, a mapping by dotted key or a list of overrides, and from the keywords
    that are not None. Raises UserError when `given` is of another kind."""
    if isinstance(given, Mapping):
        lines = [f"{key}={text_of(value)}" for key, value in given.items()]
    elif given is None or (isinstance(given, Sequence) and not isinstance(given, str)):
        lines = [str(line) for line in given or ()]
    else:
        raise UserError(f"{given!r}: expected a mapping such as {{'optim.batch': 256}}")
    return lines + [f"{key}={text_of(value)}" for key, value in keys.items() if value is not None]


def text_of(value: Any) -> str:
    """Return a value as one line of YAML, which gives the same value when it is read."""
    return yaml_text.dump_line(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, PurePath):
        return str(value)
    # Values of NumPy, pandas and PyTorch come first, as NumPy's float64 is a float that YAML cannot write.
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(f"{value!r}: expected text, a number, a path, or lists and mappings of them")
