"""Tests that training learns on drawn pictures: views are matched better than by chance, and kNN improves."""

import math
from pathlib import Path
from typing import Any

import pytest

from eagleray.api import pretrain as api
from eagleray.base.files import read_lines
from eagleray.cli.demo import RECIPE, pictures
from eagleray.datasets.shards import write_shards


def pretrain(folder: Path, images: int, *more: str) -> dict[str, Any]:
    for seed, (split, count) in enumerate((("train", images), ("test", 600))):
        write_shards(pictures(seed, count), str(folder / split))
    keys = [f"data.train={folder / 'train'}", f"data.test={folder / 'test'}", f"out={folder / 'out'}", "workers=0"]
    return api.pretrain(RECIPE, [*keys, "evaluate.probe_epochs=0", *more]).summary


@pytest.mark.slow
def test_views_of_one_picture_find_each_other(tmp_path: Path):
    pretrain(tmp_path, 2000, "optim.epochs=5", "evaluate.limit=200")
    batch, temperature = 128, 0.1
    chance = 2 * 2 * temperature * math.log(batch)  # also the loss of a collapsed network
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["loss"] < chance - 0.05


@pytest.mark.slow
def test_neighbours_agree_on_classes(tmp_path: Path):
    summary = pretrain(tmp_path, 6000, "optim.epochs=8")
    assert summary["knn/top1"] > summary["knn/top1_untrained"] + 20, summary
