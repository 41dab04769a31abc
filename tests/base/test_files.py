"""Histories that are whole whatever happens to their writer or its disk."""

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagleray.base import files
from eagleray.base.errors import Busy, UserError
from eagleray.base.files import JsonLines, Tail, append_lines, parse_lines, read_lines, write_atomic


class Disk:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> "Disk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written  # type: ignore[no-any-return]


def test_lines_that_a_full_disk_does_not_take_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path, honest = tmp_path / "metrics.jsonl", Path.open

    def full(path: Path, *more: Any, **options: Any) -> Any:
        return Disk(honest(path, *more, **options), room=5)  # not enough for a line

    history = JsonLines(path, step=0)
    history.log({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        history.log({"step": 2})
        history.log({"step": 3})
    assert path.read_text() == '{"step": 1}\n'
    assert [r.message for r in caplog.records if "No space left" in r.message] == [caplog.records[0].message]
    history.log()
    assert [r["step"] for r in read_lines(path)] == [1, 2, 3]
    history.log({"step": 4})
    assert [r["step"] for r in read_lines(path)] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("error")  # such as ResourceWarning
def test_histories_leave_no_file_open(tmp_path: Path):
    for name in "ab":
        JsonLines(tmp_path / name, step=0).log({"step": 1})
    gc.collect()


def test_a_history_goes_on_from_a_step_and_half_a_line_is_none(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"ste')
    history = JsonLines(path, step=2)
    history.log({"step": 3, "again": True})
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


@pytest.mark.parametrize("left", ["", '{"step": 0}\n', '{"step": 0}\n{"st', "{"])
def test_lines_follow_those_that_a_kill_left(tmp_path: Path, left: str):
    path = tmp_path / "skipped.jsonl"
    path.write_text(left)
    records = [{"step": 1, "keys": ["a\u2028b", "c\x85d", "e\nf"]}, {"step": 2, "keys": []}]
    for record in records:
        append_lines(path, [record])
    assert read_lines(path) == [{"step": 0}] * left.count("\n") + records


def test_one_process_at_a_time(tmp_path: Path):
    """Each adds one to a number that the other may have read as well."""
    path, times = tmp_path / "number", 200
    path.write_text("0")
    script = (
        "import sys\nfrom pathlib import Path\nfrom eagleray.base.files import file_lock\npath = Path(sys.argv[1])\n"
    )
    script += f"for _ in range({times}):\n"
    script += "    with file_lock(path.with_name('.lock')):\n        path.write_text(str(int(path.read_text()) + 1))\n"
    both = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for _ in range(2)]
    assert [p.wait(timeout=60) for p in both] == [0, 0]
    assert path.read_text() == str(2 * times)


def test_replacing_leaves_the_old_text_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_tail_returns_only_complete_lines_that_are_new(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail(path)
    with path.open("a") as f:
        f.write("first\nsec")
        f.flush()
        assert tail.lines() == ["first"]
        f.write("ond\n")
    assert tail.lines() == ["second"]
    assert tail.lines() == []


def test_a_tail_follows_a_history_that_goes_back_to_a_checkpoint(tmp_path: Path):
    """As after a restart: the file is another one then, and shorter."""
    path = tmp_path / "metrics.jsonl"
    history = JsonLines(path, step=0)
    tail = Tail(path, whole=True)
    for step in range(1, 5):
        history.log({"step": step})
    assert [r["step"] for r in parse_lines(tail.lines())] == [1, 2, 3, 4]
    history = JsonLines(path, step=2)
    assert tail.lines() == []
    history.log({"step": 3})
    assert parse_lines(tail.lines()) == [{"step": 3}]


def test_a_tail_reads_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' * 1000)
    tail = Tail(path, whole=True)
    assert len(tail.lines()) == 1000
    with path.open("a") as f:
        f.write('{"step": 1}\n')
    before = tail.offset
    assert len(tail.lines()) == 1
    assert tail.offset - before == len('{"step": 1}\n')


def test_lines_that_are_json_but_no_record_are_passed_over(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    odd = [
        "7",
        "null",
        '"step"',
        "[1]",
        "[" * 100_000,
        '{"loss": 1}',
        '{"step": "two"}',
        '{"step": null}',
        '{"step": 1.5}',
    ]
    path.write_text("\n".join([*odd, '{"step": 1}', '{"step": 2}', ""]))
    assert [r["step"] for r in files.read_history(path)] == [1, 2]
    JsonLines(path, step=1).log({"step": 2, "again": True})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "again": true}\n'


def test_a_locked_folder_names_who_holds_it_and_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with files.lock_folder(tmp_path):
        before = (tmp_path / ".lock").read_text()
        with pytest.raises(Busy, match=f"process {os.getpid()} on .* is still using this folder"):
            files.lock_folder(tmp_path)
        assert (tmp_path / ".lock").read_text() == before
        assert files.is_locked(tmp_path / files.LOCK)
    assert not files.is_locked(tmp_path / files.LOCK)
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "not implemented")))
    for attempt in (lambda: files.lock_folder(tmp_path), lambda: files.is_locked(tmp_path / files.LOCK)):
        with pytest.raises(UserError, match=f"out={tmp_path}: this file system has no locks"):
            attempt()


def test_names_are_flushed_to_the_disk_with_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a power loss could take the new name and, with it, both the old content and the new."""
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.make_folder(tmp_path / "a" / "b")
    assert set(synced) == {str(tmp_path), str(tmp_path / "a")}
    synced.clear()
    with files.durable_path(tmp_path / "a" / "large", part=tmp_path / "a" / "part") as part:
        part.write_text("text")
        assert synced == []
    assert synced == [str(tmp_path / "a" / "part"), str(tmp_path / "a")]
    synced.clear()
    write_atomic(tmp_path / "a" / "b" / "note", "text")
    assert synced == [str(tmp_path / "a" / "b" / ".note.part"), str(tmp_path / "a" / "b")]
