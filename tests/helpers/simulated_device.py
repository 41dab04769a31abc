"""A simulated accelerator: tensors on `sim:0` compute on the CPU, and what a real accelerator refuses is refused.

    with simulated() as waits:
        pretrain(recipe, World(DEVICE), tracking=...)

Every operation that would make the host wait for the device adds a line to `waits`, with the line of eagleray that
asked for it. An operation raises RuntimeError when it mixes tensors of the device with those of the CPU, or takes a
generator of the other. `torch.accelerator`, `torch.Stream`, `torch.Event`, autocast, pinned memory and
memory counters work; streams and events do nothing. `simulated_ranks.py` adds collectives.

The device is PyTorch's Python backend for the PrivateUse1 key, and its tensors are wrappers of CPU tensors. It has one
device, cannot be compiled for, and is slow. As PyTorch knows one accelerator per process, the module skips the tests
that import it where a real one is present.
"""

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.backend_registration as registration
from helpers.gpu_operations import ON_GPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eagleray.base import devices
from eagleray.runs.as_on_gpu import FLOAT32, attention, autocast_kernel, widened

if torch.accelerator.is_available() and torch.accelerator.current_accelerator() != torch.device("sim"):
    pytest.skip("simulates an accelerator, and this machine has one", allow_module_level=True)

aten = torch.ops.aten
CPU = torch.device("cpu")
COPY, COPY_, SAME_TYPE = aten._to_copy.default, aten.copy_.default, aten._has_compatible_shallow_copy_type.default
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
# The host needs their result, or the size of their result.
WAITING = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.linalg_eigh.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
WAITS: list[str] = []
ELSEWHERE: dict[str, Callable[[Any, Any, Any], Any]] = {}  # what runs the operations of a namespace, by its name


class _Backend(registration._DummyBackendModule):
    active = False

    def is_available(self) -> bool:
        return self.active

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def set_device(self, device: Any) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "simulated device"


if torch._C._get_privateuse1_backend_name() != "sim":
    BACKEND = _Backend()
    registration._setup_privateuseone_for_python_backend("sim", backend_module=BACKEND)
DEVICE = torch.device("sim", 0)


class OnDevice(Tensor):
    """A tensor on the simulated device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        like = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        out = Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, layout=inner.layout, **like)
        out.inner = inner
        MEMORY.add(inner)
        return out

    def tolist(self) -> Any:
        wait("tolist")
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees operations that have no tensor of the device among their arguments, such as `torch.zeros(2, device=...)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def simulated() -> Iterator[list[str]]:
    """Make the device available within the block. Yields the list of waits, emptied."""
    WAITS.clear()
    CASTS.clear()  # what an earlier block has cast is no memory of this one
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)
    replaced = [
        mock.patch.object(_Backend, "active", True),
        mock.patch.multiple(torch, Generator=_Generator, Event=_Event),
        mock.patch.multiple(Tensor, pin_memory=_pinned, is_pinned=_is_pinned),
        mock.patch.multiple(torch.accelerator, **ACCELERATOR),
        mock.patch.object(torch, "clear_autocast_cache", CASTS.clear),
        mock.patch.object(devices, "WIDE_SUMS", {DEVICE.type}),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for patch in replaced:
                stack.enter_context(patch)
            stack.enter_context(_Mode())
            yield WAITS
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(swap)


def wait(what: str) -> None:
    """Note that the host waits for the device, and the innermost line of eagleray that made it."""
    frame: Any = sys._getframe(1)
    while frame is not None and "eagleray/" not in frame.f_code.co_filename.rpartition("platform")[2]:
        frame = frame.f_back
    line = f" in {frame.f_code.co_filename.rpartition('eagleray/')[2]}:{frame.f_lineno}" if frame else ""
    WAITS.append(what + line)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the values of its tensors."""
    if torch.is_inference_mode_enabled():  # whose tensors cannot be wrapped
        with torch.inference_mode(False), torch.no_grad(), _Mode():
            return func(*args, **kwargs)
    if func.namespace in ELSEWHERE:
        return ELSEWHERE[func.namespace](func, args, kwargs)
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked)
    to_device = asked.type == DEVICE.type if asked is not None else bool(here)
    if here and (func in WAITING or (func in INDEXED and any(x.dtype == torch.bool for x in _indices(args)))):
        wait(str(func))
    if func not in (COPY, COPY_, SAME_TYPE):
        _check(func, args, here, [x for x in tensors if not isinstance(x, OnDevice) and x.ndim > 0])
        _check_generator(func, kwargs.get("generator"), to_device)
    if func is aten.record_stream.default:
        return None
    if func is SAME_TYPE:
        return False
    if func is aten.is_pinned.default:
        return _is_pinned(args[0])
    inner_args, inner_kwargs = map_leaves(inner, args), map_leaves(inner, kwargs)
    pinned = inner_kwargs.pop("pin_memory", None)
    out = ON_GPU.get(func, func)(*inner_args, **inner_kwargs)
    if func is COPY_:
        _note_copy(args, inner_args)
        return args[0]
    if func is COPY:
        return _copied(out, args[0], inner_args[0], to_device, blocking=not kwargs.get("non_blocking"))
    if not to_device:
        return _mark(out) if pinned else out
    known = {id(x.inner): x for x in here}  # an operation in place hands back the tensor that it was given

    def wrapped(x: Any) -> Any:
        return known[id(x)] if id(x) in known else OnDevice(x) if type(x) is Tensor else x

    return map_leaves(wrapped, out)


def leaves(x: Any) -> list[Any]:
    """Return what the tuples, lists and dicts of an operation's arguments hold; PyTorch's own function is slower."""
    if isinstance(x, tuple | list):
        return [leaf for part in x for leaf in leaves(part)]
    return [leaf for part in x.values() for leaf in leaves(part)] if isinstance(x, dict) else [x]


def map_leaves(f: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)([map_leaves(f, part) for part in x])
    return {key: map_leaves(f, part) for key, part in x.items()} if isinstance(x, dict) else f(x)


def inner(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.inner
    return CPU if isinstance(x, torch.device) and x.type == DEVICE.type else x


def _indices(args: Any) -> list[Tensor]:
    return [x for x in leaves(args[1]) if isinstance(x, Tensor)]


def _check(func: Any, args: Any, here: list[OnDevice], elsewhere: list[Tensor]) -> None:
    """Raises RuntimeError where a device refuses a tensor of the CPU. It takes scalars, and indices, for which it
    waits."""
    if not here or not elsewhere:
        return
    if func in INDEXED and isinstance(args[0], OnDevice):
        values = [x for x in args[2:3] if not isinstance(x, OnDevice) and x.ndim > 0]
        if not values:
            wait(f"{func} with an index on the CPU")
            return
    raise RuntimeError(f"{func}: expected all tensors on one device, found {DEVICE} and cpu")


def _check_generator(func: Any, generator: Any, to_device: bool) -> None:
    if generator is not None and (generator._cdata in _Generator.on_device) != to_device:
        raise RuntimeError(f"{func}: expected a generator of the device of the tensor")


def _note_copy(args: Any, inner: Any) -> None:
    """Note a wait of `a.copy_(b)` between host and device: without `non_blocking`, or to memory that is not pinned."""
    to_device, from_device = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice)
    if to_device != from_device:
        if not (len(args) > 2 and args[2]):
            wait("blocking copy_")
        elif from_device and not _is_pinned(inner[0]):
            wait("copy_ to memory that is not pinned")


def _copied(out: Tensor, source: Tensor, inner: Tensor, to_device: bool, *, blocking: bool) -> Tensor:
    """Return the result of `source.to(...)`."""
    if blocking and isinstance(source, OnDevice) != to_device:
        wait("blocking copy from the host" if to_device else "copy to the host")
    return OnDevice(out.clone() if out is inner else out) if to_device else out


# Pinned memory: a mark on the storage, which views share.


def _mark(x: Any) -> Any:
    x.untyped_storage().pinned = True
    return x


def _pinned(x: Tensor, device: Any = None) -> Tensor:
    if isinstance(x, OnDevice):
        raise RuntimeError(f"cannot pin a tensor on {DEVICE}, only one on the CPU")
    with _disable_current_modes():  # it is no operation of the device
        return x if _is_pinned(x) else _mark(x.clone())


def _is_pinned(x: Tensor, device: Any = None) -> bool:
    return not isinstance(x, OnDevice) and getattr(x.untyped_storage(), "pinned", False)


class _Generator(torch.Generator):
    """Generator of the CPU that remembers whether it was made for the device."""

    on_device: set[int] = set()  # noqa: RUF012

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        there = torch.device(device).type == DEVICE.type
        out = super().__new__(cls, CPU if there else device)
        if there:
            cls.on_device.add(out._cdata)
            weakref.finalize(out, cls.on_device.discard, out._cdata)
        return out


class _Event(torch.Event):
    """An event that can be waited for and timed, by the host's clock."""

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        wait("event.synchronize")

    def elapsed_time(self, end: Any) -> float:
        return 1000 * (end.time - self.time)


class _Memory:
    """Counts the bytes of the live storages of the device, of which it has `size`."""

    def __init__(self) -> None:
        self.now, self.peak, self.size = 0, 0, 2**34
        self._live: set[int] = set()

    def add(self, inner: Tensor) -> None:
        storage = inner.untyped_storage()
        if storage._cdata not in self._live:
            self._live.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            if self.now > self.size:
                self._drop(storage._cdata, storage.nbytes())
                raise torch.OutOfMemoryError(f"{DEVICE}: out of memory")
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes()).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size

    def reset(self) -> None:
        self.peak = self.now


MEMORY = _Memory()
ACCELERATOR: dict[str, Callable[..., Any]] = {
    "synchronize": lambda device=None: wait("synchronize"),
    "memory_allocated": lambda device=None: MEMORY.now,
    "max_memory_allocated": lambda device=None: MEMORY.peak,
    "memory_reserved": lambda device=None: MEMORY.now,
    "get_memory_info": lambda device=None: (MEMORY.size - MEMORY.now, MEMORY.size),
    "reset_peak_memory_stats": lambda device=None: MEMORY.reset(),
    "empty_cache": lambda: None,
}

# Autocast, as a GPU's: products of matrices in the lower precision, whose weights are cast once in a forward pass.
LOWER = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d")
LOWER += ("scaled_dot_product_attention",)
CASTS: dict[int, tuple[Tensor, Tensor]] = {}


def _lowered(x: Any) -> Any:
    if not (isinstance(x, OnDevice) and x.is_floating_point() and x.dtype != torch.float64):
        return x
    dtype = torch.get_autocast_dtype(DEVICE.type)
    if not (x.requires_grad and x.is_leaf and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
        return x.to(dtype)
    if id(x) not in CASTS:
        CASTS[id(x)] = x, x.to(dtype)
    return CASTS[id(x)][1]


def _register() -> list[torch.library.Library]:
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in (*LOWER, *FLOAT32.split()):
        cast = _lowered if name in LOWER else widened
        library.impl(name, autocast_kernel(name, "AutocastPrivateUse1", cast), "AutocastPrivateUse1")
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    return [others, library]


REGISTERED = _register()
