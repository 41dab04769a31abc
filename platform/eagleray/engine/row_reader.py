"""Read the rows of a sharded checkpoint, which may be malicious, without running any code that it names.

`torch.distributed.checkpoint` describes the rows in a pickle, the file `.metadata`. Here every object in it becomes a
record without behaviour, whatever its class, and only checked values are copied from these records."""

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.api import CheckpointException

from eagleray.base.errors import UserError
from eagleray.engine.checkpoint_files import METADATA, SHARD_FILE


def read(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Read values into `targets`, tensors by name. Raises UserError for a damaged or missing tensor, and OSError."""
    reader = _Reader(folder)
    try:
        dcp.load(dict(targets), storage_reader=reader, no_dist=True)
    except CheckpointException as e:  # a BaseException, which `except Exception` misses
        cause = next(iter(e.failures.values()))[0]
        if isinstance(cause, OSError | MemoryError) or not isinstance(cause, Exception):
            raise cause from None
        raise UserError(
            f"{folder}: not the rows of a checkpoint written by eagleray ({type(cause).__name__})"
        ) from None


class _Part(NamedTuple):
    """The position, in bytes, of the rows of one rank in a file."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(dcp.FileSystemReader):
    """A reader of rows that gets checked metadata; PyTorch's own would unpickle the file of metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> described.Metadata:
        return self._metadata


def _metadata(folder: Path) -> described.Metadata:
    """Return the checked description of the rows in a folder. Raises UserError when it is not valid, and OSError."""
    _check_file(folder / METADATA)
    try:
        found = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        parts = {_index(key): _part(part) for key, part in found.storage_data.items()}
        tensors = {name: _tensor(entry) for name, entry in found.state_dict_metadata.items()}
    except (OSError, MemoryError):
        raise
    except Exception as e:  # a pickle can be damaged in many ways
        raise UserError(f"{folder / METADATA}: does not describe rows ({type(e).__name__})") from None
    for name in {part.relative_path for part in parts.values()}:
        _check_file(folder / name)
    return described.Metadata(dict(tensors), storage_data=parts, storage_meta=described.StorageMeta())


class _Record:
    """Stands for an object of any class or function, and stores the state that the pickle gives it."""

    def __init__(self, *values: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = state


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """The unpickler in Python: with that in C, a few bytes may allocate gigabytes. It takes 11 s for 96,000 parts."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else tuple if (module, name) == ("torch", "Size") else _Record


def _index(key: Any) -> described.MetadataIndex:
    return described.MetadataIndex(_checked(key.fqn, str), _numbers(key.offset))


def _part(part: Any) -> _Part:
    offset, length = _numbers((part.offset, part.length))
    if not SHARD_FILE.fullmatch(part.relative_path) or getattr(part, "transform_descriptors", None):
        raise ValueError
    return _Part(part.relative_path, offset, length)


def _tensor(entry: Any) -> described.TensorStorageMetadata:
    """Return the checked description of a tensor. Raises an error for other objects, which PyTorch would unpickle."""
    chunks = [described.ChunkStorageMetadata(_numbers(c.offsets), _numbers(c.sizes)) for c in entry.chunks]
    dtype, size = _checked(entry.properties.values[0], torch.dtype), _numbers(entry.size)
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(size):  # missing values would be uninitialised memory
        raise ValueError
    return described.TensorStorageMetadata(described.TensorProperties(dtype), size, chunks)


def _numbers(values: Any) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError
    return torch.Size(values)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _check_file(path: Path) -> None:
    if not path.is_file():  # reading a pipe could wait for ever
        raise UserError(f"{path}: is missing, and the rows of its checkpoint with it")
