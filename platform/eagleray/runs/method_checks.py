"""Check that a method does what every method has to, on small random batches and without reference values."""

import inspect
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagleray import config
from eagleray.base.errors import PluginError, UserError
from eagleray.config import plugins
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Trainer
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.checks import check_method
from eagleray.runs.contract import first_line, foreign_code
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe, Watch
from eagleray.runs.start_guard import Anchor

STEPS = 4  # training steps of a rehearsal; an epoch has ten
IMAGES = 100  # size of the imaginary training set
SMALL: dict[str, Any] = {
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "options": {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    },
    "evaluate": {"size": 16, "resize": 16},
}
# Operators of PyTorch (WAITS) and methods of tensors (READS) that make the host wait for a GPU.
WAITS = {f"aten::{name}" for name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")}
WAITS |= {f"aten::{name}" for name in ("_unique", "_unique2", "unique_dim", "unique_consecutive")}
WAITS |= {"aten::index", "aten::index_put_"}  # they wait if the index is a boolean mask, to count its elements
READS = ("tolist", "numpy", "cpu", "__array__")


class Rehearsal(NamedTuple):
    """The outcome of a few training steps on one rank, with random batches."""

    method: dict[str, Tensor]  # parameters and buffers after the last step
    optimizer: dict[str, Any]
    losses: list[float]  # mean loss of each step over the images of all ranks
    gradient: dict[str, Tensor]  # gradients of the first step, averaged over ranks
    reached: set[str]  # parameters that had a gradient other than zero in some step
    monitored: dict[str, float]  # numbers that the run's monitor has measured


@dataclass(frozen=True)
class MethodReport:
    """The differences that `check_method` measured. Gradient differences are relative to the gradient's norm."""

    method: str
    losses: tuple[float, ...]  # losses of four steps
    two_ranks: float  # largest difference of the gradient on two processes from that on one, of even and uneven shares
    micro_batches: float | None  # difference of the gradient with micro-batches; None: not measured, due to batch norm

    def __str__(self) -> str:
        parts = "not checked, because of batch norm" if self.micro_batches is None else f"{self.micro_batches:.1e}"
        return (
            f"{self.method}: two ranks differ from one by {self.two_ranks:.1e}, micro-batches from the whole batch: "
            f"{parts}; a resumed run is the same to the bit, no step waits for the device, every parameter learns"
        )


def small_tree(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small recipe with `section` as its method and as few views as the method works with. Raises UserError if
    there is no such method."""
    least, _ = config.part_constant("eagleray.methods", section.get("name", ""), "views")
    return {**SMALL, "method": dict(section), "views": [{"size": 16, "count": least}]}


def check(tree: Mapping[str, Any], tolerance: float) -> MethodReport:
    """Check the method of a recipe, whose `tree` needs no data. Raises PluginError for the first check that the method
    fails, and UserError when the recipe is wrong."""
    recipe = recipes.check(dict(tree), "check_method")
    name = f"method {recipe.method.name!r}"
    unit = check_method(recipe).norm_group or 3
    whole, splits = (8 * unit,), ((4 * unit, 4 * unit), (5 * unit, 3 * unit))
    with foreign_code(f"{name}: a step fails"):
        check_no_wait(recipe, whole)
        one = rehearse(recipe, whole)
        _check_learning(name, recipe, one)
        check_resume(name, recipe, whole)
        parts = _check_micro_batches(name, recipe, one, unit, tolerance)
    worst = 0.0
    for (_, rows), two in rehearse_on_ranks({name: recipe}, splits).items():
        away = difference(two.gradient, one.gradient)
        losses = max(abs(a - b) / max(abs(b), 1) for a, b in zip(two.losses, one.losses, strict=True))
        if not max(away, losses) <= tolerance:
            shares = " and ".join(map(str, rows))
            raise PluginError(
                f"{name}: two processes with {shares} images compute something else than one process with {sum(rows)}: "
                f"the gradient differs by {away:.2g} of its norm, the loss by {losses:.2g}; gather what the loss needs "
                "of all ranks, and divide by sum(batch.rows)"
            )
        worst = max(worst, away)
    return MethodReport(recipe.method.name, tuple(one.losses), worst, parts)


def global_batch(recipe: Recipe, step: int, images: int) -> list[Tensor]:
    """Return random views (images, channels, size, size). They depend only on the step and the recipe's views."""
    # Seeds 0 to 3 are avoided: one of their images puts a hidden unit of byol_regions so near to the kink of ReLU that
    # rounding changes the gradient.
    generator = torch.Generator().manual_seed(10 + step)
    sizes = [v.size for v in recipe.views for _ in range(v.count)]
    return [torch.randn(images, recipe.planes, s, s, generator=generator) for s in sizes]


def global_boxes(recipe: Recipe, step: int, images: int) -> Tensor:
    """Return random boxes (views, images, 4) of the recipe's views, each flipped with probability 0.5."""
    generator = torch.Generator().manual_seed(1000 + step)
    views = sum(v.count for v in recipe.views)
    first = 0.5 * torch.rand(views, images, 2, generator=generator)
    last = first + 0.2 + 0.3 * torch.rand(views, images, 2, generator=generator)
    boxes = torch.cat([first, last], 2)
    flip = torch.rand(views, images, 1, generator=generator) < 0.5
    return torch.where(flip, boxes[..., [2, 1, 0, 3]], boxes)


def rank_batch(recipe: Recipe, step: int, rows: tuple[int, ...], rank: int, classes: int | None) -> Batch:
    """Return one rank's share of the global batch. `rows` is the number of images of each rank."""
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    images = torch.arange(sum(rows))
    views = [view[mine] for view in global_batch(recipe, step, sum(rows))]
    label = (images * 7 % min(classes or 10, 10))[mine]
    return Batch(views, images[mine] + step, label, rows, global_boxes(recipe, step, sum(rows))[:, mine])


def rehearse(
    recipe: Recipe,
    rows: tuple[int, ...],
    rank: int = 0,
    *,
    steps: range = range(STEPS),
    resume: Rehearsal | None = None,
    own_optimizer: bool = False,
) -> Rehearsal:
    """Train one rank on random batches, beginning with the state at the end of the rehearsal `resume` if it is given.

    Without `own_optimizer` the optimiser is SGD, as Adam turns rounding errors into full steps where the true gradient
    is zero, such as for the bias of the keys of attention."""
    world = World(torch.device("cpu"))
    method = build_method(replace(recipe, seed=recipe.seed + 1) if resume else recipe)
    method.allocate(IMAGES)
    world.synchronise(method)
    optimizer = build_optimizer(recipe, method) if own_optimizer else optim.make("sgd", method, decay="all")
    if resume:
        method.load_state_dict(resume.method)
        optimizer.load_state_dict(resume.optimizer)
    batches = ((Progress(s, 10, 2), rank_batch(recipe, s, rows, rank, method.classes)) for s in steps)
    first: dict[str, Tensor] = {}
    reached: set[str] = set()
    own = method.before_step

    def before_step(at: Progress) -> None:
        gradients = {n: p.grad for n, p in method.named_parameters() if p.grad is not None}
        if not first:
            first.update({n: g.clone() for n, g in gradients.items()})
        reached.update(n for n, g in gradients.items() if g.any())
        own(at)

    method.before_step = before_step  # type: ignore[method-assign]
    monitor = Monitor(method, optimizer, Watch(every=len(steps)))
    rate = 1e-2 if own_optimizer else 0.02
    losses, anchor = [], Anchor(recipe, method)

    def wrap(method: Method) -> nn.Module:
        return world.wrap(anchor.joined(method))

    for taken in Trainer(method, optimizer, lr=lambda _: rate, weight_decay=lambda _: 0.1, wrap=wrap).steps(batches):
        monitor.watch(taken)
        losses.append(world.agree(float(taken.values["loss"]) * rows[rank] / sum(rows))[0])
    seen = monitor.flush()[0]
    state = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    return Rehearsal(state, optimizer.state_dict(), losses, first, reached, seen)


def rehearse_on_ranks(
    named: Mapping[str, Recipe], splits: Sequence[tuple[int, int]]
) -> dict[tuple[str, tuple[int, int]], Rehearsal]:
    """Train every recipe on two processes of this machine, once for each pair in `splits`, the numbers of images of the
    two, and return the outcomes of rank 0. Raises PluginError when a process fails."""
    plain = {name: config.to_plain(recipe) for name, recipe in named.items()}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            mp.spawn(_rank, (plain, list(splits), plugins.pack(), scratch), nprocs=2)  # type: ignore[no-untyped-call]
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
            said = sorted(Path(scratch).glob("*.error"))
            why = said[0].read_text() if said else "a process died"
            raise PluginError(f"on two processes a step fails: {why}") from e
        saved = torch.load(Path(scratch) / "rehearsals.pt")
    return {key: Rehearsal(*values) for key, values in saved.items()}


def _rank(
    rank: int,
    plain: dict[str, dict[str, Any]],
    splits: list[tuple[int, int]],
    packed: dict[str, plugins.Sources],
    scratch: str,
) -> None:
    """Train one process of `rehearse_on_ranks`, and store its outcome in a file."""
    torch.set_num_threads(1)
    meet = torch.distributed.FileStore(f"{scratch}/store", 2)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=meet, rank=rank, world_size=2)
    try:
        plugins.install(packed)
        done = {}
        for name, tree in plain.items():
            recipe = config.check(Recipe, tree, name)
            for rows in splits:
                done[name, rows] = tuple(rehearse(recipe, rows, rank))
        if rank == 0:
            torch.save(done, f"{scratch}/rehearsals.pt")
    except Exception as e:
        Path(scratch, f"{rank}.error").write_text(f"{type(e).__name__}: {first_line(e)}")
        raise
    torch.distributed.destroy_process_group()


def difference(ours: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Return the norm of `ours` - `want` divided by that of `want`. All gradients of a mapping form one vector."""
    assert ours.keys() == want.keys()
    away = torch.cat([(ours[n] - w).flatten().double() for n, w in want.items()]).norm()
    return float(away / torch.cat([w.flatten().double() for w in want.values()]).norm())


def check_no_wait(recipe: Recipe, rows: tuple[int, ...]) -> None:
    """Raises PluginError when a step of the method would make the host wait for a GPU: when it reads a value of a
    tensor, or creates a tensor whose shape depends on values."""
    method = build_method(recipe)
    method.allocate(IMAGES)
    for step in range(STEPS):
        at, batch = Progress(step, 10, 2), rank_batch(recipe, step, rows, 0, method.classes)
        for event, call in _events(method, batch, at):
            try:
                with _NoReading(), _NoWaiting():
                    call()
            except _HostWait as e:
                raise PluginError(
                    f"method {recipe.method.name!r}: {event} makes the host wait for the device: {e}{_line(e, method)}"
                ) from None


def _events(method: Method, batch: Batch, at: Progress) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the parts of a step, each as a name and a function. They have to be called in this order."""
    values: dict[str, Tensor] = {}
    yield "forward", lambda: values.update(method(batch, at))
    yield "the gradient of the loss", lambda: values["loss"].backward()
    yield "before_step", lambda: method.before_step(at)
    yield "after_step", lambda: method.after_step(at)
    method.zero_grad()


class _HostWait(Exception):
    """An operation that would make the host wait for a GPU."""


class _NoWaiting(TorchDispatchMode):
    """A context in which PyTorch operators that wait for a GPU raise _HostWait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masks = (
            [x for x in (args[1] if len(args) > 1 else ()) or () if x is not None and x.dtype is torch.bool]
            if (name in ("aten::index", "aten::index_put_"))
            else [True]
        )
        if name in WAITS and masks:
            raise _HostWait({"aten::_local_scalar_dense": "it reads a number from a tensor"}.get(name, name[6:]))
        return func(*args, **(kwargs or {}))


class _NoReading(TorchFunctionMode):
    """A context in which tensor methods that read values, such as `tolist`, raise _HostWait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and args and isinstance(args[0], Tensor):
            raise _HostWait(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _check_learning(name: str, recipe: Recipe, one: Rehearsal) -> None:
    """Raises PluginError when a loss or gradient is not finite, or no gradient reaches a trainable parameter."""
    if not all(map(torch.isfinite, map(torch.tensor, one.losses))):
        raise PluginError(f"{name}: a loss is not finite: {one.losses}")
    broken = [n for n, g in one.gradient.items() if not g.isfinite().all()]
    if broken:
        raise PluginError(f"{name}: the gradient of {broken[0]} is not finite")
    trainable = [n for n, p in build_method(recipe).named_parameters() if p.requires_grad]
    still = [n for n in trainable if n not in one.reached]
    if still:
        raise PluginError(
            f"{name}: no gradient reaches {', '.join(still[:3])}; use it, or freeze it: requires_grad_(False)"
        )


def check_resume(name: str, recipe: Recipe, rows: tuple[int, ...]) -> None:
    """Raises PluginError when a resumed run ends with other weights than an uninterrupted run."""
    whole = rehearse(recipe, rows, own_optimizer=True)
    half = rehearse(recipe, rows, steps=range(STEPS // 2), own_optimizer=True)
    rest = rehearse(recipe, rows, steps=range(STEPS // 2, STEPS), resume=half, own_optimizer=True)
    for key, want in whole.method.items():
        if not torch.equal(rest.method[key], want):
            raise PluginError(
                f"{name}: a run that is resumed from a checkpoint ends with another {key}; keep all state in "
                "parameters and buffers, and take randomness from PyTorch's generator alone"
            )


def _check_micro_batches(name: str, recipe: Recipe, one: Rehearsal, unit: int, tolerance: float) -> float | None:
    """Return how much the gradient with micro-batches of `unit` images differs from that of the whole batch in `one`;
    None with batch norm. Raises PluginError when the difference exceeds the tolerance."""
    parts = replace(recipe, optim=replace(recipe.optim, micro_batch=unit))
    try:
        build_method(parts)
    except UserError:  # batch norm needs the whole batch
        return None
    away = difference(rehearse(parts, (8 * unit,), steps=range(1)).gradient, one.gradient)
    if not away <= tolerance:
        raise PluginError(f"{name}: the gradient of micro-batches differs from the batch's by {away:.2g} of its length")
    return away


def _line(error: BaseException, method: Method) -> str:
    """Return the file and line of the method's own code where an error arose; empty if it arose elsewhere."""
    file = inspect.getsourcefile(type(method))
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(file or '').name}, line {lines[-1]})" if lines else ""
