"""Runs whose numbers others have published: what is said beside them, and of data that are not there."""

import sys
from pathlib import Path

import pytest
from helpers.benchmarks import BENCHMARKS, load_benchmark
from helpers.forked import run

from eagleray.config import bundled


def test_our_numbers_stand_beside_theirs() -> None:
    published = load_benchmark("published.py")
    assert published["NAMES"]
    for name in published["NAMES"]:
        said = published["beside"]({"knn/top1": 80.0, "linear/top1": 82.0}, bundled.recipe(name).published)
        assert said.startswith("knn 80.0 % beside 8")
        assert said.endswith("% that is published")


@pytest.mark.slow
def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    [name] = [n for n in load_benchmark("published.py")["NAMES"] if "imagenette" in n]
    keys = (f"data.train={tmp_path / 'none'}", "--out", str(tmp_path / "runs"))
    words = [sys.executable, str(BENCHMARKS / "published.py"), name, *keys]
    done = run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"left out: {name}: data.train: {tmp_path / 'none'}" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: nothing was trained"


@pytest.mark.slow
def test_a_piece_of_a_run_goes_on(shards: Path, tmp_path: Path) -> None:
    [name] = [n for n in load_benchmark("published.py")["NAMES"] if n.endswith("cifar10_ep200")]
    data = (f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", "optim.batch=16", "data.lanes=4")
    command = [str(BENCHMARKS / "published.py"), name, *data, "--out", str(tmp_path), "--epochs", "1"]
    first = run([sys.executable, *command, "--minutes", "0.05"], capture_output=True, text=True)
    assert "stopped after" in first.stdout, first.stderr
    rest = run([sys.executable, *command], capture_output=True, text=True)
    assert "% beside 84.7 % that is published" in rest.stdout, rest.stderr
