"""What it costs a run that a rank is killed every two minutes: goodput, restarts, steps taken again, and whether the
weights are those of the same run unharmed.

Both runs are Ray runs of a few workers on a set of labelled shards, one after the other. Prints what a kill cost, and
with --json one object:

goodput             seconds of steps that count, as a share of the harmed run's time
goodput_unharmed    the same of the other run: what starting and saving cost without a kill
restarts, steps_repeated, seconds_lost   of the harmed run, from its summary
restart_seconds     from each kill to the first line about steps after it, `--log-steps` of them
start_over_restart  seconds from the command to the first such line / the median of restart_seconds
interval            steps between checkpoints: no kill costs more of them
same_weights        whether every tensor of the last checkpoints is the same to the bit
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch

from eagleray.base.files import read_lines
from eagleray.cluster.spares import NAME
from eagleray.engine import checkpoint

RECIPE = "mocov3_vitxs8_cifar10_ep2"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--train", required=True, help="shards of CIFAR-10 or other labelled images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--readers", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--every", type=float, default=120, help="seconds between kills; below 20, runs pause between")
    parser.add_argument("--minutes", type=float, default=10, help="that the harmed run lasts at least")
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--log-steps", type=int, default=10, help="steps between lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        harmed = Run(args, Path(scratch) / "harmed", steps=None)
        harmed_start = harmed.first_line()
        restarts = harmed.harm(args.every, 60 * args.minutes)
        steps = harmed.stop()
        harmed = Run(args, harmed.out, steps=steps)  # one step more would be another run: this only ends it
        harmed.wait()
        unharmed = Run(args, Path(scratch) / "unharmed", steps=steps)
        unharmed.wait()
        told, plain = (json.loads((r.out / "summary.json").read_text()) for r in (harmed, unharmed))
        row = {
            "workers": args.workers,
            "steps": steps,
            "interval": args.interval,
            "kills": len(restarts),
            **{k: told[k] for k in ("goodput", "restarts", "steps_repeated", "seconds_lost")},
            "goodput_unharmed": plain["goodput"],
            "restart_seconds": [round(s, 1) for s in restarts],
            "start_over_restart": harmed_start / statistics.median(restarts),
            "same_weights": same(harmed.out, unharmed.out),
            "machine": common.machine(),
        }
    print(json.dumps(row) if args.json else "\n".join(f"{k:<18} {v}" for k, v in row.items()))


class Run:
    """A command, and what it has written."""

    def __init__(self, args: argparse.Namespace, out: Path, steps: int | None) -> None:
        self.out = out
        keys = {
            "data.train": args.train,
            "out": out,
            "workers": args.workers,
            "data.workers": args.readers,
            "optim.batch": args.batch,
            "optim.epochs": 100,
            "checkpoint.steps": args.interval,
            "log_steps": args.log_steps,
            "evaluate.probe_epochs": 0,
            "evaluate.limit": 1000,
        } | ({"max_steps": steps} if steps else {})
        command = [sys.executable, "-m", "eagleray.cli", "pretrain", RECIPE, *(f"{k}={v}" for k, v in keys.items())]
        self.began = time.monotonic()
        self.log = out.with_suffix(".log").open("a")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)

    def step(self) -> int:
        lines = read_lines(self.out / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def starts(self) -> int:
        return len(read_lines(self.out / "starts.jsonl"))

    def wait_for(self, start: int) -> int:
        """The first step that a start writes a line about; starts are counted from 1."""
        while self.starts() < start or self.step() <= read_lines(self.out / "starts.jsonl")[start - 1]["step"]:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended by itself: {self.said()}")
            time.sleep(0.05)
        return self.step()

    def first_line(self) -> float:
        """Return the seconds from the command to its first line about steps."""
        self.wait_for(1)
        return time.monotonic() - self.began

    def harm(self, every: float, seconds: float) -> list[float]:
        """Kill a process that trains now and then; returns the seconds from each kill to the first line after it."""
        began, out = time.monotonic(), []
        for number in range(1, int(seconds / every) + 1):
            time.sleep(max(began + number * every - time.monotonic(), 0))
            os.kill(self.ranks()[number % len(self.ranks())], signal.SIGKILL)
            killed = time.monotonic()
            step = self.wait_for(number + 1)
            out.append(time.monotonic() - killed)
            common.note(f"kill {number}: {out[-1]:.1f} s until step {step}")
        time.sleep(every / 4)
        return out

    def ranks(self) -> list[int]:
        """The processes that train."""
        mine = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                name, stat = (entry / "comm").read_text(), (entry / "stat").read_text()
            except OSError:
                continue
            if name.strip() == NAME and int(stat.rpartition(")")[2].split()[3]) == self.process.pid:
                mine.append(int(entry.name))
        return sorted(mine)

    def stop(self) -> int:
        """The step that it saved and ended at."""
        self.process.terminate()
        self.process.wait()
        return self.step()

    def wait(self) -> None:
        if status := self.process.wait():
            raise RuntimeError(f"the run ended with status {status}: {self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self.out.with_suffix(".log").read_text()[-2000:]


def same(a: Path, b: Path) -> bool:
    one, other = (checkpoint.newest(out / "checkpoints") for out in (a, b))
    assert one is not None
    assert other is not None
    tensors: list[dict[str, Any]] = [one["method"], other["method"]]
    return all(torch.equal(tensors[0][k], tensors[1][k]) for k in tensors[0])


if __name__ == "__main__":
    common.run(main)
