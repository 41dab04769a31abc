"""A command that stood still for so long that another one has its run comes back, on a machine whose clock is wrong.

Nothing of the new owner changes: it continues to the bits and the history of a run that nobody disturbed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from chaos.check import verify
from chaos.job import Job, Run
from chaos.site import SHORT, Site, Whole

from eagleray.base.files import parse_lines
from eagleray.engine import checkpoint
from eagleray.runs.bucket_files import GROWING, RECORDS, RunCopy

pytestmark = pytest.mark.slow
# Any of a later epoch is newer, whatever its step, and takes the place of parts of histories.
EARLIER = re.compile(r"/(checkpoints/step-\d+-e000001\.(pt|json)|[a-z.]+-e000001-\d+)$")
STATUS = {"busy": 2, "superseded": os.EX_TEMPFAIL}


def start(run: Run, out: str, machine: Path, patch: pytest.MonkeyPatch, skew: float = 0.0) -> Job:
    """Start the run's command on a machine of its own, at half a second a step."""
    for name, value in {"XDG_CACHE_HOME": machine, "EAGLERAY_PACE": 0.5, "EAGLERAY_SKEW": skew}.items():
        patch.setenv(name, str(value))
    keys = [f"data.train={run.data}", f"out={out}", "workers=0", "log_steps=1", f"max_steps={SHORT}"]
    run.jobs.append(Job(run, [str(run.recipe), *keys]))
    return run.jobs[-1]


def send(job: Job, number: int) -> None:
    for pid in job.processes():
        os.kill(pid, number)


def stored(site: Site, name: str) -> dict[str, bytes]:
    listed = site.client.list_objects_v2(Bucket="chaos", Prefix=f"{name}/").get("Contents", [])
    return {o["Key"]: site.client.get_object(Bucket="chaos", Key=o["Key"])["Body"].read() for o in listed}


def assert_whole(state: dict[str, torch.Tensor], history: bytes, run: Run, whole: Whole) -> None:
    wanted = whole.run.weights(SHORT)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert [r["step"] for r in parse_lines(history.decode().splitlines())] == list(range(1, SHORT + 1))
    verify(run.lines(), whole.steps, SHORT)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("skew", [-60.0, 60.0])
def test_a_writer_that_comes_back_to_a_run_in_a_store(
    site: Site, whole: Whole, run: Run, skew: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives its lease to another command after 35 seconds. That one stands still while the first comes back,
    so that whatever changes meanwhile is the work of the first."""
    name = tmp_path.name
    old = start(run, f"s3://chaos/{name}", tmp_path / "old", monkeypatch, skew)
    old.wait_for(8)
    send(old, signal.SIGSTOP)
    new = start(run, f"s3://chaos/{name}", tmp_path / "new", monkeypatch)
    new.wait_for(16)
    while new_saves(site, name) < 2:
        time.sleep(0.2)
    send(new, signal.SIGSTOP)
    time.sleep(3)  # until what it was sending has arrived
    before, seen = stored(site, name), histories(name, tmp_path / "before")
    send(old, signal.SIGCONT)
    assert old.finish() == STATUS["superseded"], old.said()
    assert f"out=s3://chaos/{name}: another process has taken this run over" in old.complaint()
    after = stored(site, name)
    late = {key for key in before if after.get(key) != before[key]}  # what it was sending when it was stopped
    assert len(late) <= 1
    assert all(key.removeprefix(f"{name}/") in RECORDS or EARLIER.search(key) for key in late)
    assert histories(name, tmp_path / "after") == seen
    assert not {key for key in after.keys() - before.keys() if not EARLIER.search(key)}
    send(new, signal.SIGCONT)
    assert new.finish() == 0, new.said()
    state = checkpoint.newest(f"s3://chaos/{name}/checkpoints", tmp_path / "reader")
    assert state is not None
    left = histories(name, tmp_path / "left")
    assert b"e000002 is saved" in left["train.log"]
    assert b"this one ends" not in left["train.log"]
    assert_whole(state["method"], left["metrics.jsonl"], run, whole)


def histories(name: str, folder: Path) -> dict[str, bytes]:
    """The histories that a reader finds."""
    RunCopy(f"s3://chaos/{name}", folder).fetch()
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name in GROWING}


def new_saves(site: Site, name: str) -> int:
    """Return how many checkpoints of the second epoch count."""
    listed = site.client.list_objects_v2(Bucket="chaos", Prefix=f"{name}/checkpoints/")["Contents"]
    return sum(o["Key"].endswith("-e000002.json") for o in listed)


def test_a_writer_that_comes_back_to_a_run_in_a_folder(
    site: Site, whole: Whole, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its lock for as long as it stands still, so that others are refused, whatever their clocks say, and
    leave no trace."""
    old = start(run, str(run.out), tmp_path / "old", monkeypatch)
    old.wait_for(8)
    send(old, signal.SIGSTOP)
    before = {p: p.read_bytes() for p in run.out.rglob("*") if p.is_file()}
    for skew in (-60.0, 60.0):
        new = start(run, str(run.out), tmp_path / "new", monkeypatch, skew)
        assert new.finish() == STATUS["busy"], new.said()
        assert "another command is training this run" in new.complaint()
    assert {p: p.read_bytes() for p in run.out.rglob("*") if p.is_file()} == before
    send(old, signal.SIGCONT)
    assert old.finish() == 0, old.said()
    assert_whole(run.weights(SHORT), (run.out / "metrics.jsonl").read_bytes(), run, whole)
