"""Run the trials of a sweep on Ray Tune, whose scheduler decides which trials run at once and which stop early."""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cluster import ray_train
from eagleray.cluster.session import session
from eagleray.config import plugins
from eagleray.runs import layout
from eagleray.runs.plan import resolve_paths
from eagleray.runs.run_dir import finished
from eagleray.runs.tracking import Tracking
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import RANGES, Space, Sweep, recipe_of, tidy
from eagleray.sweeps.trial import POLL, Trial, free_resources, trial_dir

DEATHS = 3  # of a trial's process, after which the trial has failed
MEMORY = 2**20  # bytes: what a trial asks for whose workers ask for the rest, as Ray wants it to ask for something
VARIABLES = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # what a trial says is in its folder
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that was asked to stop has no metric to give
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the old one can be silent
}


Screen = AbstractContextManager[Callable[[], None]]


class LocalState:
    """Objects that exist in this process alone. They are pickled as nothing, as Tune would otherwise write them into
    a file that nobody reads."""

    def __init__(self, study: Study, stop: threading.Event) -> None:
        self.study, self.stop = study, stop

    def __reduce__(self) -> Any:
        return object, ()

    def __deepcopy__(self, memo: Any) -> "LocalState":
        return self


def launch(study: Study, tracking: Tracking, *, most: int | None, stop: threading.Event, screen: Screen) -> None:
    """Run the trials that are not done, at most `most` at once, until all are done or the event `stop` is set.
    `screen` shows their progress. Raises UserError."""
    os.environ.update(VARIABLES)
    # The journal says in a line what a trial ended with.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    with session() as ray, screen as show:  # Ray takes the signals, and the screen takes them back
        from ray import tune

        nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        each, width = share(study.sweep, nodes)
        pauses = study.sweep.scheduler in ("hyperband", "pbt")
        if most and pauses and most < width:
            raise UserError(
                f"--max-concurrent {most}: too few for "
                f"scheduler={study.sweep.scheduler}, which pauses and resumes trials; expected {width} or more"
            )
        local, pbt = LocalState(study, stop), study.sweep.scheduler == "pbt"
        tuner = tune.Tuner(
            trainable(tracking, each),
            param_space=population(study) if pbt else None,
            tune_config=tune.TuneConfig(
                metric="value",
                mode=study.sweep.objective.mode,
                search_alg=None if pbt else searcher(local),
                scheduler=scheduler(local),
                num_samples=1 if pbt else study.open_trials(),
                max_concurrent_trials=None if pauses else min(most or width, width),
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.config["row"]["id"],
                trial_dirname_creator=lambda trial: trial.config["row"]["id"],
            ),
            run_config=tune.RunConfig(
                name=f"tune-{time.time():.0f}",
                storage_path=str(study.folder / ".ray"),
                verbose=0,
                stop=stopper(local),
                callbacks=[journal(local)],
                failure_config=tune.FailureConfig(max_failures=DEATHS),
            ),
        )
        _fit(tuner, study, stop, show)


def _fit(tuner: Any, study: Study, stop: threading.Event, show: Callable[[], None]) -> None:
    """Run Tune in a thread of its own, as it would handle Ctrl-C itself in the main thread. When `stop` is set,
    every running trial is asked to save and stop."""
    problem: list[BaseException] = []

    def work() -> None:
        try:
            tuner.fit()
        except BaseException as e:
            problem.append(e)

    thread = threading.Thread(target=work, name="ray-tune", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL)
        show()
        if stop.is_set():
            for row in list(study.rows.values()):
                if row["state"] == "running":
                    (trial_dir(study.folder, row["id"]) / layout.STOP).touch()
    for e in problem:
        cause = getattr(e, "cause", e)
        raise cause if isinstance(cause, UserError) else RuntimeError(f"Ray Tune gave up: {e}") from e


def share(sweep: Sweep, nodes: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], int]:
    """Return the resources that one trial asks Ray for, and how many trials fit at once. Raises UserError when no
    machine has room for a trial."""
    wanted = [
        recipe_of(sweep, n, {k: v.options[0] for k, v in b.space.items()}, n) for n, b in sweep.alternatives.items()
    ]
    workers = max(r.ranks[1] for r in wanted)
    gpus = sum(n.get("GPU", 0) for n in nodes)
    if workers > 1:
        for r in wanted:
            ray_train.resources(r, nodes)  # says what is missing
        return {"CPU": 0, "memory": MEMORY}, max(int(gpus) // workers, 1)
    gpu = bool(gpus) if all(r.gpus is None for r in wanted) else any(r.gpus for r in wanted)
    fits = sum(int(min(n.get("CPU", 0) // sweep.cpus, n.get("GPU", 0) if gpu else math.inf)) for n in nodes)
    if not fits:
        raise UserError(
            f"cpus={sweep.cpus}: a trial needs {sweep.cpus} CPUs{' and a GPU' if gpu else ''}, which no machine has"
        )
    return {"CPU": sweep.cpus, "GPU": int(gpu)}, fits


def scheduler(local: LocalState) -> Any:
    """Return Tune's scheduler for the sweep. Its time is the percentage of a trial's own steps, as trials with
    different batches have different numbers of steps."""
    from ray.tune import schedulers

    sweep = local.study.sweep
    if sweep.scheduler == "asha":

        class Remembering(schedulers.ASHAScheduler):  # type: ignore[misc]
            """ASHA that also knows the results of trials from earlier processes."""

            complete = False

            def on_trial_add(self, controller: Any, trial: Any) -> None:
                if not self.complete:
                    self.complete = True
                    for name, row in local.study.rows.items():
                        if row["state"] in ("finished", "stopped"):
                            self.remember(controller, _Gone(name), name)
                super().on_trial_add(controller, trial)
                self.tell(controller, trial, trial.config["row"]["id"])

            def remember(self, controller: Any, trial: Any, name: str) -> None:
                """Add a trial of an earlier process, with its results."""
                super().on_trial_add(controller, trial)
                self.tell(controller, trial, name)

            def tell(self, controller: Any, trial: Any, name: str) -> None:
                """Pass all results that a trial has reported so far to the scheduler."""
                for r in local.study.reports.get(name, []):
                    super().on_trial_result(controller, trial, {"percent": r["percent"], "value": r["value"]})

        return Remembering(
            time_attr="percent",
            max_t=101,  # a trial at 100 ends by itself
            grace_period=100 * sweep.grace,  # type: ignore[arg-type]
            reduction_factor=sweep.reduction,
        )
    if sweep.scheduler == "hyperband":
        return schedulers.HyperBandScheduler(time_attr="percent", max_t=101, reduction_factor=sweep.reduction)
    if sweep.scheduler == "pbt":
        [branch] = sweep.alternatives.values()
        return schedulers.PopulationBasedTraining(
            time_attr="percent",
            perturbation_interval=100 * sweep.interval,
            hyperparam_mutations={"row": {"values": {k: _domain(v) for k, v in branch.space.items()}}},
            quantile_fraction=0.25 if (sweep.trials or 16) >= 4 else 0.5,
            custom_explore_fn=lambda config: within(branch.space, config),
            synch=True,
            log_config=False,
        )
    return schedulers.FIFOScheduler()


def within(space: Space, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose values are inside their ranges: PBT multiplies a value by 0.8 or 1.2 without regard to
    its range."""
    values = dict(settings["row"]["values"])
    for key, v in space.items():
        if v.kind in RANGES:
            low, high = v.options
            x = min(max(values[key], low), high)
            values[key] = round(x) if v.kind == "integer" else tidy(x, low, high)
    return settings | {"row": settings["row"] | {"values": values}}


class _Gone:
    """A stand-in for a trial of an earlier process: the scheduler needs only its id."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


def _domain(v: Any) -> Any:
    """Return the values of a key as Tune's type."""
    from ray import tune

    if v.kind == "integer":
        return tune.randint(v.options[0], v.options[1] + 1)
    if v.kind in ("uniform", "log"):
        return (tune.loguniform if v.kind == "log" else tune.uniform)(*v.options)
    return list(v.options)


def trial_settings(study: Study, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are sent to the process of a trial."""
    recipe = recipe_of(study.sweep, row["alternative"], row["values"], f"trial {row['id']}")
    reports = study.reports.get(row["id"], [])
    return {
        "id": row["id"],
        "folder": str(study.folder),
        "recipe": config.to_plain(resolve_paths(recipe)),
        "plugins": plugins.pack(recipe.plugins),
        "values": row["values"],
        "objective": study.sweep.objective.key,
        "after": reports[-1]["percent"] if reports else 0.0,
        "pause": 100 * study.sweep.interval if study.sweep.scheduler == "pbt" else None,
        "threads": study.sweep.cpus,
    }


def population(study: Study) -> dict[str, Any]:
    """Return the settings of all trials at once, as PBT needs them."""
    from ray import tune

    rows = []
    while row := study.next():
        study.set(row["id"], state="running")
        rows.append(trial_settings(study, row))
    return {"row": tune.grid_search(rows)}


def searcher(local: LocalState) -> Any:
    """Return a searcher that gives Tune the trials in the order of the study."""
    from ray.tune.search import Searcher

    class Rows(Searcher):  # type: ignore[misc]
        """A searcher that returns the study's rows."""

        def suggest(self, trial_id: str) -> Any:
            row = local.study.next()
            if row is None:
                return Searcher.FINISHED
            local.study.set(row["id"], state="running")
            return {"row": trial_settings(local.study, row)}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            pass

        def save(self, path: str) -> None:
            """Do nothing: the study holds the state."""

        def restore(self, path: str) -> None:
            pass

    return Rows(metric="value", mode=local.study.sweep.objective.mode)


def stopper(local: LocalState) -> Any:
    """Return the object that Tune asks whether to stop: when `stop` is set, or after the sweep's `hours`."""
    from ray.tune import Stopper

    end = time.monotonic() + 3600 * (local.study.sweep.hours or math.inf)

    class Asked(Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            return False

        def stop_all(self) -> bool:
            if time.monotonic() > end:
                local.stop.set()
            return local.stop.is_set()

    return Asked()


def journal(local: LocalState) -> Any:
    """Return the callback that writes Tune's events into the study."""
    from ray import tune

    class Journal(tune.Callback):  # type: ignore[misc]
        """Writes Tune's events into the study."""

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            row = local.study.rows[str(trial)]
            begun = row["step"] or (trial_dir(local.study.folder, row["id"]) / layout.METRICS).exists()
            local.study.set(row["id"], state="running")
            local.study.note(f"trial {row['id']} {'continues' if begun else 'starts'}: {words(row)}")

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            name = str(trial)
            if "value" in result:
                values = trial.config["row"]["values"]  # PBT changes them
                local.study.report(name, result["step"], result["steps"], result["percent"], result["value"])
                local.study.set(name, values=dict(values), seconds=result["seconds"])

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = str(trial)
            if (trial_dir(local.study.folder, name) / layout.FAILED).exists():
                return self.on_trial_error(iteration, trials, trial)
            through = finished(trial_dir(local.study.folder, name))
            state = "finished" if through else "waiting" if local.stop.is_set() else "stopped"
            row = local.study.rows[name]
            local.study.set(name, state=state, seconds=through["wall_seconds"] if through else row["seconds"])
            if state != "waiting":
                local.study.note(
                    f"trial {name} {state} at step {row['step']}: {local.study.sweep.objective.key} {row['metric']:.4g}"
                )

        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            local.study.note(f"trial {trial}: its process died")

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = str(trial)
            free_resources(trial_dir(local.study.folder, name))
            file = trial_dir(local.study.folder, name) / layout.FAILED
            why = file.read_text() if file.exists() else "its process died"
            local.study.set(name, state="failed", why=why)
            local.study.note(f"trial {name} failed: {why}")

    return Journal()


def words(row: Mapping[str, Any]) -> str:
    """Return a trial's alternative and values as text."""
    values = " ".join(f"{k}={v}" for k, v in row["values"].items())
    return f"{row['alternative']} {values}".strip()


def trainable(tracking: Tracking, each: dict[str, float]) -> Any:
    """Return the class that Tune runs. Its process holds the resources `each` and runs one trial after another.
    Tracking is passed as a parameter, which Tune does not write into its files, because its address may hold a
    password."""
    from ray import tune

    class TuneTrial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any], tracking: Tracking) -> None:  # type: ignore[override]
            self.tracking = tracking
            self.pretraining = Trial(self.trial_name, config["row"], tracking)

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.pretraining.end()
            self.pretraining = Trial(self.trial_name, config["row"], self.tracking)
            return True

        def step(self) -> dict[str, Any]:
            return self.pretraining.next()

        def cleanup(self) -> None:
            self.pretraining.end()

        def save_checkpoint(self, folder: str) -> None:
            """Stop the run, which saves its own checkpoint, and write down which trial it was. Tune holds no
            weights."""
            self.pretraining.end()
            mark = {"trial": self.trial_name, "percent": self.pretraining.reported}
            (Path(folder) / "mark.json").write_text(json.dumps(mark))

        def load_checkpoint(self, folder: Any) -> None:
            mark = json.loads((Path(folder) / "mark.json").read_text())
            self.pretraining.reported = mark["percent"]  # what is before it has been told
            if mark["trial"] != self.trial_name:
                self.pretraining.adopt(mark["trial"])

    trial = tune.with_resources(tune.with_parameters(TuneTrial, tracking=tracking), each)
    trial.__qualname__ = "Trial"  # what processes and Ray's pages show
    return trial
