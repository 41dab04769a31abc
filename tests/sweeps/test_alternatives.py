"""Alternatives of a sweep: each with its own scheduler, and compared at their best."""

import csv
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.recipes import small_recipe
from helpers.sweeps import write

from eagleray.sweeps import plots
from eagleray.sweeps.live_table import comparison
from eagleray.sweeps.ray_tune import LocalState
from eagleray.sweeps.schedulers import scheduler
from eagleray.sweeps.study import Study, write_comparison
from eagleray.sweeps.sweep import load


def study_of(folder: Path, **changes: Any) -> Study:
    """Four trials, of MoCo v3 and of BYOL in turn."""
    for method in ("mocov3", "byol"):
        (folder / f"{method}.yaml").write_text(small_recipe(method))
    study = Study(load(str(write(folder / "sweep.yaml", **changes))), folder)
    for _ in range(4):
        study.next()
    return study


@pytest.mark.parametrize(("apart", "kept"), [(False, [True, False, True, False]), (True, [True, True, True, False])])
def test_trials_compete_with_those_of_their_own_alternative(apart: bool, kept: list[bool], tmp_path: Path):
    study = study_of(tmp_path, apart=apart)
    study.rows["000"] |= {"state": "finished"}  # by an earlier process
    study.reports["000"] = [{"percent": 50.0, "value": 60.0}]
    asha = scheduler(LocalState(study, threading.Event(), None))  # type: ignore[arg-type]
    assert asha.set_search_properties("value", "max")
    trials = [SimpleNamespace(trial_id=n, config={"row": {"id": n}}) for n in study.rows]
    values = {"001": 20.0, "002": 70.0, "003": 10.0}
    goes_on = [True]
    for trial in trials[1:]:
        asha.on_trial_add(None, trial)
        decision = asha.on_trial_result(None, trial, {"percent": 50.0, "value": values[trial.trial_id]})
        goes_on.append(decision == asha.CONTINUE)
        asha.on_trial_complete(None, trial, {"percent": 50.0, "value": values[trial.trial_id]})
    assert goes_on == kept


def test_the_end_compares_alternatives_at_their_best(tmp_path: Path):
    study = study_of(tmp_path)
    for row, metric in zip(study.rows.values(), (40.0, 90.0, 50.0, 30.0), strict=True):
        row |= {"state": "finished", "metric": metric}
    study.rows["001"]["state"] = "stopped"  # not comparable, whatever it had reached
    lines = comparison(study)
    assert [line.split()[:6] for line in lines[1:]] == [
        ["mocov3", "2", "of", "2", "50", "002"],
        ["byol", "1", "of", "2", "30", "003"],
    ]
    assert lines[0].split() == ["ALTERNATIVE", "FINISHED", "monitor/knn", "TRIAL", "lr", "momentum"]
    [path] = write_comparison(study)
    first, _ = csv.DictReader(path.read_text().splitlines())
    assert (first["alternative"], first["monitor/knn"], first["id"]) == ("mocov3", "50.0", "002")
    assert first["optim.lr.value"] == str(study.rows["002"]["values"]["optim.lr.value"])
    study.rows["003"]["state"] = "stopped"
    assert comparison(study)[2].split()[:5] == ["byol", "0", "of", "2", "none"]
    assert [p.name for p in plots.draw(study)][-1] == "alternatives.png"
    assert write_comparison(study_of(tmp_path, alternatives={"": {"recipe": "mocov3.yaml"}})) == []
