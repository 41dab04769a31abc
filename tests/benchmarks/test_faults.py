"""The fault suite of `benchmarks/faults.py`: what is broken is named, the same methods when healthy are left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = ("lr x 30", "momentum 0", "no stop-gradient", "no centring", "wrong normalisation", "duplicated views")
BROKEN += ("fp16-like overflow", "temperature x 20")
HEALTHY = (
    "byol",
    "dino",
    "moco",
    "mocov3",
    "simclr",
    "simsiam",
)  # those that are broken; all take 12 minutes more


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_faults_are_named_and_healthy_runs_left_alone(capsys: pytest.CaptureFixture[str]):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "faults.py", "--steps", "120", "--json", "--only", *BROKEN, *HEALTHY],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    with capsys.disabled():
        for row in rows:
            print(f"\n{row['case']:<24} {row['method']:<14} {', '.join(row['named']) or 'nothing'}", end="")
    right = {row["case"]: row["right"] for row in rows}
    assert right.keys() == {*BROKEN, *(f"healthy {method}" for method in HEALTHY)}
    assert sum(right[case] for case in BROKEN) >= 7
    assert all(right[f"healthy {method}"] for method in HEALTHY), right
