"""Recipes: one door, typed, with one line for whatever does not fit."""

from pathlib import Path

import pytest

from eagleray import config
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.tree import RecipeError
from eagleray.runs import recipe
from eagleray.runs.recipe import Recipe


def test_overrides_win_over_the_file_and_the_file_over_its_base(tmp_path: Path, small: Path):
    (tmp_path / "child.yaml").write_text(f"base: {small.name}\noptim: {{batch: 64, epochs: 5}}\n")
    r = config.load(Recipe, tmp_path / "child.yaml", ["optim.epochs=7", "method.temperature=0.3"])
    assert (r.optim.batch, r.optim.epochs, r.method.args["temperature"]) == (64, 7, 0.3)
    assert r.optim.lr.value == 1e-3  # of the base


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-3", 1e-3),
        ("a=[x, y]", ["x", "y"]),
        ("a=s3://b/{00..03}.tar", "s3://b/{00..03}.tar"),
        ("a=/x/{a,b}-{0..3}.tar", "/x/{a,b}-{0..3}.tar"),
        ("a=[/x/{a,b}.tar, y-{0..3}.tar]", ["/x/{a,b}.tar", "y-{0..3}.tar"]),
        ("a={b: 1}", {"b": 1}),
        ("a=", None),
        ("a=/x/Album #1", "/x/Album #1"),
        ("a=#1", "#1"),
        ("a=1.10 #2", "1.10 #2"),
        ("a='x' # y", "x"),
    ],
)
def test_values_of_overrides(text: str, value: object):
    assert config.override(text) == {"a": value}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("optim.micro_batch=0", "optim.micro_batch: input should be greater than 0 or 'auto', got 0"),
        ("optim.micro_batch=most", "optim.micro_batch: input should be a valid integer or 'auto', got 'most'"),
        ("compile=maybe", "compile: input should be 'auto' or a valid boolean, got 'maybe'"),
    ],
)
def test_a_key_of_several_types_has_one_message(small: Path, item: str, message: str):
    with pytest.raises(RecipeError) as error:
        recipe.load(str(small), [item, "optim.epochs=0"])
    lines = str(error.value).partition(": ")[2].split("; ")
    assert sorted(lines) == sorted([message, "optim.epochs: input should be greater than 0, got 0"])


def test_a_resolved_recipe_gives_itself_back(small: Path, tmp_path: Path):
    r = config.load(Recipe, small, ["optim.lr.value=1e-4"])
    (tmp_path / "again.yaml").write_text(config.dump(r))
    assert config.load(Recipe, tmp_path / "again.yaml") == r
    assert r.optim.lr.value == 1e-4


def test_what_may_change_and_what_may_not(small: Path):
    r = config.load(Recipe, small)
    for change in ("workers=3", "out=elsewhere", "max_steps=4", "data.workers=2", "checkpoint.minutes=1"):
        assert recipe.digest(config.load(Recipe, small, [change])) == recipe.digest(r), change
    for change in ("seed=1", "optim.batch=64", "data.lanes=4", "method.dim=8", "data.train=there"):
        assert recipe.digest(config.load(Recipe, small, [change])) != recipe.digest(r), change


def test_schedules():
    def at(step: int) -> Progress:
        return Progress(step, steps_per_epoch=10, epochs=10)

    moco = Schedule(value=1.0, warmup=2, end=0.0)
    assert [moco(at(s)) for s in (0, 10, 20)] == [0.0, 0.5, 1.0]
    assert moco(at(60)) == pytest.approx(0.5)
    dino = Schedule(value=1.0, warmup=2, end=0.0, inclusive=True)
    assert dino(at(19)) == dino(at(20)) == 1.0
    steps = Schedule(value=5.0, warmup_from=1.0, warmup=5, inclusive=True, per_epoch=True)
    assert [steps(at(s)) for s in (0, 9, 10, 49, 50, 99)] == [1.0, 1.0, 2.0, 5.0, 5.0, 5.0]
    assert Schedule(value=0.3)(at(77)) == 0.3


def test_entries_of_lists_of_numbers_and_paths_are_replaced():
    tree = {"views": [{"scale": [0.2, 1.0]}, {"size": 16}], "train": ["a.tar", "b.tar"]}
    assert config.merge(tree, config.override("views.0.scale.1=0.8"))["views"] == [{"scale": [0.2, 0.8]}, {"size": 16}]
    assert config.merge(tree, config.override("train.0=c.tar"))["train"] == ["c.tar", "b.tar"]
    assert config.merge(tree, config.override("views={1: {size: 32}}"))["views"][1] == {"size": 32}
