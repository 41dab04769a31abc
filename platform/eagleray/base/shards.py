"""Tensors whose rows are divided among the ranks (FSDP2): this rank's rows, and norms of the whole.

A tensor that is not divided is its own share, so all functions here also take plain tensors.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eagleray.base import dist


def sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank holds some rows."""
    return hasattr(tensor, "to_local")  # importing torch.distributed.tensor takes a second


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's rows of each tensor, in the same memory."""
    tensors = list(tensors)
    return [t.to_local() for t in tensors] if tensors and sharded(tensors[0]) else tensors  # type: ignore[attr-defined]


@torch.no_grad()
def norms(tensors: Sequence[Tensor], *, split: bool | None = None) -> Tensor:
    """Return the norm of each tensor (P,), over the rows of all ranks.

    `split` says whether plain tensors are the rows of this rank alone; None: tensors are split where they are DTensors.
    """
    split = sharded(tensors[0]) if split is None else split
    out = torch.stack(torch._foreach_norm(local(tensors)))
    return dist.total(out.square()).sqrt() if split else out


def own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the rows of a whole tensor that FSDP2 gives to a rank: equal parts, of which the last may be empty."""
    rows = -(-len(whole) // ranks)
    return whole[rank * rows : (rank + 1) * rows]
