"""A number is the same class in the training and in the test set, or a line says which class is not."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.recipes import small_recipe

from eagleray.base.errors import UserError
from eagleray.data.index import Index, open_index
from eagleray.datasets import card
from eagleray.datasets.shapes import image
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.protocols.probes import ProbeSets, check_class_names, class_names
from eagleray.runs.checks import make_plan
from eagleray.runs.recipe import load
from eagleray.runs.sources import resolve_paths


def photos(folder: Path, *names: str) -> Index:
    """A folder of images with two images in each of some class folders."""
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            image(number, i)[0].save(folder / name / f"{i}.png")
    return open_index(str(folder), note=lambda _: None)


def shards(folder: Path, *names: str) -> Index:
    """Shards of one image of each class, with the names of the classes on their card if there are any."""
    drawn = (Sample(f"{i}", *encoded(i), i) for i in range(max(len(names), 3)))
    write_shards(drawn, str(folder))
    if names:
        about: dict[str, Any] = {"sides": {"counts": [0] * (len(card.SIDES) + 1)}}
        about |= {"aspects": {"counts": [0] * (len(card.ASPECTS) + 1)}}
        about |= dict.fromkeys(("images", "bytes", "shards", "classes", "listed"), 0)
        about |= dict.fromkeys(("source", "command", "licence"), "") | {"formats": {}, "dropped": {}}
        (folder / card.NAME).write_text(json.dumps(about | {"class_names": names}))
    return open_index(str(folder), note=lambda _: None)


def encoded(seed: int) -> tuple[str, bytes]:
    return "png", encode(image(seed, 0)[0])


MAKE = {"photos": photos, "shards": shards}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (("ant", "bee", "cat"), None),
        (("ant", "bee"), None),  # the numbers are the same
        (("bee", "cat"), "class 0 is bee, and in --train it is ant: .* expected the same names in both"),
        (("bee", "cat", "dog"), "--train has no class dog"),
        (("ant", "bee", "cat", "dog"), "--train has no class dog"),
    ],
)
def test_classes_are_compared_by_name(kind: str, theirs: tuple[str, ...], said: str | None, tmp_path: Path):
    train, test = MAKE[kind](tmp_path / "train", "ant", "bee", "cat"), MAKE[kind](tmp_path / "test", *theirs)
    assert class_names(test) == {number: {name} for number, name in enumerate(theirs)}
    if said is None:
        return check_class_names(train, test)
    with pytest.raises(UserError, match=f"^--test: {said}"):
        check_class_names(train, test)


def test_a_classifier_is_not_tested_on_other_classes(tmp_path: Path):
    """Whose numbers are among those of the training set."""
    train, test = photos(tmp_path / "train", "ant", "bee", "cat"), photos(tmp_path / "test", "bee", "cat")
    sets = ProbeSets.of(train, test, None)
    assert sets is not None
    with pytest.raises(UserError, match="--test: class 0 is bee"):
        sets.check()


def test_folders_of_different_classes_are_no_training_set_of_named_ones(tmp_path: Path):
    photos(tmp_path / "one", "ant", "bee")
    test = photos(tmp_path / "two", "ant", "cat")
    both = open_index([str(tmp_path / "one"), str(tmp_path / "two")], note=lambda _: None)
    with pytest.raises(UserError, match=r"^data\.test: class 1 is cat, and in data\.train it is bee or cat: "):
        check_class_names(both, test, ("data.train", "data.test"))


def test_a_run_says_that_classes_differ_and_supervised_training_is_refused(tmp_path: Path):
    photos(tmp_path / "train", "ant", "bee", "cat")
    photos(tmp_path / "test", "bee", "cat")
    keys = [f"{key}={tmp_path / key.partition('.')[2]}" for key in ("data.train", "data.test")]
    keys += [f"out={tmp_path / 'out'}", "optim.batch=4", "data.lanes=4"]
    said = "data.test: class 0 is bee, and in data.train it is ant: "
    for method in "mocov3", "supervised":
        (path := tmp_path / f"{method}.yaml").write_text(small_recipe(method).replace("classes: 20", "classes: 3"))
        lines: list[str] = []
        try:
            make_plan(resolve_paths(load(str(path), keys)), note=lines.append)
        except UserError as e:
            lines = [f"refused: {e}"]
        [line] = [line for line in lines if said in line]
        assert line.startswith("refused: ") == (method == "supervised")


def test_shards_without_names_are_compared_by_number(tmp_path: Path):
    train, test = shards(tmp_path / "train", "ant", "bee", "cat"), shards(tmp_path / "test")
    check_class_names(train, test)
    check_class_names(test, train)
    (tmp_path / "train" / card.NAME).write_text('{"name": "of another program"}')
    assert class_names(train) == {}
