"""Writes a state to a file, and computes the checksum of the bytes on the way."""

import atexit
import hashlib
import threading
from pathlib import Path
from typing import Any

import torch

NOT_NUMBERS = "the weights are no numbers any more, so it does not count; the first tensor with a NaN is"
# A process that ends while torch's C++ code runs would abort, so exit waits for the serialisation, not for the store.
_in_torch = threading.Lock()
atexit.register(_in_torch.acquire, timeout=60)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def ruined(tensors: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that hold a NaN. Infinite numbers may be meant, as in a mask."""
    floats = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()}
    floats = {n: x for n, x in floats.items() if not x.is_meta}
    if not floats:
        return []
    largest = torch._foreach_norm(list(floats.values()), float("inf"))  # NaN where there is one
    return [name for name, x in zip(floats, largest, strict=True) if x.isnan()]


def serialise(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a state to a file and return the size and SHA-256 of the bytes to be written. Raises OSError."""
    with path.open("wb", buffering=0) as f:
        file = _Hashed(f)
        with _in_torch:
            torch.save(state, file)  # type: ignore[arg-type]
        if file.problem:
            raise file.problem
    return {"bytes": file.size, "sha256": file.hash.hexdigest()}


class _Hashed:
    """A file that torch writes to, which keeps an error for later: raising it through torch's C++ code is unsafe."""

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
