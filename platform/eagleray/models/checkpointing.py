"""Activation checkpointing keeps only the input of each block and computes the rest again in the backward pass.

Chen et al. 2016, arXiv:1604.06174.
"""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from eagleray.models.stages import blocks


def checkpoint_blocks(model: nn.Module) -> None:
    """Let every block of a timm model keep only its input where gradients are computed.

    Gradients and buffers stay equal to the bit: a block draws the same random numbers again, and batch norm counts a
    batch once. Raises UserError for a model without stages or blocks.
    """
    for block in blocks(model):
        # Of the object, not around it: parameters keep their names, and a copy of the network has its own.
        block.forward = types.MethodType(_forward, block)  # type: ignore[method-assign]


def without_checkpoints(claim: Callable[[nn.Module], bool], block: nn.Module) -> bool:
    """Return whether a claim about a block holds when the block is taken without `checkpoint_blocks`."""
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
    """Return the contexts of a block's forward pass and of its repetition."""
    return nullcontext(), _copied_buffers(norms)


@contextmanager
def _copied_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the buffers of modules by copies while the context is open, so that they do not change."""
    tables = [module._buffers for module in modules]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: None if b is None else b.clone() for name, b in table.items()})
    try:
        yield
    finally:
        for table, buffers in zip(tables, before, strict=True):
            table.update(buffers)
