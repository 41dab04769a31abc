"""Tensors of a checkpoint are resampled to the shapes of a model: position tables, patch projections, prefix tokens.

N patches, P prefix tokens (class token and registers), D channels.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
from torch import Tensor

TABLE = "relative_position_bias_table"
POSITIONS = "pos_embed"
PATCHES = "patch_embed.proj.weight"


def has_any_size(key: str) -> bool:
    """Return whether a tensor of this name is resampled when its shape is another one."""
    return key.endswith((POSITIONS, TABLE, PATCHES))


def shaped(model: Any, key: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor in the shape that it has in the model, or None where it does not fit."""
    if key not in own or value.shape == own[key].shape:
        return value if key in own else None
    want = own[key].shape
    if not has_any_size(key) or value.ndim != len(want):
        return None
    if key.endswith(PATCHES):
        return resample_patch_embed(value, list(want[2:])) if value.shape[:2] == want[:2] else None
    if value.shape[-1] != want[-1]:
        return None
    if key.endswith(TABLE):
        window = model.get_submodule(key.rpartition(".")[0]).window_size
        return resize_rel_pos_bias_table(value, new_window_size=window, new_bias_shape=tuple(want))
    return _positions(value, list(model.patch_embed.grid_size), want[1])


def _positions(table: Tensor, grid: list[int], rows: int) -> Tensor | None:
    """Return a position table (1, P + N, D) for another grid and another number of prefix tokens, or None when its
    patches are no square. The class token comes first; a prefix token that the table lacks gets the position zero."""
    prefix = rows - math.prod(grid)
    had = next((p for p in (prefix, 1, 0) if math.isqrt(table.shape[1] - p) ** 2 == table.shape[1] - p), None)
    if had is None:
        return None
    if had != prefix:
        zeros = table.new_zeros(1, max(prefix - had, 0), table.shape[2])
        table = torch.cat([table[:, : min(had, prefix)], zeros, table[:, had:]], 1)
    return resample_abs_pos_embed(table, new_size=grid, num_prefix_tokens=prefix)


def without_class_position(model: Any, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the class token's position added to the class token, where only the file has a row for
    it: timm's ViTs with registers have positions for patches alone."""
    table, token = state.get(POSITIONS), state.get("cls_token")
    if table is None or token is None or POSITIONS not in own or table.ndim != 3 or not table.shape[1]:
        return dict(state)
    has_row = math.isqrt(table.shape[1] - 1) ** 2 == table.shape[1] - 1
    if not has_row or own[POSITIONS].shape[1] != math.prod(model.patch_embed.grid_size):
        return dict(state)
    return {**state, "cls_token": token + table[:, :1], POSITIONS: table[:, 1:]}
