"""Copies a state to host memory, so that training can go on, and writes the copy to a file with a checksum."""

import atexit
import copy
import hashlib
import threading
from pathlib import Path
from typing import Any

import torch

from eagleray.base import devices

PLAIN = (bool, int, float, str, bytes, type(None))  # types that a checkpoint may have besides tensors and containers


class HostCopy:
    """Copies states into buffers in host memory, which the next copy reuses."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}  # buffers by the path of keys to their tensor
        self._devices: set[torch.device] = set()  # devices from which copies may still be under way

    @torch.no_grad()
    def update(self, state: Any) -> Any:
        """Return the state with every tensor copied to the host, valid until the next call.

        Tensors that share memory do not share it in the copy. A buffer that fits is overwritten, as new memory costs
        more time than the copy itself."""
        before, self._buffers, self._devices = self._buffers, {}, set()
        out = self._copy(state, (), before)
        for device in self._devices:
            devices.synchronize(device)
        return out

    def _copy(self, x: Any, path: tuple[Any, ...], before: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(x, torch.Tensor) and x.is_meta:  # stands for a sharded tensor, whose rows are written apart
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
            out = copy.copy(x)  # keeps the attribute `_metadata` of a state_dict
            for key, value in x.items():
                out[key] = self._copy(value, (*path, key), before)
            return out
        if isinstance(x, list | tuple):
            return type(x)(self._copy(value, (*path, i), before) for i, value in enumerate(x))
        assert type(x) in PLAIN, f"{path}: {type(x)} in a checkpoint"
        return x


NOT_NUMBERS = "the weights are no numbers any more, so it does not count; the first tensor with a NaN is"
# A process that exits while torch's C++ code runs would abort, so exit waits for this lock, at most 60 s. Uploads to a
# store do not hold it.
_in_torch = threading.Lock()
atexit.register(_in_torch.acquire, timeout=60)


def ruined(tensors: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that have a NaN. Infinite values are accepted, as a mask may have them."""
    floats = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()}
    floats = {n: x for n, x in floats.items() if not x.is_meta}
    if not floats:
        return []
    largest = torch._foreach_norm(list(floats.values()), float("inf"))  # the norm of a tensor with a NaN is NaN
    return [name for name, x in zip(floats, largest, strict=True) if x.isnan()]


def serialise(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a state to a file, and return the size and SHA-256 of its bytes. Raises OSError, e.g. on a full disk."""
    with path.open("wb", buffering=0) as f:
        file = _Hashed(f)
        with _in_torch:
            torch.save(state, file)  # type: ignore[arg-type]
        if file.problem:
            raise file.problem
    return {"bytes": file.size, "sha256": file.hash.hexdigest()}


class _Hashed:
    """A file for torch.save that stores an error instead of raising it through torch's C++ code, which is unsafe."""

    def __init__(self, file: Any) -> None:
        self.file, self.hash, self.size = file, hashlib.sha256(), 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        if not self.problem:
            self.size += size
            self.hash.update(rest)
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError as e:
                self.problem = e
        return size

    def flush(self) -> None:
        pass
