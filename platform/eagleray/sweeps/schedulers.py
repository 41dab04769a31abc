"""The schedulers of Ray Tune that stop the trials of a sweep early.

They measure time in per cent of a trial's steps, as trials with different batch sizes differ in their number of steps.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagleray.sweeps.ray_tune import LocalState


def scheduler(local: "LocalState") -> Any:
    """Return the scheduler of a sweep for Ray Tune."""
    from ray.tune import schedulers

    sweep = local.study.sweep
    if sweep.scheduler != "asha":
        return schedulers.FIFOScheduler()
    names = list(sweep.alternatives)
    return _apart(local, {name: _asha(local, [name]) for name in names}) if sweep.apart else _asha(local, names)


def _asha(local: "LocalState", names: Collection[str]) -> Any:
    """Return ASHA for the trials of the alternatives `names`."""
    from ray.tune import schedulers

    class Remembering(schedulers.ASHAScheduler):  # type: ignore[misc]
        """ASHA that also knows the results of trials from earlier processes."""

        complete = False

        def on_trial_add(self, controller: Any, trial: Any) -> None:
            if not self.complete:
                self.complete = True
                for name, row in local.study.rows.items():
                    if row["state"] in ("finished", "stopped") and row["alternative"] in names:
                        self.add(controller, _Gone(name), name)
            self.add(controller, trial, trial.config["row"]["id"])

        def add(self, controller: Any, trial: Any, name: str) -> None:
            """Add a trial with all results that it has reported so far, also in earlier processes."""
            super().on_trial_add(controller, trial)
            for r in local.study.reports.get(name, []):
                super().on_trial_result(controller, trial, {"percent": r["percent"], "value": r["value"]})

    sweep = local.study.sweep
    return Remembering(
        time_attr="percent",
        max_t=101,  # percent; above 100, as a trial at 100 ends by itself
        grace_period=100 * sweep.grace,  # type: ignore[arg-type]
        reduction_factor=sweep.reduction,
    )


def _apart(local: "LocalState", each: dict[str, Any]) -> Any:
    """Return a scheduler that passes each trial to `each[name]`, the scheduler of its alternative. So an alternative
    that learns slowly at first does not lose its trials to faster alternatives."""
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
