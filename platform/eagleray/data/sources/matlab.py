"""Arrays of MATLAB's files."""

import io
import zlib
from typing import Any

from numpy.typing import NDArray

from eagleray.data import store
from eagleray.errors import UserError


def arrays(url: str, *names: str) -> list[NDArray[Any]]:
    """The variables of these names. Raises UserError when the file or one of them is not there."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        held = loadmat(io.BytesIO(store.store(url).get(url)), variable_names=names)
        return [held[name] for name in names]
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except (KeyError, ValueError, TypeError, NotImplementedError, MatReadError, zlib.error) as e:
        raise UserError(f"{url}: expected a MATLAB file with {', '.join(names)} ({type(e).__name__})") from None
