"""Momentum copies of a network."""

import copy
import weakref
from typing import TypeVar

import torch
from timm.layers import DropPath
from torch import nn

M = TypeVar("M", bound=nn.Module)


def ema_copy(net: M) -> M:
    """A frozen copy that starts where `net` is. It stays in train mode, as the authors' do (batch statistics are its
    own), but drops nothing."""
    out = copy.deepcopy(net).requires_grad_(False)
    out.follows = weakref.ref(net)  # type: ignore[assignment]  # see online_of
    for module in out.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return out


def online_of(target: nn.Module) -> nn.Module:
    """The network that a momentum copy follows."""
    online = target.follows()  # type: ignore[operator]
    assert isinstance(online, nn.Module), "the network is gone"
    return online


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """target <- momentum * target + (1 - momentum) * online, for parameters; buffers are left alone."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1.0 - momentum)


@torch.no_grad()
def average(target: nn.Module, online: nn.Module, decay: float) -> None:
    """An average of weights that is not run while training: what batch norm has counted follows too."""
    ema_update(target, online, decay)
    for kept, new in zip(target.buffers(), online.buffers(), strict=True):
        if kept.is_floating_point():
            kept.lerp_(new, 1.0 - decay)
        else:
            kept.copy_(new)
