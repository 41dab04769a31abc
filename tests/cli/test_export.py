"""`eagleray export`, and what `evaluate`, `finetune` and others make of its files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import refused
from helpers.runs import arguments, split
from typer.testing import CliRunner

from eagleray.api import pretrain as api
from eagleray.cli import main
from eagleray.exports import write
from eagleray.exports.compare import Difference
from eagleray.runs.tracking import Tracking

FAST = ("evaluate.probe_epochs=0", "evaluate.limit=32", "evaluate.resize=20")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "tracking_of", lambda *_: Tracking("none"))
        yield


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with the export that it writes at its end."""
    from helpers.recipes import small_recipe

    folder = tmp_path_factory.mktemp("source")
    (folder / "small.yaml").write_text(small_recipe("dino"))
    api.pretrain(*split(arguments(folder / "small.yaml", shards, folder / "run", "max_steps=2", *FAST)))
    return folder / "run"


def command(*args: str) -> str:
    done = CliRunner().invoke(main.app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_line_of_a_run_tells_timm_how_images_are_prepared(run: Path):
    shown = str(api.Run(run))
    line = shown.partition("load it")[2].splitlines()[0].strip()
    code = f"import timm; print(timm.data.resolve_model_data_config({line}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "(3, 16, 16)" in done.stdout.replace("[", "(").replace("]", ")"), done.stderr
    assert "0.485, 0.456, 0.406" in done.stdout
    assert "'interpolation': 'bicubic'" in done.stdout
    assert "'crop_pct': 0.8" in done.stdout


def test_the_history_of_a_run_is_shown_where_mlflow_is_installed(run: Path, monkeypatch: pytest.MonkeyPatch):
    assert "\nhistory   " in str(api.Run(run))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "history" not in str(api.Run(run))


def test_an_export_is_evaluated_as_its_run_is(run: Path, shards: Path, tmp_path: Path):
    more = ("--train", str(shards / "train"), "--test", str(shards / "test"), "--protocol", "knn", "--json")
    scores = [
        json.loads(command("evaluate", str(backbone), *more, "--out", str(tmp_path / str(i))))
        for i, backbone in enumerate((run, run / "export", run / "export" / "backbone.safetensors"))
    ]
    assert scores[0] == scores[1] == scores[2]
    settings = json.loads((tmp_path / "2" / "results.json").read_text())[0]["settings"]
    assert (settings["size"], settings["resize"]) == (16, 20)


def test_a_run_starts_from_an_export(run: Path, shards: Path, tmp_path: Path):
    given = arguments(run.parent / "small.yaml", shards, tmp_path / "out", "max_steps=1", *FAST)
    command("finetune", str(run / "export"), *given)
    assert ", 0 missing, 0 left over; 100.0%" in (tmp_path / "out" / "weights.txt").read_text()
    shown = command("verify", str(tmp_path / "out" / "export"))
    assert "images: unknown, as nobody has stated it; images of the start weights: unknown" in shown
    assert f"{json.loads(command('verify', str(run / 'export'), '--json'))['sha256']}" not in shown


def test_a_changed_export_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = Path(shutil.copytree(run / "export", tmp_path / "export"))
    (copy / "config.json").write_text("{}")
    assert refused(capsys, "verify", str(copy)) == f"error: {copy}: not verified: config.json: was changed"
    line = refused(capsys, "verify", str(run))
    assert line == f"error: {run}: has no provenance.json; expected the folder of an export, such as RUN/export"


def test_exports_are_listed_with_the_line_that_loads_them(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "compare", lambda *_, **__: Difference(0, 0, 0))
    shown = command("export", str(run), "--to", "timm-hub", "--what", "student").replace("\n", "")
    folder = run / "export" / "timm-hub-student"
    assert f"timm.create_model('local-dir:{folder}', pretrained=True)" in shown
    assert str(folder / "model.safetensors") in shown
    card = (folder / "README.md").read_text()
    assert "encoder: student" in card
    assert "None were measured" in card, "the run evaluates the teacher"
    command("export", str(run), "--destination", str(tmp_path / "own"))
    card = (tmp_path / "own" / "README.md").read_text()
    assert "| kNN evaluation, top-1 % |" in card
    assert "at the end of the run: 20 neighbours, temperature 0.07, centre crop of 16 from 20 pixels, 32 tr" in card
    assert "* images: unknown" in card
    assert "training: 2 steps, 64 images" in card


def test_numbers_of_another_step_are_not_on_the_card(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "compare", lambda *_, **__: Difference(0, 0, 0))
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"steps": 1}))  # as if it had been continued to step 2
    command("export", str(copy), "--destination", str(tmp_path / "own"))
    card = (tmp_path / "own" / "README.md").read_text()
    assert "None were measured of these weights" in card
    assert "training: 2 steps\n" in card


def test_wrong_exports(run: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "below")
    line = refused(capsys, "export", str(run), "--to", "timm-hub", "--destination", below)
    assert line == f"error: --destination {below}: cannot be written: Not a directory"
    line = refused(capsys, "export", str(run), "--what", "tutor")
    assert line == "error: --what tutor: dino has no such encoder; it has student, teacher"
    line = refused(capsys, "data", "stats", str(shards / "train"), "--out", below)
    assert line == f"error: --out {below}: cannot be written: Not a directory"
    line = refused(capsys, "init", "--images", "5000", "--out", f"{below}.yaml")
    assert line == f"error: --out {below}.yaml: cannot be written: Not a directory"
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((run / "export" / "backbone.safetensors").read_bytes())
    line = refused(capsys, "evaluate", str(bare), "--train", str(shards / "train"))
    assert "a file of tensors needs --architecture NAME" in line
    (tmp_path / "bare.json").write_text("[]")
    line = refused(capsys, "evaluate", str(bare), "--train", str(shards / "train"))
    assert "bare.json: not a description written by `eagleray export`: " in line
    line = refused(capsys, "evaluate", str(tmp_path), "--train", str(shards / "train"))
    assert line.endswith("holds no intact checkpoint; nor is there an exported backbone.safetensors")
