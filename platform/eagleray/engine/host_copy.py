"""A copy of a state in the host's memory, so that training can go on while it is written."""

import copy
from typing import Any

import torch

from eagleray.base import devices

PLAIN = (bool, int, float, str, bytes, type(None))  # the types that a checkpoint may hold besides tensors


class HostCopy:
    """Copies states to buffers in the host's memory, which are reused by the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}  # one buffer for each path of keys to a tensor
        self._devices: set[torch.device] = set()  # devices whose copies are not finished

    @torch.no_grad()
    def update(self, state: Any) -> Any:
        """Return the state with every tensor copied to the host, valid until the next call.

        Tensors that share memory do not share it in the copy. A buffer that fits is overwritten, as new memory costs
        more time than the copy itself.
        """
        before, self._buffers, self._devices = self._buffers, {}, set()
        out = self._copy(state, (), before)
        for device in self._devices:
            devices.synchronize(device)
        return out

    def _copy(self, x: Any, path: tuple[Any, ...], before: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(x, torch.Tensor) and x.is_meta:  # sharded checkpoints have such tensors
            return x
        if isinstance(x, torch.Tensor):
            buffer = before.get(path)
            if buffer is None or buffer.shape != x.shape or buffer.dtype != x.dtype:
                buffer = torch.empty_like(
                    x, device="cpu", requires_grad=False, pin_memory=devices.has_streams(x.device)
                )
            self._buffers[path] = buffer
            self._devices |= {x.device} if devices.is_accelerator(x.device) else set()
            return buffer.copy_(x, non_blocking=True)
        if isinstance(x, dict):
            out = copy.copy(x)  # keeps a state dict's metadata on versions
            for key, value in x.items():
                out[key] = self._copy(value, (*path, key), before)
            return out
        if isinstance(x, list | tuple):
            return type(x)(self._copy(value, (*path, i), before) for i, value in enumerate(x))
        assert type(x) in PLAIN, f"{path}: {type(x)} in a checkpoint"
        return x
