"""The card of an export says where the data comes from, however the recipe names its shards."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.exports import source
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
