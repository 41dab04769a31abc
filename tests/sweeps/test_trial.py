"""A trial in its process, without Ray: what it reports, and that its memory is free when it has ended."""

import gc
import json
import os
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers import forked
from helpers.sweeps import through, trial_settings, wait_until

from eagleray.base.errors import Outage
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.methods.method import Method
from eagleray.runs import layout, pretrain
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune
from eagleray.sweeps.schedulers import LocalState
from eagleray.sweeps.study import Study
from eagleray.sweeps.trial import History, Trial


@pytest.mark.parametrize(("rate", "state"), [(1e-3, "finished"), (1e30, "failed")])
def test_the_network_of_a_trial_is_gone_before_the_next_begins(
    rate: float, state: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    networks: list[weakref.ref[Method]] = []
    build = pretrain.build_method

    def noted(*args: Any, **kwargs: Any) -> Method:
        method = build(*args, **kwargs)
        networks.append(weakref.ref(method))
        return method

    monkeypatch.setattr(pretrain, "build_method", noted)
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
    path, history = tmp_path / "metrics.jsonl", History("knn")
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


def test_a_trial_with_the_settings_of_another_goes_on_from_its_weights_in_a_folder_of_its_own(
    shards: Path, tmp_path: Path
):
    """As Tune's PBT gives a trial the settings of the better one, with other values."""
    settings = trial_settings(shards, tmp_path, str(tmp_path), {"optim.lr.value": 1e-3}, "max_steps=4")
    first = Trial("000", settings, Tracking("none"))
    through(first)
    first.end()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "000").rglob("*")}
    second = Trial("001", settings | {"values": {"optim.lr.value": 2e-3}}, Tracking("none"))
    second.adopt(first.out)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "000").rglob("*")} == before
    [line] = read_lines(tmp_path / "001" / layout.LINEAGE)
    assert line == {"step": 4, "from": "000", "values": {"optim.lr.value": 2e-3}}
    assert [p.stem for p in (tmp_path / "001" / "checkpoints").glob("*.pt")] == ["step-000000004"]
    assert second.tracking.name == "sweep-001"


def test_a_trial_takes_over_what_another_was_when_it_was_compared(shards: Path, tmp_path: Path):
    """The other one may have gone on before there was room for this one."""
    settings = trial_settings(shards, tmp_path, str(tmp_path), {"optim.lr.value": 0.1})
    donor = Trial("000", settings, Tracking("none"))
    assert donor.saved() == 0
    method = pretrain.build_method(donor.recipe)
    optimizer = pretrain.build_optimizer(donor.recipe, method)
    for step in (4, 8):
        state = {"step": step, "method": method.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(f"{donor.out}/{layout.CHECKPOINTS}", step, state, keep=2)
    assert donor.saved() == 8
    for name, at, taken in ("001", 4, 4), ("002", None, 8), ("003", 2, 8):  # that of step 2 is not kept
        trial = Trial(name, settings, Tracking("none"))
        trial.adopt(donor.out, at)
        assert trial.saved() == taken


def test_values_that_an_exchange_has_changed_are_noted_before_the_trial_goes_on(tmp_path: Path):
    """A checkpoint with them is saved then, which a sweep that was killed continues from."""
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    study.rows = {
        "000": {"id": "000", "alternative": "", "state": "waiting", "starts": 0, "values": {"optim.lr.value": 0.1}}
    }
    journal = ray_tune.journal(LocalState(study, threading.Event(), None))

    class Cloned:
        config: ClassVar = {"row": {"values": {"optim.lr.value": 0.2}}}

        def __str__(self) -> str:
            return "000"

    journal.on_trial_start(0, [], Cloned())
    assert Study(study.sweep, tmp_path).rows["000"]["values"] == {"optim.lr.value": 0.2}


def test_a_trial_that_goes_on_from_another_keeps_the_settings_of_its_own_optimiser(shards: Path, tmp_path: Path):
    """The constant rate of the predictor is a setting of its group of parameters, as the momentum is."""
    keys = ("optim.name=sgd", "optim.constant_lr=[predictor]")
    settings = trial_settings(shards, tmp_path, str(tmp_path), {"optim.lr.value": 0.1, "optim.momentum": 0.9}, *keys)
    donor = Trial("000", settings, Tracking("none"))
    method = pretrain.build_method(donor.recipe)
    optimizer = pretrain.build_optimizer(donor.recipe, method)
    state = {"step": 4, "method": method.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(f"{donor.out}/{layout.CHECKPOINTS}", 4, state, keep=1)
    other = {"values": {"optim.lr.value": 0.2, "optim.momentum": 0.8}}
    trial = Trial("001", settings | other, Tracking("none"))
    trial.adopt(donor.out)
    taken = checkpoint.newest(f"{trial.out}/{layout.CHECKPOINTS}")
    assert taken
    optimizer.load_state_dict(taken["optimizer"])
    rates = {group.get("constant_lr") for group in optimizer.param_groups}
    assert rates == {None, 0.2}
    assert {group["momentum"] for group in optimizer.param_groups} == {0.8}
    assert str(optimizer.state_dict()["state"]) == str(state["optimizer"]["state"])


def test_a_trial_whose_store_stays_away_waits_for_the_sweep_to_continue(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that ends so is continued by the same command, and so is the sweep: nothing is wrong with the trial."""

    def give_up(*_: Any, **__: Any) -> None:
        raise Outage("s3://bucket: no answer for 10 minutes")

    monkeypatch.setattr(pretrain, "pretrain", give_up)
    trial = Trial("000", trial_settings(shards, tmp_path, str(tmp_path / "trials"), {}), Tracking("none"))
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
