"""Resample the position table of a ViT for any image size by matrix products, for programs of a traced network.

`torch.export` and ONNX do not accept an interpolation that branches on the image size. A product with two matrices,
whose entries are functions of the size, has the same result as timm's or DINO's interpolation, without a branch."""

import types
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from eagleray.models.rotary import rotary, turned


def make_resizable(model: Any, position: str) -> None:
    """Make a ViT of timm resample its positions without branches: as timm does or, for `position` "dino", as DINO does.
    A DINOv3 of timm then also computes its rotary positions from the grid size, which timm treats as a constant."""
    if rotary(model):
        model._pos_embed = types.MethodType(_turn, model)
    is_vit = type(model) is VisionTransformer
    if is_vit and model.pos_embed is not None:
        model._resample = _dino if position == "dino" else _timm
        model._pos_embed = types.MethodType(_embed, model)


def _embed(self: Any, x: Tensor) -> Tensor:
    """Add positions to patches x (B, h, w, D), and return tokens (B, P + h * w, D): P prefix tokens, then the
    patches."""
    prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
    rows = 0 if self.no_embed_class else self.num_prefix_tokens
    h0, w0 = self.patch_embed.grid_size
    down, across = self._resample((x.shape[1], x.shape[2]), (h0, w0))
    grid = self.pos_embed[0, rows:].unflatten(0, (h0, w0))
    table = torch.einsum("ih,jw,hwd->ijd", down, across, grid).flatten(0, 1).unsqueeze(0)
    patches = x.flatten(1, 2) + table
    before = torch.cat(prefix, 1) if prefix else patches[:, :0]
    return torch.cat([before + self.pos_embed[:, :rows] if rows else before, patches], 1)


def _turn(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens (B, P + h * w, D), P prefix tokens and then the patches x (B, h, w, D), and the sines and cosines
    (h * w, 2 C) of the patches' rotary positions, for heads of C channels."""
    prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
    whole = torch.zeros(1, 2)
    turns = turned(self.rope.periods, (x.shape[1], x.shape[2]), whole, whole + 1)
    return torch.cat([*prefix, x.flatten(1, 2)], 1), turns[0]


def _timm(new: tuple[int, int], old: tuple[int, int]) -> list[Tensor]:
    """Return matrices (new, old) that resample rows and columns of a grid as timm does: bicubic, antialiased."""
    matrices = []
    for n, o in zip(new, old, strict=True):
        at = torch.arange(n, dtype=torch.float32)
        scale = o / (at[-1] + 1)  # a tensor, because the size varies in the traced program
        distance = torch.arange(o) + 0.5 - scale * (at.unsqueeze(1) + 0.5)
        weight = cubic(distance / scale.clamp(min=1), -0.5)
        matrices.append(weight / weight.sum(1, keepdim=True))
    return matrices


def _dino(new: tuple[int, int], old: tuple[int, int]) -> list[Tensor]:
    """Return matrices (new, old) that resample the rows and the columns of a grid as DINO does: bicubic without
    antialiasing, with 0.1 added to new sizes; see `models.variants.resample`."""
    ats = [torch.arange(n, dtype=torch.float32) for n in new]
    same = torch.stack([at[-1] + 1 == o for at, o in zip(ats, old, strict=True)]).all()
    matrices = []
    for at, o in zip(ats, old, strict=True):
        source = (at.unsqueeze(1) + 0.5) * (o / (at[-1] + 1.1)) - 0.5
        beyond = torch.arange(-3, o + 3)  # positions beyond the border have the border's value
        fold = F.one_hot(beyond.clamp(0, o - 1), o).float()
        resampled = cubic(source - beyond, -0.75) @ fold
        matrices.append(torch.where(same, (at.unsqueeze(1) == torch.arange(o)).float(), resampled))
    return matrices


def cubic(x: Tensor, a: float) -> Tensor:
    """Return the values of Keys' cubic kernel with parameter `a` at the distances `x`."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
