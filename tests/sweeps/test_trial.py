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

from eagleray.base.errors import Outage, Superseded
from eagleray.methods.method import Method
from eagleray.runs import layout, pretrain, rank_run
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune
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
