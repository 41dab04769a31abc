"""A run whose views grow, or get all of their patches, is the same with and without stops around the change."""

import json
from pathlib import Path

import pytest
from helpers.runs import FAST, arguments, assert_same, split, weights

from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.models import tokens

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_a_student_sees_some_patches_first_and_its_teacher_all_and_a_stop_changes_nothing(
    small_dino: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    keys = ["backbone.options.patch_size=4", "curriculum=[{until: 0.5, keep: 0.5}]", "workers=0", *FAST]
    shares: list[tuple[int, float]] = []
    keep = tokens.keep_patches
    monkeypatch.setattr(
        tokens, "keep_patches", lambda model, share: [shares.append((id(model), share)), keep(model, share)]
    )
    pretrain(*split(arguments(small_dino, shards, once, "max_steps=13", *keys)))
    assert [share for _, share in shares] == [0.5] * 10 + [1.0] * 3  # an epoch has ten steps
    assert len({model for model, _ in shares}) == 1  # the student's alone
    for steps in (9, 11, 13):
        pretrain(*split(arguments(small_dino, shards, twice, f"max_steps={steps}", *keys)))
    assert_same(weights(once), weights(twice))
    assert "before epoch 1, views of 16, 16, 8 pixels, 0.5 of their patches" in (once / "train.log").read_text()
    plain = tmp_path / "plain"
    pretrain(*split(arguments(small_dino, shards, plain, "max_steps=1", keys[0], *keys[2:])))
    first, other = (json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"] for run in (once, plain))
    assert first != other


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
