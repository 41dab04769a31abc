"""Reads the tensors of files that any trainer wrote, and runs no code from these files.

PyTorch's restricted reader builds tensors and plain values. Objects of other classes become empty stand-ins, so that
options, paths and NumPy's numbers beside the tensors do no harm. A file that would call functions of Python's own
library, other than those for data such as a path or a date, is refused."""

import _compat_pickle
import builtins
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagleray.base.errors import UserError

State = dict[str, Tensor]

KEY = "backbone.weights"  # key of a recipe that errors name by default
# Modules of Python's own library whose classes are data.
DATA = {"argparse", "collections", "copyreg", "datetime", "decimal", "enum", "fractions", "functools", "pathlib", "re"}
DATA |= {"typing", "uuid"}
LEGACY_PICKLES = 4  # number of pickles in a file from before PyTorch 1.6: mark, version, machine and content
NUMBERS = re.compile(r"[biufc]\d+")  # NumPy's type codes of plain numbers, such as f4
# Matches what DistributedDataParallel, torch.compile, FSDP and other wrappers put into the names of parameters.
WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_\w+_mod(?:ule)?|module)\.")
CLASS = "stands_for"  # attribute of a stand-in: the name of the class that it stands for


def hash_tensors(total: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add names, types, shapes and values of tensors to a hash of hashlib, in the order of the names."""
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def load_tensors(path: Path, key: str = KEY) -> dict[str, Any]:
    """Read a .safetensors or PyTorch file, which the recipe's `key` names.

    Raises UserError when the file is damaged, holds no mapping or list, or would run code."""
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        named = [(".".join(name), ".".join(_of_python_3(name))) for name in set(_named(path))]
        stand_ins: list[Any] = [(_stand_in(new), name) for old, new in named for name in {old, new}]
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about deprecated types of storage
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        if "operand" in (reason := _reason(e)):
            why = "it is no file of PyTorch's, or was stored with another pickle_protocol than PyTorch's"
            raise UserError(f"{key}={path}: cannot be read ({reason}: {why})") from None
        raise UserError(f"{key}={path}: holds more than tensors; store its state dict alone ({reason})") from None
    except (SafetensorError, OSError, EOFError, KeyError, zipfile.BadZipFile) as e:
        raise UserError(f"{key}={path}: cannot be read ({type(e).__name__})") from None
    except Exception as e:  # torch has many errors for a file that is damaged or not its own
        raise UserError(f"{key}={path}: cannot be read ({type(e).__name__}: {_reason(e)})") from None
    if known := class_of(content):
        raise UserError(f"{key}={path}: holds more than tensors; store its state dict alone (it is a {known})")
    if isinstance(content, list | tuple) and any(isinstance(part, Mapping) for part in content):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping):
        raise UserError(f"{key}={path}: expected tensors by name, found a {type(content).__name__}")
    return dict(content)


def mappings(content: Mapping[Any, Any]) -> tuple[dict[str, State], list[str]]:
    """Return the tensors of each mapping with tensors, at any depth, and the classes of objects that were not read.

    The key of a mapping is its place, such as `state_dict`; outer mappings come first."""
    found: dict[str, State] = {}
    unread: dict[str, None] = {}
    queue: deque[tuple[str, Mapping[Any, Any] | list[Any] | tuple[Any, ...]]] = deque([("", content)])
    seen = {id(content)}  # a mapping may contain itself
    while queue:
        place, values = queue.popleft()
        if state := tensors_in(named := values if isinstance(values, Mapping) else dict(enumerate(values))):
            found[place] = state
        for name, value in named.items():
            if known := class_of(value):
                unread[known] = None
            elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
                seen.add(id(value))
                queue.append((f"{place}.{name}".removeprefix("."), value))
    return found, [name for name in unread if not _of_python(name)]


def tensors_in(mapping: Mapping[Any, Any]) -> State:
    """Return the tensors and NumPy arrays of a mapping, by names without the parts that wrappers add."""
    values = ((str(k), v.tensor if isinstance(v, _Array) else v) for k, v in mapping.items())
    return {unwrap_name(k): v for k, v in values if isinstance(v, Tensor)}


def unwrap_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add anywhere in it."""
    return WRAPPER.sub("", name)


def class_of(value: Any) -> str:
    """Return the name of the class that an empty stand-in stands for; an empty string for any other value."""
    return str(vars(value).get(CLASS, "")) if type(value) is Counter and not value else ""


def _named(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each class or function that a PyTorch file names, without creating an object."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            for _ in range(LEGACY_PICKLES):
                yield from _globals(file)
            return
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    with archive.open(name) as inner:
                        yield from _globals(inner)


def _globals(file: Any) -> Iterator[tuple[str, str]]:
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "GLOBAL":
                module, _, name = str(argument).partition(" ")
                yield module, name
    except ValueError:  # no pickle, which PyTorch's reader will report
        return


def _of_python_3(named: tuple[str, str]) -> tuple[str, str]:
    """Return module and name as in Python 3. Pickle's protocol 2 has Python 2's names; PyTorch translates some."""
    module, name = named
    return _compat_pickle.NAME_MAPPING.get(named) or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)


def _stand_in(name: str) -> type:
    """Return a class that replaces the class or function `name` of a file. Its objects are empty for any arguments."""
    if name in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
        return _Array
    if name == "numpy.dtype":
        return _Numbers
    if name == "collections.deque":
        return type("Deque", (), {"__new__": lambda cls, *_: []})
    if name == "functools.partial":
        return type("Partial", (), {"__init__": lambda self, *_: None, "__setstate__": lambda self, _: None})

    def make(cls: type, *_: Any) -> Counter[Any]:
        if _of_python(name) and not _is_data(name):
            raise pickle.UnpicklingError(f"it would call {name}")
        made: Counter[Any] = Counter()  # the only type for which PyTorch's reader allows both items and any state
        vars(made)[CLASS] = name
        return made

    return type("StandIn", (), {"__new__": make})


def _of_python(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _is_data(name: str) -> bool:
    """Return whether a name in Python's library means a data type, or `getattr`, which by itself calls no function."""
    module, _, own = name.partition(".")
    if module == "builtins":
        return own == "getattr" or isinstance(getattr(builtins, own, None), type)
    return module in DATA


def _reason(error: Exception) -> str:
    """Return why PyTorch refused a file, without its advice to trust it."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
    return (text.splitlines() or [""])[0].partition(" Please use ")[0].rstrip(".")[:200]


class _Numbers:
    """The data type (dtype) of a NumPy array: its type code and byte order."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"


class _Array:
    """A NumPy array, which becomes a tensor if it has plain numbers.

    NumPy's own reader is not used, as it trusts what a file says about the memory of an array."""

    tensor: Tensor | None = None

    def __init__(self, *_: Any) -> None:
        """Ignore the arguments of a pickled array, as `__setstate__` gets its shape."""

    def __setstate__(self, state: Any) -> None:
        _, shape, numbers, column_major, data = state
        if isinstance(numbers, _Numbers) and NUMBERS.fullmatch(numbers.code) and isinstance(data, bytes):
            values = np.frombuffer(data, np.dtype(numbers.order + numbers.code))
            values = values.reshape(shape, order="F" if column_major else "C")
            self.tensor = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C"))
