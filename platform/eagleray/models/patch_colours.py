"""Corrupts patches, and computes the mean colours that masked patch prediction predicts (Dosovitskiy et al. 2021,
arXiv:2010.11929, appendix B.1.2).

B images, N patches on a grid of h x w, n of them corrupted."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.base.rng import step_generator

LEVELS = 8  # levels of each colour channel, which take 3 bits


class Corruption(NamedTuple):
    """The patches that are corrupted, and how."""

    places: Tensor  # (B, n) indices of the corrupted patches
    mask: Tensor  # (B, h, w) true for patches that the mask token replaces
    source: Tensor  # (B, N) index of the patch that is shown at each position: its own unless exchanged


def corrupt(
    grid: tuple[int, int], shares: tuple[float, float, float], rows: tuple[int, ...], seed: int, device: torch.device
) -> Corruption:
    """Draw the corruption of each image of this rank, the same for any number of ranks (`rows`: images of each rank).

    `shares` are the share of patches that are corrupted and, of the corrupted patches, the shares that are masked and
    exchanged. An exchanged patch is replaced by a random other patch of its image."""
    size, g = (sum(rows), grid[0] * grid[1]), step_generator(seed, device)
    corrupted, masked, exchanged = shares
    order = torch.rand(size, generator=g, device=device).argsort(dim=1, stable=True)
    kind = torch.rand(size, generator=g, device=device)
    other = torch.randint(size[1] - 1, size, generator=g, device=device)

    order, kind, other = (dist.own(x, rows) for x in (order, kind, other))
    n = round(size[1] * corrupted)
    chosen = order.argsort(1) < n
    places = torch.arange(size[1], device=device)
    swapped = chosen & (kind >= masked) & (kind < masked + exchanged)
    source = torch.where(swapped, other + (other >= places), places)  # `other` skips the patch's own index
    return Corruption(order[:, :n], (chosen & (kind < masked)).unflatten(1, grid), source)


def mean_colours(x: Tensor, grid: tuple[int, int], mean: Tensor, std: Tensor) -> Tensor:
    """Return the mean colours (B, N) of the patches of images (B, 3, S, S) normalised with `mean` (3, 1, 1) and `std`.

    A colour is an integer with three bits for each channel, red first."""
    patches = F.adaptive_avg_pool2d(x.float(), grid) * std + mean  # (B, 3, h, w) from 0 to 1, as the pixels were
    levels = (patches * LEVELS).long().clamp(0, LEVELS - 1)
    code = levels[:, 0]
    for channel in levels.unbind(1)[1:]:
        code = code * LEVELS + channel
    return code.flatten(1)
