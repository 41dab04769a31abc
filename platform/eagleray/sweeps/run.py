"""Run a sweep for `eagleray tune`: check it, run or continue it, and write its table, plots and best recipe."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base import files
from eagleray.base.console import out, say, stop_on_signal
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.methods.method import Classifier
from eagleray.protocols.probes import RUN_PROTOCOLS
from eagleray.runs import layout, metrics, mlflow_run
from eagleray.runs.command import holds_run
from eagleray.runs.environment import environment
from eagleray.runs.layout_of_sweep import ROWS, SWEEP
from eagleray.runs.metrics import METRICS
from eagleray.runs.plan import make_plan, resolve_paths
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import Tracking, read_note, reserve, tracking_of
from eagleray.storage import store
from eagleray.sweeps import plots
from eagleray.sweeps.label_free import LABEL_FREE, agreement
from eagleray.sweeps.live_table import Show, conclude
from eagleray.sweeps.study import DONE, Study, begin, check_same, write_best, write_table
from eagleray.sweeps.sweep import Sweep, corners, count_trials, recipe_of
from eagleray.sweeps.sweep_dir import open_sweep_dir

FINAL = {m.key for m in METRICS.values() if m.when == "end"} | {metrics.GOODPUT}  # numbers of summary.json only
EVALUATED = {m.key for m in METRICS.values() if m.when == "evaluation"}
OBJECTIVES = [m for m in METRICS if m not in ("step", "epoch", metrics.LR)]  # a method may have more numbers


def tune(sweep: Sweep, *, most: int | None, resume: bool) -> dict[str, Any]:
    """Run a sweep, or continue it. Returns its folder, its best trial, all trials, and whether it is finished: a
    sweep that was asked to stop before its end is not. Raises UserError."""
    folder = store.absolute(sweep.out or "").rstrip("/")
    place = run_store(folder)
    place.check_writable()
    rows = place.get(ROWS)
    if rows is None and holds_run(place):
        raise UserError(f"out={folder}: holds a run; give another out=")
    if not rows:  # trials that have begun go on as they began
        check_objective(sweep)
    with open_sweep_dir(folder) as upload:
        study = Study(sweep, folder, upload=upload)
        check_same(study)
        if study.open_trials():
            check_begun(study, resume)
            check_data(sweep, folder)
        begin(study)
        if not study.open_trials():
            out.print(f"done already: all {count_trials(sweep)} trials in {folder} have ended", markup=False)
            told = read_note(study.folder / layout.MLFLOW, tracking_of(study.folder).uri).get("ended") == "FINISHED"
            return end(study, None if told else parent(study), done=True)
        files.write_atomic(study.folder / layout.ENVIRONMENT, json.dumps(environment(), indent=1))
        study.wait_again()
        return conduct(study, most)


def conduct(study: Study, most: int | None) -> dict[str, Any]:
    """Run the trials that are not done, and return the results."""
    from eagleray.sweeps import ray_tune

    tracking = parent(study)
    out.print(describe(study), markup=False)
    stop = threading.Event()
    try:
        ray_tune.launch(study, tracking, most=most, stop=stop, screen=screen(study, stop))
    except Exception:
        mlflow_run.mend(tracking, study.folder / layout.MLFLOW, "FAILED")  # MLflow would show it as running
        study.upload()
        raise
    study.wait_again()
    results = end(study, tracking, done=not study.open_trials())
    if study.open_trials():
        out.print(f"{study.open_trials()} trials are left; the same command with --resume continues", markup=False)
    return results


def describe(study: Study) -> str:
    """Return the sweep in words, to print before it starts."""
    s = study.sweep
    left = study.open_trials()
    of = f"{left} of {count_trials(s)} trials are left" if left < count_trials(s) else f"{left} trials"
    names = ", ".join(n for n in s.alternatives if n)
    return (
        f"{of}{' of ' + names if names else ''}; {s.objective.mode} of {s.objective.key}, search {s.search}, "
        f"scheduler {s.scheduler}\n{', '.join(study.keys())} are varied; everything is in {study.out}"
    )


def end(study: Study, tracking: Tracking | None, *, done: bool) -> dict[str, Any]:
    """Write table, plots and best recipe, send them to MLflow, and return the results. `done` tells MLflow whether
    the sweep finished."""
    written = [study.folder / SWEEP, write_table(study)]
    best = study.best()
    if best:
        recipe = recipe_of(study.sweep, best["alternative"], best["values"], "best")
        workers = recipe.workers if recipe.ranks[1] > 1 else 0
        written.append(write_best(study, resolve_paths(recipe), best, workers=workers))
    try:
        written += plots.draw(study)
    except Exception as e:  # no picture is worth a sweep
        out.print(f"warning: no plots: {one_line(e)}", markup=False)
    if tracking and tracking.parent:
        numbers = {"best": best["metric"]} if best else {}
        if agreed := agreement(study.rows.values()):
            numbers |= {f"correlation/{key}": value for key, value in agreed.correlations.items()}
        numbers |= {s: float(sum(r["state"] == s for r in study.rows.values())) for s in DONE}
        try:
            note = study.folder / layout.MLFLOW
            mlflow_run.update(tracking, note, numbers, written, "FINISHED" if done else "KILLED")
        except (UserError, Outage) as e:
            out.print(f"warning: {e}; the same command with --resume sends the rest", markup=False)
    if best and study.sweep.register:
        register_best(study, best["id"], study.sweep.register)
    study.upload()
    conclude(study, written)
    rows = list(study.rows.values())
    return {"out": study.out, "best": best, "trials": rows, "finished": done}


def register_best(study: Study, trial: str, name: str) -> None:
    """Register the model of the best trial in MLflow."""
    tracking = tracking_of(study.folder)
    sweep = read_note(study.folder / layout.MLFLOW, tracking.uri).get("run_id")
    try:
        version = mlflow_run.register_run(tracking, f"{sweep}/{trial}", name)
    except Exception as e:
        out.print(f"warning: sweep.register={name}: trial {trial} is not registered: {one_line(e)}", markup=False)
    else:
        out.print(f"registered  trial {trial} as models:/{name}/{version} in MLflow", markup=False)


def parent(study: Study) -> Tracking:
    """Return where the trials are tracked: under a parent run for the sweep, if MLflow can be reached, else each on
    its own."""
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
    try:
        reserve(tracking, study.folder / layout.MLFLOW)
        study.upload()
        own = mlflow_run.parent_run(tracking, study.folder / layout.MLFLOW, study.name, params)
        study.upload()
        return replace(tracking, parent=own)
    except (UserError, Outage) as e:
        out.print(f"warning: {e}", markup=False)
        return tracking


def check_begun(study: Study, resume: bool) -> None:
    """Raises UserError when the folder holds trials of this sweep, and nobody has said that it continues."""
    if study.rows and not resume:
        count = count_trials(study.sweep)
        raise UserError(
            f"out={study.out}: holds this sweep, {count - study.open_trials()} of {count} trials done; continue it "
            "with --resume, or give another out="
        )


def check_objective(sweep: Sweep) -> None:
    """Raises UserError when no trial would ever report the objective, or only at its end while the scheduler
    compares trials earlier."""
    key = sweep.objective.key
    where = f"objective.key={key}"
    if key not in (*OBJECTIVES, LABEL_FREE):
        raise UserError(f"{where}: not a metric that runs report{config.nearest(key, [*OBJECTIVES, LABEL_FREE])}")
    better, mode = METRICS[key].better if key in METRICS else "higher", {"higher": "max", "lower": "min"}
    if sweep.objective.mode != mode.get(better, sweep.objective.mode):
        raise UserError(f"objective.mode={sweep.objective.mode}: {better} {key} is better; expected {mode[better]}")
    early = sweep.scheduler != "none"
    if early and key in FINAL:
        raise UserError(f"{where}: measured only at the end of a trial: expected scheduler=none, not {sweep.scheduler}")
    for name, b in sweep.alternatives.items():
        r = recipe_of(sweep, name, corners(b.space)[0], f"alternatives.{name}")
        learns = issubclass(r.method.target, Classifier)
        if key in metrics.CLASSIFIED and not (learns and r.data.test):
            raise UserError(
                f"{where}: the method {r.method.name} trains no classifier"
                if not learns
                else f"{where}: needs data.test"
            )
        if learns and (key in metrics.FROZEN or key == metrics.MONITOR_KNN):
            raise UserError(
                f"{where}: not measured for {r.method.name}, which trains a classifier: "
                "expected a metric of the classifier"
            )
        if early and key in EVALUATED and (not r.evaluate.every or never_earlier(sweep, name)):
            raise UserError(
                f"{where}: evaluate.every={r.evaluate.every} measures it only at the end of a trial"
                + f" of optim.epochs={r.optim.epochs}" * bool(r.evaluate.every)
                + f", but scheduler={sweep.scheduler} compares trials earlier"
            )
        if key == metrics.LINEAR_TOP1 and not r.evaluate.probe_epochs:
            raise UserError(f"{where}: not measured, as evaluate.probe_epochs=0")


def never_earlier(sweep: Sweep, name: str) -> bool:
    """Return whether no trial of an alternative evaluates its backbone before its last epoch."""
    trials = [recipe_of(sweep, name, values, name) for values in corners(sweep.alternatives[name].space)]
    return all(r.evaluate.every >= r.optim.epochs for r in trials)


def check_data(sweep: Sweep, folder: str | Path) -> None:
    """Check the first trial of each alternative in place of all. Raises UserError when its data is missing or lacks
    the labels that the objective needs, or when its method cannot be built or cannot take an image size."""
    labelled = sweep.objective.key == metrics.MONITOR_KNN or sweep.objective.key.partition("/")[0] in RUN_PROTOCOLS
    for name, b in sweep.alternatives.items():
        recipe = resolve_paths(recipe_of(sweep, name, corners(b.space)[0], f"alternatives.{name}"))
        plan = make_plan(replace(recipe, out=str(folder)), note=say)
        if labelled and not plan.index.labelled:
            raise UserError(f"objective.key={sweep.objective.key}: needs labels, which data.train does not have")


@contextmanager
def screen(study: Study, stop: threading.Event) -> Iterator[Show]:
    """Show the trials. The first signal, such as Ctrl-C, asks all of them to save and stop."""
    with (
        stop_on_signal(stop.set, "stopping: every trial saves a checkpoint after its current step"),
        Show(study) as show,
    ):
        yield show
