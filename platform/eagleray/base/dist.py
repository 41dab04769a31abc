"""Sums, gathers and exchanges tensors between the ranks of a run.

Ranks may have different numbers of rows; an argument `rows` holds the number of rows of every rank, in rank order. On a
single process each operation returns its input.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def offset(rows: Sequence[int]) -> int:
    """Return the position of this rank's first row in a gathered batch."""
    return sum(rows[: rank()])


def gather(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Concatenate the tensors (B, ...) of all ranks, in rank order, into (sum of rows, ...), without a gradient."""
    if size() == 1:
        return x.detach()
    padded = x.new_zeros(max(rows), *x.shape[1:])
    padded[: len(x)] = x.detach()
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])


def total(x: Tensor) -> Tensor:
    """Sum a tensor over all ranks, without a gradient."""
    if size() > 1:
        x = x.detach().clone()
        dist.all_reduce(x)
    return x.detach()


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return total(grads[0])


def total_with_grad(x: Tensor) -> Tensor:
    """Sum a tensor over all ranks; its gradient is that of the sum of the losses of all ranks."""
    return _Total.apply(x) if size() > 1 else x  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: tuple[int, ...]) -> Tensor:
        ctx.rows = rows
        return gather(x, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        start = offset(ctx.rows)
        return total(grads[0])[start : start + ctx.rows[rank()]], None


def gather_with_grad(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Concatenate the tensors (B, ...) of all ranks, in rank order, into (sum of rows, ...), with a gradient.

    The gradient is that of the sum of the losses of all ranks.
    """
    return _Gather.apply(x, tuple(rows)) if size() > 1 else x  # type: ignore[no-any-return]


def gather_objects(x: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order, on every rank; they are pickled, so keep them small and rare."""
    if size() == 1:
        return [x]
    out: list[Any] = [None] * size()
    dist.all_gather_object(out, x)
    return out
