"""Memories of earlier batches: a queue of keys (MoCo) and a bank of one vector per image (InstDisc)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.rng import step_generator


class Memory(nn.Module):
    """A buffer of features from earlier steps.

    A step whose gradient is not finite is skipped, and other buffers are then restored from a copy. This buffer is too
    large to be copied before each step, so only finite rows are written."""


class Queue(Memory):
    """The last K keys, unit vectors of C channels. The oldest are overwritten first. A new queue has random keys."""

    keys: Tensor  # (C, K)
    next: Tensor  # () the column to write next

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(dim, length), dim=0))
        self.register_buffer("next", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def push(self, k: Tensor) -> None:
        """Overwrite the oldest keys with the keys (B, C) of all ranks, of which at most the last K are written."""
        length = self.keys.shape[1]
        k = k[-length:].to(self.keys.dtype)
        at = (self.next + torch.arange(len(k), device=k.device)) % length
        self.keys[:, at] = torch.where(torch.isfinite(k).all(1), k.T, self.keys[:, at])
        self.next.copy_((self.next + len(k)) % length)


class Bank(Memory):
    """One vector of C channels for each of n images, random at the start."""

    rows: Tensor  # (n, C)

    def __init__(self, images: int, dim: int) -> None:
        super().__init__()
        bound = (3 / dim) ** 0.5  # a vector's mean squared length is 1 with this bound
        self.register_buffer("rows", torch.empty(images, dim).uniform_(-bound, bound))

    @torch.no_grad()
    def write(self, index: Tensor, v: Tensor) -> None:
        """Replace the rows `index` (B,) by v (B, C)."""
        v = v.to(self.rows.dtype)
        self.rows[index] = torch.where(torch.isfinite(v).all(1, keepdim=True), v, self.rows[index])

    def move(self, index: Tensor, v: Tensor, momentum: float) -> None:
        """Replace rows `index` (B,) by momentum * rows + (1 - momentum) * v, scaled to length one; v is (B, C)."""
        self.write(index, F.normalize(momentum * self.rows[index] + (1 - momentum) * v, dim=1))


def draw_negatives(n: int, negatives: int, rows: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Draw K negatives (B, K) for each row of this rank, uniformly over all n images.

    A row's own image may be among them, as in InstDisc's code. Negatives are drawn for the rows of all ranks and depend
    on the seed alone, so they are the same for any number of ranks and after a restart."""
    drawn = torch.randint(n, (sum(rows), negatives), generator=step_generator(seed, device), device=device)
    return dist.own(drawn, rows)
