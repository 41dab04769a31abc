"""What is measured of the machine that a run trains on."""

import os
from pathlib import Path

import pytest

from eagleray.runs.mlflow_log import Machine


def test_gpus_are_watched_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second is split and does not tell all."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '35, 1000, 2000, 120.5'\necho '[N/A], 500, 2000, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    seen = Machine(tmp_path).look()
    assert {k: v for k, v in seen.items() if "gpu" in k} == {
        "system/gpu_0_utilization_percentage": 35,
        "system/gpu_0_power_usage_watts": 120.5,
        "system/gpu_0_memory_usage_megabytes": 1048.58,
        "system/gpu_0_memory_usage_percentage": 50,
        "system/gpu_1_memory_usage_megabytes": 524.29,
        "system/gpu_1_memory_usage_percentage": 25,
    }
    program.write_text("#!/bin/sh\nexit 9\n")
    machine = Machine(tmp_path)
    assert not any("gpu" in k for k in machine.look() | machine.look())
