"""Operations on a uint8 crop: those of plug-ins, and timm's RandAugment (Cubuk et al. 2020, arXiv:1909.13719)."""

import functools
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data.auto_augment import RandAugment, rand_augment_transform
from timm.data.transforms import str_to_pil_interp
from torch import Tensor

from eagleray.base.errors import PluginError
from eagleray.base.rng import seed_global_generators
from eagleray.config import register
from eagleray.config.view import View
from eagleray.views.colours import MEAN


def operate(name: str, crop: Tensor, seed: int) -> None:
    """Apply the operation called `name` to a crop, uint8 (3, S, S), in place.

    Raises PluginError when the operation is not registered, fails, or returns another shape or type than the crop's."""
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


@functools.cache
def policy(name: str, size: int, interpolation: str) -> RandAugment:
    """Return timm's policy `name` for crops of `size` pixels. Areas that it leaves empty get ImageNet's mean colour."""
    fill = tuple(round(255 * x) for x in MEAN)
    settings = {"translate_const": int(size * 0.45), "img_mean": fill}
    augmentation = rand_augment_transform(name, settings | {"interpolation": str_to_pil_interp(interpolation)})
    for op in augmentation.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize
    return augmentation


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Reduce an image to `bits` per channel. 0 bits give black: strong policies use 0, but Pillow 13 refuses it."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new("RGB", image.size)


def augment(crop: Tensor, view: View, seed: int) -> None:
    """Apply the view's RandAugment policy to a uint8 crop (3, S, S) in place. The seed decides the operations.

    The view is flipped after the policy, while timm flips first. The views have the same distribution either way:
    rotation, shear and translation have a random sign, so each is as likely as its mirror image."""
    assert view.randaugment
    image = Image.fromarray(crop.permute(1, 2, 0).numpy())
    with seed_global_generators(seed):
        out = policy(view.randaugment, view.size, view.interpolation)(image)
    crop.copy_(torch.from_numpy(np.array(out)).permute(2, 0, 1))
