"""DRLoc's loss: an MLP tells how far apart two tokens of an image are (Liu et al. 2021, arXiv:2106.03746).

Where the paper leaves a choice open, this follows the authors' code. B images, D channels, a grid of h x w tokens, N =
h * w, m pairs of tokens per image, n pairs in all, C classes of offsets on an axis."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.rng import step_generator
from eagleray.models.heads import mlp

HIDDEN = 512
VARIANCE_WEIGHT = 1e-3  # the weight of the log-variance in L_reg; the paper does not give it

# How an offset is predicted. "l1": as a number (the paper's L). "ce": as a class (L_ce). "reg": as the mean of the
# predicted distribution over classes, whose squared error is divided by the distribution's variance (L_reg). The offset
# is absolute or, in the modes "*_signed", has a sign (L*).
Mode = Literal["l1", "l1_signed", "ce", "ce_signed", "reg", "reg_signed"]
# What is predicted on an axis of k tokens. "raw": the offset in tokens, to which signed modes add k - 1, so that it is
# not negative. "normalised": raw divided by its largest value. "paper": the offset divided by k.
Targets = Literal["raw", "normalised", "paper"]

Pool = Literal["3x3", "2x2"]  # window of an average pooling with a stride of two tokens
Pairs = tuple[Tensor, Tensor]  # row-major positions of the first and the second tokens, (B, m) each


class Localiser(nn.Module):
    """An MLP f([e_1; e_2]) that predicts the offset between two tokens.

    Its output is two numbers (n, 2) or, with `classes`, the scores of the C classes on both axes (n, C, 2)."""

    def __init__(self, dim: int, classes: int | None = None) -> None:
        super().__init__()
        self.layers = mlp([2 * dim, HIDDEN, HIDDEN, HIDDEN if classes else 2], norm=False)
        self.axes = nn.ModuleList(nn.Linear(HIDDEN, classes) for _ in range(2)) if classes else None

    def forward(self, pairs: Tensor) -> Tensor:
        """Predict the offsets of pairs of concatenated tokens (n, 2 D)."""
        out: Tensor = self.layers(pairs)
        return out if self.axes is None else torch.stack([axis(out) for axis in self.axes], 2)


def pool_grid(grid: Tensor, k: int, pool: Pool) -> Tensor:
    """Halve a grid of tokens (B, D, h, w) by average pooling until one of its sides is shorter than 2 k."""
    while min(grid.shape[2:]) >= 2 * k:
        wide = pool == "3x3"
        grid = F.avg_pool2d(grid, 3, 2, 1, count_include_pad=False) if wide else F.avg_pool2d(grid, 2)
    return grid


def random_pairs(n: int, m: int, views: int, rows: tuple[int, ...], seed: int, device: torch.device) -> Pairs:
    """Draw m pairs among each image's n tokens, with replacement: a token may be its own partner."""
    first, second = torch.randint(n, (2, views, sum(rows), m), generator=step_generator(seed, device), device=device)
    return local_rows(first, rows), local_rows(second, rows)


def exhaustive_pairs(n: int, views: int, rows: tuple[int, ...], seed: int, device: torch.device) -> Pairs:
    """Pair each of n tokens with one partner.

    The partners are a permutation of the tokens, as in the authors' code; the paper draws partners independently."""
    second = local_rows(
        torch.rand(views, sum(rows), n, generator=step_generator(seed, device), device=device).argsort(2), rows
    )
    return torch.arange(n, device=device).expand_as(second), second


def local_rows(drawn: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return this rank's part (V * B, m), view-major, of `drawn` (V, sum of rows, m), which is for all ranks."""
    return drawn[:, dist.offset(rows) :][:, : rows[dist.rank()]].flatten(0, 1)


def drloc_loss(localiser: Localiser, grid: Tensor, pairs: Pairs, *, mode: Mode, targets: Targets = "raw") -> Tensor:
    """Return the mean loss over pairs of tokens of a grid (B, D, h, w).

    The losses of the two axes are averaged in the modes `l1` and `l1_signed`, which alone use `targets`, and added in
    the other modes."""
    h, w = grid.shape[2:]
    tokens = grid.flatten(2).mT  # (B, N, D)
    image = torch.arange(len(tokens), device=grid.device).unsqueeze(1)
    e1, e2 = (tokens[image, at] for at in pairs)  # (B, m, D)
    f = localiser(torch.cat([e1, e2], 2).flatten(0, 1)).float()
    first, second = (at.flatten() for at in pairs)
    dy, dx = first // w - second // w, first % w - second % w
    kind, _, signed = mode.partition("_")
    if kind == "l1":
        t = torch.stack([target(d, k, targets, signed=bool(signed)) for d, k in ((dy, h), (dx, w))], 1)
        return F.l1_loss(f, t)
    c = torch.stack([target(d, axis_tokens(f, signed), "raw", signed=bool(signed)) for d in (dy, dx)], 1)
    return 2 * F.cross_entropy(f, c) if kind == "ce" else regression_loss(f, c)


def target(d: Tensor, k: int, targets: Targets, *, signed: bool) -> Tensor:
    """Return what a localiser should predict for offsets d (n,), in tokens, on an axis of k tokens."""
    if targets == "paper":
        return (d if signed else d.abs()) / k
    t = d + (k - 1) if signed else d.abs()
    return t / (max(k - 1, 1) * (1 + signed)) if targets == "normalised" else t


def axis_tokens(f: Tensor, signed: str) -> int:
    """Return how many tokens an axis may have so that the C classes of scores f (n, C, 2) cover all their offsets."""
    return (f.shape[1] + 1) // 2 if signed else f.shape[1]


def regression_loss(f: Tensor, c: Tensor) -> Tensor:
    """Return L_reg, the mean of (c - mu)^2 / sigma^2 + 2 alpha log sigma, for scores f (n, C, 2) and classes c (n, 2).

    mu and sigma^2 are the mean and the variance of a class under softmax(f); alpha is VARIANCE_WEIGHT."""
    p = f.softmax(1)
    each = torch.arange(f.shape[1], device=f.device).view(1, -1, 1)
    mean = (p * each).sum(1)
    variance = (p * (each - mean.unsqueeze(1)).square()).sum(1) + 1e-8
    return ((c - mean).square() / variance + VARIANCE_WEIGHT * variance.log()).sum(1).mean()
