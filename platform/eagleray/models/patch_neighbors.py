"""The patches around each patch of a grid, and those of them that are most like it: positive matching of SelfPatch, Yun
et al. 2022, arXiv:2206.07990."""

import torch
import torch.nn.functional as F
from torch import Tensor

AROUND = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)]


def neighbours(grid: tuple[int, int], *, wrap: bool) -> Tensor:
    """The row-major places (N, 8) around each place of a grid (h, w), ascending; -1 for none. `wrap` joins opposite
    borders. No place is its own neighbour, nor a neighbour twice, however small the grid."""
    h, w = grid
    own = torch.arange(h * w).unsqueeze(1)  # (N, 1)
    dy, dx = torch.tensor(AROUND).unbind(1)
    y, x = own // w + dy, own % w + dx  # (N, 8)
    found = y % h * w + x % w
    if not wrap:
        found[(y < 0) | (y >= h) | (x < 0) | (x >= w)] = -1
    found = found.sort(1).values
    again = F.pad(found[:, 1:] == found[:, :-1], (1, 0))
    return found.masked_fill(again | (found == own), -1)


def most_similar_neighbours(x: Tensor, grid: tuple[int, int], k: int, *, wrap: bool) -> tuple[Tensor, Tensor]:
    """For each patch of x (B, N, D) the places (B, N, k) of the k neighbours of the largest cosine, likest first, and
    which of them there are: by a border fewer than k may be."""
    around = neighbours(grid, wrap=wrap).to(x.device)
    unit = F.normalize(x.float(), dim=-1)
    # One neighbour at a time: all eight side by side would be eight times the patches. Products, not a matrix product,
    # which autocast would round: neighbours differ by little.
    cosine = torch.stack([(unit * unit[:, place]).sum(-1) for place in around.T], -1)  # (B, N, 8)
    top = cosine.masked_fill(around < 0, -torch.inf).topk(k)
    return around.expand(len(x), -1, -1).gather(2, top.indices), top.values > -torch.inf
