"""`eagleray init`: a recipe for a folder of one's own."""

import re
from pathlib import Path

import pytest

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cli import init
from eagleray.config import bundled
from eagleray.runs import recipe

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
    init.init(images=2_000, file=path)
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


def test_images_in_a_folder_and_in_shards_are_counted(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert init.count(str(shards / "train")) == 320
    folder = tmp_path / "photos" / "deep"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"tar|image"):
        init.count(str(tmp_path / "photos"))
    for n in range(100):
        (folder / f"{n}.jpg").touch()
    init.init(str(tmp_path / "photos"), file=tmp_path / "mine.yaml")
    assert "# 100 images of 224 pixels" in (tmp_path / "mine.yaml").read_text()
    assert f"eagleray pretrain {tmp_path / 'mine.yaml'}\n" in capsys.readouterr().out
    folder_sources = recipe.load(str(tmp_path / "mine.yaml")).data.train
    assert folder_sources
    assert folder_sources[0].url == str(tmp_path / "photos")
    init.init(str(shards / "train"), file=tmp_path / "shards.yaml")
    sources = recipe.load(str(tmp_path / "shards.yaml")).data.train
    assert sources
    assert sources[0].url == str(shards / "train")


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
