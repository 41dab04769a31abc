"""Run the trials of a sweep on Ray Tune, whose scheduler decides which trials run at once and which stop early."""

import importlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.errors import Outage, Preempted, Superseded, UserError, hide_secrets
from eagleray.base.threads import begin
from eagleray.cluster.session import divert_stderr, joining, machines, session
from eagleray.config import plugins
from eagleray.runs import layout
from eagleray.runs.command import new_command
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking
from eagleray.sweeps.schedulers import scheduler
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import in_words, recipe_of
from eagleray.sweeps.trial_files import finished_summary, free_resources
from eagleray.sweeps.width import TrialWaiting, Width, share

POLL = 0.2  # seconds between two updates of the screen and checks for a request to stop
AGAIN = 2.0  # seconds between two requests to trials to stop, as some may just have begun
PENDING = 200  # largest number of trials that wait in Ray; an autoscaler adds machines for them
DEATHS = 3  # how often a trial continues after its process has died, not counting lost or preempted machines
DIED = "worker process has died"  # part of Ray's message when a process has died on a machine that is still up
VARIABLES = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # loggers are not needed, as a trial writes its own files
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the last result of a stopped trial has no metric
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # selects Tune's older output, which unlike the new one can be turned off
}


Screen = AbstractContextManager[Callable[[], None]]


class LocalState:
    """Objects that only the driver's process uses. Tune pickles them into a file that nobody reads, so they are pickled
    as an empty object."""

    def __init__(self, study: Study, stop: threading.Event, width: Width) -> None:
        self.study, self.stop, self.width = study, stop, width
        self.error: UserError | Outage | None = None  # the error that has stopped the trials, as of a store's outage
        self.command = new_command()
        self.deaths = Counter[str]()  # deaths of each trial's process that count towards DEATHS

    def __reduce__(self) -> Any:
        return object, ()

    def __deepcopy__(self, memo: Any) -> "LocalState":
        return self


def launch(study: Study, tracking: Tracking, *, most: int | None, stop: threading.Event, screen: Screen) -> None:
    """Run the trials that are not done, at most `most` at a time, until all are done or the event `stop` is set.
    `screen` yields a function that updates the screen. Raises UserError, and Outage when a store does not answer."""
    os.environ.update(VARIABLES)
    # Tune's own messages on the end of a trial are not shown, as the journal prints one line on it.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    # Ray replaces the signal handlers, so the screen, which sets handlers too, is entered later. stderr is diverted, as
    # Ray prints dozens of lines there when a machine is lost.
    with session() as ray, divert_stderr(study.folder / layout.RAY_LOG), screen as show:
        from ray import tune

        # `session` has set the authentication that Ray, which is imported here, reads.
        _keep_keys()
        joined, nodes = joining(), machines(ray)
        each = share(study.sweep, nodes, joined=joined)
        # An autoscaler adds machines for pending trials. Only one is pending with Optuna, which learns from results.
        pending = 1 if study.sweep.search == "optuna" else min(most or PENDING, PENDING)
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(pending)
        local = LocalState(study, stop, Width(study.sweep, most, lambda: machines(ray)))
        tuner = tune.Tuner(
            trainable(tracking, each),
            tune_config=tune.TuneConfig(
                metric="value",
                mode=study.sweep.objective.mode,
                search_alg=searcher(local),
                scheduler=scheduler(local),
                num_samples=study.open_trials(),
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.config["row"]["id"],
                trial_dirname_creator=lambda trial: trial.config["row"]["id"],
            ),
            run_config=tune.RunConfig(
                name=f"tune-{time.time():.0f}",
                storage_path=f"{study.folder}/.ray",
                verbose=0,
                stop=stopper(local),
                callbacks=[journal(local)],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs save their own checkpoints
                failure_config=tune.FailureConfig(max_failures=-1),  # `Journal.on_trial_recover` sets the limit
            ),
        )
        _fit(tuner, local, TrialWaiting(study, each, lambda: machines(ray), show))


def _keep_keys() -> None:
    """Remove AWS credentials from the environment variables that Tune passes to trials, as Ray logs these on every node
    and shows them in its dashboard. Trials use the credentials of their node, as the workers of a run do."""
    tune: Any = importlib.import_module("ray.tune.execution.class_cache")
    tune.ENV_VARS_TO_PROPAGATE = {name for name in tune.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}


def _fit(tuner: Any, local: LocalState, show: Callable[[], None]) -> None:
    """Run Tune in a thread of its own, as in the main thread it would handle Ctrl-C itself. When `local.stop` is set,
    all running trials are asked to save and stop. Raises Outage if a store does not answer, or the sweep is lost."""
    ended, asked = begin(tuner.fit, "ray-tune"), -math.inf
    while not ended.done():
        wait([ended], POLL)
        show()
        if local.study.lost():  # no trial is asked to stop, as the other command may be training it
            raise Superseded(f"out={local.study.out}: another command has taken this sweep over; this one ends")
        if local.stop.is_set() and time.monotonic() > asked + AGAIN:
            asked = time.monotonic()
            for row in list(local.study.rows.values()):
                if row["state"] == "running":
                    with suppress(Outage, OSError):  # the request is repeated after AGAIN seconds
                        run_store(local.study.trial(row["id"])).put(layout.STOP, "")
    if e := ended.exception():
        cause = getattr(e, "cause", e)
        raise cause if isinstance(cause, UserError | Outage) else RuntimeError(f"Ray Tune gave up: {e}") from e
    if local.error:
        raise local.error


def trial_settings(study: Study, row: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return what the process of a trial gets: recipe, values and so on. `command` is the id of the user's command."""
    recipe = recipe_of(study.sweep, row["alternative"], row["values"], f"trial {row['id']}")
    reports = study.reports.get(row["id"], [])
    return {
        "id": row["id"],
        "folder": study.trials,
        "sweep": study.name,
        "recipe": config.to_plain(resolve_paths(recipe)),
        "plugins": plugins.pack(recipe.plugins),
        "objective": study.sweep.objective.key,
        "after": reports[-1]["percent"] if reports else 0.0,
        "threads": study.sweep.cpus,
        "command": command,
    }


def searcher(local: LocalState) -> Any:
    """Return a searcher that gives Tune the next trial of the study when fewer run than `local.width` allows."""
    from ray.tune.search import Searcher

    class Rows(Searcher):  # type: ignore[misc]
        """A searcher that returns the study's rows."""

        def suggest(self, trial_id: str) -> Any:
            if local.study.busy() >= local.width.now():
                return None
            row = local.study.next()
            if row is None:
                return Searcher.FINISHED
            if row["starts"]:  # remove FAILED of an earlier driver, as this one counts deaths from 0
                run_store(local.study.trial(row["id"])).delete(layout.FAILED)
            return {"row": trial_settings(local.study, row, local.command)}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            pass

        def save(self, path: str) -> None:
            """Do nothing: the study stores the state."""

        def restore(self, path: str) -> None:
            pass

    return Rows(metric="value", mode=local.study.sweep.objective.mode)


def stopper(local: LocalState) -> Any:
    """Return an object by which Tune stops when `local.stop` is set. It sets `local.stop` after the sweep's `hours`."""
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
    """Return a callback that writes Tune's events into the study."""
    from ray import tune

    class Journal(tune.Callback):  # type: ignore[misc]
        """Writes Tune's events into the study."""

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            row = local.study.rows[str(trial)]
            begun = row["starts"]
            local.study.set(row["id"], state="running", starts=begun + 1)
            local.study.note(f"trial {row['id']} {'continues' if begun else 'starts'}: {words(row)}")

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            name = str(trial)
            if "away" in result:  # stop all trials, as each would wait for the same store
                local.error = Outage(f"trial {name}: {result['away']}; the same command with --resume continues")
                local.stop.set()
            known = local.study.reports.get(name, [])
            # A trial that Tune has started again reports the results of its run once more.
            if "value" in result and not (known and result["percent"] <= known[-1]["percent"]):
                local.study.set(name, seconds=result["seconds"], numbers=result["numbers"])
                local.study.report(name, result["step"], result["steps"], result["percent"], result["value"])

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = str(trial)
            if run_store(local.study.trial(name)).get(layout.FAILED) is not None:
                return self.on_trial_error(iteration, trials, trial)
            through = finished_summary(local.study.trial(name))
            whole = local.study.reports.get(name, [{}])[-1].get("percent") == 100
            if whole and not through:
                lacks = f"out={local.study.out}: lacks the summary of trial {name}, which took all its steps elsewhere"
                local.error = UserError(f"{lacks}; expected a folder that all machines share, or a URL; see --resume")
                local.stop.set()
            # A run may have ended before Tune stops its trial by an earlier value, which the trial then keeps.
            state = "finished" if through and whole else "waiting" if local.stop.is_set() else "stopped"
            row = local.study.rows[name]
            local.study.set(name, state=state, seconds=through["wall_seconds"] if through else row["seconds"])
            if state != "waiting":
                value = in_words(row["metric"]) or "not measured"
                local.study.note(
                    f"trial {name} {state} at step {row['step']}: {local.study.sweep.objective.key} {value}"
                )

        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name, (why, counts) = str(trial), ending(trial)
            local.study.note(f"trial {name}: {why}")
            local.study.set(name, state="waiting")
            local.deaths[name] += counts
            if local.deaths[name] > DEATHS:  # Tune starts the trial once more, but then FAILED ends it at once
                trial.max_failures = 0
                with suppress(Outage, OSError):
                    run_store(local.study.trial(name)).put(layout.FAILED, f"{why} {DEATHS + 1} times")

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            name = str(trial)
            free_resources(local.study.trial(name))
            why = run_store(local.study.trial(name)).get(layout.FAILED) or "its process died"
            local.study.set(name, state="failed", why=why)
            local.study.note(f"trial {name} failed: {why}")

    return Journal()


def ending(trial: Any) -> tuple[str, bool]:
    """Return a text on how the process of Tune's trial ended, and whether this counts towards DEATHS."""
    from ray import cloudpickle
    from ray.exceptions import RayActorError

    file = trial.pickled_error_file
    error = cloudpickle.loads(Path(file).read_bytes()) if file else None
    if isinstance(getattr(error, "cause", None), Preempted):
        return "saved, as its machine is taken away", False
    if isinstance(error, RayActorError) and error.actor_init_failed:  # its machine may lack a package
        return f"its process could not begin ({hide_secrets(str(error).splitlines()[-1])})", True
    if isinstance(error, RayActorError) and DIED not in str(error):
        return "its machine was lost", False
    return "its process died", True


def words(row: Mapping[str, Any]) -> str:
    """Return a trial's alternative and values as text."""
    values = " ".join(f"{k}={v}" for k, v in row["values"].items())
    return f"{row['alternative']} {values}".strip()


def trainable(tracking: Tracking, each: dict[str, float]) -> Any:
    """Return the class that Tune runs in processes with the resources `each`, one trial after another. `tracking` goes
    through `with_parameters`, as its URL may have a password, and Tune does not write parameters into its files."""
    from ray import tune

    class TuneTrial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any], tracking: Tracking) -> None:  # type: ignore[override]
            from eagleray.sweeps.trial import Trial  # imported here, as the driver does without PyTorch

            self.begin = lambda row: Trial(self.trial_name, row, tracking)
            self.pretraining = self.begin(config["row"])

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.pretraining.end()
            self.pretraining = self.begin(config["row"])
            return True

        def step(self) -> dict[str, Any]:
            return self.pretraining.next()

        def cleanup(self) -> None:
            self.pretraining.end()

    trial = tune.with_resources(tune.with_parameters(TuneTrial, tracking=tracking), each)
    trial.__qualname__ = "Trial"  # the name that `ps` and Ray's dashboard show
    return trial
