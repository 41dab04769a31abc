"""Build the method of a run with the weights that it begins with: random ones, public ones, or those of another run.

A method's tensors are compared by common names, in which the trained encoder is `student` and its momentum copy
`teacher`: MoCo v3's `base_encoder.head` and BYOL's `online.head` are both `student.head`."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError, explained, named
from eagleray.base.text import aligned
from eagleray.engine.checkpoint_files import sha256
from eagleray.engine.export import read_export
from eagleray.engine.export_files import FILE, HEADS, export_in
from eagleray.engine.optim import lay_out_moments
from eagleray.methods.method import Method
from eagleray.models import layouts, weights
from eagleray.models.backbone import Backbone, Encoder, encoder_with
from eagleray.models.ema import momentum_copies
from eagleray.models.layouts import STUDENT, TEACHER
from eagleray.models.pixels import OURS, conversion
from eagleray.models.weights import FillReport, Weights
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe, Start
from eagleray.runs.restore import Restored, file_tensors, pretrained, public_weights, read_state, restored

log = logging.getLogger(__name__)
KEY = "start.from"  # errors name this key of a recipe


@dataclass(frozen=True)
class StartSource:
    """The weights, heads and moments that a run may start from."""

    weights: Weights  # the backbone that the source's method exports
    about: str  # a phrase that describes the source
    backbones: Mapping[str, Weights]  # keys are STUDENT and TEACHER; empty where the source is a backbone alone
    parts: Mapping[str, Tensor]  # the method's tensors outside of its backbones, by common names
    state: Mapping[str, Any] | None = None  # the state of a checkpoint of eagleray
    run: Restored | None = None


class PartOrigin(NamedTuple):
    """The origin of one part of a method."""

    part: str
    origin: str  # the part of the source; empty where the part starts fresh
    text: str


class Note(NamedTuple):
    """The lines that tell a person what a run takes over from one source of weights."""

    file: str  # the file in the run's folder that keeps `lines`
    said: list[str]  # lines that the command prints, followed by the file's path
    lines: list[str]
    warning: str  # why weights could not be converted to this package's pixel mean and std; empty if they were


class Started(NamedTuple):
    """A method with the weights that its run begins with."""

    method: Method
    source: StartSource | None  # the source that `start` names; None without `start`
    notes: list[Note]


HEAD = PartOrigin("part", "from", "what was taken over")


def weights_of(name: str, key: str) -> Weights:
    """Return the backbone's weights of a source, which may be anything that `start.from` may name. `key` is the key of
    the recipe that names it. Raises UserError when the source cannot be read."""
    return _read(name, key).weights


def read(start: Start) -> StartSource:
    """Return what `start.from` names. Raises UserError when it cannot be read, or holds less than `start.what`."""
    source = _read(start.source, KEY)
    if start.what != "backbone" and not source.backbones:
        raise UserError(f"{KEY}={start.source}: {source.about}, which has no heads; start.what=backbone takes it over")
    adapted = source.run and source.run.recipe.backbone.lora
    if start.what == "all" and (adapted or not (source.state and {"optimizer", "step"} <= source.state.keys())):
        raise UserError(
            f"{KEY}={start.source}: {source.about}, whose moments and step cannot be taken over; start.what=method can"
        )
    return source


def _read(name: str, key: str) -> StartSource:
    if public := public_weights(name, key):
        return StartSource(public, "public weights", {}, {})
    if file := export_in(name):
        return _of_export(name, file, key)
    if (found := file_tensors(name, key)) is None:
        return _of_run(name, key)
    layout = layouts.recognise(found)
    if layout is None:
        return StartSource(weights.from_tensors(name, found, key), "a file of tensors", {}, {})
    heads = layout.heads
    backbones = {role: Weights(name, state, heads, key) for role, state in layout.backbones.items() if state}
    if layout.exported not in backbones:
        raise UserError(f"{key}={name}: a checkpoint of {layout.authors} without a backbone")
    about = f"a checkpoint of {layout.authors}'s authors"
    return StartSource(backbones[layout.exported], about, backbones, layout.parts)


def _of_export(name: str, file: Path, key: str) -> StartSource:
    """Return an exported backbone, with the heads that were exported with it. Raises UserError if they are damaged."""
    heads = file.with_name(HEADS)
    with named(f"{key}={name}"), explained(f"{heads}: cannot be read", SafetensorError):
        backbone = weights.from_module(name, read_export(file).backbone.model, key)
        if file.name != FILE or not heads.exists():
            return StartSource(backbone, "an export", {}, {})
        with safe_open(heads, "pt") as opened:
            about = opened.metadata() or {}
            role = about.get("backbone") or STUDENT
            if about.get("sha256") != sha256(file):  # the backbone was exported again, without these heads
                return StartSource(backbone, f"an export whose {HEADS} is of other weights", {}, {})
            parts = {part: opened.get_tensor(part) for part in opened.keys()}  # noqa: SIM118  it is no dictionary
    return StartSource(backbone, "an export with heads", {role: backbone}, parts)


def _of_run(name: str, key: str) -> StartSource:
    """Return the weights, heads and moments of a run of eagleray. Raises UserError when it cannot be read."""
    try:
        state, folder = read_state(name)
        run = restored(name, state, folder)
    except UserError as e:
        raise UserError(f"{key}={str(e) if str(e).startswith(name) else f'{name}: {e}'}") from None
    method = run.method
    backbones = {
        role: weights.from_module(name, encoder.backbone.model, key) for role, encoder in encoders(method).items()
    }
    step = f" after {state['step']} steps" if "step" in state else ""
    exported = weights.from_module(name, method.export().model, key)
    return StartSource(exported, f"a run of {run.recipe.method.name}{step}", backbones, parts_of(method), state, run)


def encoders(method: Method) -> dict[str, Encoder[nn.Module]]:
    """Return the trained encoder of a method as STUDENT and, if it has one, the momentum copy as TEACHER."""
    pairs = [(copy, online) for copy, online in momentum_copies(method) if isinstance(copy, Encoder)]
    if not pairs:
        return {STUDENT: encoder_with(method, method.monitored_backbone())}
    [(copy, online), *_] = pairs
    assert isinstance(online, Encoder)
    return {STUDENT: online, TEACHER: copy}


def common_names(method: Method) -> dict[str, str]:
    """Return the common name of every tensor of a method, by its own name."""
    paths = {id(module): path for path, module in method.named_modules()}
    prefixes = {f"{paths[id(encoder)]}.": f"{role}." for role, encoder in encoders(method).items()}
    names = {}
    for key in method.state_dict():
        own = next((prefix for prefix in prefixes if key.startswith(prefix)), "")
        name = key.removeprefix(own)
        if own and not name.startswith("backbone.model."):
            name = name.removeprefix("backbone.")  # a part of the method, such as SelfPatch's aggregation
        names[key] = prefixes.get(own, "") + name
    return names


def parts_of(method: Method) -> dict[str, Tensor]:
    """Return the tensors of a method outside of its backbones, by common names."""
    common = common_names(method)
    return {common[k]: v for k, v in method.state_dict().items() if not _in_backbone(common[k])}


def _in_backbone(common: str) -> bool:
    return common.startswith((f"{STUDENT}.backbone.", f"{TEACHER}.backbone."))


def part_of(common: str) -> str:
    """Return the part of a method, such as `student.head`, to which the tensor with a common name belongs. Z, which
    InstDisc and PIRL estimate once for the number of images in their bank, belongs to the bank."""
    first, _, rest = common.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in (STUDENT, TEACHER) else {"Z": "bank"}.get(first, first)


def build_started(recipe: Recipe, images: int) -> Started:
    """Build the method of a recipe with the weights that `start`, `backbone.weights` and `method.teacher.weights` name.
    `images` is the size of the training set. Raises UserError when a source does not fit."""
    if recipe.start:
        source = read(recipe.start)
        if len(set(dist.gather_objects(source.about))) > 1:  # the source still trains; a restart may help
            raise RuntimeError(f"{KEY}={recipe.start.source}: ranks read different checkpoints")
        method = build_method(recipe, lambda network: weights.fill(network, source.weights))
        method.allocate(images)
        if recipe.backbone.lora:  # adapted student and teacher share the exported weights
            source = replace(source, backbones={})
        started = Started(method, source, [take_over(method, source, recipe.start.what)])
    else:
        reports = list[FillReport]()
        given = pretrained(recipe.backbone.weights) if recipe.backbone.weights else None
        method = build_method(recipe, (lambda network: reports.append(weights.fill(network, given))) if given else None)
        method.allocate(images)
        started = Started(method, None, [note(layout.WEIGHTS, str(report), report) for report in reports])
    if recipe.teacher and recipe.teacher.weights:
        report = teach(method, recipe.teacher.weights)
        started.notes.append(note(layout.TEACHER, f"teacher: {report}", report))
    return started


def note(file: str, said: str, report: FillReport) -> Note:
    """Return the note on weights that fill one backbone. The command prints `said`."""
    return Note(file, [said], list(report.lines()), report.warning)


def take_over(method: Method, source: StartSource, what: str) -> Note:
    """Copy the backbone of a source or, unless `what` is `backbone`, all its parts into a method, and return a note on
    the origin of each part."""
    report = weights.fill(method.export(), source.weights, whole=True)
    if what == "backbone":
        roles = encoders(method)
        rows = [PartOrigin(f"{role}.backbone", "backbone", _counts(report)) for role in roles]
        fresh = {part_of(name) for name in common_names(method).values()} - {row.part for row in rows}
        rows += [PartOrigin(part, "", "new: start.what=backbone") for part in sorted(fresh)]
    else:
        rows = list(take_method(method, source))
    table = [f"started from {source.weights.source} ({source.about})", *aligned([HEAD, *rows])]
    return Note(layout.START, [*table, "every tensor of the backbone"], [*table, "", *report.lines()], report.warning)


def take_method(method: Method, source: StartSource) -> Iterator[PartOrigin]:
    """Copy the source's parts that the method also has, each completely or not at all, and yield each part's origin."""
    for role, encoder in encoders(method).items():
        given = source.backbones.get(role, source.weights)
        report = weights.fill(encoder.backbone, given, whole=True)
        origin = f"{role}.backbone" if role in source.backbones else "backbone"
        yield PartOrigin(f"{role}.backbone", origin, _counts(report))
    own, theirs = _parts(method), _by_part(source.parts)
    for part, tensors in own.items():
        origin = next((p for p in (part, _other_role(part)) if p in theirs), "")
        differ = _difference(tensors, theirs[origin]) if origin else "the source has none"
        if not differ:
            weights.check_finite(source.weights, {f"{origin}{key}": v for key, v in theirs[origin].items()})
            with torch.no_grad():
                for key, tensor in tensors.items():
                    tensor.copy_(theirs[origin][key])
        yield PartOrigin(part, "" if differ else origin, f"new: {differ}" if differ else f"{len(tensors)} tensors")
    for part in sorted(theirs.keys() - own.keys()):
        yield PartOrigin("", part, "not taken over: the method has none")


def _parts(method: Method) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a method outside of its backbones: by part, then by the name within it."""
    return _by_part(parts_of(method))


def _by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    out: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        out.setdefault(part_of(name), {})[name.removeprefix(part_of(name))] = tensor
    return out


def _other_role(part: str) -> str:
    """Return the teacher's part for one of the student and vice versa, or an empty text for a part of neither."""
    role, _, rest = part.partition(".")
    return {STUDENT: f"{TEACHER}.{rest}", TEACHER: f"{STUDENT}.{rest}"}.get(role, "")


def _difference(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """Return why the tensors of a part do not fit, or an empty text if they do."""
    for key in (*own, *theirs):
        sizes = [weights.shape_text(t[key]) if key in t else "none" for t in (own, theirs)]
        if sizes[0] != sizes[1]:
            return f"{key.removeprefix('.') or 'the tensor'} is {sizes[0]}, in the source {sizes[1]}"
    return ""


def _counts(report: FillReport) -> str:
    counts = {"matched": report.matched, "resized": report.resized, "missing": report.missing}
    return ", ".join(f"{len(keys)} tensors {kind}" for kind, keys in counts.items() if keys)


def take_progress(plan: Plan, started: Started, optimizer: torch.optim.Optimizer) -> int:
    """Return the first step of the run: 0, unless `start.what=all` takes over the steps of the source. In that case,
    copy the moments of the parameters that were taken over. Raises UserError when they do not fit."""
    check_progress(plan, started)
    recipe, source = plan.recipe, started.source
    if not (recipe.start and recipe.start.what == "all" and source and source.run and source.state):
        return 0
    theirs = build_optimizer(source.run.recipe, source.run.method)
    theirs.load_state_dict(source.state["optimizer"])
    moments = {name: (p, theirs.state[p]) for name, p in _parameters(source.run.method) if theirs.state.get(p)}
    for name, p in _parameters(started.method):
        was, there = moments.get(name, (p, {}))
        if p.requires_grad and there and torch.equal(was, p.cpu()):  # parameters of new parts differ
            optimizer.state[p] = {key: v.to(p.device, copy=True) for key, v in there.items()}
    lay_out_moments(optimizer)
    return int(source.state["step"])


def check_progress(plan: Plan, started: Started) -> None:
    """Raises UserError when `start.what=all` and the run cannot take over the moments and the step of its source."""
    start, source = plan.recipe.start, started.source
    if start is None or start.what != "all" or source is None or source.run is None or source.state is None:
        return
    name, here, there = plan.recipe.optim.name, f"{KEY}={source.weights.source}", source.run.recipe.optim.name
    if name != there:
        raise UserError(
            f"{here}: its moments are of optim.name={there}, not {name}; start.what=method takes over the rest"
        )
    if source.state["step"] >= plan.steps:
        raise UserError(
            f"{here}: has taken {source.state['step']} steps, and this run takes {plan.steps} in all; give more "
            "optim.epochs, or start.what=method, which begins at step 0"
        )


def _parameters(method: Method) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a method with their common names."""
    common = common_names(method)
    yield from ((common[name], p) for name, p in method.named_parameters())


def teach(method: Method, source: str) -> FillReport:
    """Give the frozen teacher of a method, such as `distill`, the weights of a source, as `start.from` names them, and
    the pixel mean and std that they were trained with. Raises UserError when the weights do not fit."""
    teacher, given = method.get_submodule("teacher"), weights_of(source, recipes.TEACHER)
    assert isinstance(teacher, Backbone)
    report = weights.fill(teacher, given.unconverted(), whole=True)
    method.get_buffer("colours").copy_(conversion(given.pixels or OURS).view(2, 3, 1, 1))
    return report
