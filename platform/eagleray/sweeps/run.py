"""Run a sweep for `eagleray tune`: check it, run or continue it, and write its table, plots and best recipe."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from eagleray import config
from eagleray.base import child, files
from eagleray.base.console import out, say, stop_on_signal
from eagleray.base.errors import Superseded, UserError
from eagleray.config import plugins
from eagleray.runs import layout, mlflow_run
from eagleray.runs.background import side_work
from eagleray.runs.command import holds_run
from eagleray.runs.layout import SWEEP, SWEEP_ROWS
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking, read_note, reserve, tracking_of
from eagleray.storage import store
from eagleray.sweeps import plots
from eagleray.sweeps.label_free import agreement
from eagleray.sweeps.live_table import Show, conclude
from eagleray.sweeps.study import DONE, Study, begin, check_same, write_best, write_comparison, write_table
from eagleray.sweeps.sweep import Sweep, count_trials, recipe_of
from eagleray.sweeps.sweep_dir import open_sweep_dir


def tune(sweep: Sweep, *, most: int | None, resume: bool) -> dict[str, Any]:
    """Run or continue a sweep. Returns its folder, its best trial, all trials, and whether all of them have ended,
    which is false after a request to stop. Raises UserError when the sweep cannot be run."""
    folder = store.absolute(sweep.out or "").rstrip("/")
    place = run_store(folder)
    place.check_writable()
    rows = place.get(SWEEP_ROWS)
    if rows is None and holds_run(place):
        raise UserError(f"out={folder}: holds a run; give another out=")
    with open_sweep_dir(folder) as uploads:
        study = Study(sweep, folder, upload=uploads.upload, lost=lambda: uploads.claim.lost)
        check_same(study)
        if study.open_trials():
            check_begun(study, resume)
            machine = checked(study, objective=not rows)  # a sweep with trials has had its objective checked
        begin(study)
        if not study.open_trials():
            out.print(f"done already: all {count_trials(sweep)} trials in {folder} have ended", markup=False)
            told = read_note(study.folder / layout.MLFLOW, tracking_of(study.folder).uri).get("ended") == "FINISHED"
            return end(study, None if told else parent(study), done=True)
        files.write_atomic(study.folder / layout.ENVIRONMENT, json.dumps(machine, indent=1))
        study.wait_again()
        return conduct(study, most)


def checked(study: Study, *, objective: bool) -> dict[str, Any]:
    """Check the data of a sweep and, if `objective`, its objective. Another process does it, as it needs PyTorch, and
    drivers share the memory of a cluster's head. Returns what environment.json holds. Raises UserError and Outage."""
    given = config.to_plain(study.sweep), plugins.pack(study.plugins()), study.out, objective, out.quiet
    return child.call("eagleray.sweeps.checks:check_sweep", *given)  # type: ignore[no-any-return]


def conduct(study: Study, most: int | None) -> dict[str, Any]:
    """Run the trials that are not done, and return the results."""
    from eagleray.sweeps import ray_tune

    tracking = parent(study)
    out.print(describe(study), markup=False)
    stop = threading.Event()
    try:
        ray_tune.launch(study, tracking, most=most, stop=stop, screen=screen(study, stop))
    except Superseded:  # the files and the run in MLflow are now those of the other command
        raise
    except Exception:
        mlflow_run.mend(tracking, study.folder / layout.MLFLOW, "FAILED")  # else MLflow shows the sweep as running
        study.upload()
        raise
    study.wait_again()
    results = end(study, tracking, done=not study.open_trials())
    if study.open_trials():
        out.print(f"{study.open_trials()} trials are left; the same command with --resume continues", markup=False)
    return results


def describe(study: Study) -> str:
    """Return a description of the sweep, to print before it starts."""
    s = study.sweep
    left = study.open_trials()
    of = f"{left} of {count_trials(s)} trials are left" if left < count_trials(s) else f"{left} trials"
    names = ", ".join(n for n in s.alternatives if n)
    return (
        f"{of}{' of ' + names if names else ''}; {s.objective.mode} of {s.objective.key}, search {s.search}, "
        f"scheduler {s.scheduler}\n{', '.join(study.keys())} are varied; everything is in {study.out}"
    )


def end(study: Study, tracking: Tracking | None, *, done: bool) -> dict[str, Any]:
    """Write the table, the plots and the best recipe, send them to MLflow, and return the results. `done` says whether
    all trials have ended."""
    written = [study.folder / SWEEP, write_table(study), *write_comparison(study)]
    best = study.best()
    if best:
        recipe = recipe_of(study.sweep, best["alternative"], best["values"], "best")
        workers = recipe.workers if recipe.ranks[1] > 1 else 0
        written.append(write_best(study, resolve_paths(recipe), best, workers=workers))
    with side_work("warning: no plots", say):
        written += plots.draw(study)
    if tracking and tracking.parent:
        numbers = {"best": best["metric"]} if best else {}
        each = {f"best/{one['alternative']}": one["metric"] for one in study.best_of_each() if one["alternative"]}
        numbers |= {name: metric for name, metric in each.items() if metric is not None}
        if agreed := agreement(study.rows.values()):
            numbers |= {f"correlation/{key}": value for key, value in agreed.correlations.items()}
        numbers |= {s: float(sum(r["state"] == s for r in study.rows.values())) for s in DONE}
        with side_work("warning: the same command with --resume sends what MLflow lacks", say):
            note = study.folder / layout.MLFLOW
            mlflow_run.update(tracking, note, numbers, written, "FINISHED" if done else "KILLED")
    if best and study.sweep.register:
        register_best(study, best["id"], study.sweep.register)
    study.upload()
    conclude(study, written)
    rows = list(study.rows.values())
    return {"out": study.out, "best": best, "trials": rows, "finished": done}


def register_best(study: Study, trial: str, name: str) -> None:
    """Register the model of the trial `trial` in MLflow's registry, as a new version of the model `name`."""
    with side_work(f"warning: sweep.register={name}: trial {trial} is not registered", say):
        note = run_store(study.trial(trial)).fetch(layout.PICTURES) / layout.MLFLOW
        version = mlflow_run.register_run(tracking_of(study.folder), note, name)
        out.print(f"registered  trial {trial} as models:/{name}/{version} in MLflow", markup=False)


def parent(study: Study) -> Tracking:
    """Create or find the sweep's parent run in MLflow, and return where its trials are tracked. If MLflow cannot be
    reached, a warning is printed, and each trial is tracked without a parent."""
    tracking = tracking_of(study.folder)
    if study.folder != store.folder_of(study.out) and "MLFLOW_TRACKING_URI" not in os.environ:
        out.print(
            f"warning: MLFLOW_TRACKING_URI is not set: each machine tracks its trials in a database of its own, "
            f"this one in {study.folder.parent}",
            markup=False,
        )
    params = {
        k: v for k, v in config.flatten(config.to_plain(study.sweep)).items() if not k.startswith("alternatives.")
    }
    with side_work("warning: each trial is tracked on its own", say):
        reserve(tracking, study.folder / layout.MLFLOW)
        study.upload()
        own = mlflow_run.parent_run(tracking, study.folder / layout.MLFLOW, study.name, params)
        study.upload()
        tracking = replace(tracking, parent=own)
    return tracking


def check_begun(study: Study, resume: bool) -> None:
    """Raises UserError when the folder has trials of this sweep, but the command was given without --resume."""
    if study.rows and not resume:
        count = count_trials(study.sweep)
        raise UserError(
            f"out={study.out}: holds this sweep, {count - study.open_trials()} of {count} trials done; continue it "
            "with --resume, or give another out="
        )


@contextmanager
def screen(study: Study, stop: threading.Event) -> Iterator[Show]:
    """A context that shows the trials. The first signal, such as Ctrl-C, sets `stop`, and all trials save and stop."""
    with (
        stop_on_signal(stop.set, "stopping: every trial saves a checkpoint after its current step"),
        Show(study) as show,
    ):
        yield show
