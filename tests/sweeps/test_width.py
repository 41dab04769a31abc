"""How many trials run at once, what each asks for, and one line where that cannot be had."""

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers.recipes import SMALL

from eagleray.base.errors import UserError
from eagleray.runs import layout
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune, width
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import Sweep, load
from eagleray.sweeps.width import TrialWaiting, Width, share


def sweep(folder: Path, *overrides: str) -> Sweep:
    (folder / "small.yaml").write_text(SMALL)
    space = {"optim.lr.value": {"log": [1e-4, 1e-2]}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"recipe": "small.yaml", "space": space}))
    return load(str(folder / "sweep.yaml"), overrides)


def asks(folder: Path, nodes: list[dict[str, float]], *overrides: str, joined: bool = True) -> dict[str, float]:
    return share(sweep(folder, *overrides), nodes, joined=joined)


def test_a_trial_asks_for_cpus_and_a_gpu_or_a_part_of_one(tmp_path: Path):
    gpus = [{"CPU": 16.0, "GPU": 2.0}]
    assert asks(tmp_path, [{"CPU": 9.0}], "sweep.cpus=4") == {"CPU": 4, "GPU": 0}
    assert asks(tmp_path, gpus) == {"CPU": 1, "GPU": 1}
    assert asks(tmp_path, gpus, "gpus=false") == {"CPU": 1, "GPU": 0}
    assert asks(tmp_path, gpus, "sweep.gpus=0.25") == {"CPU": 1, "GPU": 0.25}
    assert "CPU" in asks(tmp_path, gpus, "workers=2")


def test_what_does_not_exist_yet_is_waited_for_on_a_cluster(tmp_path: Path):
    head = [{"memory": 1.0}]
    assert asks(tmp_path, head, "gpus=true") == {"CPU": 1, "GPU": 1}
    assert asks(tmp_path, head, "sweep.gpus=0.5") == {"CPU": 1, "GPU": 0.5}
    assert asks(tmp_path, head, "gpus=false") == {"CPU": 1, "GPU": 0}
    with pytest.raises(UserError, match="no machine for trials is up yet: expected gpus=true or gpus=false"):
        asks(tmp_path, head)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sweep.cpus=4"], "sweep.cpus=4: a trial needs 4 CPUs, which this machine has not"),
        (["sweep.gpus=0.25"], "a trial needs 1 CPU and 0.25 of a GPU, which this machine has not"),
        (["gpus=true"], "a trial needs 1 CPU and a GPU, which this machine has not"),
        (["sweep.gpus=0.25", "gpus=false"], "sweep.gpus=0.25: the recipe's gpus=false keeps trials on CPUs"),
        (["sweep.gpus=0.25", "workers=2"], "each of a trial's workers=2 takes a whole GPU; expected workers=1"),
        (["sweep.gpus=1.5"], "gpus: input should be less than or equal to 1, got 1.5"),
        (["sweep.gpus=0"], "gpus: input should be greater than 0, got 0"),
    ],
)
def test_what_cannot_be_had_is_one_line(overrides: list[str], said: str, tmp_path: Path):
    with pytest.raises(UserError) as e:
        asks(tmp_path, [{"CPU": 2.0}], *overrides, joined=False)
    [line] = str(e.value).splitlines()
    assert said in line


def test_an_empty_address_names_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(ray_tune, "VARIABLES", {})
    monkeypatch.setattr(ray_tune, "_keep_keys", lambda: None)
    monkeypatch.setattr(ray_tune, "machines", lambda ray: [{"CPU": 2.0}])
    for context in "session", "divert_stderr":
        monkeypatch.setattr(ray_tune, context, nullcontext)
    study: Any = SimpleNamespace(sweep=sweep(tmp_path, "sweep.cpus=4"), folder=tmp_path)
    with pytest.raises(UserError, match="a trial needs 4 CPUs, which this machine has not"):
        ray_tune.launch(study, Tracking("none"), most=None, stop=threading.Event(), screen=nullcontext(lambda: None))


def test_trials_do_not_take_parts_of_two_gpus():
    each = {"CPU": 1, "GPU": 0.4}
    assert width.room({"CPU": 16, "GPU": 2}, each) == 4
    assert width.room({"CPU": 3, "GPU": 2}, each) == 3
    assert width.room({"CPU": 16}, each) == 0
    assert width.room({"CPU": 16, "GPU": 1}, {"CPU": 1, "GPU": 0.1}) == 10


def test_the_width_follows_machines_that_join(tmp_path: Path):
    nodes: list[dict[str, float]] = [{"CPU": 16, "GPU": 4}]
    nested = Width(sweep(tmp_path, "workers=2"), None, lambda: nodes)
    assert nested.now() == 2
    nodes.append({"CPU": 16, "GPU": 4})
    assert nested.now() == 4
    del nodes[0]["GPU"], nodes[1]["GPU"]
    assert nested.now() == 1, "one at a time on CPUs"
    assert Width(sweep(tmp_path, "workers=2", "gpus=true"), 6, lambda: nodes).now() == 6, "waits for GPUs"
    more = Width(sweep(tmp_path, "workers=2", "gpus=true"), None, lambda: nodes)
    assert more.now() == 1, "an autoscaler sees what waits"
    nodes[0]["GPU"] = 4
    assert more.now() == 3, "two have room, and one waits"
    assert Width(sweep(tmp_path), 3, lambda: nodes).now() == 3
    assert Width(sweep(tmp_path), None, lambda: nodes).now() == sys.maxsize, "Ray counts"


def test_trials_that_wait_say_what_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    study = Study(sweep(tmp_path, "sweep.gpus=0.25"), tmp_path / "out", note=lines.append)
    (tmp_path / "out").mkdir()
    assert study.next()
    nodes: list[Any] = [{"CPU": 16.0}]
    waiting = TrialWaiting(study, {"CPU": 1, "GPU": 0.25}, lambda: nodes, lambda: None)
    waiting()
    assert lines == []
    monkeypatch.setattr(width, "QUIET", -1.0)
    monkeypatch.setattr(width, "LOOK", 0.0)
    waiting()
    waiting()
    [line] = lines
    assert "room for a trial, 1 CPU, 0.25 GPU; the machines that are up have 16 CPU, 0 GPU" in line


@pytest.mark.parametrize("placed", [True, False])
def test_a_trial_with_workers_waits_until_these_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: bool
):
    monkeypatch.setattr(width, "QUIET", -1.0)
    monkeypatch.setattr(width, "LOOK", 0.0)
    lines: list[str] = []
    study = Study(sweep(tmp_path, "workers=4", "gpus=true"), tmp_path / "out", note=lines.append)
    (tmp_path / "out").mkdir()
    row = study.next()
    assert row
    study.set(row["id"], state="running")  # Tune has started its process, which asks for the workers
    if placed:
        run_store(study.trial(row["id"])).put(layout.PLACEMENT, "id")
    waiting = TrialWaiting(study, {"CPU": 0}, lambda: [{"memory": 1.0}], lambda: None)
    waiting()
    waiting()
    line = "waiting for room for a trial, 4 worker(s) with a GPU each; the machines that are up have 0 CPU, 0 GPU"
    assert lines == ([] if placed else [line])
