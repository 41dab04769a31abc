"""Micro-batches run a network on a few images at a time and give the gradient of the whole batch.

The features of all images are computed first. The backward pass computes the features of each micro-batch again (Gao et
al. 2021, arXiv:2101.06983).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def micro_batched(f: Callable[..., Any], x: Tensor, size: int | None, *more: Tensor) -> Any:
    """Return f(x, *more) for tensors (B, ...), computed on at most `size` rows at once; with None, on all rows at once.

    f returns a tensor (B, ...), or a tuple of such tensors and of constants. The memory needed is that of one
    micro-batch and of all outputs; the backward pass costs one more forward.
    """
    if size is None or len(x) <= size:
        return f(x, *more)
    # Without gradients there is no backward pass to recompute for.
    run = (lambda *parts: checkpoint(f, *parts, use_reentrant=False)) if torch.is_grad_enabled() else f
    outs = [run(*parts) for parts in zip(*(t.split(size) for t in (x, *more)), strict=True)]
    if isinstance(outs[0], Tensor):
        return torch.cat(outs)
    return tuple(torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*outs, strict=True))
