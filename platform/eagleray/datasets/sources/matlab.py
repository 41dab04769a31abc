"""Read variables from MATLAB files."""

import io
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.storage import store


def read_arrays(url: str, *names: str) -> list[NDArray[Any]]:
    """Return the variables with these names from a MATLAB file.

    Raises UserError when the file or a variable is missing.
    """
    try:
        data = store.store(url).get(url)
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    arrays = load(bytes(data), f"{url}: expected a MATLAB file with {', '.join(names)}", variable_names=names)
    if missing := [name for name in names if name not in arrays]:
        raise UserError(f"{url}: expected a MATLAB file with {', '.join(names)}; {missing[0]} is missing")
    return [arrays[name] for name in names]


def load(data: bytes, message: str, *, variable_names: Sequence[str], squeeze_me: bool = False) -> dict[str, Any]:
    """Return the variables of a MATLAB file whose bytes are in memory.

    Raises UserError, beginning with `message`, when the bytes cannot be parsed.
    """
    from scipy.io import loadmat

    try:
        return dict(loadmat(io.BytesIO(data), variable_names=variable_names, squeeze_me=squeeze_me))
    except Exception as e:  # SciPy's readers raise errors of any type on bytes that they do not expect
        raise UserError(f"{message} ({type(e).__name__})") from None
