"""Trace one real training step without computing it: its memory at the peak, its FLOPs and the bytes that it moves.

The method, the optimiser, the monitor and the loop are those of a run, on tensors that have shapes but no values
(PyTorch's FakeTensor), so a step of any size is traced in seconds on any machine, as a CPU or a GPU takes it. FLOPs are
counted as `torch.utils.flop_counter` counts them.

Where FSDP shards the weights among ranks (Zhao et al. 2023, arXiv:2304.11277), a rank also holds unsharded weights for
a while, as in engine/sharded.py: those outside of blocks for the entire step, and those of two blocks at a time, of
which one computes and one is gathered. Their gradients are unsharded for as long."""

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from eagleray.base import devices
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.engine.loop import Step
from eagleray.engine.precision import Precision
from eagleray.losses import softmax
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import sync_batch_norms
from eagleray.models.ema import frozen_weights, momentum_copies
from eagleray.models.stages import blocks
from eagleray.runs.accelerators import ATTENTION, CONV, FUNCTION, MATMUL, MOVE, NORM
from eagleray.runs.as_on_gpu import as_on_gpu, exchange_moments
from eagleray.runs.build import build_method, build_optimizer, make_trainer
from eagleray.runs.checks import keys_of_whole_weights
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe
from eagleray.runs.start_guard import Anchor
from eagleray.views.sampling import Views

CPU = devices.CPU
LONG = 4  # most micro-batches that are traced; a step of more is extrapolated from LONG // 2 and LONG
MIDDLE = Progress(500, 10, 100)  # a step in the middle of training, when nothing is frozen
WEIGHTS, TEACHER, BUFFERS, MOMENTS = "weights", "teacher", "buffers", "moments"
GRADIENTS, IMAGES, ACTIVATIONS = "gradients", "images", "activations"
GATHERED = "gathered"  # weights and gradients that are unsharded for a while under FSDP
AT_ONCE = 2  # blocks whose weights are gathered at the same time

# Maps kinds of operations to the beginnings of their names. All other operations move memory.
NAMES = {
    MATMUL: ("mm", "addmm", "bmm", "baddbmm"),
    CONV: ("convolution", "_convolution"),
    ATTENTION: ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "attend_"),
    NORM: ("native_layer_norm", "native_batch_norm", "_batch_norm", "native_group_norm"),
    FUNCTION: ("gelu", "_softmax", "_log_softmax", "exp", "erf", "tanh", "sigmoid", "silu", "log"),
}


register_flop_formula(torch.ops.eagleray.attend_prototypes)(softmax.flops)


class Work(NamedTuple):
    """The cost of one operation."""

    kind: str
    wide: bool  # whether it computes in float32
    flops: int
    bytes: int  # bytes read and written


@dataclass(frozen=True)
class StepTrace:
    """The memory and the work of one training step of one rank."""

    images: int  # this rank's images, each in all its views
    memory: dict[str, int]  # bytes at the peak, by kind
    gradients: int  # bytes of gradients that ranks sum
    flops: float  # FLOPs, without those of recomputed activations
    repeated: float  # FLOPs of activations that are computed again in the backward pass
    work: dict[Work, float]  # how often each operation is done
    operations: float  # number of operations that the host dispatches
    exchanges: dict[int, float] = field(default_factory=dict)  # how often ranks wait for a sum, by its number of bytes

    @property
    def peak(self) -> int:
        """Return the bytes of all tensors at the peak."""
        return sum(self.memory.values())

    def extended(self, longer: "StepTrace", images: int) -> "StepTrace":
        """Return the trace for more micro-batches of the same size, extrapolated from this and a `longer` trace."""
        times = (images - self.images) / (longer.images - self.images)

        def line(a: float, b: float) -> float:
            return a + (b - a) * times

        def lines(a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, float]:
            return {key: line(a.get(key, 0), b.get(key, 0)) for key in a | b}

        memory = {kind: round(size) for kind, size in lines(self.memory, longer.memory).items()}
        return StepTrace(
            images,
            memory,
            self.gradients,
            line(self.flops, longer.flops),
            line(self.repeated, longer.repeated),
            lines(self.work, longer.work),
            line(self.operations, longer.operations),
            lines(self.exchanges, longer.exchanges),
        )


class Tracer(TorchDispatchMode):
    """Counts the live bytes of tensors by kind, and the work, of every operation that is dispatched under it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.memory: dict[str, int] = {}  # bytes at the peak, by kind
        self.now = self.peak = 0
        self.flops, self.repeated, self.operations = 0, 0, 0
        self.work: Counter[Work] = Counter()
        self.exchanges: Counter[int] = Counter()
        self._storages: dict[int, list[Any]] = {}  # bytes, kind and weak reference of each storage, by its id

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count the memory of tensors under a kind. Memory counted under another kind moves to this one."""
        for t in tensors:
            self._add(t, kind)
            entry = self._storages[id(t.untyped_storage())]
            self.live[entry[1]] -= entry[0]
            self.live[kind] += entry[0]
            entry[1] = kind

    def _add(self, t: Tensor, kind: str = ACTIVATIONS) -> bool:
        """Count the memory of a tensor until it is freed. Returns whether its memory was not counted yet."""
        storage = t.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return False
        size = storage.nbytes()
        entry: list[Any] = [size, kind, None]
        entry[2] = weakref.ref(storage, lambda _: self._free(key))
        self._storages[key] = entry
        self.live[kind] += size
        self.now += size
        if self.now > self.peak:
            self.peak, self.memory = self.now, dict(self.live)
        return True

    def _free(self, key: int) -> None:
        size, kind, _ = self._storages.pop(key)
        self.live[kind] -= size
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # answered here, as it is asked thousands of times
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:  # a number that a method draws, such as mixup's share
            return 0.5 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten._pin_memory.default:  # FakeTensors lack it; a copy to the device follows
            self._count(torch.ops.aten._to_copy.default, args, {}, args[0], args)
            return args[0]
        out = FASTER.get(func, func)(*args, **kwargs)
        outs = list(_tensors(out))
        for t in outs:
            self._add(t)
        if func.namespace == "c10d":
            self.exchanges[exchanged(func, args)] += 1
        elif works(func):
            self._count(func, args, kwargs, out, outs)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outs: Sequence[Tensor]) -> None:
        """Add the work of an operation that is no mere view."""
        flops = 0
        if func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        inputs = list(_tensors((args, {k: v for k, v in kwargs.items() if k != "out"})))
        moved = sum(t.numel() * t.element_size() for t in (*inputs, *outs))
        wide = not any(t.dtype in (torch.bfloat16, torch.float16) for t in inputs)
        self.operations += 1
        self.work[Work(kind_of(func._overloadpacket.__name__), wide, flops, moved)] += 1
        # In a backward pass gradients are only enabled while activations are computed again.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        self.flops += 0 if again else flops
        self.repeated += flops if again else 0


def exchanged(func: Any, args: Any) -> int:
    """Return the bytes of an all-reduce that takes as long as the communication `func` between ranks.
    A communication without a sum, such as a gather, sends half as much as an all-reduce."""
    largest = max(t.nbytes for t in _tensors(args))
    return largest if "reduce" in func._schema.name else largest // 2


@functools.cache
def works(func: Any) -> bool:
    """Return whether an operation computes or moves something: it is neither a view nor a mere allocation."""
    name, schema = func._overloadpacket.__name__, func._schema
    if schema.is_mutable:
        return True
    returned = [r for r in schema.returns if "Tensor" in str(r.type) and r.alias_info is None]
    return bool(returned) and not name.startswith(("empty", "new_empty", "_unsafe_view"))


@functools.cache
def kind_of(name: str) -> str:
    """Return the kind of an operation by its name."""
    return next((kind for kind, starts in NAMES.items() if name.startswith(starts)), MOVE)


def _viewed(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x.view(shape), computed by as_strided if x is contiguous, which is faster on FakeTensors."""
    if not x.is_contiguous():
        return torch.ops.aten.view.default(x, shape)  # type: ignore[no-any-return]
    known = math.prod(n for n in shape if n != -1)
    shape = [x.numel() // max(known, 1) if n == -1 else n for n in shape]
    strides = [math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape))]
    return torch.ops.aten.as_strided.default(x, shape, strides, x.storage_offset())  # type: ignore[no-any-return]


# Maps operations on which FakeTensors spend a third of a trace to faster ones that give the same shapes.
FASTER: dict[Any, Any] = {
    torch.ops.aten.view.default: _viewed,
    torch.ops.aten.addmm.default: lambda bias, a, b, **_: torch.ops.aten.mm.default(a, b),
}


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from _tensors(x)


def trace_step(recipe: Recipe, *, ranks: int, dataset: int, dtype: torch.dtype, gpu: bool) -> StepTrace:
    """Trace a step of the rank with the most images, as it is after the first few steps, on a CPU or a GPU.

    `dataset` is the number of images in the data set, on which a memory bank depends, and `dtype` that of matrix
    products. Raises UserError as `build_method` does."""
    return trace_images(recipe, -(-recipe.optim.batch // ranks), ranks=ranks, dataset=dataset, dtype=dtype, gpu=gpu)


def trace_images(recipe: Recipe, images: int, *, ranks: int, dataset: int, dtype: torch.dtype, gpu: bool) -> StepTrace:
    """Trace a step of one of `ranks` ranks on `images` images. The other arguments are those of `trace_step`."""
    chosen = recipe.optim.micro_batch
    micro = chosen if isinstance(chosen, int) else images
    with as_on_gpu() if gpu else contextlib.nullcontext():
        if images <= LONG * micro:
            return _trace(recipe, images, ranks, dataset, dtype)
        # Each micro-batch is a graph of its own: with dozens of them the trace would take minutes, and all are equal.
        short, longer = (_trace(recipe, n * micro, ranks, dataset, dtype) for n in (LONG // 2, LONG))
        return short.extended(longer, images)


def _trace(recipe: Recipe, images: int, ranks: int, dataset: int, dtype: torch.dtype) -> StepTrace:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        method = build_method(recipe)
        method.allocate(dataset)
    with torch.random.fork_rng(devices=[]), _group_of(ranks), FakeTensorMode():
        materialise(method)
        _synchronise(method, ranks)
        optimizer = build_optimizer(recipe, method)
        monitor = Monitor(method, optimizer, replace(recipe.monitor, every=2**62), images=dataset)  # never measures
        moments = list(_with_moments(optimizer))
        batch, precision = made_up(recipe, images, ranks), Precision(dtype, CPU)
        for part in method.modules():
            if hasattr(part, "fill_layouts"):  # the first step of a run does this
                part.fill_layouts(batch.views)  # type: ignore[operator]
        trained = [p for p in method.parameters() if p.requires_grad]
        with Tracer() as tracer:
            tracer.mark(method.buffers(), BUFFERS)
            tracer.mark(_tensors(monitor.bank.state_dict()), BUFFERS)
            tracer.mark(method.parameters(), WEIGHTS)
            tracer.mark((p for copy, _ in momentum_copies(method) for p in copy.parameters()), TEACHER)
            tracer.mark(frozen_weights(method), WEIGHTS)  # a teacher shares these weights, so they are counted once
            tracer.mark(moments, MOMENTS)
            tracer.mark(batch.views, IMAGES)
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: tracer.mark([p.grad], GRADIENTS))  # type: ignore[list-item]
            for step in steps(recipe, method, optimizer, [batch], precision):
                monitor.watch(step)
    gradients = sum(p.numel() * p.element_size() for p in trained)
    memory = {k: n for k, n in tracer.memory.items() if n}
    if ranks > 1:  # gradients live in the buckets that ranks sum, from the first step on
        memory[GRADIENTS] = gradients
    work, exchanges = dict(tracer.work), dict(tracer.exchanges)
    return StepTrace(images, memory, gradients, tracer.flops, tracer.repeated, work, tracer.operations, exchanges)


def _synchronise(method: Method, ranks: int) -> None:
    """Let the batch norms of a method compute mean and variance over all ranks."""
    if ranks > 1 and devices.is_accelerator(CPU):
        exchange_moments(method)
    elif ranks > 1:
        sync_batch_norms(method, CPU)


def materialise(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module, in place, by fake CPU tensors. Called in a FakeTensorMode."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=CPU)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                if old is not None:
                    tensors[name] = made[id(old)]  # type: ignore[assignment]


def _with_moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Let an optimiser create its moments, and yield them."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.empty_like(p)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    yield from _tensors([list(state.values()) for state in optimizer.state.values()])


def made_up(recipe: Recipe, images: int, ranks: int = 1, device: torch.device = CPU) -> Batch:
    """Return a batch of `images` images for one of `ranks` ranks, with random pixels in the recipe's views."""
    views = [torch.randn(images, recipe.planes, v.size, v.size, device=device) for v in Views.of(recipe.views).views]
    label = torch.zeros(images, dtype=torch.long, device=device)
    return Batch(views, torch.arange(images, device=device), label, (images,) * ranks, whole_boxes(views))


def steps(
    recipe: Recipe, method: Method, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], precision: Precision
) -> Iterator[Step]:
    """Train on batches with the recipe's settings, each as if in the middle of training."""
    joined = Anchor(recipe, method).joined
    return make_trainer(recipe, method, optimizer, precision, joined).steps((MIDDLE, batch) for batch in batches)


@contextlib.contextmanager
def _group_of(ranks: int) -> Iterator[None]:
    """A context with a process group of `ranks` ranks, of which only this one exists. Its exchanges do nothing."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        td.destroy_process_group()


def divisible(recipe: Recipe) -> bool:
    """Return whether this recipe could be trained with `parallel=fsdp` instead of ddp."""
    return recipe.parallel == "ddp" and not keys_of_whole_weights(recipe) and _meta_method(recipe).shardable


def divided(recipe: Recipe, trace: StepTrace, ranks: int) -> StepTrace:
    """Return the trace of a step in which FSDP shards the weights among ranks, from a trace with unsharded weights.

    Activations and work are assumed to be the same. Weights are gathered for the forward and for the backward pass and
    gradients reduce-scattered: 1.5 times the time of an all-reduce. A teacher's weights are gathered once."""
    if ranks == 1:
        return trace
    method = _meta_method(recipe)
    parts = (WEIGHTS, TEACHER, GRADIENTS, MOMENTS)
    memory = {kind: -(-n // ranks) if kind in parts else n for kind, n in trace.memory.items()}
    teacher = sum(p.nbytes for copy, _ in momentum_copies(method) for p in copy.parameters())
    return replace(
        trace, memory=memory | {GATHERED: gathered(method)}, gradients=round(1.5 * trace.gradients + 0.5 * teacher)
    )


def gathered(method: Method) -> int:
    """Return the bytes of weights and gradients that each rank holds unsharded at the same time."""
    each = [block for m in method.modules() if isinstance(m, Backbone) for block in blocks(m.model)]
    sizes = [(sum(p.nbytes * (1 + p.requires_grad) for p in block.parameters())) for block in each]
    inside = {id(p) for block in each for p in block.parameters()}
    outside = sum(p.nbytes * (1 + p.requires_grad) for p in method.parameters() if id(p) not in inside)
    return outside + sum(sorted(sizes)[-AT_ONCE:])


def _meta_method(recipe: Recipe) -> Method:
    with torch.device("meta"):
        return build_method(recipe)
