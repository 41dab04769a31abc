"""The Python API: names, laziness, overrides, runs, and errors as exceptions."""

import ast
import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import forked
from helpers.commands import refused
from helpers.recipes import SMALL
from helpers.runs import assert_same, weights

import eagleray
from eagleray import config
from eagleray.api.overrides import overrides_of
from eagleray.base.files import read_lines
from eagleray.engine.export import to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.runs import layout

pytestmark = pytest.mark.usefixtures("untracked_runs")
ROOT = Path(eagleray.__file__).parent
QUICK: dict[str, Any] = {"evaluate.probe_epochs": 0, "evaluate.limit": 32}


@pytest.fixture(scope="module")
def run(untracked_runs: None, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> eagleray.Run:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.yaml").write_text(SMALL)
    return eagleray.pretrain(
        folder / "small.yaml", {"data.train": shards / "train", **QUICK}, out=folder / "run", max_steps=4
    )


def test_the_import_is_lazy_and_quick():
    code = (
        "import sys, time; began = time.process_time(); import eagleray; took = time.process_time() - began\n"
        "assert 'pretrain' in dir(eagleray)\n"
        "heavy = {'torch', 'timm', 'numpy', 'ray', 'rich', 'yaml', 'pydantic'} & set(sys.modules)\n"
        "print(took < 0.5, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    stub = {a.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert {*stub, "__version__"} == set(eagleray.__all__)
    for name, module in stub.items():
        item = getattr(eagleray, name)
        if inspect.ismodule(item):
            assert item.__name__ == f"{module}.{name}"
            continue
        assert getattr(sys.modules[item.__module__], name) is item
        assert item.__module__.startswith("eagleray."), module
    assert (ROOT / "py.typed").exists()


def test_no_room_hides_a_function():
    rooms = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert not rooms & set(eagleray.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'pretrian'"):
        eagleray.pretrian  # noqa: B018


@pytest.mark.parametrize(
    "value",
    [
        *(1e-6, 256, "s3://bucket/train", "a: b", "{00..12}.tar", "[x]", "yes", "1", None, True, [0.1, 1.0], [], {}),
        *({"value": 1e-3, "end": 0.0}, [{"size": 16}, {"size": 8}], "é", "a\nb"),
    ],
)
def test_a_value_arrives_as_it_was_given(value: Any):
    [line] = overrides_of({"a.b": value})
    assert config.override(line) == {"a": {"b": value}}


def test_overrides_of_other_kinds(tmp_path: Path):
    assert overrides_of(["a=1"], out=tmp_path, workers=None) == ["a=1", f"out={tmp_path}"]
    assert overrides_of({"a": torch.tensor(2.0)}) == ["a=2.0"]
    numbers = {"a": np.float64(0.1), "b": [np.int64(2), np.bool_(True)], "c": np.array([0.5, 1.0]), "d": np.str_("x")}
    assert overrides_of(numbers) == ["a=0.1", "b=[2, true]", "c=[0.5, 1.0]", "d=x"]
    with pytest.raises(eagleray.UserError, match="expected a mapping such as"):
        overrides_of("optim.batch=3")
    with pytest.raises(eagleray.UserError, match="expected text, a number"):
        overrides_of({"a": object()})


def test_a_run_says_where_and_what(run: eagleray.Run, shards: Path):
    assert run.finished
    assert run.summary["steps"] == 4
    assert [row["step"] for row in run.metrics(pandas=False)] == [1, 2, 3, 4]
    assert list(run.metrics()["step"]) == [1, 2, 3, 4]
    assert run.recipe["data"]["train"] == str(shards / "train")
    assert repr(eagleray.Run(run.out)) == f"Run({run.out!r}, finished=True, step=4)"
    assert "4 steps" in str(run)
    assert "export/backbone.safetensors" in str(run)
    with pytest.raises(eagleray.UserError, match="no run there"):
        eagleray.Run("nowhere")


def test_a_run_its_checkpoint_and_its_export_are_one_backbone(run: eagleray.Run, tmp_path: Path):
    x = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        want = run.backbone()(x).pooled
        checkpoint = max((run.folder / "checkpoints").glob("*.pt"))
        file = eagleray.export(run, tmp_path)
        assert file == tmp_path / "backbone.safetensors"
        for source in (run, run.out, checkpoint, f"{run.out}/export", file):
            backbone = eagleray.load(source)
            assert not backbone.training
            assert torch.allclose(backbone(x).pooled, want, atol=1e-5), source
    with pytest.raises(eagleray.UserError, match=r"none\.pt: no such run, checkpoint or file"):
        eagleray.load(tmp_path / "none.pt")


def test_a_backbone_is_loaded_without_a_change_of_the_callers_seed(run: eagleray.Run):
    before = torch.manual_seed(7).get_state()
    eagleray.load(run)
    assert torch.equal(torch.get_rng_state(), before)
    run.backbone()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_export_of_a_run_says_what_it_was_made_from(run: eagleray.Run):
    facts = eagleray.verify(f"{run.out}/export").facts
    begun = next(row for row in read_lines(run.folder / layout.STARTS) if "order" in row)
    assert list(facts.digests) == ["recipe", "data", "order", "code"]
    assert {name: (begun[name],) for name in facts.digests} == facts.digests
    assert facts.steps == 4


@pytest.mark.parametrize("keys", [{"pool": "mean"}, {"position": "dino"}, {"norm": "batch", "position": "sincos"}])
def test_an_export_is_loaded_as_the_recipe_built_it(keys: dict[str, Any], tmp_path: Path):
    """At any image size, where timm's own model may place its patches otherwise."""
    network = Network(
        name="vit_small_patch16_224",
        options={"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
        **keys,
    )
    given = {k: getattr(network, k) for k in ("position", "pool", "norm", "stem", "options")}
    backbone = Backbone(network.name, **given).eval()
    loaded = eagleray.load(to_timm(backbone, network, tmp_path))
    x = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        assert torch.equal(loaded(x).pooled, backbone(x).pooled)
        assert torch.equal(loaded(x).patches, backbone(x).patches)


def test_wrong_keys_are_exceptions_with_the_line_of_the_command(
    small: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for keys in ({"optim.btach": 32}, {"data.train": "/nowhere/at/all"}, {"optim.batch": "many"}, {"data.train": None}):
        given = {"data.train": str(shards / "train"), **keys}
        with pytest.raises(eagleray.UserError) as error:
            eagleray.pretrain(small, given, out=tmp_path / "out")
        line = refused(capsys, "pretrain", str(small), *overrides_of(given), f"out={tmp_path / 'out'}")
        assert line == f"error: {error.value}"
    with pytest.raises(eagleray.UserError, match="seeed: unknown key; did you mean 'seed'"):
        eagleray.pretrain(small, seeed=3)


@pytest.mark.slow
def test_a_run_that_is_stopped_continues_with_the_same_call(
    run: eagleray.Run, small: Path, shards: Path, tmp_path: Path
):
    """Asked from a thread, as an interrupt of a notebook asks; the call itself is in a thread, which has no signals."""
    out = tmp_path / "run"
    keys = {"data.train": shards / "train", **QUICK}
    runs: list[eagleray.Run] = []
    thread = threading.Thread(target=lambda: runs.append(eagleray.pretrain(small, keys, out=out, max_steps=2000)))
    # No schedule knows of max_steps, so a run that is stopped has the steps of one that is not.
    keys |= {"optim.epochs": 200}
    thread.start()
    while not read_lines(out / "metrics.jsonl"):
        time.sleep(0.02)
    (out / ".stop").touch()
    thread.join()
    [stopped] = runs
    assert not stopped.finished
    assert not stopped.summary
    steps = len(stopped.metrics(pandas=False))
    again = eagleray.pretrain(small, keys, out=out, max_steps=steps + 2)
    whole = eagleray.pretrain(small, keys, out=tmp_path / "whole", max_steps=steps + 2)
    assert again.finished
    assert_same(weights(Path(again.out)), weights(Path(whole.out)))


def test_a_second_call_is_refused_and_the_run_does_not_notice(small: Path, shards: Path, tmp_path: Path):
    out = tmp_path / "run"
    keys = {"data.train": shards / "train", **QUICK, "optim.epochs": 200}
    thread = threading.Thread(target=eagleray.pretrain, args=(small, keys), kwargs={"out": out})
    thread.start()
    while not read_lines(out / "metrics.jsonl"):
        time.sleep(0.02)
    names = ("recipe.yaml", "environment.json", ".command", ".owner")
    before = [((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in names]
    (out / ".failure").write_text("{}")
    with pytest.raises(eagleray.UserError, match="another command is training this run"):
        eagleray.pretrain(small, keys | {"log_steps": 3, "checkpoint.steps": 7}, out=out)
    assert [((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in names] == before
    assert (out / ".failure").exists()
    assert thread.is_alive()
    (out / ".stop").touch()
    thread.join()
    steps = [r["step"] for r in read_lines(out / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def test_ctrl_c_saves_and_returns(small: Path, shards: Path, tmp_path: Path):
    """In a program of its own, as the signal is for the whole process."""
    out = tmp_path / "out"
    code = f"""
import os, signal, threading, time, eagleray
def interrupt():
    while not os.path.exists({str(out / "metrics.jsonl")!r}) or not os.path.getsize({str(out / "metrics.jsonl")!r}):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
before = signal.getsignal(signal.SIGINT)
threading.Thread(target=interrupt).start()
keys = {{"data.train": {str(shards / "train")!r}, "optim.epochs": 1000, "evaluate.limit": 32}}
run = eagleray.pretrain({str(small)!r}, keys, out={str(out)!r})
print(run.finished, signal.getsignal(signal.SIGINT) is before)
"""
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False True", done.stderr
    assert list((out / "checkpoints").glob("*.pt"))


def test_evaluate_returns_numbers_or_raises(run: eagleray.Run, shards: Path, tmp_path: Path):
    keys: dict[str, Any] = {"train": shards / "train", "test": shards / "test", "out": tmp_path}
    scores = eagleray.evaluate(run, protocols=["knn"], k=5, **keys)
    assert set(scores) >= {"knn/top1"}
    assert scores.results[0].settings["k"] == 5
    assert scores.rows()[0]["protocol"] == "knn"
    assert str(scores).startswith("knn  top1 ")
    with pytest.raises(eagleray.UserError, match="not a setting of knn"):
        eagleray.evaluate(run, protocols="knn", kk=5, **keys)
    with pytest.raises(eagleray.Refused, match="detection: needs") as error:
        eagleray.evaluate(run, protocols=["detection", "knn"], k=5, **keys)
    assert error.value.scores == scores


def test_the_environment_names_the_recipe(run: eagleray.Run):
    environment = yaml.safe_load((run.folder / "environment.json").read_text())
    assert environment["command"][:2] == ["eagleray", "pretrain"]
    assert environment["command"][2].endswith("small.yaml")
