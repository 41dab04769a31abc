"""Subjects of commits are short enough for every tool."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "subjects.py"


def test_a_long_subject_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("subjects", FILE)
    assert spec
    assert spec.loader
    subjects = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(subjects)
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    for subject, day in (("x" * 100, 28), ("y" * 72, 30), ("z" * 73 + "\n\nA body of any length. " * 9, 30)):
        date = f"2026-11-{day}T00:00:00+00:00"
        subprocess.run([*git, "commit", "-q", "--allow-empty", "--date", date, "-m", subject], check=True)
    [line] = subjects.too_long()
    assert line.split()[1] == "z" * 73 + ":"
    assert line.endswith("73 characters; a commit's subject has at most 72")
