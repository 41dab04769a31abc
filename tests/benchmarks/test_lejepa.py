"""The rank correlations of LeJEPA's loss are read from the logs of a sweep's trials."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmarks import load_benchmark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lejepa() -> dict[str, Any]:
    return load_benchmark("lejepa.py")


def test_a_trial_has_the_mean_loss_of_the_last_fifth_of_its_log(lejepa: dict[str, Any], tmp_path: Path):
    losses = [9.0] * 8 + [1.0, 2.0]
    rows = [{"step": n, "loss": loss} for n, loss in enumerate(losses)] + [{"step": 10, "knn/top1": 31.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "summary.json").write_text(json.dumps({"knn/top1": 31.0}))
    found = lejepa["trial"](tmp_path, {"method.weight": 0.01, "optim.lr.value": 0.001})
    assert found == {"lambda": 0.01, "lr": 0.001, "loss": 1.5, "scaled": pytest.approx(1.5 / 0.01**0.4), "knn": 31.0}


def test_a_low_loss_with_a_high_accuracy_correlates_positively(lejepa: dict[str, Any]):
    trials = [{"loss": 3.0 - n, "scaled": float(n), "knn": 30.0 + n**3} for n in range(4)]
    found = lejepa["correlations"](trials)
    assert found == {"rank correlation, loss": pytest.approx(1.0), "rank correlation, scaled loss": pytest.approx(-1.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "words", "said"),
    [
        ("other", [], "--data {}: expected a folder with cifar10/"),
        ("cifar10", ["--programs", "0"], "--programs 0: expected 1 or more"),
        ("cifar10", ["--hours", "0"], "--hours 0.0: 0 of 12 trials have ended; the same command continues"),
    ],
)
def test_a_mistake_is_one_line(made: str, words: list[str], said: str, tmp_path: Path):
    (tmp_path / made).mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / "lejepa.py"), "--data", str(tmp_path), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert said.format(tmp_path) in line
