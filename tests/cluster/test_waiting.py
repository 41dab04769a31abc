"""What a run says while the cluster has no room for it."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import arguments
from ray.util.state.exception import RayStateApiException

from eagleray.base.errors import Outage
from eagleray.cluster import ray_train, waiting
from eagleray.cluster.reservation import Reservation
from eagleray.cluster.session import session
from eagleray.cluster.waiting import Waiting
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.bucket_files import BucketRun
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking


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

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_job_id=lambda: "ours")

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


def test_free_machines_that_ray_keeps_for_others_are_said_to_be(cluster: Cluster, clock: list[float]):
    kept: list[dict[str, float] | None] = [{}]
    cluster.nodes = lambda: [{"Alive": True, "Resources": cluster.total}]  # type: ignore[method-assign]
    run = Waiting(cluster, 1, 4, {"CPU": 2.0}, lambda line: None, lambda: kept[0])
    assert run.there().endswith("of which 4 CPUs are free, but Ray keeps them for runs that asked before")
    for kept[0] in ({"CPU": 2.0}, None):  # None: the run can have whatever is free, or nobody knows
        assert run.there().endswith("are free")
    kept[0], cluster.total = {}, {"CPU": 1.0}
    assert run.there().endswith("are free"), "no machine is large enough"


def test_what_ray_keeps_for_dead_runs_is_released_while_a_run_waits_for_it(cluster: Cluster, clock: list[float]):
    kept, released = [{"CPU": 2.0}], list[float]()
    cluster.nodes = lambda: [{"Alive": True, "Resources": cluster.total}]  # type: ignore[method-assign]
    more = lambda: kept[0], lambda: released.append(clock[0])
    run = Waiting(cluster, 1, 4, {"CPU": 2.0}, lambda line: None, *more)
    for clock[0] in range(0, 40, 2):
        run.look()
    assert not released, "nobody else has asked for it"
    kept[0] = {}
    for clock[0] in range(40, 60, 2):
        run.look()
    assert len(released) == 3, "at each look"


def test_only_the_requests_of_submitted_runs_that_nobody_continues_are_taken_back(monkeypatch: pytest.MonkeyPatch):
    now = time.time()

    def job(out: str, status: str, ended: float | None = None, words: str = "") -> SimpleNamespace:
        labels = {"eagleray": "pretrain", "out": out} if out else {}
        return SimpleNamespace(metadata=labels, status=status, end_time=ended and 1000 * ended, entrypoint=words)

    known = [job(out, "FAILED", now - 9) for out in ("s3://b/dead/", "s3://b/sent-again/", "s3://b/here", "")]
    known += [job("s3://b/sent-again", "PENDING"), job("", "RUNNING", words="eagleray pretrain x out=s3://b/here")]
    known += [job("s3://b/long-ago", "FAILED", now - 999)]
    taken = list[str]()
    monkeypatch.setattr("ray.util.state.list_jobs", lambda **_: known)
    monkeypatch.setattr(Reservation, "cancel", lambda self: taken.append(self.name))
    own = Reservation(None, "s3://b/own")
    own.release_dead()
    assert taken == [Reservation(None, "s3://b/dead").name]

    def away(**_: object) -> None:
        raise RayStateApiException("no dashboard")

    monkeypatch.setattr("ray.util.state.list_jobs", away)
    own.release_dead()


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
    stopped = lambda: bool(asked.append(1)) or len(asked) == 3  # noqa: E731
    assert ray_train._fit(trainer, run, stopped, trainer.ended.set) is None
    for thread in threading.enumerate():
        assert thread.name != "ray-train" or (not thread.join(60) and not thread.is_alive()), "it waits for ever"
    assert said[0].startswith("waiting for 2 worker(s)")
    assert said[1:] == ["stopped while it waited; the same command continues"]
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
    assert ray_train._fit(trainer, run, ray_train.stop_asked("s3://runs/mine", "id", 60), bool) is None
    assert answers == []
    answers += ["away"] * 9
    with pytest.raises(Outage, match="connection refused"):
        ray_train._fit(trainer, run, ray_train.stop_asked("s3://runs/mine", "id", 60), bool)
    assert len(answers) == 9 - 3
    trainer.ended.set()


@pytest.mark.slow
def test_a_stopped_run_leaves_no_controller_that_waits(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a Ray that goes on, as that of a sweep does: it would start workers for nobody when there is room."""
    from ray.util import placement_group_table

    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = arguments(small, shards, tmp_path / "out", "workers=2..3", "gpus=false")
    recipe = resolve_paths(recipes.load(given[0], given[1:]))
    (tmp_path / "out").mkdir()
    said = list[str]()

    def stop(line: str) -> None:
        said.append(line)
        (tmp_path / "out" / layout.STOP).touch()

    with session(cpus=1) as ray:
        tracking = Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}")
        assert ray_train.fit(ray, recipe, tracking=tracking, command="first", say=stop) is None
        assert said[-1] == "stopped while it waited; the same command continues"
        for thread in threading.enumerate():
            assert thread.name != "ray-train" or (not thread.join(120) and not thread.is_alive()), "it waits for ever"
        assert all(group["state"] == "REMOVED" for group in placement_group_table().values())


def test_new_workers_of_another_run_are_not_its_own(cluster: Cluster, clock: list[float]):
    said: list[str] = []
    run = Waiting(cluster, 2, 2, {"CPU": 8}, said.append)
    cluster.start("another run's", "CREATED", *[{"CPU": 8.0}] * 2)
    for clock[0] in range(0, 60, 5):
        assert run.look() or not said
    assert said[0].startswith("waiting for 2")


@pytest.mark.slow
def test_the_id_of_a_placement_group_ends_with_that_of_its_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from ray.util.placement_group import placement_group

    with session(cpus=1) as ray:
        assert placement_group([{"CPU": 1}]).id.hex().endswith(ray.get_runtime_context().get_job_id())
