"""A sweep that is sent to a real head, on nodes that share no disk, with its folder in a real S3 store."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.mlflow_server import running as mlflow_running
from helpers.ray_head import Head, running
from helpers.s3.server import store_of
from helpers.sweeps import LONG, accounted, ended, stored, trained_on, wait_until, write_long

from eagleray.cluster.job_package import identify

pytestmark = pytest.mark.slow
OUT, TRIALS = "s3://sweeps/small", 8


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an MLflow server, which the environment names."""
    (tmp_path / "mlflow").mkdir()
    with mlflow_running(tmp_path / "mlflow") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        yield server.uri


@pytest.fixture
def head(uri: str, tmp_path: Path) -> Iterator[Head]:
    """A head that only directs, with two nodes whose processes keep their files in folders of their own."""
    with store_of(tmp_path / "s3", "sweeps"), running(cpus=0) as head:
        for name in ("node-a", "node-b"):
            head.join(name, XDG_CACHE_HOME=str(tmp_path / name))
        yield head


def rows() -> list[dict[str, Any]]:
    """The lines about the trials; none before the first."""
    return stored(f"{OUT}/trials.jsonl")


def steps() -> int:
    return sum(r["step"] for r in rows())


def driver() -> int:
    """The process of the sweep's driver."""
    found = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if is_driver(p)]
    assert len(found) == 1, found
    return found[0]


def is_driver(cmdline: Path) -> bool:
    try:
        words = cmdline.read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    # Its parent, which runs job_start.py, has the same words but for -m.
    return {b"-m", b"eagleray.cli", b"tune", b"sweep.yaml"} <= {*words}


@pytest.mark.timeout(6 * LONG)
def test_a_sweep_that_is_sent_goes_on_after_its_driver_is_killed_twice(
    head: Head, uri: str, shards: Path, tmp_path: Path
):
    sweep = write_long(tmp_path, TRIALS)
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={OUT}"]

    code, text = head("submit", "tune", sweep, *keys)
    assert code == 0, text
    before: dict[str, Any] = {}
    for times in (1, 2):
        reached = steps()
        wait_until(lambda: steps() >= reached + 45)  # noqa: B023
        maps = psutil.Process(driver()).memory_maps()
        assert not [m.path for m in maps if "libtorch" in m.path], "each sweep would cost the head PyTorch"
        os.kill(driver(), signal.SIGKILL)
        wait_until(lambda: head.jobs()[-1]["state"] == "failed")
        before = {r["id"]: r for r in rows()}
        assert any(r["state"] == "running" for r in before.values())
        code, text = head("submit", "tune", sweep, *keys, "--resume", *(["--follow"] if times == 2 else []))
        assert code == 0, text
    assert "continues" in text
    assert head.jobs()[-1]["id"].startswith(identify(OUT, "tune"))
    ended(rows(), before, TRIALS)
    accounted(uri, "small", TRIALS)
    trained_on(tmp_path / "node-a", tmp_path / "node-b")
