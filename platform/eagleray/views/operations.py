"""Apply the operations of plug-ins to the crop of one view."""

import torch
from torch import Tensor

from eagleray.base.errors import PluginError
from eagleray.config import register


def operate(name: str, crop: Tensor, seed: int) -> None:
    """Apply the operation called `name` to a crop, uint8 (3, S, S), in place.

    Raises PluginError when it fails or returns something else than such a crop."""
    function = register.entries("view")[name].target
    try:
        result = function(crop, seed)
    except Exception as e:
        raise PluginError(f"view operation {name!r} failed: {type(e).__name__}: {e}") from e
    if not isinstance(result, Tensor) or result.shape != crop.shape or result.dtype != torch.uint8:
        what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise PluginError(f"view operation {name!r} returned {what}, expected torch.uint8 {tuple(crop.shape)}")
    crop.copy_(result)
