"""Coordinates of a crop's patches in the uncropped image. B images, V views, N = h * w patches."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.losses.prototypes import Match


def centres(boxes: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the coordinates x, y (B, N, 2) in the image of the centres of a view's patches, and their diagonal (B,).

    The view is divided into a `grid` (h, w) of patches. Each row of `boxes` (B, 4) is its left, top, right and bottom
    in the image; in a flipped view, left is greater than right."""
    (h, w), (left, top, right, bottom) = grid, boxes.unbind(1)
    width, height = (right - left) / w, (bottom - top) / h
    x = left[:, None] + width[:, None] * (torch.arange(w, device=boxes.device) + 0.5)  # (B, w)
    y = top[:, None] + height[:, None] * (torch.arange(h, device=boxes.device) + 0.5)  # (B, h)
    places = torch.stack([x[:, None].expand(-1, h, -1), y[:, :, None].expand(-1, -1, w)], -1)  # (B, h, w, 2)
    return places.flatten(1, 2), torch.hypot(width, height)


def right_share(pairs: Match, boxes: Tensor, s: Sequence[Tensor], t: Sequence[Tensor]) -> Tensor:
    """Return the share of matched student tokens whose teacher token is the one with the nearest centre in the image.

    `pairs` matches tokens of student views s[v] (B, N_v, D) with tokens of teacher views t[q] (B, M, D). Grids are
    square, and `boxes` are (V, B, 4). Only the first student views, which the teacher sees too, count, and in them only
    tokens whose centre lies inside the teacher's view, as other tokens have no right match."""
    (images, tokens, _), device = t[0].shape, t[0].device
    first = torch.arange(images, device=device).unsqueeze(1) * tokens  # (B, 1) first row of each image within a view
    there = [centres(boxes[q], _square(y))[0] for q, y in enumerate(t)]  # Q x (B, M, 2)
    corners = [boxes[q].unflatten(1, (2, 2)).sort(1).values[:, :, None] for q in range(len(t))]  # Q x (B, 2, 1, 2)
    nearest, inside = [], []
    for v, x in enumerate(s[: len(t)]):
        here, _ = centres(boxes[v], _square(x))  # (B, N_v, 2)
        rows = [apart(here, c).argmin(2) + first + q * images * tokens for q, c in enumerate(there)]
        nearest.append(torch.stack(rows, -1).flatten(0, 1))
        within = [((here > c[:, 0]) & (here < c[:, 1])).all(2) for c in corners]
        inside.append(torch.stack(within, -1).flatten(0, 1))
    matched = pairs.teacher[: len(t) * images * tokens]
    counted = torch.cat(inside) & (matched >= 0)
    right = counted & (torch.cat(nearest) == matched)
    return right.sum() / counted.sum().clamp(min=1)


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Return the Euclidean distances (B, N, M) between points (B, N, 2) and points (B, M, 2).

    No matrix product is used, as PyTorch may round its factors to TF32."""
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def _square(tokens: Tensor) -> tuple[int, int]:
    """Return the grid of the tokens (B, N, D) of a square view."""
    side = math.isqrt(tokens.shape[1])
    return side, side
