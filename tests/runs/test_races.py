"""Commands that meet on one run, in a folder or in a store: its weights and its history are those of one command."""

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time as honest_time
from typing import Any

import pytest
import torch
from helpers.bucket import CountingBucket
from helpers.forked import CONTEXT, Command
from helpers.recipes import SMALL
from helpers.runs import assert_same

import eagleray
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint, export
from eagleray.runs import background, lease, run_store
from eagleray.runs.bucket_files import RunCopy
from eagleray.storage import store

pytestmark = pytest.mark.slow
STEPS = 20
KEYS: dict[str, Any] = {"checkpoint.steps": 5, "evaluate.probe_epochs": 0, "evaluate.limit": 32, "log_steps": 1}
OTHER = {"checkpoint.steps": 7, "checkpoint.keep": 1}  # what a second command may have changed
BUSY = "Busy: out="


class Bucket(CountingBucket):
    """A bucket with a clock of its own, which several processes use."""

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return Bucket, (self.folder,)

    def look(self, url: str) -> tuple[bytes, float]:
        return self.get(url), honest_time() - os.stat(self._path(url)).st_mtime


def arrange(bucket: Bucket, put: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Let commands notice each other soon, use a bucket and check no export in a new process."""
    put(export, "compare", lambda *_: 0.0)
    for name, seconds in {"DEAD": 6.0, "BEAT": 0.3, "SETTLE": 0.3}.items():
        put(lease, name, seconds)
    put(background.Background, "seconds", 0.1)
    put(run_store, "SOON", 0.2)
    put(run_store, "PATIENCE", 2.0)
    put(store, "STORES", store.STORES | {"s3": bucket})


def begin(bucket: Bucket, barrier: Any = None, lead: float = 0.0) -> None:
    """Arrange a new process, and wait for the others."""
    arrange(bucket)
    if barrier:
        barrier.wait()
    time.sleep(lead)


class Site:
    """A run in a folder or in a store, and how it ends without any meeting."""

    def __init__(self, folder: Path, out: str, keys: dict[str, Any], recipe: Path) -> None:
        self.folder, self.out, self.keys, self.recipe = folder, out, keys, recipe
        self.commands: list[Command] = []

    def start(
        self, more: dict[str, Any] | None = None, *, barrier: Any = None, lead: float = 0.0, skew: float = 0.0
    ) -> Command:
        """Start the command, on a machine of its own where the run is in a store."""
        first = functools.partial(begin, Bucket(self.folder), barrier, lead)
        number = len(self.commands) + 1 if self.out.startswith("s3:") else 0
        machine = self.folder / f"machine{number}"
        self.commands.append(Command(self.recipe, self.keys | (more or {}), self.out, machine, begin=first, skew=skew))
        return self.commands[-1]

    def first(self, lines: int) -> Command:
        """Start the first command, and wait until it has written so many lines of its history."""
        first, end = self.start(), time.monotonic() + 60
        while True:
            folder = self.folder / "machine1" if self.out.startswith("s3:") else self.stored.parent
            paths = [p for p in folder.rglob("metrics.jsonl") if p.parent.name in ("work", "run")]
            if any(p.read_bytes().count(b"\n") >= lines for p in paths):
                return first
            assert first.process.is_alive(), first.outcome()
            assert time.monotonic() < end
            time.sleep(0.005)

    def files(self) -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in self.stored.rglob("*") if p.is_file()}

    @property
    def stored(self) -> Path:
        return self.folder / self.out.removeprefix("s3://") if self.out.startswith("s3:") else Path(self.out)

    def weights(self) -> dict[str, torch.Tensor]:
        state = checkpoint.newest(f"{self.out}/checkpoints", self.folder / "reader")
        assert state is not None
        assert state["step"] == STEPS
        return dict(state["method"])

    def verify(self, whole: dict[str, torch.Tensor]) -> None:
        assert_same(self.weights(), whole)
        folder = self.stored
        if self.out.startswith("s3:"):
            RunCopy(self.out, folder := self.folder / "reader").fetch()
        assert [r["step"] for r in read_lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def keys(shards: Path) -> dict[str, Any]:
    return {"data.train": str(shards / "train"), "max_steps": STEPS, **KEYS}


@pytest.fixture(scope="module")
def whole(recipe: Path, keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "compare", lambda *_: 0.0)
        eagleray.pretrain(recipe, keys, out=out, workers=0)
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None
    return dict(state["method"])


@pytest.fixture(params=["folder", "store"])
def site(
    request: pytest.FixtureRequest, recipe: Path, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    arrange(Bucket(tmp_path), monkeypatch.setattr)
    site = Site(tmp_path, str(tmp_path / "run") if request.param == "folder" else "s3://runs/run", keys, recipe)
    yield site
    for started in site.commands:
        started.kill()


@pytest.mark.parametrize("lead", [0.0, 0.05, 0.5])
def test_two_commands_that_start_at_once(site: Site, lead: float, whole: dict[str, torch.Tensor]) -> None:
    barrier = CONTEXT.Barrier(2)
    first = site.start(barrier=barrier)
    second = site.start(OTHER, barrier=barrier, lead=lead)
    outcomes = [first.outcome(), second.outcome()]
    refused = [o for o in outcomes if o != "done"]
    assert len(refused) < 2
    assert all(o.startswith(BUSY) and "\n" not in o for o in refused), outcomes
    site.verify(whole)
    if refused:  # the recipe is that of the one that ran
        kept = 5 if outcomes[0] == "done" else 7
        assert f"steps: {kept}" in (site.stored / "recipe.yaml").read_text()


@pytest.mark.parametrize("step", [1, 6, 19])
def test_two_commands_that_continue_a_killed_run_at_once(site: Site, step: int, whole: dict[str, torch.Tensor]) -> None:
    killed = site.first(step)
    killed.kill()
    barrier = CONTEXT.Barrier(2)
    commands = [site.start(more, barrier=barrier) for more in ({}, OTHER)]
    outcomes = [c.outcome() for c in commands]
    assert outcomes.count("done") >= 1, outcomes
    assert all(o == "done" or o.startswith(BUSY) for o in outcomes), outcomes
    site.verify(whole)


@pytest.mark.parametrize("step", [1, 17, 19, 20])
def test_a_request_to_stop_that_meets_the_end(site: Site, step: int, whole: dict[str, torch.Tensor]) -> None:
    """It stops this command, or comes too late; the next command does not hear it, and ends the run."""
    asked = site.first(step)
    asked.send(signal.SIGTERM)
    assert (outcome := asked.outcome()) in ("done", "stopped"), outcome
    assert site.start().outcome() == "done"
    site.verify(whole)


@pytest.mark.parametrize("site", ["folder"], indirect=True)
@pytest.mark.parametrize("skew", [-60.0, 60.0])
def test_a_writer_that_comes_back(site: Site, skew: float, whole: dict[str, torch.Tensor]) -> None:
    """It stood still while another command with a wrong clock came, and still holds its lock, so that one is refused.
    tests/runs/test_lease.py has the same in a store, where it has lost the run."""
    old = site.first(6)
    old.send(signal.SIGSTOP)
    time.sleep(1)
    files = site.files()
    assert site.start(OTHER, skew=skew).outcome().startswith(BUSY)
    assert site.files() == files
    old.send(signal.SIGCONT)
    assert old.outcome() == "done"
    assert json.loads((site.stored / "summary.json").read_text())["restarts"] == 0
    site.verify(whole)
