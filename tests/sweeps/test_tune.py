"""Sweeps on a real Ray, through every way of being ended."""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import forked
from helpers.processes import below
from helpers.recipes import small_recipe
from helpers.runs import assert_same, weights
from helpers.sweeps import LONG, accounted, start, wait, wait_until, write

from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.sweeps import checks
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import load

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two methods, four trials of 40 steps."""
    for method in ("mocov3", "byol"):
        (tmp_path / f"{method}.yaml").write_text(small_recipe(method))
    return write(tmp_path / "sweep.yaml")


def rows(out: Path) -> list[dict[str, Any]]:
    return read_lines(out / "trials.jsonl")


def steps_of(out: Path) -> int:
    return sum(r[-1]["step"] for p in out.glob("trials/*/metrics.jsonl") if (r := read_lines(p)))


def runs_one(out: Path) -> bool:
    """Whether a trial is marked as running, which a trial of small steps may be late for."""
    return any(r["state"] == "running" for r in rows(out))


@pytest.mark.timeout(4 * LONG)
def test_a_sweep_killed_twice_ends_as_one(sweep: Path, shards: Path, tmp_path: Path):
    """Every trial once, in the folder and in MLflow; and the best recipe gives the same number again."""
    out = tmp_path / "out"
    process = start(sweep, shards, out)
    wait_until(lambda: steps_of(out) > 12 and runs_one(out), process)
    for more in (20, None):
        process.kill()
        process.communicate()
        before = {r["id"]: r for r in rows(out)}
        process = start(sweep, shards, out, "--resume")
        if more:
            known = steps_of(out)
            wait_until(lambda: steps_of(out) > known + more and runs_one(out), process)  # noqa: B023
    text = wait(process)
    assert process.returncode == 0, text
    assert "continues" in text
    done = rows(out)
    assert [r["id"] for r in done] == ["000", "001", "002", "003"]
    assert {r["state"] for r in done} <= {"finished", "stopped"}
    for r in done:
        if r["id"] in before:
            assert r["values"] == before[r["id"]]["values"]
    for name in ("000", "001"):  # went on from their own checkpoints
        starts = read_lines(out / "trials" / name / "starts.jsonl")
        assert any(s.get("step") for s in starts)
    accounted(f"sqlite:///{out.parent / 'mlflow.db'}", out.name, 4)
    assert len(text.splitlines()) < 40
    again_and_done(sweep, shards, out)
    best = json.loads(json.dumps(max((r for r in done if r["state"] == "finished"), key=lambda r: r["metric"])))
    registered(sweep, shards, out, best["id"])
    forked.run(
        [sys.executable, "-m", "eagleray.cli", "pretrain", str(out / "best.yaml")],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "platform"},
    )
    assert_same(weights(out / "best"), weights(out / "trials" / best["id"]))
    seen = [r["monitor/knn"] for r in read_lines(out / "best" / "metrics.jsonl") if "monitor/knn" in r]
    assert seen[-1] == best["metric"]


def again_and_done(sweep: Path, shards: Path, out: Path) -> None:
    """A finished sweep says so, and another one in its folder is refused."""
    text = wait(process := start(sweep, shards, out))
    assert process.returncode == 0
    assert "done already" in text
    text = wait(process := start(sweep, shards, out, "optim.batch=64"))
    assert process.returncode == 2
    assert "optim.batch is 32 there and 64 here" in text.splitlines()[-1]


def registered(sweep: Path, shards: Path, out: Path, best: str) -> None:
    """A finished sweep registers the model of its best trial, once."""
    from mlflow import MlflowClient

    for _ in range(2):
        text = wait(process := start(sweep, shards, out, "sweep.register=shapes"))
        assert process.returncode == 0, text
        assert f"trial {best} as models:/shapes/1" in text
    client = MlflowClient(f"sqlite:///{out.parent / 'mlflow.db'}")
    version = client.get_model_version_by_alias("shapes", "best")
    assert client.get_run(version.run_id).info.run_name == f"{out.name}-{best}"


@pytest.mark.timeout(3 * LONG)
def test_a_sweep_asked_to_stop_saves_and_goes_on(sweep: Path, shards: Path, tmp_path: Path):
    out = tmp_path / "out"
    process = start(sweep, shards, out)
    wait_until(lambda: steps_of(out) > 6, process)
    process.send_signal(signal.SIGTERM)
    text = wait(process)
    assert process.returncode == 1, text
    assert "--resume continues" in text
    assert {r["state"] for r in rows(out)} <= {"waiting", "finished", "stopped"}
    for path in out.glob("trials/*/metrics.jsonl"):  # saved at the very step
        if lines := read_lines(path):  # a trial may have only begun
            assert (path.parent / "checkpoints" / f"step-{lines[-1]['step']:09d}.pt").exists()
    text = wait(process := start(sweep, shards, out))
    assert process.returncode == 2
    assert "continue it with --resume, or give another out=" in text.splitlines()[-1]


@pytest.mark.timeout(3 * LONG)
def test_a_trial_that_fails_is_listed_and_the_others_go_on(shards: Path, tmp_path: Path):
    """A rate of 1e30 gives no finite gradient."""
    (tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    sweep = write(
        tmp_path / "sweep.yaml",
        alternatives={"": {"recipe": "mocov3.yaml"}},
        space={"optim.lr.value": {"grid": [1.0e30, 1.0e-3]}},
        search="grid",
        scheduler="none",
    )
    text = wait(process := start(sweep, shards, tmp_path / "out"))
    assert process.returncode == 0, text
    first, second = rows(tmp_path / "out")
    assert first["state"] == "failed"
    assert "no finite gradient in 3 steps" in first["why"]
    assert second["state"] == "finished"
    assert "trial 000 failed: step" in text


@pytest.mark.timeout(4 * LONG)
def test_trials_with_workers_of_their_own_let_go_of_them(sweep: Path, shards: Path, tmp_path: Path):
    """Both CPUs are held by one trial at a time: what a stopped one, or a killed one, kept would end the sweep."""
    out = tmp_path / "out"
    process = start(sweep, shards, out, "workers=2", "sweep.trials=3", "sweep.grace=0.05")
    wait_until(lambda: steps_of(out) > 6, process)
    [trial] = below(process, "ray::Trial")
    os.kill(trial, signal.SIGKILL)
    text = wait(process)
    assert process.returncode == 0, text
    assert "trial 000: its process died\ntrial 000 continues" in text
    assert Counter(r["state"] for r in rows(out))["failed"] == 0
    assert len(rows(out)) == 3


def test_data_without_labels_cannot_serve_knn(sweep: Path, tmp_path: Path):
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import Sample, write_shards

    images = [Sample(s.key, s.extension, s.data, None) for s in pictures(0, 40)]
    write_shards(iter(images), str(tmp_path / "bare"))
    given = load(str(sweep), [f"data.train={tmp_path / 'bare'}"])
    with pytest.raises(UserError, match=r"needs labels, which data\.train does not have"):
        checks.check_data(given, tmp_path)
    assert Study(given, tmp_path).open_trials() == 4
