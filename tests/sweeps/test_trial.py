"""A trial in its process, without Ray: what it reports, and that its memory is free when it has ended."""

import gc
import json
import os
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import forked
from helpers.sweeps import through, trial_settings, wait_until

from eagleray.base.errors import Outage, Superseded, UserError
from eagleray.base.files import read_lines
from eagleray.methods.method import Method
from eagleray.runs import layout, pretrain, rank_run
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune
from eagleray.sweeps import trial as trials
from eagleray.sweeps.ray_tune import LocalState
from eagleray.sweeps.study import Study
from eagleray.sweeps.trial import ObjectiveHistory, Trial


@pytest.mark.parametrize(("rate", "state"), [(1e-3, "finished"), (1e30, "failed")])
def test_the_network_of_a_trial_is_gone_before_the_next_begins(
    rate: float, state: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    networks: list[weakref.ref[Method]] = []
    build = rank_run.build_method

    def noted(*args: Any, **kwargs: Any) -> Method:
        method = build(*args, **kwargs)
        networks.append(weakref.ref(method))
        return method

    monkeypatch.setattr(rank_run, "build_method", noted)
    gc.disable()  # or it might come by chance
    try:
        trial = Trial(
            "000", trial_settings(shards, tmp_path, str(tmp_path), {"optim.lr.value": rate}), Tracking("none")
        )
        results = through(trial)
        trial.end()
        assert networks
        assert [n() for n in networks if n()] == []
    finally:
        gc.enable()
    failed = Path(trial.out) / layout.FAILED
    assert failed.exists() == (state == "failed")
    assert (results[-1]["percent"] == 100) == (state == "finished")
    if state == "failed":
        assert "no finite gradient" in failed.read_text()
    else:
        assert [r["step"] for r in results] == [4, 8, 10]


def test_a_history_is_parsed_once_and_again_where_it_is_replaced(tmp_path: Path):
    path, history = tmp_path / "metrics.jsonl", ObjectiveHistory("knn")
    assert history.lines(path) == []
    path.write_text('{"step": 1, "knn": 5}\n{"step": 2, "loss": 1}\n{"step": 3, "kn')
    first = history.lines(path)
    assert [r["step"] for r in first] == [1]
    with path.open("a") as f:
        f.write('n": 7}\n{"step": 4, "knn": NaN}\n')
    assert [r["step"] for r in history.lines(path)] == [1, 3]
    assert history.lines(path)[0] is first[0]
    other = tmp_path / "other"
    other.write_text(json.dumps({"step": 1, "knn": 6}) + "\n")
    other.replace(path)
    assert [r["knn"] for r in history.lines(path)] == [6]


def ended_by(error: Exception, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A trial whose run ends with an error."""

    def end(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pretrain, "pretrain", end)
    return Trial("000", trial_settings(shards, tmp_path, str(tmp_path / "trials"), {}), Tracking("none"))


def test_a_trial_that_another_process_has_taken_over_ends_no_sweep(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trial = ended_by(Superseded("another process has taken the run over"), shards, tmp_path, monkeypatch)
    with pytest.raises(Superseded):
        through(trial)


def test_a_trial_whose_store_stays_away_waits_for_the_sweep_to_continue(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that ends so is continued by the same command, and so is the sweep: nothing is wrong with the trial."""
    trial = ended_by(Outage("s3://bucket: no answer for 10 minutes"), shards, tmp_path, monkeypatch)
    [result] = through(trial)
    assert not (Path(trial.out) / layout.FAILED).exists()
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    study.rows = {name: {"id": name, "state": "running", "seconds": 0.0} for name in ("000", "001")}
    local = LocalState(study, threading.Event(), None)
    journal = ray_tune.journal(local)
    (tmp_path / "trials" / "001").mkdir()

    def fit() -> None:
        journal.on_trial_result(0, [], "000", result)
        journal.on_trial_complete(0, [], "000")
        wait_until((tmp_path / "trials" / "001" / layout.STOP).exists)  # the others save, and wait too
        journal.on_trial_complete(0, [], "001")

    with pytest.raises(Outage, match=r"^trial 000: s3://bucket: no answer for 10 minutes; .* --resume continues$"):
        ray_tune._fit(SimpleNamespace(fit=fit), local, lambda: None)
    assert [row["state"] for row in study.rows.values()] == ["waiting", "waiting"]


def test_ray_is_not_imported_before_its_session_has_said_how_it_authenticates():
    """It reads RAY_AUTH_MODE then; a client without the token that its own server wants never connects."""
    code = """
import sys
from eagleray.sweeps import ray_tune

def session():
    sys.exit("ray is imported" if "ray" in sys.modules else 0)

ray_tune.session = session
ray_tune.launch(None, None, most=None, stop=None, screen=None)
sys.exit("no session")
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_a_sweep_that_another_command_has_taken_over_ends_and_stops_no_trial(tmp_path: Path):
    study, over = Study(SimpleNamespace(), tmp_path), threading.Event()  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running"}}
    study.lost = lambda: True
    local, tuner = LocalState(study, threading.Event(), None), SimpleNamespace(fit=lambda: over.wait(60))
    with pytest.raises(Superseded, match="has taken this sweep over"):
        ray_tune._fit(tuner, local, lambda: None)
    over.set()
    assert not (tmp_path / "trials").exists()


def test_a_trial_may_be_stopped_before_its_first_result(tmp_path: Path):
    said: list[str] = []
    sweep = SimpleNamespace(objective=SimpleNamespace(key="knn"))
    study = Study(sweep, tmp_path, note=said.append)  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running", "seconds": 0.0, "step": 0, "metric": None}}
    (tmp_path / "trials" / "000").mkdir(parents=True)
    ray_tune.journal(LocalState(study, threading.Event(), None)).on_trial_complete(0, [], "000")
    assert said == ["trial 000 stopped at step 0: knn not measured"]
    assert study.rows["000"]["state"] == "stopped"


def test_a_trial_that_tune_starts_again_has_each_result_once(tmp_path: Path):
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running"}}
    journal = ray_tune.journal(LocalState(study, threading.Event(), None))
    for step in (4, 8, 4, 8, 9):
        result = {"step": step, "steps": 10, "percent": 10.0 * step, "value": 1.0, "seconds": 1.0, "numbers": {}}
        journal.on_trial_result(0, [], "000", result)
    assert [r["step"] for r in read_lines(tmp_path / "reports.jsonl")] == [4, 8, 9]


def test_a_trial_whose_files_do_not_arrive_is_not_taken_for_stopped(tmp_path: Path):
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running", "seconds": 0.0}}
    journal = ray_tune.journal(local := LocalState(study, threading.Event(), None))

    def fit() -> None:
        result = {"step": 10, "steps": 10, "percent": 100.0, "value": 1.0, "seconds": 1.0, "numbers": {}}
        journal.on_trial_result(0, [], "000", result)
        journal.on_trial_complete(0, [], "000")

    with pytest.raises(UserError, match=f"^out={tmp_path}: lacks the summary of trial 000.* that all machines share"):
        ray_tune._fit(SimpleNamespace(fit=fit), local, lambda: None)
    assert study.rows["000"]["state"] == "waiting"


def test_a_trial_that_is_stopped_when_its_run_has_ended_is_not_the_best(tmp_path: Path):
    """Tune reads results one by one, so the value by which it stops a trial may be an early one."""
    sweep = SimpleNamespace(objective=SimpleNamespace(key="knn", mode="max"))
    study = Study(sweep, tmp_path)  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running", "seconds": 0.0}}
    (folder := tmp_path / "trials" / "000").mkdir(parents=True)
    (folder / layout.SUMMARY).write_text('{"steps": 10, "wall_seconds": 5.0}')
    journal = ray_tune.journal(LocalState(study, threading.Event(), None))
    result = {"step": 3, "steps": 10, "percent": 30.0, "value": 1.0, "seconds": 1.0, "numbers": {}}
    journal.on_trial_result(0, [], "000", result)
    journal.on_trial_complete(0, [], "000")
    assert study.rows["000"]["state"] == "stopped"
    assert study.best() is None


def test_an_outage_while_an_ended_trial_is_fetched_fails_it_not(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def away(**_: Any) -> None:
        raise Outage("s3://bucket: no answer")

    trial = Trial("000", trial_settings(shards, tmp_path, str(tmp_path / "trials"), {}), Tracking("none"))
    monkeypatch.setattr(trials, "finished_summary", lambda *_: {"steps": 10})
    monkeypatch.setattr(trial.store, "fetch", away)
    [result] = through(trial)
    assert result["away"] == "s3://bucket: no answer"
    assert not (Path(trial.out) / layout.FAILED).exists()
