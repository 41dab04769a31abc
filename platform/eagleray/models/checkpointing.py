"""Saves memory: activations inside of each block or micro-batch are not stored, but recomputed in the backward pass.

Activation checkpointing keeps only the input of a block (Chen et al. 2016, arXiv:1604.06174). Micro-batches run a
network on a few images at a time and give the gradient of the whole batch (Gao et al. 2021, arXiv:2101.06983)."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagleray.models.stages import blocks


def checkpoint_blocks(model: nn.Module) -> None:
    """Let every block of a timm model keep only its input when gradients are computed.

    Gradients and buffers are bit-identical: a block draws the same random numbers again, and batch norm counts a batch
    once. Raises UserError for a model without stages or blocks."""
    for block in blocks(model):
        # Only `forward` is replaced: a wrapper would rename the parameters. It is a method and
        # not a closure, so that a copy of the block, such as an EMA teacher's, runs with its own parameters.
        block.forward = types.MethodType(_forward, block)  # type: ignore[method-assign]


def without_checkpoints(claim: Callable[[nn.Module], bool], block: nn.Module) -> bool:
    """Return claim(block). While `claim` runs, the block has its original `forward`, without checkpointing."""
    own: Any = vars(block).get("forward")
    if getattr(own, "__func__", None) is not _forward:
        return claim(block)
    del block.forward
    try:
        return claim(block)
    finally:
        block.forward = own


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = functools.partial(type(self).forward, self)
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    norms = [m for m in self.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    # Without batch norm no context is passed, because torch.compile accepts none.
    own: dict[str, Any] = {"context_fn": functools.partial(_contexts, norms)} if norms else {}
    return checkpoint(run, *args, use_reentrant=False, **own, **kwargs)


def _contexts(norms: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's forward pass and of its recomputation, which must not update `norms` again."""
    return nullcontext(), _copied_buffers(norms)


@contextmanager
def _copied_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the buffers of modules by copies while the context is open, so that the originals stay unchanged."""
    tables = [module._buffers for module in modules]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: None if b is None else b.clone() for name, b in table.items()})
    try:
        yield
    finally:
        for table, buffers in zip(tables, before, strict=True):
            table.update(buffers)


def micro_batched(f: Callable[..., Any], x: Tensor, size: int | None, *more: Tensor) -> Any:
    """Return f(x, *more) for tensors (B, ...), computed on at most `size` rows at a time, or on all if it is None.

    f returns a tensor (B, ...), or a tuple of such tensors and of constants. Memory is needed for one micro-batch and
    for all outputs; the backward pass costs one more forward pass."""
    if size is None or len(x) <= size:
        return f(x, *more)
    # Without gradients there is no backward pass to recompute for.
    run = (lambda *parts: checkpoint(f, *parts, use_reentrant=False)) if torch.is_grad_enabled() else f
    outs = [run(*parts) for parts in zip(*(t.split(size) for t in (x, *more)), strict=True)]
    if isinstance(outs[0], Tensor):
        return torch.cat(outs)
    return tuple(torch.cat(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*outs, strict=True))
