"""Build, restore and save a run as one rank trains it: the objects whose state a step changes."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.data.loader_processes import processes
from eagleray.engine import checkpoint, sharded, sharded_checkpoint
from eagleray.engine.compiling import compile_backbones, compiles
from eagleray.engine.optim import lay_out_moments
from eagleray.engine.precision import Precision
from eagleray.engine.world import World
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.token_linear import on_device
from eagleray.protocols.image_batches import Reading
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.checks import check_continues
from eagleray.runs.monitor import Monitor
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_dir import RunDir
from eagleray.runs.start_guard import Anchor, StartGuard
from eagleray.runs.step_log import Clock, OpenLine

log = logging.getLogger(__name__)
STATEFUL = ("method", "optimizer", "monitor", "precision", "guard", "anchor", "line")  # parts that checkpoints hold
GROUPED = "a new run takes over its weights with start='{from: OUT, what: method}'"


class RankRun(NamedTuple):
    """A run as one rank trains it."""

    plan: Plan
    world: World
    folder: RunDir
    clock: Clock
    method: Method
    optimizer: torch.optim.Optimizer
    monitor: Monitor
    precision: Precision
    guard: StartGuard
    anchor: Anchor
    line: OpenLine

    @property
    def sharded(self) -> bool:
        """Return whether each rank has only a part of the weights."""
        return dist.sharded(next(self.method.parameters()))

    def export(self) -> Backbone:
        """Return the backbone to evaluate and export, with unsharded weights. Called by all ranks together."""
        if not self.sharded:
            return self.method.export()
        backbone = build_method(self.plan.recipe).export()
        backbone.load_state_dict(sharded.whole_state(self.method.export()))
        return backbone.to(self.world.device)

    @property
    def embedding(self) -> dict[str, Any]:
        """Return the settings for computing features: the precision, and as many loader processes as training has."""
        recipe, stream = self.plan.recipe, self.plan.stream
        workers = processes(recipe.data.workers, self.world.cpus)
        return {"precision": recipe.precision, "reading": Reading(workers, stream.cache, stream.patience)}

    def wrap(self, method: Method) -> nn.Module:
        """Return the module that a step calls: it runs the method, adds the anchor's loss, if there is an anchor, and
        averages gradients over ranks."""
        return self.world.wrap(self.anchor.joined(method), reduce=self.plan.recipe.optim.reduce)

    def compare_with_start(self, step: int) -> dict[str, float]:
        """Return `StartGuard.measure` of the backbone after a step, with this run's precision and way of reading."""
        return self.guard.measure(step, self.export, **self.embedding)


def build_run(
    plan: Plan, world: World, folder: RunDir, precision: Precision, state: dict[str, Any] | None
) -> tuple[RankRun, int]:
    """Build the run on the rank's device, with the `state` of a checkpoint or else the weights that the recipe names.
    Return it with the number of its steps so far. Raises UserError when the state or the weights do not fit."""
    recipe, started = plan.recipe, None
    if state is None and (recipe.start or recipe.backbone.weights or (recipe.teacher and recipe.teacher.weights)):
        from eagleray.runs.start import build_started, take_progress

        started = build_started(recipe, len(plan.index))
        method = started.method
        if started.source:
            log.info("%s", started.notes[0].said[0])
    else:
        method = build_method(recipe)
        method.allocate(len(plan.index))
    place(method, recipe, world)
    optimizer = build_optimizer(recipe, method)
    labelled = plan.index.labelled and not method.supervised  # a supervised method mixes images, and their labels
    monitor = Monitor(method, optimizer, recipe.monitor, images=len(plan.index), labelled=labelled)
    first = take_progress(plan, started, optimizer) if started else 0
    clock, guard, anchor = Clock(time.monotonic(), 0.0), StartGuard(plan), Anchor(recipe, method)
    line = OpenLine(monitor.layers)
    run = RankRun(plan, world, folder, clock, method, optimizer, monitor, precision, guard, anchor, line)
    return run, first if state is None else load_checkpoint(run, state)


def place(method: Method, recipe: Recipe, world: World) -> None:
    """Move a method to the rank's device, and synchronise, shard or compile it as the recipe says."""
    on_device(method, world.device)
    if method.export().batch_norm and recipe.parallel != "fsdp":  # FSDP shards only contiguous weights
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # convolutions are fast in it
    world.synchronise(method)
    if recipe.parallel == "fsdp":
        sharded.shard(method)
    elif compiles(recipe.compile, world.device):
        compile_backbones(method)


def newest_checkpoint(plan: Plan, folder: RunDir, step: int | None = None) -> dict[str, Any] | None:
    """Return the run's newest checkpoint or, with `step`, that of this step; None if there is none. Called by all ranks
    together. Raises UserError when it was made with another recipe or other data than the plan's."""
    recipe = plan.recipe
    url, patience = f"{recipe.out}/checkpoints", 60 * recipe.data.patience
    listed = dist.from_rank_zero(partial(checkpoint.listing, url, patience))
    whole = recipe.parallel == "ddp" or dist.size() == 1
    state = checkpoint.newest(url, folder.scratch, patience=patience, whole=whole, listed=listed, step=step)
    if len(set(dist.gather_objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks read different checkpoints")  # a disk fails; a restart may help
    if state:
        check_continues(plan, state)
    return state


def load_checkpoint(run: RankRun, state: dict[str, Any]) -> int:
    """Load a checkpoint into a run, and return its step. Raises UserError when its optimiser has other groups of
    parameters."""
    groups = state["optimizer"]["param_groups"], run.optimizer.param_groups
    saved, own = ([len(group["params"]) for group in side] for side in groups)
    if saved != own:
        found = f"the checkpoint of step {state['step']} groups the parameters otherwise ({saved}, not {own})"
        raise UserError(f"{found}; {GROUPED}")
    load_parts(run, state, STATEFUL)
    run.clock.began, run.clock.useful = time.monotonic() - state["seconds"], state["useful"]
    return int(state["step"])


def load_parts(run: RankRun, state: dict[str, Any], names: Sequence[str]) -> None:
    """Load the objects `names` of a run, which must include `method` and `optimizer`, from a checkpoint's `state`."""
    parts = {name: getattr(run, name) for name in names}
    if run.sharded:
        read = partial(sharded_checkpoint.read_rows, Path(state.get("shards", "")))
        sharded.load(parts.pop("method"), parts.pop("optimizer"), state, read)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    if not run.sharded:
        lay_out_moments(run.optimizer)


def return_to_best(run: RankRun) -> int:
    """Load the weights of the best checkpoint that the guard of the start has kept, and return their step. Called by
    all ranks together. Raises UserError when that checkpoint is gone or damaged."""
    best = run.guard.returns
    run.folder.settle()  # the best checkpoint may be the one that is being written
    state = newest_checkpoint(run.plan, run.folder, best)
    if state is None:
        raise UserError(f"{run.plan.recipe.out}/checkpoints: the best checkpoint, of step {best}, is gone or damaged")
    load_parts(run, state, ("method", "optimizer"))
    return int(state["step"])


def save_checkpoint(run: RankRun, step: int) -> None:
    """Save a checkpoint in the background. Only rank 0 saves, as every rank holds the same weights and moments, unless
    these are sharded."""
    if run.guard.watches:
        run.compare_with_start(step)
        run.folder.keep(run.guard.saved(kept=all(dist.gather_objects(run.folder.settle() is None))))
    if dist.rank() == 0 or run.sharded:
        state = {
            "step": step,
            "seconds": run.clock.seconds,
            "useful": run.clock.useful,
            "digest": recipes.digest(run.plan.recipe),
            "recipe": config.dump(run.plan.recipe),
            "images": len(run.plan.index),
            "origin": run.plan.origin,
            "lengths": run.folder.lengths(),
            "shards_read": run.plan.shards_text,
        } | {name: getattr(run, name).state_dict() for name in STATEFUL}
        state["optimizer"] = sharded.optimizer_state(run.optimizer)
        run.folder.save(step, state)
        log.debug("saving step %d", step)
    run.folder.callbacks("checkpoint", step)
