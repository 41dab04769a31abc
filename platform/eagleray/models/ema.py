"""Momentum copies of a network: its exponential moving averages."""

import copy
import weakref
from itertools import compress
from typing import TypeVar

import torch
from timm.layers import DropBlock2d, DropPath, PatchDropout
from torch import Tensor, nn

from eagleray.base.dist import local, sharded
from eagleray.models.layer_names import in_adapter

M = TypeVar("M", bound=nn.Module)


def frozen_weights(net: nn.Module) -> list[Tensor]:
    """Return the weights that no step changes: the weights of backbones with adapters, except the adapters' own."""
    adapted = [module for module in net.modules() if hasattr(module, "adapted")]
    return [p for module in adapted for name, p in module.named_parameters() if not in_adapter(name)]


def sharing_copy(net: M) -> M:
    """Return a copy of a network that shares its `frozen_weights`."""
    return copy.deepcopy(net, {id(p): p for p in frozen_weights(net)})


def ema_copy(net: M) -> M:
    """Return a momentum copy of `net`, which gradients do not train.

    It has no dropout or drop path, sees every patch and does not augment rotary positions. It stays in training mode,
    so its batch norms use the statistics of the batch."""
    out = sharing_copy(net).requires_grad_(False)
    out.online_ref = weakref.ref(net)  # type: ignore[assignment]  # `momentum_copies` reads it
    for module in out.modules():
        if isinstance(module, DropPath | DropBlock2d):
            module.drop_prob = 0.0
        elif isinstance(module, PatchDropout):
            module.prob = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "aug_active"):  # only timm's rotary positions have this switch
            module.aug_active = False  # type: ignore[assignment]
        elif hasattr(module, "drop_rate"):  # some CNNs of timm draw dropout without a module
            module.drop_rate = 0.0  # type: ignore[assignment]
    return out


def momentum_copies(module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return every momentum copy inside a module, each with the network whose average it is."""
    return [(copy, copy.online_ref()) for copy in module.modules() if hasattr(copy, "online_ref")]  # type: ignore[operator]


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Set the parameters of `target` to momentum * target + (1 - momentum) * online; buffers stay as they are.

    Parameters of backbones in `target` that are `held`, and those that both networks share, keep their values."""
    weight = 1.0 - momentum
    targets: list[Tensor] = list(target.parameters())
    onlines: list[Tensor] = list(online.parameters())
    models: list[nn.Module] = [m.model for m in target.modules() if getattr(m, "held", False)]  # type: ignore[misc]
    held = {id(p) for model in models for p in model.parameters()}
    follows = [t is not o and id(t) not in held for t, o in zip(targets, onlines, strict=True)]
    targets, onlines = list(compress(targets, follows)), list(compress(onlines, follows))
    if hasattr(target, "stored"):  # engine/sharded.py lists the sharded parameters in `stored`
        mine, theirs = (local(compress(net.stored, follows)) for net in (target, online))  # type: ignore[arg-type]
        torch._foreach_lerp_(mine, theirs, weight)
        # Parameters that FSDP has gathered for a forward pass are copies that it still uses, so they are updated too.
        gathered = [not sharded(t) for t in targets]
        targets, onlines = (list(compress(params, gathered)) for params in (targets, onlines))
    if targets:
        torch._foreach_lerp_(targets, onlines, weight)


@torch.no_grad()
def average(target: nn.Module, online: nn.Module, decay: float) -> None:
    """Move the parameters and floating-point buffers of `target` towards those of `online`, and copy other buffers.

    The buffers are batch norm's statistics, which an averaged copy that does not run in training cannot collect."""
    ema_update(target, online, decay)
    pairs = list(zip(target.buffers(), online.buffers(), strict=True))
    if floats := [pair for pair in pairs if pair[0].is_floating_point()]:
        torch._foreach_lerp_([old for old, _ in floats], [new for _, new in floats], 1.0 - decay)
    if counts := [pair for pair in pairs if not pair[0].is_floating_point()]:
        torch._foreach_copy_([old for old, _ in counts], [new for _, new in counts])
