"""A short run whose k-th call to its disk or store fails, or at which the power fails: for every k by `make faults`,
for one of each kind by `make test`.

The run ends as if nothing had been, or with one line; the same command then ends it with equal bits and no step lost.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faulty_io import FaultyBucket, FaultyDisk, PowerLoss
from helpers.recipes import SMALL
from helpers.runs import assert_same

import eagleray
from eagleray.base import files
from eagleray.base.errors import Outage, UserError
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint, export
from eagleray.runs import layout, lease
from eagleray.runs.background import Background
from eagleray.runs.run_store import run_store
from eagleray.storage import store

STEPS = 20
STRIDE = int(os.environ.get("STRIDE") or 10)
KEYS: dict[str, Any] = {"checkpoint.steps": 5, "checkpoint.keep": 2, "evaluate.probe_epochs": 0, "log_steps": 2}


class Short:
    """A run of 20 steps, on any disk, and how one without faults ends."""

    def __init__(self, folder: Path, shards: Path) -> None:
        self.recipe = folder / "small.yaml"
        self.recipe.write_text(SMALL)
        self.keys = {"data.train": str(shards / "train"), "evaluate.limit": 32, **KEYS}
        self.train(folder / "whole")
        self.weights = self.method(folder / "whole")

    def train(self, out: Path | str) -> eagleray.Run:
        return eagleray.pretrain(self.recipe, self.keys, out=out, workers=0, max_steps=STEPS)

    def method(self, out: Path | str) -> dict[str, torch.Tensor]:
        state = checkpoint.newest(f"{out}/checkpoints", run_store(str(out)).work / "checkpoints")
        assert state is not None
        return dict(state["method"])

    def attempt(self, out: Path | str) -> None:
        """Train until the end, or until an error that is one line."""
        try:
            self.train(out)
        except (UserError, Outage) as e:
            line = str(e)
        else:
            return
        assert "\n" not in line
        assert len(line) < 500

    def verify(self, out: Path | str) -> None:
        """The same command ends the run as if nothing had been."""
        assert self.train(out).finished
        assert_same(self.method(out), self.weights)
        lines = read_lines(run_store(str(out)).work / "metrics.jsonl")
        assert [r["step"] for r in lines] == list(range(2, STEPS + 1, 2))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Short:
    return Short(tmp_path_factory.mktemp("short"), shards)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lease, "SETTLE", 0.01)
    monkeypatch.setattr(export, "compare", lambda *_: 0.0)  # imports PyTorch in another process, at the end of each run
    monkeypatch.setattr(Background, "seconds", 0.2)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # of a thread that lost power
    yield
    assert not [t.name for t in threading.enumerate() if t.name in ("mirror", "heartbeat", "stop-signal")]


def full_disk(short: Short, out: Path, number: int, code: int, lasting: int = 1) -> int:
    """Fail a call, then continue. Returns the number of calls so far."""
    out.mkdir(parents=True)
    with FaultyDisk(out, fail_at=number, code=code, lasting=lasting) as disk:
        short.attempt(out)
    short.verify(out)
    return disk.calls


def power_loss(short: Short, out: Path, number: int, caplog: pytest.LogCaptureFixture) -> int:
    out.mkdir(parents=True)
    caplog.clear()
    with FaultyDisk(out, lose_at=number) as disk, contextlib.suppress(PowerLoss):
        short.train(out)
    # A name that is there already may not be flushed yet; then nothing has been deleted for it.
    saved = [str(r.args[0]) for r in caplog.records if r.args and r.msg == "%s is saved and verified"]  # type: ignore[index]
    disk.lose_power()
    assert newest_step(out) >= max(map(step_of, saved), default=0), f"call {number}, {disk.names[-1]}"
    short.verify(out)
    return disk.calls


def newest_step(out: Path) -> int:
    names = checkpoint.manifests(out / "checkpoints")
    return step_of(names[0]) if names else 0


def step_of(name: str) -> int:
    return int(name.split("-")[1])


def outage(short: Short, folder: Path, number: int, error: Exception | None) -> int:
    folder.mkdir(parents=True)
    bucket, out = FaultyBucket(folder, fail_at=number, error=error), "s3://runs/run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(store.STORES, "s3", bucket)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        short.attempt(out)
        calls, bucket.error = bucket.calls, None
        patch.setattr(lease, "DEAD", 0.0)  # rather than wait for what it could not release
        short.verify(out)
    return calls


@pytest.mark.slow
def test_a_disk_that_is_full_for_some_calls(short: Short, tmp_path: Path):
    full_disk(short, tmp_path / "out", 75, errno.ENOSPC, lasting=5)


def test_the_last_line_is_not_lost_on_a_disk_that_was_full_for_it(
    short: Short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    honest, failed = files.append_lines, []

    def full_once(path: Path, records: list[dict[str, Any]]) -> None:
        if path.name == layout.METRICS and records[-1]["step"] == STEPS and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(path, records)

    monkeypatch.setattr(files, "append_lines", full_once)
    short.attempt(tmp_path / "out")
    assert failed
    short.verify(tmp_path / "out")


def test_power_that_fails(short: Short, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    power_loss(short, tmp_path / "out", 90, caplog)
    assert any(r.msg == "%s is saved and verified" for r in caplog.records)


def test_a_store_that_fails_for_a_request(short: Short, tmp_path: Path):
    outage(short, tmp_path / "out", 60, Outage("the store is away"))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_a_disk_that_fails_at_any_call(short: Short, tmp_path: Path):
    calls = full_disk(short, tmp_path / "none", 10**9, errno.ENOSPC)
    for number in range(1, calls + 1, STRIDE):
        full_disk(short, tmp_path / str(number), number, (errno.ENOSPC, errno.EIO)[number % 2])
        print(f"call {number} of {calls}")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_power_that_fails_at_any_call(short: Short, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    calls = power_loss(short, tmp_path / "none", 10**9, caplog)
    for number in range(1, calls + 1, STRIDE):
        power_loss(short, tmp_path / str(number), number, caplog)
        print(f"call {number} of {calls}")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_a_store_that_fails_at_any_request(short: Short, tmp_path: Path):
    calls = outage(short, tmp_path / "none", 10**9, None)
    for number in range(1, calls + 1, STRIDE):
        error = (Outage("the store is away"), UserError("s3://runs: AccessDenied"))[number % 2]
        outage(short, tmp_path / str(number), number, error)
        print(f"request {number} of {calls}")
