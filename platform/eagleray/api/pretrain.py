"""Pretrain and fine-tune: check the recipe and its data, train on Ray or in this process, and return the run."""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.api.overrides import Overrides, overrides_of
from eagleray.api.run import Run
from eagleray.base import files
from eagleray.base.console import out as console
from eagleray.base.console import say, stop_on_signal
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.cluster.scan_shards import scanner
from eagleray.engine import world
from eagleray.engine.compiling import compiles
from eagleray.engine.precision import compute_dtype
from eagleray.models import weights as pretrained_weights
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.runs import layout, profile, teacher
from eagleray.runs import pretrain as training
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_backbone
from eagleray.runs.command import hold, new_command
from eagleray.runs.environment import environment, write_plugins
from eagleray.runs.follow import FollowRun
from eagleray.runs.local_forecast import check_fit
from eagleray.runs.mlflow_run import send_missing, update
from eagleray.runs.plan import Plan, make_plan, resolve_paths
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import check_exists
from eagleray.runs.start import build_started, check_progress
from eagleray.runs.stop_signal import StopRequest
from eagleray.runs.summary import finished
from eagleray.runs.tracking import Tracking, read_note, tracking_of
from eagleray.storage import store


def pretrain(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    workers: int | str | None = None,
    plugins: Sequence[str | Path] = (),
    insist: bool = False,
    **keys: Any,
) -> Run:
    """Pretrain a backbone, or continue the run that is in `out`, and return the run.

    `recipe` is a name of `eagleray list recipes` or a YAML file. `overrides` change its keys, by their dotted names or
    as a list of `key=value`; `out`, `workers` and further keywords, such as `seed` or `max_steps`, are keys of the
    recipe too. `data.train` may name shards or a folder of images. With `workers=0` the run is in this process.
    `plugins` are Python files and modules to load beside those that the recipe lists: docs/plugins.md. A run that
    cannot fit into the memory of this machine's accelerator is not begun, unless you `insist`: docs/plan.md.

    Ctrl-C, SIGTERM or the notebook's interrupt ends the run after its step with a checkpoint: the run that is returned
    is not `finished`, and the same call continues it. A second interrupt raises KeyboardInterrupt at once.

    Raises UserError for a wrong key, missing data or a folder that holds another run, and Outage when a store stays
    away.

    Example:

        run = eagleray.pretrain(
            "mocov3_vitxs8_shapes_demo",
            {"data.train": "shards/", "data.lanes": 8, "optim.batch": 32},
            out="runs/example",
            workers=0,
            max_steps=2,
        )
        assert run.finished
        run.summary["knn/top1"]
    """
    lines = overrides_of(overrides, out=out, workers=workers, **keys)
    return see_through(str(recipe), lines, plugins, insist=insist)


def finetune(
    weights: str | Path | Run,
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    workers: int | str | None = None,
    plugins: Sequence[str | Path] = (),
    **keys: Any,
) -> Run:
    """Train a recipe from pretrained weights: `pretrain` with `backbone.weights`.

    `weights` is a run, a checkpoint, a file of tensors, or timm's name of a model such as
    `timm:vit_base_patch16_224`. Everything else, also what is raised, is as in `pretrain`.

    Example:

        run = eagleray.finetune(
            "runs/a",
            "mocov3_vitxs8_shapes_demo",
            {"data.train": "shards/", "data.lanes": 8, "optim.batch": 32},
            out="runs/finetuned",
            workers=0,
            max_steps=1,
        )
    """
    source = weights.out if isinstance(weights, Run) else str(weights)
    lines = overrides_of(overrides, out=out, workers=workers, **keys)
    return see_through(str(recipe), [*lines, *overrides_of({"backbone.weights": source})], plugins)


def see_through(
    name: str, overrides: Sequence[str], plugins: Sequence[str | Path] = (), *, insist: bool = False
) -> Run:
    """Start or continue a run, show its progress, and return it when it ends or was asked to stop. `insist` is as in
    `pretrain`."""
    recipe = resolve_paths(recipes.load(name, overrides, [str(p) for p in plugins]))
    # From Python, the program's own arguments say nothing about the run.
    line = sys.argv if name in sys.argv else ["eagleray", "pretrain", name, *overrides]
    command = new_command()
    with hold(recipe.out, command, say):
        return _see_through(recipe, command, line, insist=insist)


def _see_through(recipe: Recipe, command: str, line: Sequence[str], *, insist: bool) -> Run:
    """Start or continue the run that this command holds. `line` is the command as a list of words."""
    out, run = recipe.out, run_store(recipe.out)
    run.check_writable()
    folder = run.fetch()
    begun = bool(files.read_history(folder / layout.METRICS))
    if begun and (folder / layout.RECIPE).exists():
        check_same(recipe, folder / layout.RECIPE)
    check_device(recipe)  # this and the weights before the data, which may take long to index
    if not begun:
        for key, place in recipe.weight_files.items():
            check_exists(place, key)
    plan = make_plan(recipe, note=say, scan_all=scanner())
    tracking = tracking_of(folder, out.rpartition("/")[2])
    if finished(folder, plan.steps):
        console.print(f"done already: the run in {out} has taken all its {plan.steps} steps", markup=False)
        send_rest(recipe, folder, tracking)
    else:
        check_fit(plan, say, insist=insist)
        if recipe.backbone.weights and not begun:
            check_weights(recipe, recipe.backbone.weights)
        if recipe.start and not begun:
            check_source(plan)
        if recipe.teacher and not begun:
            check_teacher(recipe, recipe.teacher)
        write_beginning(recipe, line)
        note_choice(plan)
        stop = StopRequest(out, command)
        with (
            contextlib.closing(stop),
            FollowRun(folder, plan.steps, plan.stream.batch),
            run.following(),
            stop_on_signal(stop.ask, "stopping after this step"),
        ):
            run_in_world(recipe, tracking, stop)
        if recipe.profile:
            run.fetch(layout.PROFILE)
        table = folder / layout.PROFILE / profile.TABLE
        if recipe.profile and table.exists():
            console.print(f"{table.parent}:\n{table.read_text()}", markup=False, highlight=False, soft_wrap=True)
        send_report(out, folder, tracking)
    return Run(out, steps=plan.steps)


def send_rest(recipe: Recipe, folder: Path, tracking: Tracking) -> None:
    """Send what MLflow lacks of a finished run that it knows, such as the name that its model is to have now."""
    fields, name = read_note(note := folder / layout.MLFLOW, tracking.uri), recipe.track.register
    if not fields or (fields.get("ended") == "FINISHED" and name in (None, fields.get("registered"))):
        return
    try:
        say(send_missing(folder, tracking, recipes.flat(recipe), "FINISHED"))
    except (UserError, Outage) as e:
        say(f"warning: {e}; `eagleray track {recipe.out}` sends what is missing")
    run_store(recipe.out).share(note)


def send_report(out: str, folder: Path, tracking: Tracking) -> None:
    """Write the report of a run that has ended or was stopped, and send it to MLflow."""
    from eagleray.reports import write

    if "ended" not in read_note(folder / layout.MLFLOW, tracking.uri):  # MLflow is not installed, or is away
        return
    try:
        page = Path(write.report([out])[0])
    except Exception as e:  # no page is worth a run, and matplotlib may be missing
        say(f"warning: no report: {one_line(e)}")
        return
    try:
        update(tracking, folder / layout.MLFLOW, {}, [page, page.with_suffix("")])
    except (UserError, Outage) as why:
        say(f"the report was not sent to MLflow: {why}; it is {page}")


def note_choice(plan: Plan) -> None:
    """Write into the run folder which samples the run reads, where its recipe chooses some, for the report."""
    from eagleray.reports.draw_choice import choice_of_plan

    run, selection = run_store(plan.recipe.out), plan.stream.selection
    if selection is None or json.loads(run.get(layout.CHOICE) or "{}").get("digest") == selection.digest:
        return
    try:
        run.put(layout.CHOICE, json.dumps(asdict(choice_of_plan(plan))))
    except Exception as e:  # pictures are not worth a run
        say(f"warning: the report will not show the choice of samples: {one_line(e)}")


def check_weights(recipe: Recipe, source: str) -> None:
    """Check how much of the backbone the weights of `source` fill, print it and write it into the run folder. Raises
    UserError when too little is filled."""
    report = pretrained_weights.fill(build_backbone(recipe), pretrained(source))
    run_store(recipe.out).put(layout.WEIGHTS, "\n".join(report.lines()) + "\n")
    console.print(f"{report}: {recipe.out}/{layout.WEIGHTS}", markup=False)
    warn(report)


def check_source(plan: Plan) -> None:
    """Check that what `start` names fits the run, print what is taken over and what not, and write it into the run
    folder. Raises UserError."""
    out, started = plan.recipe.out, build_started(plan.recipe, len(plan.index))
    if started.source.run and plan.recipe.start and plan.recipe.start.what == "all":
        check_progress(plan, started.source)
    run_store(out).put(layout.START, "\n".join(started.lines()) + "\n")
    console.print("\n".join(started.table()), markup=False, highlight=False, soft_wrap=True)
    console.print(f"every tensor of the backbone: {out}/{layout.START}", markup=False)
    warn(started.report)


def check_teacher(recipe: Recipe, network: Network) -> None:
    """Check that the weights of a frozen teacher fit it, print it and write it into the run folder. Raises
    UserError."""
    assert network.weights is not None
    report, _ = teacher.fill(Backbone(**network.arguments), network.weights)
    run_store(recipe.out).put(layout.TEACHER, "\n".join(report.lines()) + "\n")
    console.print(f"teacher: {report}: {recipe.out}/{layout.TEACHER}", markup=False)
    warn(report)


def warn(report: pretrained_weights.Report) -> None:
    """Say what is wrong with the colours that a backbone gets, if anything is."""
    if report.warning:
        say(f"warning: {report.warning}")


def check_device(recipe: Recipe) -> None:
    """Raises UserError when the run will stay on this machine, which lacks the GPUs, the number format or the compiler
    that the recipe asks for. A cluster may start machines that have them."""
    if recipe.workers and os.environ.get("RAY_ADDRESS"):
        return
    device = world.device_of(recipe.gpus)
    compute_dtype(recipe.precision, device)
    compiles(recipe.compile, device)


def write_beginning(recipe: Recipe, command: Sequence[str]) -> None:
    """Write the resolved recipe, the sources of its plug-ins and the environment into the run folder. Raises UserError
    when it cannot be written."""
    out, run = recipe.out, run_store(recipe.out)
    try:
        run.put(layout.RECIPE, config.dump(recipe))
        write_plugins(out, recipe.plugins)
        run.put(layout.ENVIRONMENT, json.dumps(environment() | {"command": list(command)}, indent=1))
        for name in (layout.STOP, layout.FAILURE):
            for left in run.list(name):
                store.store(out).delete(left.url)
    except OSError as e:
        raise UserError(f"out={out}: cannot be written: {e.strerror or e}") from None


def run_in_world(recipe: Recipe, tracking: Tracking, stop: StopRequest) -> dict[str, Any] | None:
    """Train on Ray's workers or in this process. Returns the summary, or None when the run was asked to stop."""
    if recipe.workers:
        if importlib.util.find_spec("ray") is None:
            raise UserError(
                f"workers={recipe.workers}: needs the package ray, which is not installed; workers=0 runs without it"
            )
        from eagleray.cluster import ray_train

        return ray_train.launch(recipe, tracking=tracking, command=stop.command)
    device = world.local(recipe.gpus)
    return training.pretrain(recipe, device, tracking=tracking, command=stop.command, stop=stop.event)


def check_same(recipe: Recipe, stored: Path) -> None:
    """Raises UserError when a run has another recipe stored. The message names the keys that differ and the two ways
    to go on."""
    differ = config.differences(recipes.identity(config.load(Recipe, stored)), recipes.identity(recipe))
    if differ:
        raise UserError(
            f"out={recipe.out}: holds another run: {differ}; give another out=, or continue that run with "
            f"`eagleray pretrain {stored}`"
        )
