"""Pretrain and fine-tune: check the recipe and its data, train on Ray or in this process, and return the run."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagleray.api.begin import begin, begin_apart
from eagleray.api.overrides import Overrides, overrides_of
from eagleray.api.run import Run
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.background import side_work
from eagleray.runs.command import hold, new_command
from eagleray.runs.follow import following
from eagleray.runs.mlflow_run import send_missing, update
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import resolve_paths
from eagleray.runs.stop_request import StopRequest, check_hours
from eagleray.runs.tracking import Tracking, read_note, tracking_of


def pretrain(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    workers: int | str | None = None,
    plugins: Sequence[str | Path] = (),
    insist: bool = False,
    max_hours: float | None = None,
    **keys: Any,
) -> Run:
    """Pretrain a backbone, or continue the run in the folder `out`, and return the run.

    `recipe` is a name from `eagleray list recipes` or a YAML file. To continue a run, `recipe` may also be the folder
    or URL of that run. `overrides` changes recipe keys: a mapping from dotted names to values, or a list of
    `key=value`. `out`, `workers` and further keyword arguments, such as `seed` or `max_steps`, set recipe keys too.
    `data.train` may name shards or a folder of images. With `workers=0` the run trains in this process. `plugins` lists
    Python files and modules to load besides those of the recipe. If the run cannot fit into the memory of this
    machine's accelerator, `pretrain` refuses it unless `insist` is true. After `max_hours` hours the run saves a
    checkpoint and stops.

    After Ctrl-C, SIGTERM or a notebook's interrupt button, the run finishes the current step, saves a checkpoint and
    ends. Its attribute `finished` is then False. Repeat the call to continue the run. A second interrupt raises
    KeyboardInterrupt immediately.

    Raises UserError for a wrong key, missing data or a different run's folder, and Outage if a store does not answer.

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
    return see_through(str(recipe), lines, plugins, insist=insist, hours=max_hours)


def finetune(
    weights: str | Path | Run,
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | Path | None = None,
    workers: int | str | None = None,
    plugins: Sequence[str | Path] = (),
    max_hours: float | None = None,
    **keys: Any,
) -> Run:
    """Train a recipe from pretrained weights. `finetune` does the same as `pretrain` with the key `backbone.weights`.

    `weights` is a run, a checkpoint, a file of tensors, or timm's name of a model such as `timm:vit_base_patch16_224`.
    The other arguments and the exceptions are those of `pretrain`.

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
    return see_through(str(recipe), [*lines, *overrides_of({"backbone.weights": source})], plugins, hours=max_hours)


def see_through(
    name: str,
    overrides: Sequence[str],
    plugins: Sequence[str | Path] = (),
    *,
    insist: bool = False,
    hours: float | None = None,
) -> Run:
    """Start or continue a run, show its progress, and return it when it ends or was asked to stop. `name` is the
    recipe; `insist` and `hours` are as `insist` and `max_hours` in `pretrain`."""
    check_hours(hours)
    recipe = resolve_paths(recipes.load(name, overrides, [str(p) for p in plugins]))
    # When called from Python, the arguments of the program do not describe the run, so a command is made up.
    line = sys.argv if name in sys.argv else ["eagleray", "pretrain", name, *overrides]
    out, command, time_over = recipe.out, new_command(), False
    beginning = begin_apart if recipe.is_elsewhere else begin
    with hold(out, command, say):
        begun, folder = beginning(recipe, line, insist=insist), run_store(out).view
        tracking = tracking_of(folder, out.rpartition("/")[2])
        if begun.done:
            say(f"done already: the run in {out} has finished")
            send_rest(recipe, folder, tracking)
        else:
            with following(out, begun.steps, begun.batch, command, hours) as stop:
                run_in_world(recipe, tracking, stop)
            time_over = stop.time_over
            if recipe.profile:
                show_profile(out)
            send_report(out, folder, tracking)
    run = Run(out, steps=begun.steps)
    run.time_over = time_over
    return run


def run_in_world(recipe: Recipe, tracking: Tracking, stop: StopRequest) -> dict[str, Any] | None:
    """Train on Ray's workers or in this process. Returns the summary, or None when the run was asked to stop."""
    if recipe.workers:
        if importlib.util.find_spec("ray") is None:
            raise UserError(
                f"workers={recipe.workers}: needs the package ray, which is not installed; workers=0 runs without it"
            )
        from eagleray.cluster import ray_train

        return ray_train.launch(recipe, tracking=tracking, command=stop.command)
    from eagleray.engine import world
    from eagleray.runs import pretrain as training

    device = world.local(recipe.gpus)
    return training.pretrain(recipe, device, tracking=tracking, command=stop.command, stop=stop.event)


def show_profile(out: str) -> None:
    """Print the table of operations of a run with `profile`, if it has reached the profiled steps."""
    from eagleray.runs import profile

    table = run_store(out).fetch(layout.PROFILE) / layout.PROFILE / profile.TABLE
    if table.exists():
        console.print(f"{table.parent}:\n{table.read_text()}", markup=False, highlight=False, soft_wrap=True)


def send_report(out: str, folder: Path, tracking: Tracking) -> None:
    """Write the report of a run that has ended or was stopped, and send it to MLflow."""
    from eagleray.reports import write

    with side_work("warning: no report", say):  # matplotlib may be missing
        page = Path(write.report([out])[0])
        if "ended" not in read_note(folder / layout.MLFLOW, tracking.uri):  # MLflow is away: `eagleray track` sends it
            return
        with side_work(f"the report is {page}, and was not sent to MLflow", say):
            update(tracking, folder / layout.MLFLOW, {}, [page, page.with_suffix("")])


def send_rest(recipe: Recipe, folder: Path, tracking: Tracking) -> None:
    """Send MLflow the missing data about a finished run, such as a new name for its model, if MLflow knows the run."""
    fields, name = read_note(note := folder / layout.MLFLOW, tracking.uri), recipe.track.register
    if not fields or (fields.get("ended") == "FINISHED" and name in (None, fields.get("registered"))):
        return
    with side_work(f"warning: `eagleray track {recipe.out}` sends what is missing", say):
        say(send_missing(folder, tracking, recipes.flat(recipe), "FINISHED"))
    run_store(recipe.out).share(note)
