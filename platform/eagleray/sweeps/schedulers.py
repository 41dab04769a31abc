"""Make the schedulers of Ray Tune, which decide which trials of a sweep stop early or exchange weights."""

import threading
from typing import Any

from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import RANGES, Space, tidy
from eagleray.sweeps.width import Width


class LocalState:
    """Objects that exist in this process alone. They are pickled as nothing, as Tune would otherwise write them into
    a file that nobody reads."""

    def __init__(self, study: Study, stop: threading.Event, width: Width | None) -> None:
        self.study, self.stop, self.width = study, stop, width
        self.away = ""  # the store that does not answer, because of which trials were asked to stop

    def __reduce__(self) -> Any:
        return object, ()

    def __deepcopy__(self, memo: Any) -> "LocalState":
        return self


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

        class Meeting(schedulers.PopulationBasedTraining):  # type: ignore[misc]
            """PBT whose trials meet without those that have ended on their way, by an error or by being faster than a
            request to pause. Tune's own waits for their results for good, with all others paused."""

            def on_trial_result(self, controller: Any, trial: Any, result: Any) -> Any:
                unfinished: Any = _Unfinished(controller)
                return super().on_trial_result(unfinished, trial, result)

            def choose_trial_to_run(self, controller: Any) -> Any:
                chosen, going = super().choose_trial_to_run(controller), _Unfinished(controller).get_live_trials()
                if chosen is None and going and all(trial.status == "PAUSED" for trial in going):
                    self.on_trial_result(controller, going[0], self._trial_state[going[0]].last_result)
                    chosen = super().choose_trial_to_run(controller)
                return chosen

        return Meeting(
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


class _Unfinished:
    """Tune's controller, for which trials that ended with an error are not alive."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def get_live_trials(self) -> list[Any]:
        """Return the trials that may give another result."""
        return [trial for trial in self.controller.get_live_trials() if not trial.is_finished()]


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
