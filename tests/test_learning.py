"""Training learns: on drawn pictures, kNN after a short run is well above the untrained backbone's."""

from pathlib import Path

from eagleray import launch
from eagleray.data.shards import write_shards
from eagleray.demo import RECIPE, pictures


def test_a_short_run_beats_the_untrained_backbone(tmp_path: Path):
    for seed, (split, count) in enumerate((("train", 3000), ("test", 500))):
        write_shards(pictures(seed, count), str(tmp_path / split))
    keys = {"data.train": tmp_path / "train", "data.test": tmp_path / "test", "out": tmp_path / "out", "workers": 0}
    keys |= {"optim.epochs": 5, "optim.lr.warmup": 1, "evaluate.limit": 3000, "evaluate.probe_epochs": 0}
    summary = launch.pretrain(RECIPE, [f"{k}={v}" for k, v in keys.items()])
    assert summary["knn/top1"] > summary["knn/top1_untrained"] + 6, summary
