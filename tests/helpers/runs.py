"""Short runs of the tests: their arguments, their processes and the weights they end with."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from helpers import forked

from eagleray.base.files import read_lines
from eagleray.engine import checkpoint

FAST = ("evaluate.probe_epochs=0", "evaluate.limit=32")  # keys of runs whose scores do not matter


def arguments(recipe: Path, shards: Path, out: Path | str, *more: str) -> list[str]:
    return [str(recipe), f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}", *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    return state["method"]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def split(args: list[str]) -> tuple[str, list[str]]:
    return args[0], args[1:]


def start(
    args: list[str], *, group: int | None = None, cold: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """`eagleray pretrain`, in the process group of the tests, or with `group=0` in its own. `cold`: as users start it,
    not as a copy of a process that has imported everything."""
    command = [sys.executable, "-m", "eagleray.cli", "pretrain", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return (subprocess.Popen if cold else forked.Popen)(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, process_group=group
    )


def wait_for_start(out: Path, number: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while len(read_lines(out / "starts.jsonl")) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"no start {number}"
        time.sleep(0.02)


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        lines = read_lines(out / "metrics.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"the run has not reached step {step} in 240 s")
