"""The fault suite of `benchmarks/faults.py`, whole: what is broken is named, what is not is left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_faults_are_named_and_healthy_runs_left_alone(capsys: pytest.CaptureFixture[str]):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--steps", "120", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    with capsys.disabled():
        for row in rows:
            print(f"\n{row['case']:<24} {row['method']:<14} {', '.join(row['named']) or 'nothing'}", end="")
    broken = [r for r in rows if not r["case"].startswith("healthy ")]
    assert len(broken) == 8
    assert sum(r["right"] for r in broken) >= 7
    assert not [r["case"] for r in rows if r not in broken and not r["right"]]
