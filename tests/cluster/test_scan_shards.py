"""Shards of others are indexed on the cluster where there is one, and maps follow its size."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.bucket import CountingBucket
from helpers.pictures import write_shards

from eagleray.cluster import ray_map
from eagleray.cluster import ray_map as mapping
from eagleray.data.index import open_index, scan_here, write_index
from eagleray.storage import store


def test_tars_in_a_bucket_are_read_by_the_cluster_and_others_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def elsewhere(function: Callable[[Any], Any], given: Iterable[Any]) -> Iterator[Any]:
        blobs = list(given)
        read.extend(b.url for b in blobs)
        return map(function, reversed(blobs))  # in the order in which tasks finish

    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ray_map, "ray_map", elsewhere)
    write_shards(tmp_path / "data", 20, 2)
    write_shards(tmp_path / "near", 20, 2)
    assert ray_map.scanner() is scan_here
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    sources = ["s3://data", str(tmp_path / "near")]
    [one, two] = write_index(sources, scan_all=ray_map.scanner())
    assert {one[1:], two[1:]} == {(20, 0)}
    assert read == ["s3://data/x-000.tar", "s3://data/x-001.tar"]
    assert len(open_index(sources, note=lambda _: None)) == 40


class Ray:
    """A Ray whose cluster gets a node of 4 CPUs with every result."""

    def __init__(self) -> None:
        self.cpus, self.running, self.most = 0, 0, [0]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} if self.cpus else {}

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: SimpleNamespace(remote=lambda task: self.begin(function, task))

    def begin(self, function: Any, task: bytes) -> Callable[[], Any]:
        self.running += 1
        self.most.append(self.running)
        return lambda: function(task)

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], None]:
        return tasks[:1], None

    def get(self, task: Callable[[], Any]) -> Any:
        self.running, self.cpus = self.running - 1, self.cpus + 4
        return task()


@pytest.mark.parametrize(("workers", "first", "most"), [(None, 3, 15), (2, 2, 2)])
def test_a_map_hands_out_more_tasks_as_nodes_join(
    workers: int | None, first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And always some that wait, for which an autoscaler starts nodes."""
    ray = Ray()
    monkeypatch.setattr(mapping, "session", lambda **_: nullcontext(ray))
    for name in ("_begin", "give_cpus"):  # which tell the cluster, and the process of the task
        monkeypatch.setattr(mapping, name, lambda _: None)
    monkeypatch.setattr(mapping, "SECONDS", -1.0)
    monkeypatch.setattr(mapping, "WAITING", 3)
    results = mapping.ray_map(str, range(60), workers=workers)
    found = [next(results)]
    assert max(ray.most) == first
    assert sorted([*found, *results]) == sorted(map(str, range(60)))
    assert max(ray.most) >= most if workers is None else max(ray.most) == most
