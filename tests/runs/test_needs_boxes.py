"""Recipes of a method that needs to know where in the image each view lies."""

from pathlib import Path

import pytest
from helpers.pictures import write_shards
from helpers.recipes import small_recipe

from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.runs import recipe as recipes
from eagleray.runs.checks import make_plan


def written(folder: Path, method: str = "pixpro") -> str:
    (path := folder / f"{method}.yaml").write_text(small_recipe(method))
    return str(path)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["views.1.rotate=0.5"], "views.1.rotate=0.5"),
        (["views.0.recrop=1"], "views.0.recrop=1.0"),
        (["views.0.jitter=0", "views.0.randaugment=rand-m9"], "views.0.randaugment=rand-m9"),
    ],
)
def test_views_that_move_pixels_are_refused_in_one_line(keys: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        recipes.load(written(tmp_path), keys)
    assert str(error.value) == (
        f"{said}: may move pixels after the crop, and pixpro needs to know where in the image they are; leave it out"
    )
    recipes.load(written(tmp_path, "byol"), keys)
    assert recipes.needs_boxes(recipes.load(written(tmp_path, "esvit")))
    assert not recipes.needs_boxes(recipes.load(written(tmp_path, "esvit"), keys)), "its loss does without"


def test_an_operation_of_a_plugin_is_refused(tmp_path: Path) -> None:
    lines = ("from eagleray import register", "@register.view('shift')", "def shift(crop, seed):", "    return crop")
    (plugin := tmp_path / "shift.py").write_text("\n".join(lines))
    keys = [f"plugins=[{plugin}]", "views.0.operations=[shift]"]
    try:
        with pytest.raises(UserError, match=r"^views\.0\.operations=\['shift'\]: may move pixels after the crop"):
            recipes.load(written(tmp_path), keys)
    finally:
        plugins.unload()


def test_other_operations_are_allowed(tmp_path: Path) -> None:
    more = ["views.0.erasing=0.5", "views.0.cutout=0.5", "views.0.noise=0.5", "views.0.sobel=0.1", "views.0.blur=1"]
    recipe = recipes.load(written(tmp_path), [*more, "views.1.flip=1"])
    assert recipes.needs_boxes(recipe)
    assert not recipes.needs_boxes(recipes.load(written(tmp_path, "densecl")))


@pytest.mark.parametrize("method", ["pixpro", "byol"])
def test_the_stream_of_a_run_has_boxes_where_its_method_needs_them(method: str, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", 64, 2)
    recipe = recipes.load(written(tmp_path, method), [f"data.train={shards}", f"out={tmp_path / 'run'}"])
    assert make_plan(recipe, note=lambda _: None).stream.boxes is (method == "pixpro")
