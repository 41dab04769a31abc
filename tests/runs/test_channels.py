"""Runs on images of five channels of 16 bits: to the end, killed, evaluated and exported; and keys that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers.pictures import write_tar
from helpers.recipes import METHODS, small_recipe
from helpers.runs import assert_same, split, start, wait_for_step, weights
from helpers.tiffs import BANDS, CHANNELS, scene, tiff, write_scenes

import eagleray
from eagleray import config
from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.data.decode import decode
from eagleray.engine.export import read_export
from eagleray.evaluation.evaluate import Request, evaluate
from eagleray.runs import recipe as recipes
from eagleray.runs.checks import check_method

pytestmark = pytest.mark.usefixtures("untracked_runs")
KEYS = ("optim.batch=24", "optim.epochs=4", "evaluate.probe_epochs=1", "checkpoint.steps=2")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 72 labelled scenes, one of which has a channel less."""
    return write_scenes(tmp_path_factory.mktemp("scenes") / "shards", 72, broken=1)


def written(folder: Path, method: str = "mocov3", channels: list[dict[str, float]] | None = None) -> Path:
    """A recipe for scenes, with the keys that an error names set."""
    tree = yaml.safe_load(small_recipe(method))
    tree["data"] |= {"channels": channels or CHANNELS, "bad_limit": 0.1}
    for view in tree["views"]:
        view |= {"gray": 0, "strength": [0.4, 0.4, 0, 0]}
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def arguments(recipe: Path, scenes: Path, out: Path, *more: str) -> list[str]:
    return [str(recipe), f"data.train={scenes}", f"out={out}", *KEYS, *more]


@pytest.fixture(scope="module")
def once(untracked_runs: None, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("once")
    pretrain(*split(arguments(written(folder), scenes, folder / "run")))
    return folder / "run"


@pytest.mark.slow
def test_a_run_that_is_killed_learns_what_one_run_learns(once: Path, scenes: Path, tmp_path: Path):
    recipe, twice = written(tmp_path), tmp_path / "twice"
    process = start(arguments(recipe, scenes, twice))
    wait_for_step(twice, 5, process)
    process.kill()
    process.wait()
    pretrain(*split(arguments(recipe, scenes, twice, "data.workers=2")))
    assert_same(weights(once), weights(twice))


def test_timm_loads_the_export_and_has_its_features_and_numbers(once: Path, scenes: Path, tmp_path: Path):
    summary = json.loads((once / "summary.json").read_text())
    assert summary["knn/top1"] > 50
    bad = read_lines(once / "quarantine.jsonl")
    assert [(b["key"], b["reason"]) for b in bad] == [("s0000", f"{BANDS - 1} channels, expected {BANDS} (its .tif)")]

    exported = once / "export"
    backbone, network, images = read_export(exported / "backbone.safetensors")
    assert images is not None
    assert [vars(c) for c in images.channels] == CHANNELS
    assert network.options["in_chans"] == backbone.channels == BANDS
    described = json.loads((exported / "backbone.json").read_text())
    model = timm.create_model(
        described["timm"], num_classes=0, checkpoint_path=exported / "backbone.safetensors", **described["options"]
    )
    x = torch.stack([images(decode(tiff(scene(n)), images.channels)) for n in range(9)])
    assert x.shape == (9, BANDS, 16, 16)
    with torch.inference_mode():
        assert torch.allclose(model.eval()(x), backbone.pooled(x), atol=1e-5)

    report = evaluate(Request(str(exported), ["knn", "correspondence"], train=str(scenes), out=str(tmp_path / "e")))
    assert report.results[0].numbers["knn/top1"] == pytest.approx(summary["knn/top1"])
    [refused] = report.refused
    assert refused == f"correspondence: reads red, green and blue, not the backbone's {BANDS} data.channels"


@pytest.mark.slow
def test_an_export_is_compared_on_files_of_its_channels_and_is_for_timm_alone(once: Path, tmp_path: Path):
    eagleray.export(once, tmp_path / "out", to="timm")
    assert f"Files have {BANDS} channels" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UserError, match="--to onnx: is for images in red, green and blue; expected --to timm"):
        eagleray.export(once, tmp_path / "onnx", to="onnx")


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"distill"}))
def test_every_method_takes_images_of_any_number_of_channels(method: str, tmp_path: Path):
    loaded = recipes.load(str(written(tmp_path, method)), ["data.train=x"])
    assert loaded.planes == BANDS
    check_method(loaded)


def test_one_channel_is_a_run_too(tmp_path: Path):
    values = [np.random.default_rng(n).normal(1000 + 50 * (n % 3), 20, (32, 32, 1)).astype("u2") for n in range(48)]
    members = [(f"s{n:03d}.{kind}", data) for n, v in enumerate(values) for kind, data in files(v, n)]
    write_tar(tmp_path / "shards" / "x.tar", members)
    recipe = written(tmp_path, "mae", [{"mean": 1050, "std": 50}])
    pretrain(*split(arguments(recipe, tmp_path / "shards", tmp_path / "run", "optim.epochs=1")))
    assert weights(tmp_path / "run")["decoder.pred.weight"].shape[0] == 8 * 8


def files(values: np.ndarray, number: int) -> list[tuple[str, bytes]]:
    return [("tif", tiff(values)), ("cls", b"%d" % (number % 3))]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["views.0.gray=0.2"], "got 5; expected views.0.gray=0"),
        (["views.1.strength=[0.4,0.4,0.2,0.1]"], "expected views.1.strength=[0.4,0.4,0,0]"),
        (["views.0.jitter=0", "views.0.randaugment=rand-m9"], "views.0.randaugment=rand-m9: needs 3 channels, got 5"),
        (["backbone.options.in_chans=4"], "in_chans=4: expected 5, as data.channels has 5 entries"),
        (
            ["data.channels=[]", "backbone.options.in_chans=5"],
            "in_chans=5: expected 3, as data.channels has no",
        ),
        (["data.channels=[{mean: 1, std: 0}]"], "data.channels.0.std"),
        (["data.channels=[{mean: 1}]"], "data.channels.0.std"),
        (["data.channels=[{mean: .nan, std: 1}]"], "data.channels.0.mean"),
        ([f"data.channels=[{', '.join(['{mean: 1, std: 1}'] * 65)}]"], "65 channels; expected 64 at most"),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_one_line(keys: list[str], words: str, tmp_path: Path):
    with pytest.raises(UserError) as e:
        recipes.load(str(written(tmp_path)), keys)
    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_a_teacher_that_sees_colours_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="distill has a teacher that sees red, green and blue"):
        recipes.load(str(written(tmp_path, "distill")))


def test_a_resolved_recipe_is_read_as_it_was_written(tmp_path: Path):
    loaded = recipes.load(str(written(tmp_path)))
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(loaded))
    assert recipes.digest(recipes.load(str(again))) == recipes.digest(loaded)
