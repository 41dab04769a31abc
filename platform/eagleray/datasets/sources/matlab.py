"""Arrays of MATLAB's files."""

import io
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.storage import store


def arrays(url: str, *names: str) -> list[NDArray[Any]]:
    """The variables of these names. Raises UserError when the file or one of them is not there."""
    try:
        data = store.store(url).get(url)
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    held = loaded(bytes(data), f"{url}: expected a MATLAB file with {', '.join(names)}", variable_names=names)
    if lacking := [name for name in names if name not in held]:
        raise UserError(f"{url}: expected a MATLAB file with {', '.join(names)}; {lacking[0]} is not there")
    return [held[name] for name in names]


def loaded(data: bytes, said: str, *, variable_names: Sequence[str], squeeze_me: bool = False) -> dict[str, Any]:
    """The variables of a file that is in memory. Raises UserError with what was `said` for what is none, or cut off."""
    from scipy.io import loadmat

    try:
        return dict(loadmat(io.BytesIO(data), variable_names=variable_names, squeeze_me=squeeze_me))
    except Exception as e:  # SciPy's readers fail in every way on bytes that are not what they expect
        raise UserError(f"{said} ({type(e).__name__})") from None
