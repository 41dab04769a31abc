"""Runs sent to a real head of Ray, with token authentication."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.pictures import jpeg
from helpers.ray_head import Head, running
from helpers.runs import arguments

from eagleray.cluster import job_package, jobs


@pytest.fixture(scope="module")
def real() -> Iterator[Head]:
    with running() as head:
        yield head


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_job_of_a_real_head_ends_as_its_run(real: Head, small: Path, shards: Path, tmp_path: Path):
    out = tmp_path / "out"
    args = ["submit", *arguments(small, shards, out), "evaluate.probe_epochs=0", "--follow"]
    code, text = real(*args)
    assert code == 0, text
    assert "1 node(s) with 2 CPUs and 0 GPUs" in text
    assert re.search(r"step \d+/20", text)
    assert json.loads((out / "summary.json").read_text())["steps"] == 20
    # The package that ran is the one that was sent, alone with the recipe, and not what is installed there.
    ran = Path(json.loads((out / "environment.json").read_text())["command"][0])
    assert "_ray_pkg_" in str(ran)
    assert {p.name for p in ran.parents[2].iterdir()} == {"eagleray", "recipe.yaml"}

    code, text = real(*args)
    assert code == 0, text
    assert "done already" in text
    name = job_package.identify(str(out))
    assert [(j["id"], j["state"], j["status"]) for j in real.jobs()] == [
        (name, "succeeded", 0),
        (f"{name}-2", "succeeded", 0),
    ]

    code, text = real(*args, f"out={tmp_path / 'wrong'}", f"data.train={tmp_path / 'nowhere'}")
    assert code == 2, text
    assert f"error: data.train: {tmp_path / 'nowhere'}: cannot be read: No such file or directory" in text.splitlines()
    assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_stopped_job_has_saved_and_continues(real: Head, small: Path, shards: Path, tmp_path: Path):
    """On a worker of Ray Train; everything in the job's own environment."""
    out = tmp_path / "out"
    keys = ["workers=1", "optim.epochs=400", "max_steps=4000", "evaluate.probe_epochs=0", "checkpoint.minutes=60"]
    args = ["submit", *arguments(small, shards, out, *keys)]
    code, text = real(*args)
    assert code == 0, text
    name = job_package.identify(str(out))
    end = time.monotonic() + 600
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < end, real("logs", name)[1]
        time.sleep(0.5)
    assert not list((out / "checkpoints").glob("*.json"))
    code, text = real(*args)
    assert code == 2
    assert f"error: {name}: this run is being trained already" in text
    follower = real.start(*args, "--follow")
    assert follower.stdout
    line = next(line for line in follower.stdout if not line.startswith("sent with it: "))  # a variable of this machine
    assert line == f"{name}: this run is being trained already\n"
    code, text = real("stop", name)
    assert code == 0, text
    assert f"{name}: stopped" in text
    text = follower.communicate(timeout=300)[0]
    assert follower.returncode == 1, text
    [saved] = (out / "checkpoints").glob("*.json")
    step = int(saved.stem.rpartition("-")[2])
    assert 3 <= step < 4000
    code, text = real(*args, f"max_steps={step + 5}", "--follow")
    assert code == 0, text
    assert f"{name}-2: submitted" in text
    assert f"continuing from step {step}" in text
    assert json.loads((out / "summary.json").read_text())["steps"] == step + 5


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_other_commands_are_jobs_of_a_real_head(real: Head, small: Path, shards: Path, tmp_path: Path):
    """Data, its index and a sweep on it, one after the other, each in the environment of the head's own Ray."""
    for i in range(4):
        (path := tmp_path / "photos" / "ab"[i % 2] / f"{i}.jpg").parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    made, swept = tmp_path / "made", tmp_path / "swept"
    code, text = real("submit", "prepare", "folder", tmp_path / "photos", made, "--workers", 1, "--follow")
    assert code == 0, text
    assert json.loads((made / "dataset.json").read_text())["images"] == 4
    code, text = real("submit", "index", made, "--follow")
    assert code == 0, text
    assert "4 images" in text

    tree = {"recipe": str(small), "space": {"optim.lr.value": {"choice": [0.1]}}, "trials": 1, "scheduler": "none"}
    tree["fixed"] = {"workers": 0, "optim.epochs": 1, "max_steps": 2, "evaluate.probe_epochs": 0}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree | {"objective": {"key": "loss", "mode": "min"}}))
    data = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={swept}"]
    code, text = real("submit", "tune", tmp_path / "sweep.yaml", *data, "--follow")
    assert code == 0, text
    assert (swept / "best.yaml").exists()
    known = {j["command"]: j["state"] for j in real.jobs()}
    assert {"prepare": "succeeded", "index": "succeeded", "tune": "succeeded"}.items() <= known.items()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_room_says_so_and_can_be_stopped(real: Head, small: Path, shards: Path, tmp_path: Path):
    """It asks for GPUs that nobody brings."""
    out = tmp_path / "out"
    code, text = real("submit", *arguments(small, shards, out), "--gpus", 2)
    assert code == 0, text
    assert "asks for 2 worker(s) with a GPU each" in text
    name, end = job_package.identify(str(out)), time.monotonic() + 300
    wanted = "waiting for 2 worker(s) with 1 CPU and 1 GPU each; the cluster has 1 node(s) with 2 CPUs and 0 GPUs"
    while not (waits := next(j["waits"] for j in real.jobs() if j["id"] == name)):
        assert time.monotonic() < end, real("logs", name)[1]
    assert waits.startswith(wanted)
    assert f"{name}: {wanted}" in real("jobs")[1]
    began = time.monotonic()
    code, text = real("stop", name)
    assert code == 0, text
    assert f"{name}: stopped" in text
    assert time.monotonic() - began < jobs.STOPPING, "Ray killed it, as no worker was there to see that it shall stop"
    lines = real("logs", name)[1].splitlines()
    assert len(lines) < 20, lines  # what Ray's libraries say is in ray.log
    assert (out / "ray.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_head_asks_for_its_token(real: Head, tmp_path: Path):
    for env, wanted in (
        ({"RAY_AUTH_TOKEN": "wrong"}, "the cluster refuses the token"),
        ({"RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}, "the cluster requires a token"),
        ({"RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": "disabled"}, "the cluster requires a token"),
    ):
        code, text = real("jobs", **env)
        assert code == 2, text
        [line] = text.strip().splitlines()
        assert wanted in line
