"""The live table of a sweep on a terminal."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagleray.sweeps import live_table
from eagleray.sweeps.live_table import Show


def test_lines_of_a_running_trial_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is drawn several times a second, and a long trial has many lines."""
    seen: list[str] = []
    parse = live_table.parse_lines

    def counted(lines: list[str]) -> list[dict[str, Any]]:
        seen.extend(lines)
        return parse(lines)

    monkeypatch.setattr(live_table, "parse_lines", counted)
    study: Any = SimpleNamespace(folder=tmp_path)
    show, row = Show(study), {"id": "a", "state": "running", "step": 3, "steps": 9, "why": ""}
    assert show.look(row)["step"] == 3, "what the trial has reported, before there is a line"
    path = tmp_path / "trials" / "a" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    for step in range(4, 8):
        with path.open("a") as f:
            f.write(json.dumps({"step": step}) + "\n")
        assert [show.look(row)["step"] for _ in range(2)] == [step, step]
    assert len(seen) == 4
