"""Rotary positions of timm's DINOv3 transformers: coordinates of patches that training shifts, stretches and scales.

RoPE is by Su et al. 2021, arXiv:2104.09864. In training, the box that the coordinates fill is changed at random as in
DINOv3 (Siméoni et al. 2025, arXiv:2508.10104, section 3.2); timm's options `rope_shift_coords`, `rope_jitter_coords`
and `rope_rescale_coords` limit the changes. timm draws one box for all blocks, but another one on every rank. Here, as
in the authors' code, every block has its own box. It depends only on the step, so it is the same on all ranks and after
a restart. L blocks, a grid of h x w = N patches, C channels of a head."""

import math
from typing import Any

import numpy as np
import torch
from timm.layers import RotaryEmbeddingDinoV3
from timm.models import Eva
from torch import Tensor

from eagleray.base import devices
from eagleray.models.tokens import Hidden, hide


def rotary(model: Any) -> bool:
    """Return whether a model is a DINOv3 transformer of timm, with rotary positions alone."""
    return (
        type(model) is Eva
        and isinstance(model.rope, RotaryEmbeddingDinoV3)
        and model.rope.rotate_half
        and model.dynamic_img_size
        and model.pos_embed is None
        and model.patch_drop is None
    )


def rotary_features(model: Any, images: Tensor, turns: Tensor, hidden: Hidden | None = None) -> Tensor:
    """Return the output of a `rotary` model's `forward_features`, tokens (B, P + N, D), for images (B, 3, S, S).

    `turns` are the result of `rotations`; patches may be hidden."""
    patches = model.patch_embed(images)  # (B, h, w, D)
    patches = patches if hidden is None else hide(patches, hidden)
    prefix = [t.expand(len(images), -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    x = model.norm_pre(model.pos_drop(torch.cat([*prefix, patches.flatten(1, 2)], 1)))
    for block, turn in zip(model.blocks, turns.unbind(), strict=True):
        x = block(x, rope=turn)
    return model.norm(x)


def rotations(model: Any, grid: tuple[int, int], seed: int) -> Tensor:
    """Return sines and cosines (L, N, 2 C) of patches' angles for every block of a `rotary` model and a grid (h, w).

    In training, the coordinates of patches fill a random box in each block, which the seed and the grid determine."""
    rope, blocks, device = model.rope, len(model.blocks), model.rope.periods.device
    if not (rope.training and rope.aug_active):
        whole = torch.zeros(1, 2, device=device)
        return turned(rope.periods, grid, whole, whole + 1).expand(blocks, -1, -1)
    u = torch.from_numpy(np.random.default_rng([seed, *grid]).uniform(-1, 1, (blocks, 5)).astype(np.float32))
    jitter, rescale = (math.log(x or 1.0) for x in (rope.jitter_coords, rope.rescale_coords))
    shift = (rope.shift_coords or 0.0) * u[:, :2]
    box = torch.cat([shift, (jitter * u[:, 2:4] + rescale * u[:, 4:]).exp()], 1)  # (L, 4)
    box = (box.pin_memory() if devices.has_streams(device) else box).to(device, non_blocking=True)
    return turned(rope.periods, grid, box[:, :2], box[:, 2:])


def turned(periods: Tensor, grid: tuple[int, int], shift: Tensor, scale: Tensor) -> Tensor:
    """Return sines and cosines (L, N, 2 C) of the angles of patches at the coordinates (x + shift) * scale.

    x (N, 2) are the patches' centres in an image whose rows and columns go from -1 to 1. `shift` and `scale` are
    (L, 2), `periods` (C / 4,)."""
    at = [(2 * torch.arange(n, device=periods.device) + 1) / n - 1 for n in grid]
    x = torch.stack(torch.meshgrid(*at, indexing="ij"), -1).flatten(0, 1)  # (N, 2)
    x = (x + shift.unsqueeze(1)) * scale.unsqueeze(1)  # (L, N, 2)
    angles = (2 * math.pi * x.unsqueeze(-1) / periods).flatten(2).tile(2)  # (L, N, C)
    return torch.cat([angles.sin(), angles.cos()], -1)
