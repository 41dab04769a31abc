"""`benchmarks/gpu.sh` goes on where the last call ended; a stand-in for Python notes which programs it is to run."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.benchmarks import BENCHMARKS, load_benchmark

NEW = ["esvit", "esvit-compiled", "selfpatch", "selfpatch-compiled", "drloc", "drloc-compiled"]
NEW += ["crops", "prototypes", "windows"]
STAND_IN = """#!/usr/bin/env bash
case $1 in
-) cat >/dev/null ;;
-c) echo 1 ;;
*table.py) cat "$2" ;;
*) echo "$*" >>"$CALLS" && echo '{"step_ms": 1.0}' ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def call(folder: Path, *words: str, rc: int = 0, **variables: str) -> list[str]:
    """Run the script, and return the names of its new lines."""
    lines = folder / "results" / "gpu.jsonl"
    before = len(lines.read_text().splitlines()) if lines.exists() else 0
    given = os.environ | {"PYTHON": str(folder / "python"), "OUT": str(lines.parent), "CALLS": str(folder / "calls")}
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu.sh", *words], env=given | variables, capture_output=True, text=True
    )
    assert done.returncode == rc, done.stderr
    return [json.loads(line)["name"] for line in lines.read_text().splitlines()[before:]]


def test_a_call_begins_with_what_nobody_measured_and_the_next_one_has_nothing_left(folder: Path) -> None:
    first = call(folder)
    assert first[: len(NEW)] == NEW
    assert {"methods", "mocov3", "dino", "simclr", "tests", "loader"} <= set(first)
    assert call(folder) == []


def test_a_call_leaves_out_parts_with_lines_unless_they_are_named(folder: Path) -> None:
    everything = call(folder)
    lines = folder / "results" / "gpu.jsonl"
    kept = [line for line in lines.read_text().splitlines() if json.loads(line)["name"] not in ("windows", "simclr")]
    lines.write_text("".join(f"{line}\n" for line in kept))
    assert call(folder) == ["windows", "simclr"]
    assert call(folder, "dino", "drloc") == ["drloc", "dino"]
    assert len(lines.read_text().splitlines()) == len(everything) + 2


def test_no_part_begins_that_might_end_after_the_limit(folder: Path) -> None:
    assert call(folder, LIMIT="57") == ["esvit", "selfpatch", "drloc", "crops", "prototypes", "windows"]
    assert call(folder, LIMIT="0") == []


def test_a_part_that_is_not_there_is_an_error(folder: Path) -> None:
    assert call(folder, "drloc", "swin", rc=2) == ["drloc"]


def test_steps_have_the_views_and_networks_of_the_papers(folder: Path) -> None:
    call(folder, *NEW)
    calls = (folder / "calls").read_text().splitlines()
    assert [line.split()[1].split("/")[-1] for line in calls[:6:2]] == [
        "esvit_swint.yaml",
        "selfpatch_vits16.yaml",
        "drloc_swint.yaml",
    ]
    assert ["compile=true" in line for line in calls] == [False, True] * 3 + [False] * 3


def test_small_kernels_agree_with_the_plain_way() -> None:
    program = load_benchmark("kernels.py")
    for part in ("prototypes", "windows"):
        found = program["PARTS"][part](0.004, 1)
        assert found[f"{part}_loss_error"] < 1e-4
        assert found[f"{part}_gradient_error"] < 1e-3
        assert found["ratio"] == pytest.approx(found[f"{part}_plain_ms"] / found[f"{part}_ms"])
