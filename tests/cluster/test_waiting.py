"""What a run says while the cluster has no room for it."""

import threading
from typing import Any

import pytest

from eagleray.base.errors import Outage
from eagleray.cluster import ray_train, waiting
from eagleray.cluster.waiting import Waiting
from eagleray.runs.run_store import BucketRun


class Cluster:
    """What `Waiting` asks Ray."""

    def __init__(self) -> None:
        self.total = {"CPU": 4.0, "memory": 9.0}
        self.groups: dict[str, Any] = {}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": False}]

    def cluster_resources(self) -> dict[str, float]:
        return self.total

    available_resources = cluster_resources

    def start(self, name: str, state: str, *bundles: dict[str, float]) -> None:
        self.groups[name] = {"state": state, "bundles": dict(enumerate(bundles))}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr("ray.util.placement_group_table", lambda: cluster.groups)
    return cluster


def test_a_run_without_room_says_what_it_asks_for_and_what_there_is(cluster: Cluster, clock: list[float]):
    cluster.start("another run's", "CREATED", *[{"CPU": 12.0, "GPU": 1.0}] * 8)
    said: list[str] = []
    run = Waiting(cluster, 8, 8, {"CPU": 12, "GPU": 1.0}, said.append)
    for clock[0] in range(0, 200, 2):
        run.look()
    [line] = said
    assert line == (
        "waiting for 8 worker(s) with 12 CPUs and 1 GPU each; the cluster has 1 node(s) with 4 CPUs and 0 GPUs, of "
        "which 4 CPUs and 0 GPUs are free"
    )
    cluster.total = {"CPU": 100.0, "GPU": 4.0}
    clock[0] += waiting.LOOK
    run.look()
    assert "100 CPUs and 4 GPUs" in said[1], "what there is has changed"
    clock[0] += waiting.AGAIN
    run.look()
    assert len(said) == 3
    cluster.start("ours", "PENDING", *[{"CPU": 12.0, "GPU": 1.0}] * 8)
    clock[0] += waiting.LOOK
    run.look()
    assert len(said) == 3
    cluster.start("ours", "CREATED", *[{"CPU": 12.0, "GPU": 1.0}] * 8)
    clock[0] += waiting.LOOK
    run.look()
    assert said[3:] == ["8 worker(s) have what they asked for"]
    cluster.start("ours", "REMOVED", *[{"CPU": 12.0, "GPU": 1.0}] * 8)  # a node was lost
    lost = int(clock[0])
    for clock[0] in range(lost, lost + 60, 2):
        run.look()
    assert len(said) == 5


def test_a_run_that_has_room_says_nothing(cluster: Cluster, clock: list[float]):
    said: list[str] = []
    run = Waiting(cluster, 1, 4, {"CPU": 2}, said.append)
    clock[0] = 10
    run.look()
    cluster.start("ours", "CREATED", *[{"CPU": 2.0}] * 3)
    for clock[0] in range(12, 100, 2):
        run.look()
    assert said == []
    assert run.wanted() == "1 to 4 worker(s) with 2 CPUs each"


class NoRoom:
    """A trainer whose workers never start."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def fit(self) -> None:
        self.ended.wait(60)


def test_a_run_that_waits_can_be_stopped(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOOK", "SOON"):
        monkeypatch.setattr(waiting, name, 0.0)
    said: list[str] = []
    trainer, asked = NoRoom(), []
    run = Waiting(cluster, 2, 2, {"CPU": 8}, said.append)
    assert ray_train._fit(trainer, run, lambda: bool(asked.append(1)) or len(asked) == 3) is None
    trainer.ended.set()
    assert len(said) == 1
    assert len(asked) == 3


def test_a_run_that_waits_outlives_a_store_that_is_away_for_a_while(
    cluster: Cluster, clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    answers: list[Any] = ["away", "away", None, None, "away", "away", ""]

    def read(*_: Any) -> str | None:
        clock[0] += 40
        answer = answers.pop(0)
        if answer == "away":
            raise Outage("s3://runs/mine/.stop: connection refused")
        return answer

    monkeypatch.setattr(BucketRun, "get", read)
    for name in ("LOOK", "SOON"):
        monkeypatch.setattr(waiting, name, 0.0)
    trainer = NoRoom()
    run = Waiting(cluster, 2, 2, {"CPU": 8}, lambda line: None)
    assert ray_train._fit(trainer, run, ray_train.stop_asked("s3://runs/mine", "id", 60)) is None
    assert answers == []
    answers += ["away"] * 9
    with pytest.raises(Outage, match="connection refused"):
        ray_train._fit(trainer, run, ray_train.stop_asked("s3://runs/mine", "id", 60))
    assert len(answers) == 9 - 3
    trainer.ended.set()
