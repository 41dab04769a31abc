"""`eagleray init`: a recipe for a folder of one's own."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cli import init
from eagleray.config import bundled
from eagleray.data.tiff import write_pages
from eagleray.datasets.survey import survey
from eagleray.runs import local_forecast, recipe
from eagleray.runs.forecast import Forecast, refusal

METHODS = [m for m in config.parts("eagleray.methods") if m not in init.LABELLED]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("images", "size", "gpus"), [(2_000, 224, 1), (2_000, 32, 0), (20_000_000, 224, 8)])
def test_every_method_has_a_recipe_that_loads(method: str, images: int, size: int, gpus: int, tmp_path: Path):
    path = tmp_path / "my_recipe.yaml"
    path.write_text(init.text(init.base_of(method), images=images, size=size, gpus=gpus))
    r = recipe.load(str(path))
    assert r.method.name == method
    assert r.workers == gpus
    assert r.optim.batch <= images / 8
    assert r.out == "runs/my_recipe"


def test_bases_are_shipped_and_methods_that_need_labels_are_refused():
    assert set(init.BASES.values()) <= set(bundled.names())
    with pytest.raises(UserError, match=r"--method drloc, which needs labels: expected one of .*dino"):
        init.base_of("drloc")
    with pytest.raises(UserError, match=r"--method nothing: expected one of .*dino"):
        init.base_of("nothing")


def test_a_file_is_never_overwritten(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    init.init(images=2_000, file=path, gpu=["l4"])
    with pytest.raises(UserError, match="already exists"):
        init.init(images=2_000, file=path)
    with pytest.raises(UserError, match="their number as --images N"):
        init.init(file=tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("data", "name", "images", "said"),
    [
        ("", "r1.txt", 2_000, "r1.txt: expected a file that ends in .yaml or .yml"),
        ("", "a" * 300 + ".yaml", 2_000, "cannot be written: File name too long"),
        ("photos", "mine.yaml", 3, "--images 3: the images in photos are counted; give one of the two"),
        ("photos\udcff", "mine.yaml", 0, r"DATA 'photos\udcff': the name is not UTF-8"),
        ("", "mine\udcff.yaml", 2_000, r"mine\udcff.yaml': the name is not UTF-8"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_recipe_is_written(
    data: str, name: str, images: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for n in range(6):
        Path("photos", f"{n}.jpg").touch()
    with pytest.raises(UserError, match=re.escape(said)) as e:
        init.init(data, images=images, file=Path(name))
    assert len(str(e.value).splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]


def photographs(folder: Path, images: int, size: tuple[int, int], mode: str = "RGB", kind: str = "jpg") -> None:
    """Write images of this size into two class folders; those after the first two are links to these."""
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    for n in range(images):
        path = folder / "ab"[n % 2] / f"{n}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if n < 2:
            Image.fromarray(noise).convert(mode).resize(size).save(path)
        else:
            path.hardlink_to(folder / "ab"[n % 2] / f"{n % 2}.{kind}")


SETS: dict[str, tuple[tuple[int, int], str, str]] = {
    "tiny": ((28, 28), "L", "png"),
    "usual": ((300, 224), "RGB", "jpg"),
    "camera": ((4000, 3000), "RGB", "jpg"),
}
WRITTEN = {
    "tiny": [
        "# shorter side 28 to 28 pixels (5th to 95th percentile), median 28; PNG 100%",
        "# grey, 28 x 28 pixels and ",
        "    img_size: 28 # 14 x 14 patches",
        "    patch_size: 2 # pixels, for small images",
        "  - {size: 28, scale: [0.4, 1.0]",
    ],
    "usual": [
        "# shorter side 224 to 224 pixels",
        "# colour, 300 x 224 pixels and ",
        "crops are of the recipe's usual size, as the shorter side is 224 pixels.",
        "take the recipe continue_dinov3_vits16",
    ],
    "camera": [
        "# shorter side 3000 to 3000 pixels",
        "though images are 13 times as large: details below 13 pixels are lost",
        "decode: scaled # JPEGs of 4000 x 3000 pixels are decoded at an eighth to a half of their size",
    ],
}


@pytest.mark.parametrize("name", SETS)
def test_a_recipe_is_made_for_the_images_that_are_seen(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    size, mode, kind = SETS[name]
    photographs(tmp_path / "photos", 300, size, mode, kind)
    path = tmp_path / "mine.yaml"
    init.init(str(tmp_path / "photos"), file=path, gpus=4, gpu=["l4", "h100"], price=2.0)
    written = path.read_text()
    assert "# 300 images, 2 classes; " in written
    assert "# Few images teach a backbone little from random weights: public weights may serve you better" in written
    for line in WRITTEN[name]:
        assert line in written
    assert ("decode: scaled" in written) == (name == "camera")
    assert ("patch_size" in written) == (name == "tiny")
    said = capsys.readouterr().out
    assert f"eagleray pretrain {path}\n" in said
    assert all(line in said for line in written.splitlines())
    for gpu in ("l4", "h100"):
        assert re.search(rf"plan      4 x {gpu}: .* GiB, .* images/s, .* h, .* GPU-hours, .* at 2 an hour; ", said)
    assert not (tmp_path / "photos" / "index.parquet").exists()


def test_hours_and_cost_are_said_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    init.init(images=2_000_000, gpus=4, gpu=["l4"], price=0.5, file=tmp_path / "mine.yaml")
    found = re.search(r"4 x l4: .* ([\d.]+) h, ([\d.]+) GPU-hours, ([\d.]+) at 0.5 an hour", capsys.readouterr().out)
    assert found
    hours, all_hours, cost = map(float, found.groups())
    assert all_hours == pytest.approx(4 * hours, rel=0.01)
    assert cost == pytest.approx(all_hours / 2, rel=0.01)
    with pytest.raises(UserError, match="--gpu h10: unknown; did you mean 'h100'"):
        init.init(images=2_000_000, gpu=["h10"], file=tmp_path / "other.yaml")


def test_a_recipe_that_a_gpu_cannot_hold_is_forecast_with_smaller_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real = local_forecast.plan_run

    def whole_batches_are_refused(asked: recipe.Recipe, **how: Any) -> Forecast:
        found = real(asked, **how)
        if asked.optim.micro_batch != "auto":
            raise refusal(replace(found, memory_of_device=0))
        return found

    cures = [{"optim.checkpointing": "true"}]
    monkeypatch.setattr("eagleray.runs.forecast.remedies", lambda found: [(keys, found) for keys in cures])
    monkeypatch.setattr(local_forecast, "plan_run", whole_batches_are_refused)
    init.init(images=300, size=32, gpu=["t4"], file=tmp_path / "mine.yaml")
    said = capsys.readouterr().out
    assert re.search(r"1 x t4 with optim\.micro_batch=auto: .* of 15\.0 GiB, .* images/s", said)


def test_a_gpu_that_cannot_hold_a_recipe_leaves_the_forecasts_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A ResNet's batch norm needs the whole batch, so micro-batches save nothing, and no comment may propose them."""
    facts = {"memory_needed": 2**33, "memory_of_device": 2**34, "images_per_s": 100.0}
    result = SimpleNamespace(hours=1.0, cost=None, ranks=1, limit="model", **facts)

    def plan(file: str, keys: list[str], *, gpu: str, **how: Any) -> Any:
        if gpu == "t4" or "optim.checkpointing=true" not in keys:
            raise UserError(f"resnet50: a step of 16 images needs 20.0 GiB on each {gpu}, which has 15.0 GiB")
        return result

    monkeypatch.setattr("eagleray.plan", plan)
    path = tmp_path / "mine.yaml"
    init.init(images=300, method="simsiam", gpu=["t4", "l4"], file=path)
    said = capsys.readouterr().out
    assert "plan      1 x t4: resnet50: a step of 16 images needs 20.0 GiB on each t4" in said
    assert "plan      1 x l4 with optim.checkpointing=true: 8.0 of 16.0 GiB, 100 images/s" in said
    assert f"train     eagleray pretrain {path} data.train=DATA" in said
    assert "optim.checkpointing=true if memory runs out" in path.read_text()
    assert "micro_batch" not in path.read_text()


def test_images_of_many_channels_need_a_key(tmp_path: Path):
    for n in range(4):
        write_pages(tmp_path / f"{n}.tif", np.ones((20, 30, 6), np.float32))
    (tmp_path / "broken.tif").write_bytes(b"II*\0" + bytes(20))
    seen = survey(str(tmp_path))
    assert (seen.images, seen.looked, seen.broken, seen.channels) == (5, 4, 1, 6)
    assert "data stats --channels" in init.text(init.base_of("dino"), images=300, seen=seen)


def test_tiffs_that_only_pillow_reads_are_looked_at(tmp_path: Path):
    Image.new("P", (30, 20)).save(tmp_path / "palette.tif")
    Image.new("1", (30, 20)).save(tmp_path / "fax.tif", compression="group4")
    Image.new("RGB", (30, 20)).save(tmp_path / "jpeg.tif", compression="jpeg")
    seen = survey(str(tmp_path))
    assert (seen.looked, seen.broken, seen.width, seen.height, seen.channels) == (3, 0, 30, 20, 3)


def test_images_in_a_folder_and_in_shards_are_counted(shards: Path, tmp_path: Path):
    assert survey(str(shards / "train")).images == 320
    folder = tmp_path / "photos" / "deep"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"tar|image"):
        survey(str(tmp_path / "photos"))
    (folder / "0.jpg").touch()
    with pytest.raises(UserError, match="photos: none of 1 images can be opened"):
        survey(str(tmp_path / "photos"))
    photographs(folder, 300, (64, 48))
    init.init(str(tmp_path / "photos"), file=tmp_path / "mine.yaml", gpu=["l4"])
    assert "# 301 images, no classes; 255 of them" in (tmp_path / "mine.yaml").read_text()
    folder_sources = recipe.load(str(tmp_path / "mine.yaml")).data.train
    assert folder_sources
    assert folder_sources[0].url == str(tmp_path / "photos")
    init.init(str(shards / "train"), file=tmp_path / "shards.yaml", gpu=["l4"])
    sources = recipe.load(str(tmp_path / "shards.yaml")).data.train
    assert sources
    assert sources[0].url == str(shards / "train")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_recipe_of_each_set_trains_some_steps(name: str, tmp_path: Path):
    """With one small block in place of twelve."""
    from eagleray.api.pretrain import pretrain

    size, mode, kind = SETS[name]
    photographs(tmp_path / "photos", 300, size, mode, kind)
    init.init(str(tmp_path / "photos"), file=tmp_path / "mine.yaml", gpus=0, gpu=["l4"])
    small = {f"backbone.options.{k}": v for k, v in {"depth": 1, "embed_dim": 32, "num_heads": 2}.items()}
    keys = {**small, "data.workers": 0, "max_steps": 2, "out": str(tmp_path / "run")}
    assert pretrain(tmp_path / "mine.yaml", keys).summary["steps"] == 2


@pytest.mark.slow
def test_a_recipe_for_two_thousand_images_trains_an_epoch(tmp_path: Path):
    """With a tiny backbone in place of its own."""
    from eagleray.api.pretrain import pretrain
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import write_shards

    write_shards(pictures(0, 2_000), str(tmp_path / "shards"), size=10**6)
    path = tmp_path / "my_recipe.yaml"
    init.init(str(tmp_path / "shards"), size=32, gpus=0, method="mocov3", file=path)
    steps = 2_000 // recipe.load(str(path)).optim.batch
    tiny = ["backbone.options={img_size: 32, patch_size: 8, embed_dim: 32, depth: 1, num_heads: 2}"]
    tiny += ["method.dim=16", "method.hidden=32", "data.workers=0", f"max_steps={steps}"]
    keys = [*tiny, f"out={tmp_path / 'run'}", "evaluate.probe_epochs=0", "evaluate.limit=64"]
    summary = pretrain(path, keys).summary
    assert (summary["steps"], summary["images"]) == (31, 31 * 64)
