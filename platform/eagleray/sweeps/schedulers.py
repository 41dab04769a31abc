"""The schedulers of Ray Tune that stop the trials of a sweep early.

Their unit of time is one per cent of a trial's steps, whose number depends on the trial's batch size."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagleray.sweeps.ray_tune import LocalState


def scheduler(local: "LocalState") -> Any:
    """Return the scheduler for Ray Tune that a sweep's keys `scheduler` and `apart` select."""
    from ray.tune import schedulers

    sweep = local.study.sweep
    if sweep.scheduler != "asha":
        return schedulers.FIFOScheduler()
    names = list(sweep.alternatives)
    return _apart(local, {name: _asha(local, [name]) for name in names}) if sweep.apart else _asha(local, names)


def _asha(local: "LocalState", names: Collection[str]) -> Any:
    """Return an ASHA scheduler for the trials of the alternatives `names`."""
    from ray.tune import schedulers

    class Remembering(schedulers.ASHAScheduler):  # type: ignore[misc]
        """ASHA that also compares with trials of earlier processes, from which a sweep is continued."""

        complete = False

        def on_trial_add(self, controller: Any, trial: Any) -> None:
            if not self.complete:
                self.complete = True
                for name, row in local.study.rows.items():
                    if row["state"] in ("finished", "stopped") and row["alternative"] in names:
                        self.add(controller, _Gone(name), name)
            self.add(controller, trial, trial.config["row"]["id"])

        def add(self, controller: Any, trial: Any, name: str) -> None:
            """Add the trial `name` to ASHA, with all results that it has reported so far, in earlier processes too."""
            super().on_trial_add(controller, trial)
            for r in local.study.reports.get(name, []):
                super().on_trial_result(controller, trial, {"percent": r["percent"], "value": r["value"]})

    sweep = local.study.sweep
    return Remembering(
        time_attr="percent",
        max_t=101,  # percent of the steps at which ASHA ends a trial: never, as trials end at 100
        grace_period=100 * sweep.grace,  # type: ignore[arg-type]
        reduction_factor=sweep.reduction,
    )


def _apart(local: "LocalState", each: dict[str, Any]) -> Any:
    """Return a scheduler that passes each trial to `each[name]`, the scheduler of its alternative. So trials of
    an alternative that learns slowly at first are not stopped in favour of faster alternatives."""
    from ray.tune import schedulers

    class Apart(schedulers.FIFOScheduler):  # type: ignore[misc]
        def set_search_properties(self, metric: Any, mode: Any, **spec: Any) -> bool:
            return [one.set_search_properties(metric, mode, **spec) for one in each.values()] == [True] * len(each)

        def of(self, trial: Any) -> Any:
            return each[local.study.rows[trial.config["row"]["id"]]["alternative"]]

        def on_trial_add(self, controller: Any, trial: Any) -> None:
            self.of(trial).on_trial_add(controller, trial)

        def on_trial_result(self, controller: Any, trial: Any, result: Any) -> Any:
            return self.of(trial).on_trial_result(controller, trial, result)

        def on_trial_complete(self, controller: Any, trial: Any, result: Any) -> None:
            self.of(trial).on_trial_complete(controller, trial, result)

    return Apart()


class _Gone:
    """A stand-in for a trial that ended in an earlier process. The scheduler needs only its id."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
