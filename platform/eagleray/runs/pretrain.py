"""Pretrain a recipe on one rank: join data, method, optimiser, checkpoints, tracking and evaluation."""

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from eagleray.base import dist
from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import is_accelerator
from eagleray.data.loader_processes import processes, start_server
from eagleray.engine.export import to_timm
from eagleray.engine.export_files import ADAPTERS, CONFIG, DESCRIPTION, FILE
from eagleray.engine.precision import Precision, exact_products, numerics
from eagleray.engine.world import World
from eagleray.models.backbone import Backbone
from eagleray.models.layer_names import in_adapter
from eagleray.runs import evaluations, layout
from eagleray.runs.callbacks import Callbacks, RunView
from eagleray.runs.checks import check_device
from eagleray.runs.health import Checked, checked
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.plan import open_plan
from eagleray.runs.rank_run import RankRun, build_run, newest_checkpoint, return_to_best, save_checkpoint
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_dir import RunDir
from eagleray.runs.summary import CHECKED, EARLY, EXPORTED, UNCHECKED, VERDICT
from eagleray.runs.tracking import Tracking
from eagleray.runs.train import train
from eagleray.storage import store
from eagleray.storage.retry import at_least
from eagleray.views.preprocessing import Preprocessing

log = logging.getLogger(__name__)


def pretrain(
    recipe: Recipe, world: World, *, tracking: Tracking, command: str = "", stop: threading.Event | None = None
) -> dict[str, Any] | None:
    """Train a run, or continue it, until the planned steps are taken, then evaluate and export.

    Returns the summary, or None when the run was asked to stop before its end. `command` is the id of the user's
    command, and `stop` an event by which a command asks a run in its own process to stop. Raises UserError if a person
    has to act, Outage when a store does not answer, and Preempted when a machine is about to be taken away."""
    check_device(recipe, world.device)  # an unsupported number format or compiler is reported before anything starts
    precision = Precision.of(recipe.precision, world.device)
    if world.why:  # an earlier attempt had access, so a refusal may only mean that credentials are being renewed
        store.expect_access(recipe.out)
        for url in (place for source in recipe.data.sources() for place in (source.url, store.parent(source.url))):
            store.expect_access(url, ("list", "read"))  # "write" is not needed: the index may be stored elsewhere
    if not is_accelerator(world.device):
        keep_freed_memory()
    starting = contextlib.ExitStack()
    if world.spot:  # retry for longer: mistakes in the recipe or the data were reported before the ranks started
        starting.enter_context(at_least(60 * recipe.data.patience))
    with (
        starting,
        numerics(precision, deterministic=recipe.deterministic),
        RunDir(recipe, world.rank, tracking, command=command, stop=stop) as folder,
    ):
        # No rank reads checkpoints before rank 0 has claimed the run.
        folder.epoch = dist.gather_objects(folder.epoch)[0]
        plan = open_plan(recipe, patience=60 * recipe.data.patience)
        if world.spot and (ended := dist.from_rank_zero(lambda: folder.ended(plan.steps))):
            return ended  # Ray has replaced the workers after the run's end, which must not be repeated
        if processes(recipe.data.workers, world.cpus):
            start_server()  # it imports what loader processes need while this process builds the model
        state = newest_checkpoint(plan, folder)
        folder.writer.stays = plan.is_milestone
        run, step = build_run(plan, world, folder, precision, state)
        folder.begin(step, world.size, plan.inputs, lengths=state.get("lengths") if state else None, **plan.origin)
        if world.rank == 0:
            from eagleray.runs.materials import record

            record(plan, folder.path, first=state is None)
        starting.close()
        view = RunView(recipe, run.method, recipe.out, world.rank, world.size, world.device, plan.steps)
        folder.callbacks = Callbacks(view)
        folder.callbacks("start", step)
        log.info("%s", describe(run))
        for phase in recipe.phases[:-1]:
            log.info("curriculum: before epoch %d, %s", phase.until, phase)
        if plan.stream.selection:
            log.info("data.train: %s", plan.stream.selection)
        for line in plan.forgotten:
            log.info("forgotten: %s", line)
        if world.why:
            log.warning("started again: %s", world.why)
        if recipe.start and state is None:
            evaluations.at_start(run, step)
            save_checkpoint(run, step)
        if step < plan.steps and not run.guard.over:
            with explain_exhaustion(recipe, run.method, world.size):
                step = train(run, step)
        if step < plan.steps and not run.guard.over:
            log.info("stopped at step %d of %d; the same command continues", step, plan.steps)
            return None
        return finish(run, step)


def finish(run: RankRun, step: int) -> dict[str, Any]:
    """Export the backbone and evaluate it, then write and return the run's summary."""
    plan, folder = run.plan, run.folder
    folder.trained(step)
    best = return_to_best(run) if run.guard.returns is not None else None
    backbone = run.export()
    if run.world.rank == 0:
        recipe = plan.recipe
        images = Preprocessing.of(recipe.evaluate.size, recipe.evaluate.resize, recipe.data.channels)
        with exact_products():
            write_export(backbone, recipe, folder.path, images, step if best is None else best)
    summary: dict[str, Any] = {"steps": step, "epochs": round(plan.at(step).epoch, 3)}
    summary["images"] = step * plan.stream.batch
    if best is not None:
        summary |= {EXPORTED: best, EARLY: int(run.guard.over)}
    starts = dist.gather_objects(folder.begin_evaluation(summary))[0]
    scores = evaluations.final(run, backbone, step, starts)
    summary = scores | summary | {"wall_seconds": round(run.clock.seconds, 1)}
    summary[VERDICT] = [*([] if best is None else [run.guard.outcome(best)]), *evaluations.verdict(run, scores)]
    summary |= dict(zip((CHECKED, UNCHECKED), what_was_checked(run), strict=True))
    folder.end(summary, run.clock.useful)
    folder.callbacks("end", summary)
    return summary


def write_export(backbone: Backbone, recipe: Recipe, out: Path, images: Preprocessing, step: int) -> None:
    """Write the export of a finished run, with its provenance, in place of an earlier one."""
    from eagleray.runs.materials import facts_of
    from eagleray.runs.provenance import remove_stale, seal

    folder = out / layout.EXPORT
    parameters = sum(p.numel() for name, p in backbone.named_parameters() if not in_adapter(name))
    to_timm(backbone, recipe.backbone, folder, images)
    names = [name for name in (FILE, DESCRIPTION, CONFIG, ADAPTERS) if (folder / name).exists()]
    facts = facts_of(recipe, recipe.out, out, recipe.backbone, features=backbone.dim, parameters=parameters, steps=step)
    remove_stale(folder, names)
    seal(folder, names, facts)


def what_was_checked(run: RankRun) -> Checked:
    """Return for which kinds of findings the run was checked, from the records of rank 0."""
    plan, starts = run.plan, run.folder.starts
    return checked(
        run.folder.records(),
        lr=plan.lr.value,
        frozen=plan.frozen_steps,
        first=starts.starts[0]["step"] if starts and starts.starts else 0,
        labelled=plan.index.labelled and not run.method.supervised,
        started=run.guard.watches,
    )


def describe(run: RankRun) -> str:
    """Return the first line of a run's log: method, backbone, ranks, data and steps."""
    plan, world = run.plan, run.world
    millions = sum(x.numel() for x in run.method.export().parameters()) / 1e6
    shards = f" in {n} shard{'s' * (n > 1)}" if (n := plan.index.packed) else ""  # loose images are in none
    return (
        f"{plan.recipe.method.name} on {plan.recipe.backbone.name} ({millions:.2f} M parameters), {world.size} rank"
        f"{'s' * (world.size > 1)} on {world.device.type}; "
        f"{len(plan.index)} images{shards}, "
        f"{plan.steps} steps of {plan.stream.batch} ({plan.stream.steps_per_epoch} an epoch)"
    )
