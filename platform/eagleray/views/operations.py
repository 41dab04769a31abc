"""Applies the view operations of plug-ins to a crop."""

import torch
from torch import Tensor

from eagleray.base.errors import PluginError
from eagleray.config import register


def operate(name: str, crop: Tensor, seed: int) -> None:
    """Apply the operation called `name` to a crop, uint8 (3, S, S), in place.

    Raises PluginError when the operation fails or does not return a crop of the same shape and type."""
    entry = register.entries("view").get(name)
    if entry is None:
        raise PluginError(f"view operation {name!r}: this process has not loaded the plug-in that registers it")
    try:
        result = entry.target(crop, seed)
    except Exception as e:
        said = " ".join(str(e).split())
        raise PluginError(f"view operation {name!r} failed: {type(e).__name__}: {said}") from e
    if not isinstance(result, Tensor) or result.shape != crop.shape or result.dtype != torch.uint8:
        what = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise PluginError(f"view operation {name!r} returned {what}, expected torch.uint8 {tuple(crop.shape)}")
    crop.copy_(result)
