"""Sweeps on machines that are taken away: trials in their own processes save at a notice, and go on elsewhere."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ray_nodes import add, drain, ray_cluster
from helpers.recipes import small_recipe
from helpers.sweeps import FIXED, LONG, PACKAGE, accounted, start, through, trial_settings, wait_until, write
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from eagleray.base.errors import Preempted
from eagleray.base.files import read_lines
from eagleray.runs import layout, recipe
from eagleray.runs.tracking import Tracking
from eagleray.sweeps import ray_tune, trial_world
from eagleray.sweeps.ray_tune import LocalState
from eagleray.sweeps.study import Study
from eagleray.sweeps.trial import Trial
from eagleray.sweeps.trial_world import TrialWorld

TAKEN = RayTaskError("train", "", cause=Preempted("a machine of this run is about to be taken away or added"))
LOST = RayActorError(error_msg="The actor died unexpectedly before finishing this task.")
LACKING = ActorDiedError(RayTaskError("__init__", "Traceback\nImportError: no timm", cause=ImportError("no timm")))
DIED = RayActorError(error_msg="The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR")


class TuneTrial:
    """What Tune tells of a trial."""

    max_failures = -1

    def __init__(self, name: str, file: str) -> None:
        self.name, self.pickled_error_file = name, file

    def __str__(self) -> str:
        return self.name


def test_a_trial_whose_process_cannot_begin_is_not_started_for_ever(tmp_path: Path):
    """It never comes to read that it has failed, so Tune has to know."""
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    study.rows = {"000": {"id": "000", "state": "running"}}
    journal = ray_tune.journal(LocalState(study, threading.Event(), None))  # type: ignore[arg-type]
    tried = TuneTrial("000", str(tmp_path / "e"))
    Path(tried.pickled_error_file).write_bytes(cloudpickle.dumps(LACKING))
    for _ in range(3):
        journal.on_trial_recover(0, [], tried)
        assert tried.max_failures == -1
    journal.on_trial_recover(0, [], tried)
    assert tried.max_failures == 0
    journal.on_trial_error(0, [], tried)
    assert study.rows["000"]["state"] == "failed"
    assert study.rows["000"]["why"] == "its process could not begin (ImportError: no timm) 4 times"


def test_a_trial_whose_driver_was_killed_after_too_many_deaths_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The note that it has failed is for the process that this driver starts next."""
    study = Study(SimpleNamespace(trials=2, search="random"), tmp_path)  # type: ignore[arg-type]
    study.rows = {name: {"id": name, "state": "waiting", "starts": 5} for name in ("000", "001")}
    study.rows["001"]["state"] = "failed"
    for name in study.rows:
        (note := tmp_path / "trials" / name / layout.FAILED).parent.mkdir(parents=True)
        note.write_text("its process died 4 times")
    monkeypatch.setattr(ray_tune, "trial_settings", lambda study, row, command: row["id"])
    local = LocalState(study, threading.Event(), SimpleNamespace(now=lambda: 9))  # type: ignore[arg-type]
    study.sweep.objective = SimpleNamespace(mode="max")
    assert ray_tune.searcher(local).suggest("a") == {"row": "000"}
    assert [path.parent.name for path in tmp_path.glob(f"trials/*/{layout.FAILED}")] == ["001"]


def test_machines_that_go_do_not_speak_against_a_trial(shards: Path, tmp_path: Path):
    """But a process that dies again and again does: Tune starts the trial once more, and it says so."""
    study = Study(SimpleNamespace(), tmp_path)  # type: ignore[arg-type]
    said: list[str] = []
    study.note = said.append
    study.rows = {"000": {"id": "000", "state": "running"}}
    journal = ray_tune.journal(LocalState(study, threading.Event(), None))  # type: ignore[arg-type]

    tried = TuneTrial("000", str(tmp_path / "error.pkl"))
    failed = tmp_path / "trials" / "000" / layout.FAILED
    for error in (*[TAKEN, LOST] * 9, *[DIED] * 3):
        Path(tried.pickled_error_file).write_bytes(cloudpickle.dumps(error))
        journal.on_trial_recover(0, [], tried)
    assert not failed.exists()
    journal.on_trial_recover(0, [], tried)
    assert failed.read_text() == "its process died 4 times"
    assert study.rows["000"]["state"] == "waiting"
    assert set(said) == {
        "trial 000: saved, as its machine is taken away",
        "trial 000: its machine was lost",
        "trial 000: its process died",
    }
    trial = Trial("000", trial_settings(shards, tmp_path, str(tmp_path / "trials"), {}), Tracking("none"))
    assert trial.next()["done"]
    assert trial.failure == "its process died 4 times"


def test_a_trial_that_saved_at_a_notice_leaves_its_process(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its next process takes no step again, and what it exports has the run's address."""
    warned, shown, closed = [False], list[Any](), threading.Event()
    monkeypatch.setattr("eagleray.runs.agreement.WARNED", 0.0)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(TrialWorld, "warned", lambda self: warned[0])

    def gauges(*about: Any) -> Any:
        return SimpleNamespace(update=lambda record: shown.append((about, record)), close=closed.set)

    monkeypatch.setattr(trial_world, "Gauges", gauges)
    keys = ("optim.epochs=4", "log_steps=1", "checkpoint.steps=1000")
    settings = trial_settings(shards, tmp_path, str(tmp_path / "trials"), {}, *keys)
    first = Trial("000", settings, Tracking("none", user="ada"))
    first.next()
    warned[0] = True
    with pytest.raises(Preempted):
        through(first)
    warned[0] = False
    assert not (Path(first.out) / layout.FAILED).exists()
    second = Trial("000", settings | {"after": first.reported}, Tracking("none", user="ada"))
    assert through(second)[-1]["percent"] == 100
    assert shown[-1][0] == (second.out, "mocov3", "ada", 40)
    again = [line for line in read_lines(Path(second.out) / layout.STARTS) if "step" in line]
    assert len(again) == 2
    assert closed.is_set(), "the numbers of a trial that has ended stay for ever"
    assert again[1]["step"] == again[1]["reached"] > 0


def test_a_step_does_not_wait_for_the_answer_of_a_head_that_is_away(small: Path, monkeypatch: pytest.MonkeyPatch):
    asked, back = threading.Event(), threading.Event()

    def nodes() -> dict[str, int]:
        asked.set()
        back.wait()
        return {"mine": 0}

    monkeypatch.setattr(trial_world.Notice, "seconds", 0.01)
    monkeypatch.setattr("ray._private.state.state.get_draining_nodes", nodes)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "mine"))
    world = TrialWorld(recipe.load(str(small)), "ada")
    asked.wait()
    assert not world.warned()
    back.set()
    while not world.warned():
        world.notice.join(0.01)
    world.close()
    world.notice.join()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that only directs."""
    with ray_cluster(monkeypatch, PYTHONPATH=str(PACKAGE)) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(4 * LONG)
def test_a_sweep_loses_a_machine_with_a_notice_and_one_without(cluster: Any, shards: Path, tmp_path: Path):
    (tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    longer = {"optim.epochs": 120, "monitor.every": 15, "checkpoint.steps": 100, "log_steps": 1}
    sweep = write(
        tmp_path / "sweep.yaml",
        alternatives={"": {"recipe": "mocov3.yaml"}},
        fixed=FIXED | longer,
        trials=2,
        scheduler="none",
    )
    out, nodes = tmp_path / "out", [add(cluster)]
    process = start(sweep, shards, out)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()

    def begun(trial: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(out / "trials" / trial / layout.STARTS) if "step" in line]

    def training(trial: str, starts: int) -> None:
        def come() -> bool:
            done = read_lines(out / "trials" / trial / layout.METRICS)
            return len(begun(trial)) >= starts and bool(done) and done[-1]["step"] > begun(trial)[-1]["step"] + 5

        wait_until(come, process)

    training("000", 1)
    nodes.append(add(cluster))
    training("001", 1)
    drain(cluster, nodes[0])
    wait_until(lambda: "trial 000: saved, as its machine is taken away\n" in lines, process)
    nodes.append(add(cluster))
    training("000", 2)
    assert begun("000")[1]["step"] == begun("000")[1]["reached"], "no step is taken again after a notice"
    cluster.remove_node(nodes[0], allow_graceful=False)
    cluster.remove_node(nodes[1], allow_graceful=False)
    add(cluster)
    wait_until(lambda: "trial 001: its machine was lost\n" in lines, process)
    process.wait(LONG)
    assert process.returncode == 0, lines
    assert [r["state"] for r in read_lines(out / "trials.jsonl")] == ["finished"] * 2
    assert len(begun("001")) == 2
    accounted(f"sqlite:///{out.parent / 'mlflow.db'}", out.name, 2)
