"""What a Ray task asks for, and what is said while there is no room for it."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ray_nodes import MEMORY, ray_cluster

from eagleray.base.cpu_share import cpus
from eagleray.base.errors import UserError
from eagleray.cluster import ray_map as mapping
from eagleray.cluster import waiting
from eagleray.cluster.ray_map import TaskWaiting, gpu_share, ray_map
from eagleray.cluster.session import session


def ray_of(*nodes: dict[str, float]) -> Any:
    """A Ray with nodes of these resources."""
    up = [{"Alive": True, "Resources": node} for node in nodes]
    return SimpleNamespace(
        nodes=lambda: up, cluster_resources=lambda: {"CPU": 4.0}, available_resources=lambda: {"CPU": 3.0}, up=up
    )


def test_a_connection_of_the_caller_is_used_and_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(f"ray.{name}", lambda **_: pytest.fail("it is the caller's"))
    with session(cpus=1) as ray:
        assert ray.is_initialized()


def test_a_task_with_a_gpu_has_its_share_of_the_cpus_on_every_machine():
    nodes = [{"CPU": 96.0, "GPU": 8.0}, {"CPU": 30.0, "GPU": 4.0}, {"CPU": 4.0}]
    assert gpu_share(ray_of(*nodes), 8, print) == {"num_gpus": 1, "num_cpus": 7}
    assert gpu_share(ray_of({"CPU": 1.0, "GPU": 2.0}), 8, print) == {"num_gpus": 1, "num_cpus": 1}
    with pytest.raises(UserError, match=r"^gpus: this machine has no GPU"):
        gpu_share(ray_of({"CPU": 4.0}), 8, print)


def test_a_cluster_without_a_gpu_is_asked_for_some(monkeypatch: pytest.MonkeyPatch):
    """Then the machines have come, and their shares are known."""
    ray, asked = ray_of({"CPU": 4.0}), []

    @contextmanager
    def reserve_workers(ray: Any, number: int, each: dict[str, float], say: Any) -> Any:
        asked.append((number, each))
        ray.up.append({"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0}})
        yield

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(mapping, "reserve_workers", reserve_workers)
    assert gpu_share(ray, 8, print) == {"num_gpus": 1, "num_cpus": 12}
    assert asked == [(8, {"CPU": 1.0, "GPU": 1.0})]


def test_a_map_says_what_its_tasks_wait_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    now, begun, said = [0.0], [False], list[str]()
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(mapping, "_begun", lambda name: begun[0])
    ray = ray_of({"CPU": 4.0})
    tasks = TaskWaiting(ray, 8, {"num_cpus": 6, "num_gpus": 1}, said.append, "name")

    def pass_time() -> list[str]:
        said.clear()
        for _ in range(20):
            now[0] += 2
            tasks.look()
        return said

    there = "the cluster has 1 node(s) with 4 CPUs and 0 GPUs, of which 3 CPUs and 0 GPUs are free"
    assert pass_time() == [f"waiting for 1 to 8 worker(s) with 6 CPUs and 1 GPU each; {there}"]
    ray.up.append({"Alive": True, "Resources": {"CPU": 96.0, "GPU": 8.0}})
    assert len(pass_time()) == 1, "others have its GPUs"
    begun[0] = True
    assert pass_time() == ["the worker(s) have what they asked for"]
    assert pass_time() == []
    ray.up.pop()
    assert len(pass_time()) == 1, "the node is gone"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_map_on_a_cluster_without_nodes_waits_for_them(monkeypatch: pytest.MonkeyPatch):
    """A node with a GPU comes when the map has said what it waits for, and its tasks have their share of the CPUs."""
    said: list[str] = []
    for name in ("LOOK", "SOON"):
        monkeypatch.setattr(waiting, name, 0.5)
    with ray_cluster(monkeypatch) as cluster:

        def say(line: str) -> None:
            if not said:
                cluster.add_node(num_cpus=3, num_gpus=1, object_store_memory=MEMORY)
            said.append(line)

        monkeypatch.setattr(mapping, "say", say)
        assert list(ray_map(lambda _: cpus(), range(3), workers=2, gpus=True)) == [3.0] * 3
    assert said[0].startswith("waiting for 1 worker(s) with 1 CPU and 1 GPU each; the cluster has")
    assert "1 worker(s) have what they asked for" in said
