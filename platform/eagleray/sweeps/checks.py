"""Check a sweep before its first trial. This runs in a process of its own, whose end frees the memory of PyTorch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.data.index import open_shown
from eagleray.methods.method import Classifier
from eagleray.protocols.probes import RUN_PROTOCOLS
from eagleray.runs import metrics
from eagleray.runs.checks import make_plan
from eagleray.runs.command import environment
from eagleray.runs.metrics import METRICS
from eagleray.runs.monitor import first_knn
from eagleray.runs.sources import resolve_paths
from eagleray.sweeps.label_free import LABEL_FREE
from eagleray.sweeps.sweep import Sweep, corners, recipe_of

FINAL = {m.key for m in METRICS.values() if m.when == "end"} | {metrics.GOODPUT}  # keys that only summary.json has
EVALUATED = {m.key for m in METRICS.values() if m.when == "evaluation"}
OBJECTIVES = [m for m in METRICS if m not in ("step", "epoch", metrics.LR)]  # METRICS has none of single methods


def check_sweep(
    tree: dict[str, Any], packed: Mapping[str, plugins.Sources], folder: str, objective: bool, quiet: bool
) -> dict[str, Any]:
    """Check the data of a sweep and, if `objective`, its objective. Returns the contents of environment.json. `tree` is
    the sweep as plain values, `folder` its path or URL, `packed` its plug-ins' sources. Raises UserError and Outage."""
    console.quiet = quiet
    plugins.install(packed)
    sweep = config.check(Sweep, tree, "sweep")
    if objective:
        check_objective(sweep)
    check_data(sweep, folder)
    return environment()


def check_objective(sweep: Sweep) -> None:
    """Raises UserError when no trial would report the objective, its mode is wrong for the metric, or trials report it
    only at their end while the scheduler compares them earlier."""
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
    """Return whether evaluate.every is at least optim.epochs at all corners of the search space of the sweep's
    alternative `name`, so that its trials are evaluated only at their end. The caller handles evaluate.every=0."""
    trials = [recipe_of(sweep, name, values, name) for values in corners(sweep.alternatives[name].space)]
    return all(r.evaluate.every >= r.optim.epochs for r in trials)


def check_data(sweep: Sweep, folder: str | Path) -> None:
    """Check the first trial of each alternative, which stands for the others. Raises UserError when its data is missing
    or lacks the labels that the objective needs, its method cannot be built, or the method rejects the image size."""
    labelled = sweep.objective.key == metrics.MONITOR_KNN or sweep.objective.key.partition("/")[0] in RUN_PROTOCOLS
    for name, b in sweep.alternatives.items():
        recipe = resolve_paths(recipe_of(sweep, name, corners(b.space)[0], f"alternatives.{name}"))
        plan = make_plan(replace(recipe, out=str(folder)), note=say, opening=open_shown)
        if labelled and not plan.index.labelled:
            raise UserError(f"objective.key={sweep.objective.key}: needs labels, which data.train does not have")
        first = first_knn(recipe.monitor, len(plan.index), recipe.optim.batch)
        if sweep.objective.key == metrics.MONITOR_KNN and first > plan.steps:
            raise UserError(
                f"objective.key={metrics.MONITOR_KNN}: first measured at step {first}, and a trial takes {plan.steps} "
                "steps; give more optim.epochs, or a smaller monitor.every or monitor.bank"
            )
