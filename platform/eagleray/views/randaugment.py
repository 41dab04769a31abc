"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719), timm's, on a crop: every image's own choice of operations."""

import functools
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data.auto_augment import RandAugment, rand_augment_transform
from timm.data.transforms import str_to_pil_interp
from torch import Tensor

from eagleray.base.rng import seed_global_generators
from eagleray.config.view import View
from eagleray.views.photometric import MEAN


@functools.cache
def policy(name: str, size: int, interpolation: str) -> RandAugment:
    """As timm makes it for crops of that size: what is moved in from outside has the mean colour."""
    fill = tuple(round(255 * x) for x in MEAN)
    settings = {"translate_const": int(size * 0.45), "img_mean": fill}
    found = rand_augment_transform(name, settings | {"interpolation": str_to_pil_interp(interpolation)})
    for op in found.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize
    return found


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Of 0 bits, which strong policies ask for, nothing is left; Pillow 13 refuses them."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new("RGB", image.size)


def augment(crop: Tensor, view: View, seed: int) -> None:
    """Change a crop (3, S, S) of bytes in place, as the seed says. A mirrored view is mirrored after this, not before:
    no operation tells left from right but by a sign, which is drawn."""
    assert view.randaugment
    image = Image.fromarray(crop.permute(1, 2, 0).numpy())
    with seed_global_generators(seed):
        out = policy(view.randaugment, view.size, view.interpolation)(image)
    crop.copy_(torch.from_numpy(np.array(out)).permute(2, 0, 1))
