"""A step of a run on several workers is taken again on as many, by Ray."""

import os
import sys
from pathlib import Path

import pytest
from helpers import forked
from helpers.runs import arguments, start


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_two_workers_is_replayed_on_two(small_dino: Path, shards: Path, tmp_path: Path):
    keys = ["workers=2", "gpus=false", "max_steps=6", "checkpoint.steps=3", "evaluate.probe_epochs=0", "log_steps=3"]
    process = start(arguments(small_dino, shards, tmp_path / "run", *keys))
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    command = [sys.executable, "-m", "eagleray.cli", "replay", str(tmp_path / "run"), "--step", "5", "--keys"]
    done = forked.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 5: equal to the bit\n" in done.stdout
    assert "from        the checkpoint of step 3, with 2 step(s)" in done.stdout
    keys_of_batch = done.stdout.splitlines()[-32:]
    assert len({key.partition("_")[0] for key in keys_of_batch}) == 32
