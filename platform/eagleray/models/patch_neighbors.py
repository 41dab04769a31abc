"""The neighbours of each patch of a grid, and the most similar ones: SelfPatch's positive matching (Yun et al. 2022,
arXiv:2206.07990).

B images, a grid of h x w patches, N = h * w, D channels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def neighbours(grid: tuple[int, int], *, wrap: bool, device: torch.device | None = None) -> Tensor:
    """Return the ascending row-major indices (N, 8) of the patches around each patch of a grid (h, w); -1 if missing.

    `wrap` joins opposite borders. No patch is its own neighbour, or a neighbour twice, however small the grid."""
    h, w = grid
    own = torch.arange(h * w, device=device).unsqueeze(1)  # (N, 1)
    # The offsets, 0 to 8 without the middle 4, are computed on the device, which would wait for a copy from the host.
    around = torch.arange(8, device=device)
    around = around + (around >= 4)
    y, x = own // w + around // 3 - 1, own % w + around % 3 - 1  # (N, 8)
    index = y % h * w + x % w
    if not wrap:
        index = index.masked_fill((y < 0) | (y >= h) | (x < 0) | (x >= w), -1)
    index = index.sort(1).values
    repeated = F.pad(index[:, 1:] == index[:, :-1], (1, 0))
    return index.masked_fill(repeated | (index == own), -1)


def most_similar_neighbours(x: Tensor, grid: tuple[int, int], k: int, *, wrap: bool) -> tuple[Tensor, Tensor]:
    """Return the indices (B, N, k) of the k most similar neighbours of each patch of x (B, N, D), and a mask (B, N, k).

    Similarity is the cosine, most similar first. The mask is false where a patch at a border has fewer neighbours."""
    candidates = neighbours(grid, wrap=wrap, device=x.device)
    unit = F.normalize(x.float(), dim=-1)
    # Neighbours are compared one at a time, as all eight would take eight times the memory of the patches, and without
    # a matrix product, which autocast would round: neighbours differ little.
    cosine = torch.stack([(unit * unit[:, index]).sum(-1) for index in candidates.T], -1)  # (B, N, 8)
    top = cosine.masked_fill(candidates < 0, -torch.inf).topk(k)
    return candidates.expand(len(x), -1, -1).gather(2, top.indices), top.values > -torch.inf
