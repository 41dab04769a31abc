"""Fully sharded training: each rank stores some rows of every weight, gradient and moment.

PyTorch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv:2304.11277) gathers the weights of a block before it is computed
and divides its gradients among the ranks. This module makes optimisers and momentum copies work on this rank's rows."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.dist import local, own_rows, sharded
from eagleray.base.errors import UserError
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import momentum_copies
from eagleray.models.stages import blocks

Path = tuple[Any, ...]  # the keys to a tensor in a nested state
Reader = Callable[[Mapping[Path, Tensor]], None]


def check_shardable(method: Method, name: str) -> None:
    """Raises UserError for a method that is not tested with sharded weights."""
    if not method.shardable:
        raise UserError(f"parallel=fsdp: expected a method that is tested with it, got method.name={name}; use ddp")


def shard(method: Method) -> None:
    """Divide the parameters of a method among all ranks, in place, if there are several; buffers are not divided.

    The blocks of backbones are gathered one at a time, everything else for the whole step."""
    if dist.size() == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(method.parameters()).device.type, (dist.size(),))
    for backbone in [m for m in method.modules() if isinstance(m, Backbone)]:
        for block in blocks(backbone.model):
            fully_shard(block, mesh=mesh)
    fully_shard(method, mesh=mesh)
    for target, online in momentum_copies(method):  # updated with rows, even while FSDP has gathered the weights
        for module in (target, online):
            module.stored = tuple(module.parameters())  # type: ignore[assignment]


def divide_groups(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    """Replace the sharded parameters of an optimiser's groups by plain ones: this rank's rows in the same memory.

    Returns the sharded parameters in order, or nothing if parameters are not sharded."""
    whole = [p for group in groups for p in group["params"]]
    if not (whole and sharded(whole[0])):
        return []
    for group in groups:
        group["params"] = [nn.Parameter(rows) for rows in local(group["params"])]
    return whole


def follow(optimizer: torch.optim.Optimizer, whole: list[nn.Parameter]) -> None:
    """Make an optimiser over this rank's rows take its gradients from the sharded parameters, and clear them."""

    def take(*_: Any) -> None:
        for p, rows in zip(whole, (p for group in optimizer.param_groups for p in group["params"]), strict=True):
            rows.grad = None if p.grad is None else local([p.grad])[0]

    def clear(*_: Any) -> None:
        for p in whole:
            p.grad = None

    if whole:
        optimizer.register_step_pre_hook(take)
        optimizer.register_step_post_hook(clear)
        optimizer.whole = whole  # type: ignore[attr-defined]  # `optimizer_state` reads it


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimiser. If the parameters are sharded, its moments are DTensors."""
    state = optimizer.state_dict()
    whole: list[Any] = getattr(optimizer, "whole", [])
    if whole:
        from torch.distributed.tensor import DTensor

        for i, values in state["state"].items():
            p = whole[i]
            where = (p.device_mesh, p.placements)
            state["state"][i] = {  # the number of steps is a scalar, not a tensor of rows
                name: DTensor.from_local(x, *where, run_check=False, shape=p.shape, stride=p.stride()) if x.ndim else x
                for name, x in values.items()
            }
    return state


@torch.no_grad()
def load(method: Method, optimizer: torch.optim.Optimizer, state: dict[str, Any], read_rows: Reader) -> None:
    """Load the states `method` and `optimizer` of a checkpoint into a sharded method and its optimiser.

    The tensors in `state` are unsharded, or meta tensors, which have no values. For the latter, `read_rows` reads
    values into DTensors, given by their keys."""
    parameters = dict(method.named_parameters())
    whole: list[Any] = optimizer.whole  # type: ignore[attr-defined]
    state = {"method": dict(state["method"]), "optimizer": state["optimizer"]}
    targets: dict[Path, Tensor] = {}
    for path, x in tensors(state):
        p = parameters.get(path[1]) if path[0] == "method" else whole[path[2]] if path[1] == "state" else None
        if p is None or x.shape != p.shape:
            continue
        target = p.detach() if path[0] == "method" else torch.zeros_like(p.detach())
        if x.is_meta:
            targets[path] = target
        else:
            local([target])[0].copy_(own_rows(x, dist.rank(), dist.size()))
        if path[0] == "optimizer":
            state = replace(state, path, local([target])[0])
    if targets:
        read_rows(targets)
    for name, buffer in method.named_buffers():
        if name in state["method"]:
            buffer.copy_(state["method"][name])
    optimizer.load_state_dict(state["optimizer"])


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module in host memory, with every tensor gathered. Called by all ranks together."""
    state = module.state_dict()
    return {name: (x.full_tensor() if sharded(x) else x).detach().cpu() for name, x in state.items()}


def tensors(state: Any, path: Path = ()) -> Iterable[tuple[Path, Tensor]]:
    """Yield every tensor of a nested state, with the keys that lead to it."""
    if isinstance(state, Tensor):
        yield path, state
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from tensors(value, (*path, key))


def replace(state: Any, path: Path, tensor: Tensor) -> Any:
    """Return a copy of a nested state with `tensor` in place of the tensor at `path`."""
    if not path:
        return tensor
    out = copy.copy(state)  # keeps the attribute `_metadata` of a state_dict
    out[path[0]] = replace(state[path[0]], path[1:], tensor)
    return out
