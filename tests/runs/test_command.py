"""The same command started twice for a folder, requests to stop, and what is left open by errors."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagleray.base import files
from eagleray.base.errors import Busy, UserError
from eagleray.runs import layout, run_store
from eagleray.runs.command import hold
from eagleray.runs.run_store import RunStore
from eagleray.runs.stop_request import StopRequest
from eagleray.runs.stop_signal import StopSignal


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "SOON", 0.3)
    monkeypatch.setattr(run_store, "PATIENCE", 0.6)
    monkeypatch.setattr(StopSignal, "seconds", 0.05)
    monkeypatch.setattr(StopRequest, "seconds", 0.05)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_a_second_command_is_refused_and_leaves_no_trace(tmp_path: Path):
    with hold(str(tmp_path), "first"):
        (tmp_path / layout.RECIPE).write_text("steps: 100")
        before = snapshot(tmp_path)
        with pytest.raises(Busy, match=rf"out={tmp_path}: process {os.getpid()} on .*another command is training"):
            hold(str(tmp_path), "second").__enter__()
        assert snapshot(tmp_path) == before
    with hold(str(tmp_path), "third"):
        pass


def test_a_run_that_was_refused_leaves_no_folder(tmp_path: Path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for out in new, old:
        with pytest.raises(UserError, match="no such data"), hold(str(out), "first"):
            raise UserError("no such data")
    assert not new.exists()
    assert old.exists(), "the user made it"
    with hold(str(new), "second"):
        (new / layout.RECIPE).write_text("steps: 100")
    assert (new / layout.RECIPE).exists()


@pytest.mark.parametrize("folder", ["out", "s3://bucket/out"])
def test_a_run_is_not_written_into_the_folder_of_a_sweep(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store is a folder here, and what holds a run in a store comes after the check."""
    (kept := tmp_path / "out").mkdir()
    out = folder if "://" in folder else str(kept)
    monkeypatch.setattr(
        RunStore, "get", lambda self, name: (kept / name).read_text() if (kept / name).exists() else None
    )
    for name in (layout.SWEEP_ROWS, layout.ENVIRONMENT):
        (kept / name).write_text("")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=rf"^out={out}: holds a sweep; give another out=$"):
        hold(out, "first").__enter__()
    assert snapshot(tmp_path) == before
    (kept / layout.RECIPE).write_text("steps: 100")  # a run was written into it before that was refused
    with hold(str(kept), "second"):
        pass


def test_a_command_waits_for_the_last_rank_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    rank = files.lock_folder(tmp_path, layout.OWNER)
    with pytest.raises(Busy, match="is still using this folder"):
        hold(str(tmp_path), "second", said.append).__enter__()
    assert "is still using this folder: waiting" in said[0]
    monkeypatch.setattr(run_store, "PATIENCE", 60.0)
    threading.Timer(0.5, rank.close).start()
    with hold(str(tmp_path), "third"):
        assert not files.is_locked(tmp_path / layout.OWNER)


def test_a_request_to_stop_is_heard_at_once_and_written_when_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    honest, away = RunStore.put, True

    def put(self: RunStore, name: str, text: str | bytes) -> None:
        if away:
            raise OSError(5, "Input/output error")
        honest(self, name, text)

    def refused() -> int:
        return len([r for r in caplog.records if "not written yet" in r.getMessage()])

    monkeypatch.setattr(RunStore, "put", put)
    out, request = str(tmp_path), StopRequest(str(tmp_path), "mine")
    note = tmp_path / f"{layout.STOP}-mine"
    with hold(out, "mine"):
        here, elsewhere = StopSignal(out, "mine", request.event), StopSignal(out, "mine")
        other = StopSignal(out, "another")
        assert not any(signal.asked() for signal in (here, elsewhere, other))
        request.ask()
        assert here.asked()
        wait(refused)
        time.sleep(0.2)  # in which it is tried again
        assert not note.exists()
        away = False
        wait(elsewhere.asked)
        assert note.read_bytes() == b"", "a full disk has no room for content"
        assert not other.asked()
        (tmp_path / layout.STOP).write_text("")  # a person's
        wait(other.asked)
        for signal in (here, elsewhere, other):
            signal.close()
    request.close()
    assert refused() == 1


def test_the_limit_of_hours_stops_a_run_before_it_is_told(tmp_path: Path):
    """It may be impossible to tell, as on a terminal that was closed."""
    request, asked = StopRequest(str(tmp_path), "mine"), list[bool]()
    with request.after(0, lambda line: asked.append(request.event.is_set())):
        wait(lambda: asked)
    request.close()
    assert asked == [True]


def wait(true: Any) -> None:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    assert true()
