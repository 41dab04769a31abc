"""Population based training, whose trials wait for each other at every perturbation."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagleray.sweeps.schedulers import scheduler


class Trial:
    """What PBT reads of a trial of Tune."""

    def __init__(self, status: str) -> None:
        self.status = status

    def is_finished(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")


def meeting(*statuses: str) -> tuple[Any, Any, list[Trial]]:
    """A scheduler whose perturbations are at 30, 60 and 90 %, Tune's controller with trials of these states that have
    done 20 % each, and what is perturbed."""
    branch = SimpleNamespace(space={})
    sweep = SimpleNamespace(scheduler="pbt", alternatives={"": branch}, interval=0.3, trials=4)
    pbt = scheduler(SimpleNamespace(study=SimpleNamespace(sweep=sweep)))  # type: ignore[arg-type]
    pbt.set_search_properties("value", "max")
    trials = [Trial(status) for status in statuses]
    controller = SimpleNamespace(
        get_trials=lambda: trials,
        get_live_trials=lambda: {t for t in trials if t.status != "TERMINATED"},  # with errors, as Tune's
    )
    for trial in trials:
        state = {"last_score": None, "last_train_time": 20, "last_perturbation_time": 0, "last_result": None}
        pbt._trial_state[trial] = SimpleNamespace(**state, last_checkpoint=None)
    return pbt, controller, trials


def pause(pbt: Any, controller: Any, trial: Trial, percent: float, value: float) -> None:
    assert pbt.on_trial_result(controller, trial, {"percent": percent, "value": value}) == "PAUSE"
    trial.status = "PAUSED"


@pytest.mark.parametrize("end", ["TERMINATED", "ERROR"])
def test_trials_do_not_wait_for_one_that_has_ended(end: str, monkeypatch: pytest.MonkeyPatch):
    pbt, controller, trials = meeting("RUNNING", "RUNNING", "RUNNING", "RUNNING")
    perturbed: list[int] = []
    monkeypatch.setattr(pbt, "_checkpoint_or_exploit", lambda trial, *_: perturbed.append(trials.index(trial)))
    for i in 0, 1, 2:
        pause(pbt, controller, trials[i], 30, i)
        assert pbt.choose_trial_to_run(controller) is None, "one is on its way"
    assert perturbed == []
    trials[3].status = end  # without a result
    assert pbt.choose_trial_to_run(controller) in trials[:3]
    assert {0, 1, 2} <= set(perturbed)
    assert len(perturbed) == len(set(perturbed)), "once"


def test_trials_meet_at_the_result_of_the_last_one(monkeypatch: pytest.MonkeyPatch):
    pbt, controller, trials = meeting("RUNNING", "RUNNING", "ERROR")
    perturbed: list[int] = []
    monkeypatch.setattr(pbt, "_checkpoint_or_exploit", lambda trial, *_: perturbed.append(trials.index(trial)))
    pause(pbt, controller, trials[0], 30, 1.0)
    pause(pbt, controller, trials[1], 30, 2.0)
    assert {0, 1} <= set(perturbed)
    assert pbt.choose_trial_to_run(controller) in trials[:2]
    assert len(perturbed) == 3, "they met once"
