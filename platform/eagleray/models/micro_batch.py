"""A network run on a few images at a time, with the gradient of the whole batch: first the features of all, then, going
back, each part computed again with what the loss said about its features (Gao et al. 2021, arXiv:2101.06983)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def micro_batched(f: Callable[[Tensor], Any], x: Tensor, size: int | None) -> Any:
    """f(x) for (B, ...), never more than `size` rows at once; f gives a tensor (B, ...) or a tuple of such and of
    constants. Memory is that of one part and of the outputs; a backward costs one more forward."""
    if size is None or len(x) <= size:
        return f(x)
    # Nothing to come back to where no gradient is asked for.
    run = (lambda part: checkpoint(f, part, use_reentrant=False)) if torch.is_grad_enabled() else f
    outs = [run(part) for part in x.split(size)]
    if isinstance(outs[0], Tensor):
        return torch.cat(outs)
    return tuple(torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*outs, strict=True))
