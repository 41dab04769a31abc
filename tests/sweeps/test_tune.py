"""Sweeps on a real Ray, through every way of being ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.processes import below
from helpers.recipes import small_recipe
from helpers.runs import assert_same, weights

from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.sweeps import ray_tune, run
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import load

pytestmark = pytest.mark.slow
LONG = 900  # seconds: machines are shared
FIXED: dict[str, Any] = {"optim.epochs": 4, "evaluate.probe_epochs": 0, "monitor.every": 4, "checkpoint.steps": 4}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two methods, four trials of 40 steps."""
    for method in ("mocov3", "byol"):
        (tmp_path / f"{method}.yaml").write_text(small_recipe(method))
    return write(tmp_path / "sweep.yaml")


def write(path: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "alternatives": {m: {"recipe": f"{m}.yaml"} for m in ("mocov3", "byol")},
        "fixed": FIXED,
        "space": {
            "optim.lr.value": {"log": [1.0e-4, 1.0e-2]},
            "method.momentum.value": {"uniform": [0.5, 0.99]},
        },
        "objective": {"key": "monitor/knn"},
        "trials": 4,
        "reduction": 2,
    }
    if changes.get("search") == "grid":
        del given["trials"]
    path.write_text(yaml.safe_dump(given | changes, sort_keys=False))
    return path


def start(sweep: Path, shards: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "eagleray.cli", "tune", str(sweep), *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "platform"},
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str]) -> str:
    text = process.communicate(timeout=LONG)[0]
    assert "Traceback" not in text, text
    return text


def rows(out: Path) -> list[dict[str, Any]]:
    return read_lines(out / "trials.jsonl")


def wait_until(true: Any, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)


def steps_of(out: Path) -> int:
    return sum(r[-1]["step"] for p in out.glob("trials/*/metrics.jsonl") if (r := read_lines(p)))


def accounted(out: Path, trials: int) -> list[Any]:
    """MLflow's runs: one for each trial under one parent, and nothing else."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{out.parent / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("eagleray").experiment_id])
    parents = [r for r in found if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    children = [r for r in found if r.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert sorted(r.info.run_name for r in children) == [f"{out.name}-{n:03d}" for n in range(trials)]
    assert parents[0].info.status == "FINISHED"
    files = {f.path for f in client.list_artifacts(parents[0].info.run_id)}
    assert {"best.yaml", "trials.csv", "keys.png", "parallel.png", "curves.png"} <= files
    return children


@pytest.mark.timeout(4 * LONG)
def test_a_sweep_killed_twice_ends_as_one(sweep: Path, shards: Path, tmp_path: Path):
    """Every trial once, in the folder and in MLflow; and the best recipe gives the same number again."""
    out = tmp_path / "out"
    process = start(sweep, shards, out)
    wait_until(lambda: steps_of(out) > 12, process)
    for more in (20, None):
        process.kill()
        process.communicate()
        left = Counter(r["state"] for r in rows(out))
        assert left["running"]
        before = {r["id"]: r for r in rows(out)}
        process = start(sweep, shards, out, "--resume")
        if more:
            known = steps_of(out)
            wait_until(lambda: steps_of(out) > known + more, process)  # noqa: B023
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
    accounted(out, 4)
    assert len(text.splitlines()) < 40
    again_and_done(sweep, shards, out)
    best = json.loads(json.dumps(max((r for r in done if r["state"] == "finished"), key=lambda r: r["metric"])))
    subprocess.run(
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
        assert (path.parent / "checkpoints" / f"step-{read_lines(path)[-1]['step']:09d}.pt").exists()
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


@pytest.mark.parametrize("scheduler", ["hyperband", "pbt"])
@pytest.mark.timeout(3 * LONG)
def test_trials_that_are_paused_go_on(scheduler: str, shards: Path, tmp_path: Path):
    (tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    sweep = write(
        tmp_path / "sweep.yaml",
        alternatives={"": {"recipe": "mocov3.yaml"}},
        objective={"key": "health/backbone_rank"},
        scheduler=scheduler,
        interval=0.3,
    )
    out = tmp_path / "out"
    text = wait(process := start(sweep, shards, out))
    assert process.returncode == 0, text
    done = rows(out)
    assert {r["state"] for r in done} <= {"finished", "stopped"}
    assert [r["id"] for r in done] == ["000", "001", "002", "003"]
    if scheduler == "pbt":
        assert {r["state"] for r in done} == {"finished"}
        taken = [line for p in out.glob("trials/*/lineage.jsonl") for line in read_lines(p)]
        assert taken
        assert all(line["step"] > 0 for line in taken)
        assert all(1e-4 <= line["values"]["optim.lr.value"] <= 1e-2 for line in taken)
        assert all(0.5 <= line["values"]["method.momentum.value"] <= 0.99 for line in taken)


def test_resources_are_said_when_they_are_missing(sweep: Path, shards: Path):
    given = load(str(sweep), ["sweep.cpus=4"])
    with pytest.raises(UserError, match="cpus=4: a trial needs 4 CPUs"):
        ray_tune.share(given, [{"CPU": 2}])
    assert ray_tune.share(given, [{"CPU": 9}, {"CPU": 4}]) == ({"CPU": 4, "GPU": 0}, 3)
    assert ray_tune.share(given, [{"CPU": 16, "GPU": 2}]) == ({"CPU": 4, "GPU": 1}, 2)
    nested = load(str(sweep), ["workers=2"])
    assert ray_tune.share(nested, [{"CPU": 16, "GPU": 4}])[1] == 2
    assert ray_tune.share(nested, [{"CPU": 16}])[1] == 1


def test_data_without_labels_cannot_serve_knn(sweep: Path, tmp_path: Path):
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import Sample, write_shards

    images = [Sample(s.key, s.extension, s.data, None) for s in pictures(0, 40)]
    write_shards(iter(images), str(tmp_path / "bare"))
    given = load(str(sweep), [f"data.train={tmp_path / 'bare'}"])
    with pytest.raises(UserError, match=r"needs labels, which data\.train does not have"):
        run.check_data(given, tmp_path)
    assert Study(given, tmp_path).open_trials() == 4
