"""The same run on Ray Train, with workers that are killed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.commands import refused
from helpers.processes import below
from helpers.runs import arguments, assert_same, start, wait_for_start, wait_for_step, weights

from eagleray.cluster.spares import NAME

LONG = ["workers=2", "optim.epochs=40", "max_steps=60", "evaluate.probe_epochs=0", "checkpoint.steps=9"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_processes_cost_nothing_but_time(small: Path, shards: Path, tmp_path: Path):
    """One that trains is killed, and all are forked again; then a worker is, and Ray starts all workers again."""
    harmed, whole = tmp_path / "harmed", tmp_path / "whole"
    process = start(arguments(small, shards, harmed, *LONG))
    workers = set[int]()
    for start_number, (kind, step) in enumerate([(NAME, 15), ("RayTrainWorker", 30)], 2):
        wait_for_step(harmed, step, process)
        parts = below(process, kind)
        assert len(parts) == 2
        workers = workers or set(below(process, "RayTrainWorker"))
        assert workers == set(below(process, "RayTrainWorker")), "Ray has started no others"
        os.kill(parts[-1], signal.SIGKILL)
        wait_for_start(harmed, start_number, process)
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    assert json.loads((harmed / "summary.json").read_text())["restarts"] == 2
    assert "continuing from step" in text
    said = (harmed / "train.log").read_text()
    assert len(re.findall(r"rank0 WARNING started again: the process of rank [01] was ended by signal 9", said)) == 1
    process = start(arguments(small, shards, whole, *LONG))
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    assert_same(weights(harmed), weights(whole))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_continues_on_ray(small: Path, shards: Path, tmp_path: Path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    long = [*LONG, "workers=1"]
    process = start(arguments(small, shards, killed, *long))
    wait_for_step(killed, 15, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.5)
    process = start(arguments(small, shards, killed, *long))
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    # One worker computes what this process does without Ray, to the bit, on as many threads.
    process = start(arguments(small, shards, whole, *LONG, "workers=0"), OMP_NUM_THREADS=str(os.cpu_count()))
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text
    assert_same(weights(killed), weights(whole))


@pytest.mark.slow
def test_what_the_user_must_know_comes_back(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from eagleray.datasets.shards import Sample, write_shards

    write_shards((Sample(f"{i}", "jpg", b"no image", 0) for i in range(40)), str(tmp_path / "bad"))
    data = f"data.train=[{shards / 'train'}, {tmp_path / 'bad'}]"
    line = refused(capsys, "pretrain", str(small), data, f"out={tmp_path / 'out'}", "workers=1")
    assert "more than data.bad_limit=0.01 allows" in line
