"""Count what keeps a run together: requests to the store, messages between ranks, and the time of rank 0.

All ranks of a run with out=s3:// are simulated in this process: each has its run folder with the threads that belong
to it, opens the data, continues from a checkpoint and takes steps that train nothing. Only the exchanges between ranks
are answered by the benchmark. The bucket is a folder that counts requests. Each figure is by number of ranks.

requests_per_minute_per_rank    to the store while training, over all ranks
requests_per_minute             of all ranks together, and of rank 0
bytes_per_minute                that are uploaded while training
requests_at_start               of rank 0, and of each other rank of its machine: listing, index, checkpoints
messages_per_step               exchanges in which all ranks take part
cpu_seconds_per_step            of rank 0: steps, histories and threads, beside a history of `--history` MB
"""

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import common
import synthetic
import torch

from eagleray.base import dist
from eagleray.data.quarantine import Quarantine
from eagleray.engine import checkpoint
from eagleray.engine.world import World
from eagleray.runs import recipe
from eagleray.runs.agreement import Agreement, Cadence, Decision
from eagleray.runs.checks import make_plan
from eagleray.runs.follow import FollowRun
from eagleray.runs.plan import open_plan
from eagleray.runs.rank_run import newest_checkpoint
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_dir import RunDir
from eagleray.runs.sources import resolve_paths
from eagleray.runs.step_log import Clock, OpenLine, StepLog
from eagleray.runs.tracking import Tracking
from eagleray.storage import store

common.sys.path.insert(0, str(common.ROOT / "tests"))

from helpers.bucket import CountingBucket  # noqa: E402
from helpers.recipes import SMALL  # noqa: E402

UNREAD: Any = SimpleNamespace(rows=(), waited=0.0)  # stands in for the loader: nothing is read
PACE = 0.1  # seconds of a step
LAST = 10  # the step of the checkpoint that the run continues from
LINE = {"step": 0, "loss": 1.0, "images_per_s": 100.0, "data_wait": 0.0, "bad_samples": 0} | {
    f"gradient/block{n}": 0.123456789 for n in range(30)
}


class Exchanges:
    """What the ranks tell each other. They are called one after the other, rank 0 first, and all say the same."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank, self.count = ranks, 0, 0
        self.answers: list[Any] = []
        self.asked = 0  # answers that the current rank has got from rank 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        replaced: dict[str, Callable[..., Any]] = {
            "size": lambda: self.ranks,
            "rank": lambda: self.rank,
            "gather_objects": lambda x: [x] * self.ranks,
            "from_rank_zero": self.from_rank_zero,
            "tell": lambda message: None,
            "told": lambda message: False,
        }
        with contextlib.ExitStack() as stack:
            for name, function in replaced.items():
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, function))
            yield

    def become(self, rank: int) -> None:
        self.rank, self.asked = rank, 0

    def from_rank_zero(self, get: Callable[[], Any]) -> Any:
        if self.rank == 0:
            self.answers.append(get())
        self.asked += 1
        return self.answers[self.asked - 1]


class CountingWorld(World):
    """A rank whose exchanges of a step are counted, not made."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.device, self.exchanges = torch.device("cpu"), exchanges
        self.rank, self.size = exchanges.rank, exchanges.ranks

    def agree(self, *values: float) -> list[float]:
        self.exchanges.count += self.rank == 0
        return list(values)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--history", type=float, default=8.0, help="MB of metrics.jsonl that are there already")
    args = parser.parse_args()
    rows = {str(n): measured(n, args) for n in args.ranks}
    names = next(iter(rows.values()))
    common.show({name: {n: row[name] for n, row in rows.items()} for name in names}, as_json=args.json)


def measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run on so many ranks."""
    common.note(f"{ranks} ranks")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bucket = CountingBucket(Path(folder))
        stack.enter_context(mock.patch.dict(store.STORES, {"s3": bucket}))
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": f"{folder}/cache"}))
        synthetic.write(Path(folder, "data"), images=256, distinct=8, width=16, height=16, each=64, classes=2)
        Path(folder, "small.yaml").write_text(SMALL)
        keys = ["data.train=s3://data", "out=s3://runs/run", "optim.batch=64", "optim.epochs=100000"]
        r = resolve_paths(recipe.load(f"{folder}/small.yaml", keys))
        plan = make_plan(r, note=lambda _: None)
        history(Path(folder, "runs", "run"), args.history)
        state = {"step": LAST, "digest": recipe.digest(r), "origin": plan.origin, "shards_read": plan.shards_text}
        writer = checkpoint.Writer(f"{r.out}/checkpoints", keep=1, scratch=Path(folder, "part"))
        writer.save(LAST, state)
        writer.settle()
        exchanges = Exchanges(ranks)
        stack.enter_context(exchanges.patched())
        at_start, logs = start(r, bucket, exchanges, stack)
        bucket.requests.clear()
        bucket.written.clear()
        steps, seconds, _ = train(logs, bucket, exchanges, args.seconds)
        messages = exchanges.count / steps
        minute = {rank: 60 * n / seconds for rank, n in bucket.requests.items()}
        uploaded = 60 * sum(bucket.written) / seconds
        alone = rank_zero(r, logs[0], bucket, exchanges, args.seconds)
    total = sum(minute.values())
    return {
        "requests_per_minute_per_rank": round(total / ranks, 2),
        "requests_per_minute": {"all": round(total, 1), "rank 0": round(minute.get(0, 0.0), 1)},
        "bytes_per_minute": round(uploaded),
        "requests_at_start": {"rank 0": at_start[0], "another": round(sum(at_start[1:]) / max(ranks - 1, 1), 2)},
        "messages_per_step": messages,
        "cpu_seconds_per_step": round(alone, 5),
    }


def history(folder: Path, megabytes: float) -> None:
    """Write a history of so many MB, as of a run that has trained for long."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(json.dumps(LINE)) + 1
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(LINE) + "\n" for _ in range(int(megabytes * 1e6 / size)))


def start(
    r: Recipe, bucket: CountingBucket, exchanges: Exchanges, stack: contextlib.ExitStack
) -> tuple[list[int], list["Rank"]]:
    """Start every rank, and return its requests and its loop of steps."""
    at_start, logs = [], []
    for rank in range(exchanges.ranks):
        exchanges.become(rank)
        bucket.rank, before = rank, bucket.requests[rank]
        folder = stack.enter_context(RunDir(r, rank, Tracking("none"), command="benchmark"))
        if isinstance(folder.stop_signal, threading.Thread) and folder.stop_signal.ident:
            bucket.ranks[folder.stop_signal.ident] = rank
        plan = open_plan(r, note=lambda _: None)
        state = newest_checkpoint(plan, folder)
        assert state is not None
        folder.begin(state["step"], exchanges.ranks, lengths={})
        world = CountingWorld(exchanges)
        monitor: Any = SimpleNamespace(layers=())
        quarantine = Quarantine(None, samples=256, limit=1.0)
        StepLog(plan, world, folder, quarantine, monitor, Clock(time.monotonic(), 0.0), OpenLine(), UNREAD)
        agreement = Agreement(world, folder, quarantine, Cadence(plan, state["step"]))
        at_start.append(bucket.requests[rank] - before)
        logs.append(Rank(rank, folder, decisions(agreement)))
    bucket.rank = 0
    return at_start, logs


class Rank:
    """A simulated rank and its loop of steps."""

    def __init__(self, rank: int, folder: RunDir, steps: Iterator[Any]) -> None:
        self.rank, self.folder, self.steps = rank, folder, steps


def decisions(agreement: Agreement) -> Iterator[Decision]:
    """Yield what the ranks decide before each step."""
    for step in itertools.count(1):
        yield agreement.decide(step, [], stop=False)


def train(logs: list[Rank], bucket: CountingBucket, exchanges: Exchanges, seconds: float) -> tuple[int, float, float]:
    """Take steps on all ranks in turn for some seconds, and return their number, the seconds and the CPU seconds."""
    began, cpu, steps = time.monotonic(), time.process_time(), 0
    while time.monotonic() < began + seconds:
        for one in logs:
            exchanges.become(one.rank)
            bucket.rank = one.rank
            next(one.steps)
            if steps % 10 == 0:
                one.folder.log(LINE | {"step": steps + 1})
        steps += 1
        exchanges.become(0)
        bucket.rank = 0
        time.sleep(max(began + steps * PACE - time.monotonic(), 0.0))
    return steps, time.monotonic() - began, time.process_time() - cpu


def rank_zero(r: Recipe, log: Rank, bucket: CountingBucket, exchanges: Exchanges, seconds: float) -> float:
    """Return the CPU seconds of a step of rank 0 alone, with the display of a command in the same process, without what
    an idle process takes."""
    names = [f"eagleray.runs.follow.{name}" for name in ("out", "progress_bar")]
    with mock.patch(names[0]), mock.patch(names[1]), FollowRun(log.folder.path, 10**6, 1):
        steps, _, cpu = train([log], bucket, exchanges, seconds)
    return cpu / steps


if __name__ == "__main__":
    common.run(main)
