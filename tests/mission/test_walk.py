"""The whole walk, as `make mission` does it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mission.stations import STATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_station_is_reached():
    done = subprocess.run(
        [sys.executable, "-m", "mission.walk"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*STATIONS, "all"]
