"""A run that forgets images ends with the bits of a run that has never read them, wherever it is and was stopped."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import forked
from helpers.bucket import CountingBucket
from helpers.commands import refused, run
from helpers.killed_runs import assert_same_story, write_data
from helpers.ranks import Run, train
from helpers.recipes import SMALL
from helpers.runs import assert_same

import eagleray
from eagleray import config
from eagleray.base.files import read_lines
from eagleray.data.sample_uses import steps_with
from eagleray.engine import checkpoint
from eagleray.engine.checkpoint_files import step_of
from eagleray.engine.loop import Trainer
from eagleray.exports.source import load_source
from eagleray.exports.write import facts_of_export
from eagleray.runs import layout, lease
from eagleray.runs import recipe as recipes
from eagleray.runs.command import hold
from eagleray.runs.evaluations import Probed, held_out
from eagleray.runs.forgotten import lines_of, read_forgotten, unread_samples, write_forgotten
from eagleray.runs.plan import open_plan
from eagleray.runs.provenance import statements
from eagleray.runs.run_store import run_store
from eagleray.runs.start_guard import StartGuard
from eagleray.runs.stop_signal import StopSignal
from eagleray.storage import store

pytestmark = pytest.mark.usefixtures("quick_runs", "every_save")
EPOCH, STEPS = 3, 18  # steps: an epoch reads three tenths of the 320 images
KEYS = ("optim.epochs=6", "data.test=null", "data.bad_limit=0.2", "checkpoint.steps=2", "monitor.every=4")
KEYS += ("evaluate.limit=48", "evaluate.probe_epochs=1", "evaluate.every=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 320 images, of which some are broken, and the recipe."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    (folder / "small.yaml").write_text(SMALL)
    return folder


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingBucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(lease, "SETTLE", 0.0)  # this bucket lets one process alone create a file
    monkeypatch.setitem(store.STORES, "s3", bucket := CountingBucket(tmp_path / "stored"))
    return bucket


def keys_of(data: Path, out: str, *more: str) -> list[str]:
    source = json.dumps({"url": str(data / "train"), "weight": "0.3"})
    return [f"data.train={source}", f"out={out}", *KEYS, *more]


def pretrain(data: Path, out: str, *more: str) -> eagleray.Run:
    return eagleray.pretrain(data / "small.yaml", keys_of(data, out, *more))


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Runs are asked to stop in this step."""
    take, taken = Trainer.step, list[int]()

    def noted(self: Trainer, at: Any, batch: Any) -> Any:
        taken.append(at.step + 1)
        return take(self, at, batch)

    patch.setattr(Trainer, "step", noted)
    patch.setattr(StopSignal, "asked", lambda self: step in taken)


def uses(out: str) -> dict[str, list[int]]:
    """The steps, counted from 1, that used each image of a run of STEPS steps, by its key."""
    folder = run_store(out).fetch()
    plan = open_plan(recipes.load(str(folder / layout.RECIPE)), note=lambda _: None)
    steps = steps_with(plan.stream, range(len(plan.index)), STEPS, unread_samples(plan.index, folder))
    return {plan.index.key(sample): [s + 1 for s in of_sample] for sample, of_sample in enumerate(steps)}


def first_used_in(found: dict[str, list[int]], *steps: int) -> list[str]:
    """An image for each of some steps that no earlier step has used."""
    return [next(key for key, mine in found.items() if mine and mine[0] == step) for step in steps]


def listing(folder: Path, keys: list[str]) -> Path:
    (path := folder / "takedown.csv").write_text("key\n" + "".join(f"{key}\n" for key in keys))
    return path


def state_of(out: str, scratch: Path) -> dict[str, Any]:
    state = checkpoint.newest(f"{out}/checkpoints", scratch / "scratch")
    assert state is not None
    return state


def assert_as_never_read(data: Path, out: str, tmp_path: Path, *more: str) -> None:
    """A new run that has the list from the start has the same weights, histories and order."""
    write_forgotten(never := str(tmp_path / "never"), read_forgotten(out))
    pretrain(data, never, *more)
    assert_same(state_of(out, tmp_path)["method"], state_of(never, tmp_path)["method"])
    (tmp_path / "copies").mkdir()
    assert_same_story(out, never, tmp_path / "copies")
    assert uses(out) == uses(never)


MILESTONES, LAST = (["checkpoint.keep=1", "checkpoint.milestones=1"], None), (["checkpoint.keep=1"], None)
MANY, FEW = (["checkpoint.keep=9"], 12), (["checkpoint.keep=2"], 9)


@pytest.mark.parametrize(
    ("place", "more", "stop"),
    [
        pytest.param("folder", *MILESTONES, id="finished, with milestones"),
        pytest.param("folder", *LAST, id="finished"),
        pytest.param("folder", *MANY, id="stopped, with checkpoints"),
        pytest.param("folder", *FEW, id="stopped"),
        pytest.param("bucket", *MILESTONES, id="bucket, finished, with milestones", marks=pytest.mark.slow),
        pytest.param("bucket", *LAST, id="bucket, finished"),
        pytest.param("bucket", *MANY, id="bucket, stopped, with checkpoints"),
        pytest.param("bucket", *FEW, id="bucket, stopped", marks=pytest.mark.slow),
    ],
)
def test_the_end_is_that_of_a_run_that_never_read_them(
    place: str,
    more: list[str],
    stop: int | None,
    data: Path,
    tmp_path: Path,
    bucket: CountingBucket,
    monkeypatch: pytest.MonkeyPatch,
):
    out = str(tmp_path / "out") if place == "folder" else "s3://runs/out"
    with monkeypatch.context() as patch:
        if stop:
            stop_at(patch, stop)
        pretrain(data, out, *more)
    before = uses(out)
    gone = first_used_in(before, 8, 9)
    kept = [step_of(name) for name in checkpoint.manifests(f"{out}/checkpoints")]
    goes_back_to = max([0, *(step for step in kept if step < 8)])
    assert goes_back_to or more in (["checkpoint.keep=1"], ["checkpoint.keep=2"])
    found = eagleray.forget(out, listing(tmp_path, [*gone, "nobody"]))
    assert found["images"] == 2
    assert found["not_found"] == ["nobody"]
    assert found["taken"] == (stop or STEPS)
    assert found["used"] == 8
    assert found["step"] == goes_back_to
    assert all(step_of(name) < 8 for name in checkpoint.manifests(f"{out}/checkpoints"))
    assert not eagleray.Run(out).finished
    assert not [r for r in eagleray.Run(out).metrics(pandas=False) if r["step"] > goes_back_to]
    again = eagleray.forget(out, listing(tmp_path, gone))
    assert (again["forgotten"], again["used"]) == (2, None)
    eagleray.pretrain(out)
    after = uses(out)
    assert not any(after[key] for key in gone)
    assert {key for key in after if after[key] != before[key]} > set(gone), "neighbours stand in"
    assert_as_never_read(data, out, tmp_path, *more)


def killed_at(number: int, out: str, listed: str, folder: str, environment: dict[str, str]) -> None:
    """Forget in this process, which ends as if it was killed before the change of a file of this number."""
    os.environ |= environment
    lease.SETTLE = 0.0
    store.STORES["s3"] = CountingBucket(Path(folder))
    changes = iter(range(1, 1000))

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and next(changes) == number:
                os._exit(9)
            return change(*args, **more)

        return call

    for name in ("replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    eagleray.forget(out, listed)
    os._exit(0)


@pytest.mark.parametrize(
    ("place", "every"),
    [
        ("folder", 5),
        ("bucket", 15),
        pytest.param("folder", 1, marks=pytest.mark.slow),
        pytest.param("bucket", 7, marks=pytest.mark.slow),
    ],
)
def test_after_a_kill_at_any_change_of_a_file_the_same_command_completes(
    place: str, every: int, data: Path, tmp_path: Path, bucket: CountingBucket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "DEAD", 1.0)
    out = str(tmp_path / "stored" / "runs" / "out") if place == "folder" else "s3://runs/out"
    pretrain(data, out, "checkpoint.keep=9", "max_steps=11")
    for page in ("export/backbone.json", "export/onnx/README.md", "pictures/knn.png"):
        store.put_bytes(f"{out}/{page}", b"{}")
    listed = listing(tmp_path, first_used_in(uses(out), 8, 9))
    for kind in ("stored", "cache"):
        shutil.copytree(tmp_path / kind, tmp_path / f"{kind} before") if (tmp_path / kind).exists() else None

    def left() -> dict[str, Any]:
        copy = Path(out) if place == "folder" else run_store(out).fetch()
        files = {b.url.removeprefix(out) for b in store.store(out).walk(f"{out}/")}
        kept = {name for name in files if not re.search(r"owner|command|\.jsonl|\.log|mlflow|-e\d|/\.", name)}
        histories = {n: read_lines(copy / n) for n in (layout.METRICS, layout.STEPS, layout.HEALTH, layout.QUARANTINE)}
        return (
            histories
            | {"files": kept, "names": checkpoint.manifests(f"{out}/checkpoints")}
            | {"gone": read_forgotten(out)}
        )

    wanted, status, number = dict[str, Any](), 9, 1 - every
    while status == 9:
        number += every
        for kind in ("stored", "cache"):
            shutil.rmtree(tmp_path / kind, ignore_errors=True)
            if (tmp_path / f"{kind} before").exists():
                shutil.copytree(tmp_path / f"{kind} before", tmp_path / kind)
        args = number, out, str(listed), str(tmp_path / "stored"), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        process = forked.CONTEXT.Process(target=killed_at, args=args)
        process.start()
        process.join()
        status = process.exitcode
        assert status in (0, 9)
        eagleray.forget(out, listed)
        wanted = wanted or left()
        assert left() == wanted, f"killed at change {number}"
    assert number > 10
    assert 0 < step_of(wanted["names"][0]) < 8
    assert len(wanted["gone"]) == 2
    assert {line["step"] for line in wanted["gone"]} == {step_of(wanted["names"][0])}
    assert not [name for name in wanted["files"] if "export" in name or "pictures" in name or "summary" in name]


def test_no_copy_on_this_machine_shows_a_forgotten_image(data: Path, tmp_path: Path, bucket: CountingBucket):
    """A report of the run would show it again, and store its page with the run."""
    out = "s3://runs/out"
    pretrain(data, out, "max_steps=7")
    store.put_bytes(f"{out}/pictures/knn.png", b"")
    page = run_store(out).fetch(layout.PICTURES) / "report.html"
    page.touch()
    assert (picture := page.parent / "pictures" / "knn.png").exists()
    eagleray.forget(out, listing(tmp_path, first_used_in(uses(out), 8)))
    run_store(out).fetch(layout.PICTURES)
    assert not page.exists()
    assert not picture.exists()


def test_an_image_that_no_step_has_used_is_only_recorded(data: Path, tmp_path: Path):
    out = str(tmp_path / "out")
    pretrain(data, out, "max_steps=7")
    later = first_used_in(uses(out), 8, 12)
    before = {path: path.read_bytes() for path in (tmp_path / "out" / "checkpoints").iterdir()}
    names = layout.CHOICE, layout.NEIGHBOURS, "pictures/knn.png", "report.html"
    showing = [tmp_path / "out" / name for name in names]
    for path in showing[1:]:
        store.put_bytes(str(path), b"")
    assert all(path.exists() for path in showing)
    found = eagleray.forget(out, where=f"key in ('{later[0]}', '{later[1]}')")
    assert (found["images"], found["used"], found["step"], found["checkpoints"]) == (2, None, 7, [])
    assert eagleray.Run(out).finished
    assert not any(path.exists() for path in showing), "they may show the images"
    assert {path: path.read_bytes() for path in (tmp_path / "out" / "checkpoints").iterdir()} == before
    pretrain(data, out)
    assert not any(uses(out)[key] for key in later)
    assert_as_never_read(data, out, tmp_path)


def test_a_second_list_goes_back_to_before_a_neighbour_stood_in(data: Path, tmp_path: Path):
    """What stands in for a forgotten image is used in its step, too."""
    out = str(tmp_path / "out")
    pretrain(data, out, "checkpoint.keep=9")
    before = uses(out)
    [first] = first_used_in(before, 8)
    eagleray.forget(out, listing(tmp_path, [first]))
    eagleray.pretrain(out)
    after = uses(out)
    [second, *_] = [key for key in after if 8 in after[key] and 8 not in before[key]]
    assert eagleray.forget(out, listing(tmp_path, [second]))["used"] <= 8
    eagleray.pretrain(out)
    assert not any(uses(out)[key] for key in (first, second))
    assert len({line["key"] for line in read_forgotten(out)}) == 2
    assert_as_never_read(data, out, tmp_path, "checkpoint.keep=9")


@pytest.mark.slow
def test_two_ranks_forget_as_one_does(data: Path, tmp_path: Path):
    keys = [*keys_of(data, "unused", "checkpoint.keep=9", "optim.epochs=4")]
    del keys[1]
    train(data / "small.yaml", [Run(2, tmp_path / "out", [*keys, "max_steps=10"])])
    recipe = recipes.load(str(data / "small.yaml"), [*keys, f"out={tmp_path / 'out'}"])
    (tmp_path / "out" / layout.RECIPE).write_text(config.dump(recipe))  # as the command does
    gone = first_used_in(uses(str(tmp_path / "out")), 8)
    assert 0 < eagleray.forget(tmp_path / "out", listing(tmp_path, gone))["step"] < 8
    write_forgotten(str(tmp_path / "never"), read_forgotten(str(tmp_path / "out")))
    train(data / "small.yaml", [Run(2, tmp_path / name, keys) for name in ("out", "never")])
    out, never = (state_of(str(tmp_path / name), tmp_path)["method"] for name in ("out", "never"))
    assert_same(out, never)
    (tmp_path / "copies").mkdir()
    assert_same_story(str(tmp_path / "out"), str(tmp_path / "never"), tmp_path / "copies")


def test_what_a_user_sees(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "out")
    pretrain(data, out, "checkpoint.keep=9", "max_steps=11")
    gone = first_used_in(uses(out), 8, 9)
    listed = listing(tmp_path, [*gone, '"no\nbody"'])
    capsys.readouterr()
    (note := tmp_path / "out" / layout.MLFLOW).write_text('{"http://a": {"run_id": "7", "key": "k", "name": "out"}}')
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("[!.]*") if p.is_file()}
    run("forget", out, "--samples", str(listed), "--dry-run")
    assert capsys.readouterr().out.splitlines() == [
        "images    2 of the training data",
        "not found 1 keys: no\\x0abody",
        "first use step 8 of 11",
        "goes back to the checkpoint of step 6",
        "deletes   3 later checkpoints (step-000000011, step-000000010, step-000000008), exports, summary and "
        "pictures; histories end at step 6",
        "nothing was changed: --dry-run",
        f"continue  eagleray pretrain {out}",
    ]
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("[!.]*") if p.is_file()} == before
    run("forget", out, "--samples", str(listed))
    [there] = json.loads(note.read_text()).values()
    assert there.keys() == {"key", "name"}
    assert there["key"] != "k", "else MLflow keeps the numbers and the model of the steps that are taken again"
    run("data", "which", out, "--key", gone[0])
    said = capsys.readouterr().out.splitlines()
    assert f"listed in {out}/forgotten.jsonl" in said
    assert said[-1].endswith(f"{gone[0]}: read in 0 steps: none; forgotten: training went on from step 6")
    pretrain(data, out, "checkpoint.keep=9", "max_steps=11")
    assert "forgotten: 2 images, training went on from step 6" in (tmp_path / "out" / "train.log").read_text()
    facts = facts_of_export(load_source(out))
    assert "* forgotten: 2 images, training went on from step 6\n" in statements(facts)["forgotten"]


def test_what_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, moved = str(tmp_path / "out"), tmp_path / "data"
    shutil.copytree(data, moved)
    pretrain(moved, out, "max_steps=2")
    listed = str(listing(tmp_path, ["nobody"]))
    capsys.readouterr()
    for words, line in (
        ((out,), "expected one of --samples FILE and --where EXPRESSION"),
        ((out, "--samples", listed, "--where", "true"), "expected one of --samples FILE and --where EXPRESSION"),
        ((out, "--samples", listed), f"{listed}: none of its 1 keys is in {moved}/train"),
        ((out, "--samples", "none.csv"), "none.csv"),
        ((out, "--where", "blur > 3"), "--where: blur > 3"),
        ((out, "--where", "label = 99"), "--where: label = 99: true for none of 320 samples"),
        ((str(tmp_path / "none"), "--where", "true"), "no run there"),
    ):
        assert line in refused(capsys, "forget", *words)
    with hold(out, "another"):
        assert "another command is training this run" in refused(capsys, "forget", out, "--where", "label = 1")
    shard = next((moved / "train").glob("*.tar"))
    shard.rename(tmp_path / shard.name)
    assert shard.name in refused(capsys, "forget", out, "--where", "label = 1")
    (moved / "train" / "index.parquet").unlink()
    line = refused(capsys, "forget", out, "--where", "label = 1")
    assert "the shards of data.train are not those that the run has read; put back what was there" in line
    shutil.rmtree(moved / "train")
    assert "train" in refused(capsys, "forget", out, "--where", "label = 1")


def test_evaluations_and_the_guard_of_the_start_leave_forgotten_images_out(data: Path, tmp_path: Path):
    keys = keys_of(data, str(tmp_path / "out"), "start={from: nowhere}")
    recipe = recipes.load(str(data / "small.yaml"), keys)
    gone = {0, 1, 2, 319}
    write_forgotten(recipe.out, lines_of(open_plan(recipe, note=lambda _: None).index, gone, 0))
    plan = open_plan(recipe, note=lambda _: None)
    assert plan.index.forgotten == gone
    images = held_out(plan)
    assert isinstance(images, Probed)
    measured = np.concatenate([images.sets.train_samples, images.sets.test_samples, StartGuard(plan).samples])
    assert not gone & set(measured.tolist())
    plan.index.label[3:] = -1
    plan.index.label[3] = 0
    assert not StartGuard(plan).labelled, "no other image has a label, so none is a neighbour"
    unlabelled = replace(plan, stream=replace(plan.stream, index=replace(plan.index, labelled=False)))
    assert not gone & {*held_out(unlabelled).drawn[1].tolist(), *StartGuard(unlabelled).samples.tolist()}
