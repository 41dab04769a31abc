"""Sum, gather and exchange tensors between the ranks of a run, and find a rank's own rows.

Ranks may have different numbers of rows; an argument `rows` has the number of rows of every rank, in rank order. In a
single process each operation returns its input. The rows of a DTensor are divided among the ranks (FSDP2). Functions
for DTensors also take plain tensors, and use all of their rows."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eagleray.base.errors import Outage, UserError

T = TypeVar("T")
_limit: timedelta | None = None  # timeout of collective operations; None: PyTorch's default


def form_group(device: torch.device, limit: timedelta, **where: Any) -> None:
    """Form the process group of this process. `limit` is the timeout of its collective operations."""
    global _limit  # a process has one group, and so one limit
    _limit = limit
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=limit, **where)


def host_group() -> Any:
    """Return a new process group of all ranks for tensors in host memory (gloo), with the timeout of the default group.
    All ranks must call this together."""
    return dist.new_group(backend="gloo", timeout=_limit)


def size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def offset(rows: Sequence[int]) -> int:
    """Return the index of this rank's first row in a tensor with the rows of all ranks, in rank order."""
    return sum(rows[: rank()])


def own(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return this rank's rows of x (sum of rows, ...), a tensor that all ranks have, such as draws from one seed."""
    return x[offset(rows) :][: rows[rank()]]


def gather(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Concatenate the tensors x (B, ...) of all ranks, in rank order, into (sum of rows, ...), without a gradient."""
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
    """Return `gather(x, rows)` for each tensor x (B, ...) in `columns`, with a single exchange between the ranks."""
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
    """Sum a tensor over all ranks. The gradient of x is that of the sum of the losses of all ranks."""
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
    """Sum a tensor over all ranks, where each rank computes the same loss from the sum.

    The gradient equals that of `total_with_grad`, but needs no exchange: each rank weights the loss by its share of the
    rows, so this rank's gradient, divided by this rank's share, is the sum of the gradients of all ranks."""
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
    """Concatenate the tensors x (B, ...) of all ranks, in rank order, into (sum of rows, ...).

    The gradient of x is that of the sum of the losses of all ranks."""
    return _Gather.apply(x, tuple(rows)) if size() > 1 else x  # type: ignore[no-any-return]


def gather_objects(x: Any) -> list[Any]:
    """Return the objects x of all ranks, in rank order, on every rank. They are pickled, so they should be small."""
    if size() == 1:
        return [x]
    out: list[Any] = [None] * size()
    dist.all_gather_object(out, x)
    return out


def gather_at_zero(x: T) -> list[T] | None:
    """Return the objects x of all ranks, in rank order, on rank 0, and None on other ranks."""
    if size() == 1:
        return [x]
    out: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(x, out)
    return out


def together(work: Callable[[], T]) -> T:
    """Run `work`, which must not wait for other ranks, on every rank, and return this rank's result.

    If `work` fails on any rank, all ranks raise an error, so that no rank waits later for the failed one. A failed rank
    raises its own error, the others RuntimeError with the message of the first failed rank."""
    if size() == 1:
        return work()
    result, error = _attempt(work)
    said = gather_objects(_words(error) if error else "")
    if error:
        raise error
    for other, text in enumerate(said):
        if text:
            raise RuntimeError(f"rank {other}: {text}")
    return result  # type: ignore[return-value]


def from_rank_zero(get: Callable[[], T]) -> T:
    """Call `get` on rank 0 and return its result on all ranks, which must call this together. If `get` fails, all ranks
    raise its error. But if it is neither a UserError nor an Outage, other ranks raise RuntimeError."""
    if size() == 1:
        return get()
    result, error = _attempt(get) if rank() == 0 else (None, None)
    known = error is None or isinstance(error, UserError | Outage)
    answer: list[Any] = [result, error if known else RuntimeError(f"rank 0: {_words(error)}")]
    dist.broadcast_object_list(answer, src=0)
    if problem := error or answer[1]:
        raise problem
    return answer[0]  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the pair (result of `work`, None) or, if it failed, (None, its error)."""
    try:
        return work(), None
    except Exception as e:
        return None, e


def _words(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def tell(message: str) -> None:
    """Leave a message that `told` finds on all ranks. Other ranks need not take part, and may be waiting for data."""
    if size() > 1:
        _keys().set(message, "1")


def told(message: str) -> bool:
    """Return whether any rank has called `tell` with this message. Asks the process group's store, on rank 0."""
    return size() > 1 and bool(_keys().check([message]))


def _keys() -> dist.Store:
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-any-return, no-untyped-call]


def sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has some rows."""
    return hasattr(tensor, "to_local")  # faster than `isinstance`: importing torch.distributed.tensor takes a second


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's rows of each DTensor, as a view of its memory. Plain tensors are returned unchanged."""
    tensors = list(tensors)
    return [t.to_local() for t in tensors] if tensors and sharded(tensors[0]) else tensors  # type: ignore[attr-defined]


@torch.no_grad()
def norms(tensors: Sequence[Tensor], *, split: bool | None = None) -> Tensor:
    """Return the Euclidean norms (P,) of P tensors, over the rows of all ranks.

    `split`: whether each rank holds only its own rows of the tensors. None: true for DTensors, false for plain ones."""
    split = sharded(tensors[0]) if split is None else split
    out = torch.stack(torch._foreach_norm(local(tensors)))
    return total(out.square()).sqrt() if split else out


def own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the rows of the unsharded tensor `whole` that FSDP2 gives to `rank`: the last ranks may get fewer."""
    rows = -(-len(whole) // ranks)
    return whole[rank * rows : (rank + 1) * rows]
