"""Errors of a rank reach the command and the log, and a resize waits until the run has saved."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from helpers.bucket import CountingBucket

from eagleray.base.errors import Outage, UserError
from eagleray.cluster import failure, ray_train, resize, supervisor
from eagleray.cluster.session import session
from eagleray.cluster.supervisor import RayWorker
from eagleray.runs import bucket_files
from eagleray.runs.bucket_files import RunCopy
from eagleray.runs.run_store import RunStore, run_store
from eagleray.runs.tracking import Tracking
from eagleray.storage import store


def fail(out: str, rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except Exception as e:
        return RayWorker(out, "a", "mocov3", "").count(failure.report(e))


def test_an_error_that_came_back_is_kept_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "checkpoints").mkdir()
    out = str(tmp_path)
    assert not fail(out, 0, RuntimeError("device busy"), monkeypatch)
    assert not fail(out, 3, ZeroDivisionError("rank 3's own"), monkeypatch)
    assert not (tmp_path / ".failure").exists()
    assert fail(out, 3, ZeroDivisionError("rank 3's own"), monkeypatch)
    kept = json.loads((tmp_path / ".failure").read_text())
    assert kept["why"].startswith("failed 3 times without progress: ZeroDivisionError: rank 3's own")
    assert kept["trace"].startswith("rank 3 failed\nTraceback")
    assert "test_failures.py" in kept["trace"]
    with pytest.raises(RuntimeError, match="rank 3's own"):
        ray_train.raise_failure(out, "a")
    ray_train.raise_failure(out, "b")  # that of another command is none to this one


def test_errors_before_and_after_a_checkpoint_and_of_two_commands_are_not_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "checkpoints").mkdir()
    counts = [failure.count(str(tmp_path), "a") for _ in range(2)]
    monkeypatch.setattr("eagleray.engine.checkpoint.manifests", lambda folder: ["step-9", "step-8"])
    counts += [failure.count(str(tmp_path), command) for command in "aab"]
    assert counts == [1, 2, 1, 2, 1]


def test_an_error_that_cannot_be_counted_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def away(*_: str) -> None:
        raise Outage("s3://bucket/run: no answer")

    monkeypatch.setattr(RunStore, "get", away)
    assert not any(fail(str(tmp_path), 0, RuntimeError("no"), monkeypatch) for _ in range(4))


def test_a_traceback_of_another_machine_is_in_the_log_of_a_remote_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = "s3://bucket/run"
    failed = {"command": "a", "user": False, "why": "no", "trace": "rank 3 failed\n"}
    run_store(out).put(".failure", json.dumps(failed))
    store.put_bytes(bucket_files.part_url(out, "train.log", 2, 0), b"begun\n")
    for _ in range(2):  # the second time it is there
        with pytest.raises(RuntimeError, match=r"^no$"):
            ray_train.raise_failure(out, "a")
    RunCopy(out, tmp_path / "reader").fetch()
    assert (tmp_path / "reader" / "train.log").read_text() == "begun\nrank 3 failed\n"


@pytest.mark.slow  # a Ray of its own
def test_a_failure_that_the_store_does_not_take_is_known_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The workers that Ray starts again return at once, and the command ends with the reason."""

    def refuse(*_: str) -> None:
        raise UserError("s3://bucket/run: AccessDenied")

    with session(cpus=1):
        monkeypatch.setattr(RunStore, "put", refuse)
        failure.fail(str(tmp_path), "a", {"user": True, "why": "AccessDenied"})
        restarted = ray.remote(failure.failure_of)
        assert ray.get(restarted.remote(str(tmp_path), "a"), timeout=60)["why"] == "AccessDenied"
        assert ray.get(restarted.remote(str(tmp_path), "b"), timeout=60) is None
        with pytest.raises(UserError, match=r"^AccessDenied$"):
            ray_train.raise_failure(str(tmp_path), "a")
    with pytest.raises(UserError, match="s3://bucket/run: AccessDenied"):  # no Ray to tell
        failure.fail(str(tmp_path), "a", {})


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Workers that answer in this process."""
    monkeypatch.setattr(resize, "_asked", threading.Event())
    monkeypatch.setattr(resize, "_saved", threading.Event())
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return SimpleNamespace(execute_single_async=lambda rank, function: function())


def test_ray_waits_until_the_run_has_saved(group: Any, monkeypatch: pytest.MonkeyPatch):
    callback = resize.save_before_resize()
    callback.after_worker_group_training_start(group)
    waiting = threading.Thread(target=callback.before_controller_execute_resize_decision, args=[None])
    waiting.start()
    end = time.monotonic() + 60
    while not resize.asked_to_save():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert waiting.is_alive()
    resize.note_saved()
    waiting.join(60)
    assert not waiting.is_alive()


def test_ray_does_not_wait_for_workers_that_ended_or_died(group: Any, monkeypatch: pytest.MonkeyPatch):
    def died(answer: Any, timeout: float) -> None:
        raise ray.exceptions.RayActorError

    callback = resize.save_before_resize()
    callback.before_controller_execute_resize_decision(None)  # before the first start
    callback.after_worker_group_training_start(group)
    monkeypatch.setattr(ray, "get", died)
    callback.before_controller_execute_resize_decision(None)
    monkeypatch.undo()
    for ended in callback.before_worker_group_shutdown, callback.before_controller_execute_failure_decision:
        callback.after_worker_group_training_start(group)
        ended(None)
        callback.before_controller_execute_resize_decision(None)


def test_ray_does_not_wait_for_a_run_that_has_ended(group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept: dict[str, str] = {}
    there = SimpleNamespace(set=kept.__setitem__, get=lambda key: kept[key].encode())
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: there)
    monkeypatch.setattr(supervisor, "failure_of", lambda *_: None)
    monkeypatch.setattr(supervisor, "Spare", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda *_: {"steps": 12})
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    for name in "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT":
        monkeypatch.setenv(name, "0")
    given: dict[str, Any] = {"recipe": {"out": str(tmp_path), "method": {"name": "mae"}}, "command": "a", "cpus": 1}
    assert not resize.has_saved()
    assert supervisor.supervise(given | {"tracking": Tracking("none")}) == {"steps": 12}
    assert resize.has_saved()


def test_a_failure_that_ray_keeps_is_that_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The trials of a sweep have the id of its command in common."""
    kept: dict[bytes, bytes] = {}
    kv = "ray.experimental.internal_kv._internal_kv_"
    monkeypatch.setattr(kv + "initialized", lambda: True)
    monkeypatch.setattr(kv + "get", kept.get)
    monkeypatch.setattr(kv + "put", kept.__setitem__)
    (tmp_path / "file").touch()
    first, second = (str(tmp_path / "file" / name) for name in ("000", "001"))  # no folders can be made there
    failure.fail(first, "sweep", {"why": "AccessDenied"})
    assert (failure.failure_of(first, "sweep") or {})["why"] == "AccessDenied"
    assert failure.failure_of(second, "sweep") is None
