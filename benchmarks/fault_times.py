"""Measure the seconds from a fault to the next step of a run on real nodes of Ray, whose folder is in a real S3 server.

A head that only directs, and nodes of one CPU each, run on this machine, one run after the other. The first may have
one or two workers; it loses a rank, a raylet, the store and its driver, and is given a node. The second has two, and
loses its driver. Whoever lost a driver submits again at once. Prints for each fault, or with --json in one object:

next_step  seconds from the fault until the line of the first step that the restarted run takes is in metrics.jsonl of
           rank 0's machine; for the store, from its return
still      for the store and the new node, the longest time between the lines of two steps
repeated   steps that were taken again
ranks      ranks that go on
"""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import psutil
import synthetic

common.sys.path.insert(0, str(common.ROOT / "tests"))

from helpers import ray_head  # noqa: E402
from helpers.s3.server import Swift, store_of  # noqa: E402

from eagleray.base.files import read_lines  # noqa: E402
from eagleray.cluster.spares import NAME  # noqa: E402
from eagleray.runs import layout  # noqa: E402
from eagleray.runs.attempts import read_starts  # noqa: E402
from eagleray.runs.run_store import run_store  # noqa: E402

RECIPE = "mocov3_vitxs8_cifar10_ep2"
LIMIT = 900.0  # seconds until what is waited for has come
KEYS = {
    "gpus": "false",
    "optim.batch": 64,
    "optim.epochs": 100_000,
    "data.workers": 0,
    "checkpoint.steps": 20,
    "log_steps": 1,
    "monitor.every": 100_000,
    "evaluate.probe_epochs": 0,
}
Row = dict[str, float]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--away", type=float, default=45, help="seconds for which the store does not answer")
    parser.add_argument("--steps", type=int, default=45, help="steps between two faults")
    args = parser.parse_args()
    found: dict[str, Row] = {}
    with TemporaryDirectory() as scratch, store_of(Path(scratch), "runs") as store, ray_head.running(cpus=0) as head:
        for name in ("a", "b"):
            join(head, name)
        synthetic.write(head.folder / "train", images=256, width=32, height=32, each=64)
        for name, row in itertools.chain(walk(head, store, args.steps, args.away), fixed(head, args.steps)):
            found[name] = row
            common.note(f"{name}: {row}")
    common.show(found, as_json=args.json)


def walk(head: ray_head.Head, store: Swift, steps: int, away: float) -> Iterator[tuple[str, Row]]:
    """Yield what each fault cost a run of one or two workers."""
    run = Run(head, "elastic", "1..2")
    run.submit()
    run.train(steps, ranks=2)
    yield "rank", run.restarted(kill(below(head, NAME)[0]), steps)
    yield "raylet", run.restarted(kill(below(head, "raylet")[0]), steps, ranks=1)
    join(head, "c")
    yield "node added", run.restarted(time.time(), steps, ranks=2, still=True)
    began = time.time()
    store("kill9", "all")
    time.sleep(away)
    store("start")
    back = time.time()
    run.wait(lambda: bool(run.times(back)))
    after = run.times(back)[0]
    yield f"store away {away:g} s", {"next_step": after - back, "still": run.still(began, after), "ranks": 2}
    run.train(steps)
    yield "driver of 1..2 workers", run.resubmitted(steps)
    run.stop()


def fixed(head: ray_head.Head, steps: int) -> Iterator[tuple[str, Row]]:
    """Yield what the death of its driver cost a run of two workers."""
    run = Run(head, "fixed", "2")
    run.submit()
    run.train(steps, ranks=2)
    yield "driver of 2 workers", run.resubmitted(steps)
    run.stop()


class Run:
    """A submitted run, and what it has written into its folder."""

    def __init__(self, head: ray_head.Head, name: str, workers: str) -> None:
        self.head, self.out, self.seen = head, f"s3://runs/{name}", list[tuple[float, int]]()
        self.files = str(Path("cache-*", "eagleray", "runs", f"{name}-*", "work", layout.METRICS))
        self.keys = KEYS | {"out": self.out, "workers": workers, "data.train": head.folder / "train"}

    def submit(self) -> None:
        code, text = self.head("submit", RECIPE, *(f"{k}={v}" for k, v in self.keys.items()))
        assert code == 0, text
        if not self.seen:
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Note when the line of each step comes into metrics.jsonl, in the cache of the node of rank 0."""
        seen: tuple[Any, ...] = ()
        while True:
            time.sleep(0.05)
            found = [(p.stat().st_mtime, p.stat().st_size, p) for p in self.head.folder.glob(self.files)]
            if not found or max(found) == seen:
                continue
            seen = max(found)
            if lines := read_lines(seen[-1])[-1:]:
                self.seen.append((time.time(), lines[0].get("step", 0)))

    def times(self, since: float = 0.0, step: int = 0) -> list[float]:
        """When the lines of steps after one came, since a moment."""
        return [moment for moment, reached in list(self.seen) if moment > since and reached > step]

    def starts(self) -> list[dict[str, Any]]:
        return [line for line in read_starts(run_store(self.out).fetch() / layout.STARTS) if "ranks" in line]

    def wait(self, come: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not come():
            if time.monotonic() > end:
                sys.exit(f"nothing in {LIMIT:.0f} s: {self.head('logs', self.head.jobs()[-1]['id'])[1][-2000:]}")
            time.sleep(1)

    def train(self, steps: int, ranks: int | None = None) -> None:
        """Wait until so many ranks have taken so many steps together."""

        def come() -> bool:
            starts = self.starts()
            if not starts or ranks not in (None, starts[-1]["ranks"]):
                return False
            return len(self.times(starts[-1]["time"], starts[-1]["step"])) >= steps

        self.wait(come)

    def restarted(self, fault: float, steps: int, ranks: int | None = None, *, still: bool = False) -> Row:
        """Return what a fault cost, when the run has gone on for some steps."""
        self.wait(lambda: bool(self.starts()) and self.starts()[-1]["time"] > fault)
        self.train(steps, ranks)
        start = next(s for s in self.starts() if s["time"] > fault and ranks in (None, s["ranks"]))
        after = self.times(start["time"], start["step"])[0]
        row = {
            "next_step": after - fault,
            "repeated": start.get("reached", start["step"]) - start["step"],
            "ranks": start["ranks"],
        }
        return row | ({"still": self.still(fault, after)} if still else {})

    def still(self, first: float, last: float) -> float:
        """Return the longest time between two lines of steps from one moment to another."""
        within = [t for t in self.times() if first - 30 < t <= last]
        return max(b - a for a, b in itertools.pairwise(within))

    def resubmitted(self, steps: int) -> Row:
        """Kill the driver, submit again as soon as the head knows, and return what that cost."""
        [driver] = [p for p in children(self.head.process.pid) if {"eagleray.cli", "-m"} <= set(p.cmdline())]
        fault = kill(driver)
        self.wait(lambda: self.head.jobs()[-1]["state"] == "failed")
        self.submit()
        return self.restarted(fault, steps)

    def stop(self) -> None:
        code, text = self.head("stop", self.head.jobs()[-1]["id"])
        assert code == 0, text


def join(head: ray_head.Head, name: str) -> None:
    """Add a node that shares no cache with the others."""
    head.join(name, XDG_CACHE_HOME=str(head.folder / f"cache-{name}"))


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:  # a node that was lost
        return []


def below(head: ray_head.Head, name: str) -> list[psutil.Process]:
    """Return the processes of this name on all nodes."""
    return [p for node in head.nodes for p in children(node.pid) if p.name() == name]


def kill(process: psutil.Process) -> float:
    """Kill a process, and return when that was."""
    process.send_signal(signal.SIGKILL)
    return time.time()


if __name__ == "__main__":
    common.run(main)
