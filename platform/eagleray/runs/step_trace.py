"""Trace one real training step without computing it: its memory at the peak, its FLOPs and the bytes that it moves.

The method, the optimiser, the monitor and the loop are those of a run, on tensors that have shapes but no values
(PyTorch's FakeTensor), so a step of any size is traced in seconds on any machine. FLOPs are counted as
`torch.utils.flop_counter` counts them.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.engine.loop import Step
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models.ema import momentum_copies
from eagleray.runs.anchor import Anchor
from eagleray.runs.build import build_method, build_optimizer, make_trainer
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

CPU = torch.device("cpu")
LONG = 4  # micro-batches that are traced; a step of more of them is extended from the traces of two numbers of them
MIDDLE = Progress(500, 10, 100)  # a step in the middle of training, when nothing is frozen
WEIGHTS, TEACHER, BUFFERS, MOMENTS = "weights", "teacher", "buffers", "moments"
GRADIENTS, IMAGES, ACTIVATIONS = "gradients", "images", "activations"

# Operations by what limits them, by the first part of their names; all others move memory.
MATMUL, CONV, ATTENTION, NORM, FUNCTION, MOVE = "matmul", "conv", "attention", "norm", "function", "move"
NAMES = {
    MATMUL: ("mm", "addmm", "bmm", "baddbmm"),
    CONV: ("convolution", "_convolution"),
    ATTENTION: ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    NORM: ("native_layer_norm", "native_batch_norm", "_batch_norm", "native_group_norm"),
    FUNCTION: ("gelu", "_softmax", "_log_softmax", "exp", "erf", "tanh", "sigmoid", "silu", "log"),
}


class Work(NamedTuple):
    """The cost of one operation."""

    kind: str
    wide: bool  # whether it computes in float32
    flops: int
    bytes: int  # read and written


@dataclass(frozen=True)
class StepTrace:
    """The memory and the work of one training step of one rank."""

    images: int  # this rank's images, each in all its views
    memory: dict[str, int]  # bytes at the peak, by kind
    gradients: int  # bytes that ranks sum up
    flops: float  # operations of the method's equations
    repeated: float  # FLOPs of activations that are computed again in the backward pass
    work: dict[Work, float]  # how often each operation is done
    operations: float  # dispatched by the host

    @property
    def peak(self) -> int:
        """Return the bytes of all tensors at the peak."""
        return sum(self.memory.values())

    def extended(self, longer: "StepTrace", images: int) -> "StepTrace":
        """Return the trace for more images from this one and a `longer` one, as both grow by equal micro-batches."""
        times = (images - self.images) / (longer.images - self.images)

        def line(a: float, b: float) -> float:
            return a + (b - a) * times

        memory = {k: round(line(self.memory.get(k, 0), longer.memory.get(k, 0))) for k in self.memory | longer.memory}
        work = {w: line(self.work.get(w, 0), longer.work.get(w, 0)) for w in self.work | longer.work}
        return StepTrace(
            images,
            memory,
            self.gradients,
            line(self.flops, longer.flops),
            line(self.repeated, longer.repeated),
            work,
            line(self.operations, longer.operations),
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
        self._storages: dict[int, list[Any]] = {}  # bytes, kind and weak reference of each storage, by its id

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors under a kind, those that are counted already too."""
        for t in tensors:
            self._add(t, kind)
            entry = self._storages[id(t.untyped_storage())]
            self.live[entry[1]] -= entry[0]
            self.live[kind] += entry[0]
            entry[1] = kind

    def _add(self, t: Tensor, kind: str = ACTIVATIONS) -> bool:
        """Count the memory of a tensor until it is freed. Returns whether it was new."""
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
        if func is torch.ops.prim.device.default:  # asked thousands of times
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:  # a number that a method draws, such as mixup's share
            return 0.5 if args[0].dtype.is_floating_point else 1
        out = func(*args, **kwargs)
        outs = list(_tensors(out))
        new = [self._add(t) for t in outs]
        if any(new) or func._schema.is_mutable:
            self._count(func, args, kwargs, out, outs)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outs: Sequence[Tensor]) -> None:
        """Add the work of an operation that is no mere view."""
        name, flops = func._overloadpacket.__name__, 0
        if name.startswith(("empty", "new_empty")):
            return
        if func._overloadpacket in flop_registry:
            flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        inputs = list(_tensors((args, kwargs)))
        moved = sum(t.numel() * t.element_size() for t in (*inputs, *outs))
        wide = not any(t.dtype in (torch.bfloat16, torch.float16) for t in inputs)
        self.operations += 1
        self.work[Work(kind_of(name), wide, flops, moved)] += 1
        # In a backward pass gradients are only enabled while activations are computed again.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        self.flops += 0 if again else flops
        self.repeated += flops if again else 0


def kind_of(name: str) -> str:
    """Return what limits an operation of this name."""
    return next((kind for kind, starts in NAMES.items() if name.startswith(starts)), MOVE)


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


def trace_step(recipe: Recipe, *, ranks: int, dataset: int, dtype: torch.dtype) -> StepTrace:
    """Trace a step of the rank with the most images, as it is after the first few steps.

    `dataset` is the number of images in the data set, on which a memory bank depends, and `dtype` that of matrix
    products. Raises UserError as `build_method` does.
    """
    return trace_images(recipe, -(-recipe.optim.batch // ranks), ranks=ranks, dataset=dataset, dtype=dtype)


def trace_images(recipe: Recipe, images: int, *, ranks: int, dataset: int, dtype: torch.dtype) -> StepTrace:
    """Trace a step of one of the ranks on so many images."""
    chosen = recipe.optim.micro_batch
    micro = chosen if isinstance(chosen, int) else images
    if images <= LONG * micro:
        return _trace(recipe, images, ranks, dataset, dtype)
    # Each micro-batch is a graph of its own: with dozens of them the trace would take minutes, and all are equal.
    short, longer = (_trace(recipe, n * micro, ranks, dataset, dtype) for n in (LONG // 2, LONG))
    return short.extended(longer, images)


def _trace(recipe: Recipe, images: int, ranks: int, dataset: int, dtype: torch.dtype) -> StepTrace:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        method = build_method(recipe)
        method.allocate(dataset)
    with torch.random.fork_rng(devices=[]), _pretended(ranks), FakeTensorMode():
        materialise(method)
        optimizer = build_optimizer(recipe, method)
        moments = list(_with_moments(optimizer))
        monitor = _monitor(recipe, method, optimizer, dataset, dtype)
        batch = made_up(recipe, images, ranks)
        trained = [p for p in method.parameters() if p.requires_grad]
        with Tracer() as tracer:
            tracer.mark(method.buffers(), BUFFERS)
            tracer.mark(_tensors(monitor.bank.state_dict()), BUFFERS)
            tracer.mark(method.parameters(), WEIGHTS)
            tracer.mark((p for copy, _ in momentum_copies(method) for p in copy.parameters()), TEACHER)
            tracer.mark(moments, MOMENTS)
            tracer.mark(batch.views, IMAGES)
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: tracer.mark([p.grad], GRADIENTS))  # type: ignore[list-item]
            for step in steps(recipe, method, optimizer, [batch], Precision(dtype, CPU)):
                monitor.watch(step)
    gradients = sum(p.numel() * p.element_size() for p in trained)
    memory = {k: n for k, n in tracer.memory.items() if n}
    if ranks > 1:  # they live in the buckets that ranks sum up, from the first step on
        memory[GRADIENTS] = gradients
    return StepTrace(images, memory, gradients, tracer.flops, tracer.repeated, dict(tracer.work), tracer.operations)


def materialise(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module, in place, by ones of the CPU without values."""
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


def _monitor(
    recipe: Recipe, method: Method, optimizer: torch.optim.Optimizer, dataset: int, dtype: torch.dtype
) -> Monitor:
    """Return a monitor that keeps what a run's keeps, and never measures."""
    monitor = Monitor(method, optimizer, replace(recipe.monitor, every=2**62), images=dataset)
    if dtype != torch.float32:
        monitor.bank.features = monitor.bank.features.to(dtype)
    return monitor


def made_up(recipe: Recipe, images: int, ranks: int = 1, device: torch.device = CPU) -> Batch:
    """Return a batch of random pixels in the recipe's views, for one of the ranks."""
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
def _pretended(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which only this one exists and whose exchanges do nothing."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    td.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        td.destroy_process_group()
