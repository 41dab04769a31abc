"""Runs that are kept in a store: whichever machine goes on, it finds all of them there."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.bucket import CountingBucket
from helpers.rank_zero import close, end, rank_zero
from helpers.recipes import SMALL
from helpers.runs import assert_same, start, weights
from helpers.s3.server import Swift, store_of

import eagleray
from eagleray.base import dist
from eagleray.base.errors import Superseded, UserError
from eagleray.base.files import read_lines
from eagleray.data import kinds
from eagleray.engine import checkpoint
from eagleray.evaluation import evaluate, results
from eagleray.evaluation.extraction import Task
from eagleray.evaluation.target import Inputs
from eagleray.protocols.needs import Extraction
from eagleray.runs import layout, lease
from eagleray.runs import recipe as recipes
from eagleray.runs.background import Background
from eagleray.runs.bucket_files import RunCopy, part_url
from eagleray.runs.plan import open_plan
from eagleray.runs.restore import restore
from eagleray.runs.run_store import run_store
from eagleray.runs.sinks import Sinks
from eagleray.runs.stop_signal import StopSignal
from eagleray.storage import store
from eagleray.storage.store import LocalStore


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with store_of(tmp_path_factory.mktemp("s3"), "runs") as server:
        yield server


@pytest.fixture
def out(swift: Swift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine0"))
    return f"s3://runs/{tmp_path.name}"


def test_a_copy_grows_is_replaced_and_never_falls_behind(out: str, tmp_path: Path):
    copy, file = RunCopy(out, tmp_path / "here"), tmp_path / "here" / "metrics.jsonl"
    part = part_url(out, layout.METRICS, 1, 0).removeprefix(f"{out}/")
    run_store(out).put(part, "one\n")
    copy.fetch()
    with file.open() as reader:
        reader.read()
        run_store(out).put(part, "one\ntwo\n")
        copy.fetch()
        assert reader.read() == "two\n"
    file.write_text("one\ntwo\nthree\n")  # the machine that wrote them is ahead of what it has sent
    RunCopy(out, tmp_path / "here", may_be_ahead=True).fetch()
    assert file.read_text() == "one\ntwo\nthree\n"
    run_store(out).put(part, "one\nother\n")  # another machine went on from before
    copy.fetch()
    assert file.read_text() == "one\nother\n"


def test_a_copy_has_what_the_store_has_and_no_more(bucket: CountingBucket):
    """Also where another run was copied from there before, of which nothing may become part of the next one."""
    run = run_store("s3://runs/run")
    for name, text in ((layout.RECIPE, "a: 1\nb: 2\n"), (layout.SUMMARY, "{}"), (layout.SWEEP_ROWS, "{}\n")):
        run.put(name, text)
    run.append(layout.METRICS, "one\ntwo\n")
    run.put(f"{layout.EXPORT}/backbone.json", "{}")
    folder = run.fetch()
    for blob in run.list():
        bucket.delete(blob.url)
    run.put(layout.RECIPE, "a: 1\n")
    run.append(layout.METRICS, "one\n")
    run.fetch()
    assert {p.name: p.read_text() for p in folder.glob("[!.]*") if p.is_file()} == {
        layout.RECIPE: "a: 1\n",
        layout.METRICS: "one\n",
    }
    shutil.rmtree(bucket.folder / "runs")
    run.fetch()
    assert not [p for p in folder.rglob("[!.]*") if p.is_file()]


def test_an_index_that_cannot_lie_beside_the_shards_lies_in_the_store_of_the_run(
    bucket: CountingBucket, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There each machine finds it that goes on, and each worker that evaluates."""
    data, honest, scans = tmp_path / "data", LocalStore.put, list[str]()
    shutil.copytree(shards / "train", data, ignore=shutil.ignore_patterns("index*"))

    def put(self: LocalStore, url: str, source: Path, **how: Any) -> None:
        if url.startswith(str(data)):
            raise PermissionError(13, "Permission denied")
        honest(self, url, source, **how)

    scan = kinds.scan
    monkeypatch.setattr(LocalStore, "put", put)
    monkeypatch.setattr(kinds, "scan", lambda blob, passed: [scans.append(blob.url), scan(blob, passed)][1])
    (tmp_path / "small.yaml").write_text(SMALL)
    keys = [f"data.train={data}", "data.test=null", "out=s3://runs/run"]
    images = len(open_plan(recipes.load(str(tmp_path / "small.yaml"), keys)).index)
    assert len(scans) == len(list(data.glob("*.tar")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    plan = open_plan(recipes.load(str(tmp_path / "small.yaml"), keys))
    inputs = Inputs("", "", spare="s3://runs/run")
    task = Task(inputs, str(data), np.arange(2), Extraction("pooled", 16, 16))
    assert len(plan.index) == len(task.open()) == images
    assert len(scans) == len(list(data.glob("*.tar")))


def test_processes_that_fetch_at_once_get_whole_files(
    bucket: CountingBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As those of an evaluation on one machine do."""
    out = "s3://runs/run"
    for name in layout.SUMMARY, layout.RECIPE, layout.LOG:
        run_store(out).put(name, name * 1000)
    run_store(out).append(layout.LOG, layout.LOG * 1000)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.02), sync(file))[1])  # a slow disk
    with ThreadPoolExecutor(8) as threads:
        for fetched in [threads.submit(RunCopy(out, tmp_path / "here").fetch) for _ in range(8)]:
            fetched.result()
    for name in layout.SUMMARY, layout.RECIPE, layout.LOG:
        assert (tmp_path / "here" / name).read_text() == name * 1000


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingBucket:
    """The store of a run at s3://runs/run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lease, "SETTLE", 0.0)  # this bucket lets one process alone create a file
    bucket = CountingBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    return bucket


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_was_deleted_in_its_store_begins_anew(
    steps: int, bucket: CountingBucket, small: Path, shards: Path, tmp_path: Path
):
    """Also on the machine that had trained it, to its end or not, and with another recipe."""
    keys = {"data.train": str(shards / "train"), "evaluate.probe_epochs": 0, "log_steps": 2, "checkpoint.steps": 4}
    first = eagleray.pretrain(small, keys, out="s3://runs/run", workers=0, max_steps=steps)
    id = json.loads((first.folder / layout.MLFLOW).read_text())
    shutil.rmtree(tmp_path / "runs")
    again = eagleray.pretrain(small, keys | {"seed": 1, "log_steps": 4}, out="s3://runs/run", workers=0, max_steps=8)
    assert again.finished
    for folder in again.folder, run_store("s3://runs/run").work:
        assert [r["step"] for r in read_lines(folder / layout.METRICS)] == [4, 8]
        assert len([line for line in read_lines(folder / layout.STARTS) if "step" in line]) == 1
        assert json.loads((folder / layout.MLFLOW).read_text()) != id


def test_of_a_long_history_only_new_lines_are_fetched(bucket: CountingBucket, tmp_path: Path):
    out, copy = "s3://runs/run", RunCopy("s3://runs/run", tmp_path / "here")
    lines = [f"line {n}, whose text is not that of others\n" for n in range(20_000)]
    run_store(out).append(layout.METRICS, "".join(lines[:19_990]))
    copy.fetch()
    bucket.lengths.clear()
    run_store(out).append(layout.METRICS, "".join(lines[19_990:]))
    copy.fetch()
    assert (tmp_path / "here" / "metrics.jsonl").read_text() == "".join(lines)
    assert sum(bucket.lengths) < 10_000


def stored(out: str, tmp_path: Path, name: str) -> str:
    """A history as it is in the store."""
    RunCopy(out, tmp_path / "reader").fetch()
    return (tmp_path / "reader" / name).read_text()


def test_files_are_uploaded_at_each_checkpoint_and_at_least_once_a_minute(bucket: CountingBucket, tmp_path: Path):
    out = "s3://runs/run"
    rank, waits = rank_zero(out, "command", thread=False), list[float]()
    (rank.folder / layout.TENSORBOARD).mkdir(parents=True)
    for n in range(8):
        for name in (layout.METRICS, f"{layout.TENSORBOARD}/events"):
            with (rank.folder / name).open("a") as file:
                file.write(f"{n}\n")
        waits.append(rank.seconds)
        rank.tick()
        assert stored(out, tmp_path, layout.METRICS).endswith(f"{n}\n")
    assert waits == [3, 6, 12, 24, 48, 60, 60, 60]
    assert run_store(out).get(f"{layout.TENSORBOARD}/events") is None, "files that are sent whole wait for a checkpoint"
    rank.copy()  # before a checkpoint counts
    assert run_store(out).get(f"{layout.TENSORBOARD}/events") == "".join(f"{n}\n" for n in range(8))
    with (rank.folder / layout.METRICS).open("a") as file:
        file.write("last\n")
    close(rank)
    assert stored(out, tmp_path, layout.METRICS).endswith("last\n")


def test_a_start_on_another_machine_is_the_same_run_in_wandb(
    bucket: CountingBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, ids = "s3://runs/run", []
    monkeypatch.setattr(lease, "SETTLE", 0.0)
    opened = SimpleNamespace(log=ids.append, define_metric=lambda *_, **__: None, finish=lambda: None)
    wandb = SimpleNamespace(Settings=dict, init=lambda **given: ids.append(given["id"]) or opened)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for machine in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        rank = rank_zero(out, "command")
        Sinks(["wandb"], rank.folder, 0, {}).close()
        close(rank)
    assert len(ids) == 2
    assert ids[0] == ids[1]


def test_only_rank_0_asks_the_store_whether_to_stop(bucket: CountingBucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Background, "seconds", 0.01)
    told: list[str] = []
    monkeypatch.setattr(dist, "tell", told.append)
    monkeypatch.setattr(dist, "told", lambda message: message in told)
    monkeypatch.setattr(dist, "size", lambda: 2)
    monkeypatch.setattr(dist, "rank", lambda: 1)
    other = StopSignal("s3://runs/run")
    time.sleep(0.1)
    assert not other.asked()
    assert not bucket.requests
    monkeypatch.setattr(dist, "rank", lambda: 0)
    first = StopSignal("s3://runs/run")
    run_store("s3://runs/run").put(".stop", "")
    end = time.monotonic() + 10
    while not first.asked() and time.monotonic() < end:
        time.sleep(0.01)
    assert first.asked()
    monkeypatch.setattr(dist, "rank", lambda: 1)
    assert other.asked()  # also while it waits for data
    first.close()


def test_only_histories_and_the_export_are_copied(out: str, tmp_path: Path):
    for name in ("export/backbone.json", ".stop", "checkpoints/step-000000001.pt"):
        run_store(out).put(name, name)
    run_store(out).append(layout.LOG, "line\n")
    RunCopy(out, tmp_path / "here").fetch()
    found = {str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*") if p.is_file()}
    assert found == {"train.log", "export/backbone.json", ".fetch"}


@pytest.mark.slow  # tests/runs/test_lease.py has it without a server
def test_one_command_at_a_time_and_the_next_one_once_the_first_is_silent(out: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "DEAD", 3.0)
    monkeypatch.setattr(lease, "BEAT", 0.5)
    monkeypatch.setattr(Background, "seconds", 0.2)
    first = rank_zero(out, "first")
    again = rank_zero(out, "first")  # Ray's restarted worker: the same command
    latest = time.monotonic() + 10
    while not first.claim.lost and time.monotonic() < latest:
        time.sleep(0.1)
    assert first.claim.lost
    with pytest.raises(Superseded, match="another process has taken this run over"):
        first.claim.check()
    close(first)
    with pytest.raises(UserError, match="another command is training this run"):
        rank_zero(out, "second")
    end(again)
    began = time.monotonic()
    close(rank_zero(out, "second"))
    assert time.monotonic() - began < 30


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_killed_run_goes_on_from_another_machine(small: Path, shards: Path, tmp_path: Path, out: str):
    keys = [str(small), f"data.train={shards / 'train'}", "evaluate.probe_epochs=0", "optim.epochs=40", "max_steps=60"]
    keys += ["checkpoint.steps=9", "data.workers=0", "workers=0"]
    process = start([*keys, f"out={out}"], XDG_CACHE_HOME=str(tmp_path / "machine1"))
    step = wait_until_saved(out, 18)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    forget(out)
    elsewhere = {name: str(tmp_path / "machine2") for name in ("XDG_CACHE_HOME", "HOME")}
    other = start([f"{out}/recipe.yaml", "optim.epochs=41"], **elsewhere).communicate(timeout=100)[0]
    assert "holds another run: optim.epochs is 40 there and 41 here" in other, "as for the command that began it"
    process = start([out], **elsewhere)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    assert f"continuing from step {step}" in text
    assert str(tmp_path / "machine2") in text.split("load it")[1]
    process = start([*keys, f"out={tmp_path / 'whole'}"])
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    state = checkpoint.newest(f"{out}/checkpoints", tmp_path / "machine3")
    assert state is not None
    assert_same(state["method"], weights(tmp_path / "whole"))
    RunCopy(out, tmp_path / "machine3").fetch()
    lines = read_lines(tmp_path / "machine3" / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(1, 61))
    summary = json.loads((tmp_path / "machine3" / "summary.json").read_text())
    assert summary["restarts"] == 1
    assert 0 < summary["goodput"] < 1
    assert (tmp_path / "machine3" / "export" / "backbone.safetensors").exists()
    assert not run_store(out).is_claimed()
    text = start([*keys, f"out={out}"], XDG_CACHE_HOME=str(tmp_path / "machine4")).communicate(timeout=120)[0]
    assert "done already" in text
    line = start([out], XDG_CACHE_HOME=str(tmp_path / "machine4")).communicate(timeout=120)[0]
    assert line == f"error: {out}: the run has finished, with 60 steps; a larger max_steps continues it\n"
    recipe, _, _ = restore(out)
    assert recipe.out == out
    asked = evaluate.Request(out, ["knn", "components"], str(shards / "train"))
    found = evaluate.evaluate(replace(asked, settings={"components.size": "32", "images": "2"}))
    assert not found.refused
    assert found.folder == out
    assert results.load(out)[0].numbers["knn/top1"] == summary["knn/top1"]
    [picture] = results.load(out)[1].pictures
    assert store.store(out).get(f"{out}/{picture}").startswith(b"\x89PNG")


def forget(out: str) -> None:
    """Let a killed command count as given up, rather than wait for that."""
    for name in (layout.COMMAND, layout.OWNER):
        found = lease.holder(out, name)
        assert found is not None
        assert found.alive
        run_store(out).put(f"{name}-{found.epoch:06d}", json.dumps(found.record | {"released": True}))


def wait_until_saved(out: str, step: int) -> int:
    """The newest checkpoint that counts, once it is of this step or a later one."""
    for _ in range(600):
        names = checkpoint.manifests(f"{out}/checkpoints")
        if names and step_of(names[0]) >= step:
            return step_of(names[0])
        time.sleep(0.2)
    raise AssertionError(f"no checkpoint of step {step}")


def step_of(name: str) -> int:
    return int(name.split("-")[1])


@pytest.mark.slow
def test_a_run_in_a_store_is_asked_to_stop(small: Path, shards: Path, tmp_path: Path, out: str):
    keys = [str(small), f"data.train={shards / 'train'}", f"out={out}", "optim.epochs=4000", "workers=0"]
    process = start([*keys, "checkpoint.steps=9"])
    wait_until_saved(out, 9)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=100)[0]
    assert process.returncode == 1, text
    assert "the same command continues" in text
    steps = [r["step"] for r in read_lines(run_store(out).work / "metrics.jsonl")]
    assert step_of(checkpoint.manifests(f"{out}/checkpoints")[0]) == steps[-1]


@pytest.mark.parametrize(
    ("given", "said"), [("s3://no-such-bucket/run", "no-such-bucket"), ("ftp://b/run", "ftp://b/run")]
)
def test_a_place_that_cannot_be_written_is_said_in_one_line(
    swift: Swift, small: Path, shards: Path, given: str, said: str
):
    process = start([str(small), f"data.train={shards / 'train'}", f"out={given}", "workers=0"])
    text = process.communicate(timeout=100)[0]
    assert process.returncode == 2, text
    assert text.splitlines()[-1].startswith("error: out=")
    assert said in text.splitlines()[-1]
