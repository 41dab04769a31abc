"""Histories that are whole whatever happens to their writer or its disk."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagleray.base.files import JsonLines, append_lines, read_lines, write_atomic


class Disk:
    """A file on a disk with room for so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def fileno(self) -> int:
        return self.file.fileno()  # type: ignore[no-any-return]

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written  # type: ignore[no-any-return]


def test_lines_that_a_full_disk_does_not_take_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    honest, disks = Path.open, []

    def small_disk(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        file = honest(path, mode, *more, **options)
        if mode != "ab":
            return file
        disks.append(Disk(file, room=1000))
        return disks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", small_disk)
        history = JsonLines(tmp_path / "metrics.jsonl", step=0)
    [disk] = disks
    history.log({"step": 1})
    disk.room = 5  # not enough for a line
    history.log({"step": 2})
    history.log({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert [r.message for r in caplog.records if "No space left" in r.message] == [caplog.records[0].message]
    disk.room = 1000
    history.log({"step": 4})
    assert [r["step"] for r in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


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
