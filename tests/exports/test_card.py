<<<<<<< HEAD
"""The card of an export lists what was measured of the exported weights, and nothing else."""

import json
=======
"""The card of an export says where the data comes from, however the recipe names its shards."""

>>>>>>> wC
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.exports import source
<<<<<<< HEAD
from helpers.networks import VIT

from eagleray.exports import card


@pytest.mark.parametrize(("steps", "shown"), [(100, True), (120, False), (None, False)])
def test_numbers_of_an_earlier_end_are_not_those_of_newer_weights(steps: int | None, shown: bool, tmp_path: Path):
    """A run of 100 steps was continued with a larger max_steps, and stopped before its new end."""
    found = replace(source(tmp_path, "vit_tiny_patch16_224", options=VIT), steps=steps)
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 100, "images": 3200, "epochs": 1.0, "knn/top1": 31.5, "linear/top1": 40.0})
    )
    assert bool(list(card.measured(found))) == shown
    lines = [line for line in card.origin(found) if line.startswith(("training", "step"))]
    assert lines == {100: ["training: 100 steps, 3200 images, 1.0 epochs"], 120: ["step: 120"], None: []}[steps]
=======
from helpers.layouts import fill, run_prepare
from helpers.networks import VIT

from eagleray.exports.card import training_set
from eagleray.runs import recipe


@pytest.mark.parametrize("form", ["", "/", "/*.tar", "/shard-{000000..000000}.tar", "/shard-000000.tar"])
def test_the_cards_beside_the_shards_are_found_by_every_form_of_their_url(form: str, tmp_path: Path):
    for name in ("a", "b", "c"):
        fill(tmp_path / f"photos-{name}", [f"{name}-{i}.jpg" for i in range(2)])
        run_prepare("folder", tmp_path / f"photos-{name}", tmp_path / name)
    (tmp_path / "b" / "dataset.json").write_text("[]")
    found = source(tmp_path / "run", "vit_tiny_patch16_224", options=VIT)
    keys = [f"data.train.{i}.url={tmp_path}/{name}{form}" for i, name in enumerate("abc")]
    trained = recipe.load(str(tmp_path / "run" / "small.yaml"), ["data.train=[{}, {}, {}]", *keys])
    data, licence = training_set(replace(found, recipe=trained))
    assert "labels of 6 images. Made from folder, 2 listed. Made from folder, 2 listed." in data
    assert "card states: not stated by the source: you have to know it; not stated by the source" in licence
>>>>>>> wC
