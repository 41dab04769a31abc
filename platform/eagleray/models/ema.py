"""Momentum copies of a network: its exponential moving averages."""

import copy
import weakref
from typing import TypeVar

import torch
from timm.layers import DropPath
from torch import nn

M = TypeVar("M", bound=nn.Module)


def ema_copy(net: M) -> M:
    """Return a copy of `net` that is not trained by gradients and has no dropout or drop path.

    It stays in training mode, so its batch norms use the statistics of the batch.
    """
    out = copy.deepcopy(net).requires_grad_(False)
    out.online_ref = weakref.ref(net)  # type: ignore[assignment]  # see momentum_copies
    for module in out.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return out


def momentum_copies(module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return every momentum copy inside a module, each with the network that it follows."""
    return [(copy, copy.online_ref()) for copy in module.modules() if hasattr(copy, "online_ref")]  # type: ignore[operator]


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Set the parameters of `target` to momentum * target + (1 - momentum) * online; buffers stay as they are."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1.0 - momentum)


@torch.no_grad()
def average(target: nn.Module, online: nn.Module, decay: float) -> None:
    """Average parameters and batch norm's buffers, for a copy that does not run while training."""
    ema_update(target, online, decay)
    pairs = list(zip(target.buffers(), online.buffers(), strict=True))
    if floats := [pair for pair in pairs if pair[0].is_floating_point()]:
        torch._foreach_lerp_([old for old, _ in floats], [new for _, new in floats], 1.0 - decay)
    if counts := [pair for pair in pairs if not pair[0].is_floating_point()]:
        torch._foreach_copy_([old for old, _ in counts], [new for _, new in counts])
