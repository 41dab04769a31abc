"""Make the schedulers of Ray Tune, which decide which trials of a sweep stop early."""

import threading
from typing import Any

from eagleray.sweeps.study import Study
from eagleray.sweeps.width import Width


class LocalState:
    """Objects that exist in this process alone. They are pickled as nothing, as Tune would otherwise write them into
    a file that nobody reads."""

    def __init__(self, study: Study, stop: threading.Event, width: Width) -> None:
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
    return schedulers.FIFOScheduler()


class _Gone:
    """A stand-in for a trial of an earlier process: the scheduler needs only its id."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
