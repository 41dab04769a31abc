"""A run whose views grow is the same with and without stops around the change."""

from pathlib import Path

import pytest
from helpers.runs import FAST, arguments, assert_same, split, weights

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_stopping_at_a_change_of_view_sizes_equals_no_stop(small_dino: Path, shards: Path, tmp_path: Path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    # Sizes change after ten steps.
    keys = ["backbone.options.patch_size=4", "curriculum=[{until: 0.5, sizes: [8, 8, 4]}]", *FAST]
    pretrain(*split(arguments(small_dino, shards, once, "max_steps=13", *keys)))
    for steps in (9, 10, 11, 13):
        pretrain(*split(arguments(small_dino, shards, twice, f"max_steps={steps}", *keys)))
    assert_same(weights(once), weights(twice))
    assert "curriculum: before epoch 1, views of 8, 8, 4 pixels" in (once / "train.log").read_text()
    with pytest.raises(UserError, match="curriculum"):
        pretrain(*split(arguments(small_dino, shards, twice, "max_steps=14", keys[0], *FAST)))
