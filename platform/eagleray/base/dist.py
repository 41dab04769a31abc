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
    x, most = x.detach(), max(rows)
    if len(x) < most:
        x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    out = x.new_empty(len(rows) * most, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    if min(rows) == most:
        return out
    return torch.cat([part[:n] for part, n in zip(out.split(most), rows, strict=True)])


def gather_together(columns: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Return what `gather` returns for each of several tensors (B, ...), in one exchange of their bytes."""
    if size() == 1:
        return [x.detach() for x in columns]
    flat = [x.detach().contiguous().view(len(x), -1).view(torch.uint8) for x in columns]
    parts = gather(torch.cat(flat, 1), rows).split([x.shape[1] for x in flat], 1)
    pairs = zip(columns, parts, strict=True)
    return [part.contiguous().view(x.dtype).view(-1, *x.shape[1:]) for x, part in pairs]


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


class _TotalOfSameLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.share, None


def total_of_same_loss(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Sum a tensor over all ranks, each of which computes the same loss from the sum.

    The gradient is that of `total_with_grad`, without an exchange: the gradients of all ranks are the same but for the
    weights of their losses, which are proportional to their rows.
    """
    share = rows[rank()] / sum(rows)
    return _TotalOfSameLoss.apply(x, share) if size() > 1 else x  # type: ignore[no-any-return]


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
