"""Two writers of one run in a store, either of which may crash or be paused at any request, in any order.

Clocks say all the time that the other one is dead, so that each takes the run over whenever it starts. Whatever
happens, the newest checkpoint is whole, and at least as new as any that a writer was told to be saved.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.bucket import CountingBucket
from helpers.rank_zero import end, rank_zero
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from eagleray.base.errors import Superseded
from eagleray.engine import checkpoint
from eagleray.engine.checkpoint import Writer
from eagleray.engine.checkpoint_files import last_epoch
from eagleray.runs import layout, lease
from eagleray.storage import store

OUT = "s3://runs/run"
CHECKPOINTS = f"{OUT}/checkpoints"
KEEP = 2
SLOTS = st.integers(0, 1)
AT = st.integers(1, 14)  # the request at which something happens to the process that makes it; a save has about ten
WHAT = st.sampled_from(
    ["nothing", "crash", "save", "start", "succeed", "succeed"]
)  # to it, or meanwhile by the other one


class Crash(BaseException):
    """The process ends at this request."""


class PausingBucket(CountingBucket):
    """A store that calls a function before each request. All that is in it seems to have been there for long."""

    before: Callable[[], None] | None = None

    def _path(self, url: str) -> str:
        if self.before:
            self.before()
        return super()._path(url)

    def look(self, url: str) -> tuple[bytes, float]:
        return super().look(url)[0], 1000.0


class Process:
    """Rank 0 of a start: it claims the run, continues from the newest checkpoint, and saves."""

    def __init__(self, folder: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(folder)
        scratch = folder / "scratch"
        found = checkpoint.blobs_of(CHECKPOINTS)
        self.mirror = rank_zero(OUT, folder.name, last_epoch(found), thread=False)
        self.epoch = self.mirror.claim.epoch
        state = checkpoint.newest(CHECKPOINTS, scratch)
        self.step = state["step"] if state else 0
        self.writer = Writer(
            CHECKPOINTS,
            keep=KEEP,
            scratch=scratch,
            first=self.mirror.copy,
            epoch=self.epoch,
            guard=self.mirror.claim.check,
        )

    def save(self) -> tuple[int, int]:
        """Save a checkpoint of the next step. Returns what it is ordered by, its epoch and step."""
        self.step += 1
        self.mirror.folder.mkdir(parents=True, exist_ok=True)
        with (self.mirror.folder / layout.METRICS).open("a") as file:
            file.write(f'{{"step": {self.step}}}\n')
        values = torch.tensor([self.epoch, self.step])
        self.writer.save(self.step, {"step": self.step, "method": {"values": values}})
        self.writer.settle()
        return self.epoch, self.step


class TwoWriters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.folder = pytest.MonkeyPatch(), tempfile.TemporaryDirectory()
        self.root, self.number = Path(self.folder.name), 0
        self.bucket = PausingBucket(self.root)
        self.patch.setitem(store.STORES, "s3", self.bucket)
        self.patch.setenv("XDG_CACHE_HOME", str(self.root))
        self.patch.setattr(lease, "SETTLE", 0.0)
        self.patch.setattr(threading, "excepthook", lambda args: None)
        self.processes: list[Process | None] = [None, None]
        self.claimed = 0  # the highest epoch that a start has
        self.counted: set[tuple[int, int]] = set()  # what was told to be saved

    def teardown(self) -> None:
        for process in self.processes:
            self.end(process)
        self.patch.undo()
        self.folder.cleanup()

    def end(self, process: Process | None) -> None:
        if process:
            end(process.mirror)

    def start_one(self, slot: int) -> None:
        self.end(self.processes[slot])
        self.processes[slot], self.number = None, self.number + 1
        process = Process(self.root / f"machine{self.number}")
        assert process.epoch > 0
        self.processes[slot], self.claimed = process, max(self.claimed, process.epoch)

    def save_one(self, slot: int) -> None:
        process = self.processes[slot]
        if process is None:
            return
        superseded = process.epoch < self.claimed
        try:
            saved = process.save()
        except Superseded:  # by one that has begun, or is about to
            return
        if not self.crashed:
            assert not superseded, f"{saved} was saved, and a process of epoch {self.claimed} had begun before"
            self.counted.add(saved)

    def succeed_one(self, slot: int) -> None:
        self.start_one(slot)
        self.save_one(slot)

    def run(self, action: Callable[[int], None], slot: int, at: int, what: str) -> None:
        """Do something, at one of whose requests the process crashes, or is paused while the other one acts."""
        requests, self.crashed = 0, False

        def before() -> None:
            nonlocal requests
            requests += 1
            if self.crashed:
                raise Crash
            if requests != at or what == "nothing":
                return
            if what == "crash":
                self.crashed = True
                raise Crash
            self.bucket.before = None
            actions = {"start": self.start_one, "save": self.save_one, "succeed": self.succeed_one}
            actions[what](1 - slot)
            self.bucket.before = before

        self.bucket.before = before
        try:
            action(slot)
        except Crash:
            pass
        finally:
            self.bucket.before = None
        if self.crashed:
            self.end(self.processes[slot])
            self.processes[slot] = None
        self.crashed = False

    @rule(slot=SLOTS, at=AT, what=WHAT)
    def start(self, slot: int, at: int, what: str) -> None:
        self.run(self.start_one, slot, at, what)

    @rule(slot=SLOTS, at=AT, what=WHAT)
    def save(self, slot: int, at: int, what: str) -> None:
        self.run(self.save_one, slot, at, what)

    @invariant()
    def what_was_told_to_be_saved_is_there(self) -> None:
        if not self.counted:
            return
        state = checkpoint.newest(CHECKPOINTS, self.root / f"reader{time.monotonic_ns()}")
        assert state is not None
        assert tuple(state["method"]["values"].tolist()) >= max(self.counted)
        assert state["step"] == state["method"]["values"][1]
        names = checkpoint.manifests(CHECKPOINTS)
        assert len(names) <= 2 * KEEP + 2


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)


def test_two_writers_and_crashes_between_any_two_requests():
    few = settings(SETTINGS, derandomize=True, max_examples=30, stateful_step_count=12)
    run_state_machine_as_test(TwoWriters, settings=few)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_two_writers_for_long_fuzz():
    run_state_machine_as_test(TwoWriters, settings=settings(SETTINGS, max_examples=200, stateful_step_count=25))
