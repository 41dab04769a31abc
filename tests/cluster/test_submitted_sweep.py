"""A sweep that is sent to a real head, on nodes that share no disk, with its folder in a real S3 store."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.mlflow_server import running as mlflow_running
from helpers.ray_head import Head, running
from helpers.recipes import small_recipe
from helpers.s3.server import store_of
from helpers.sweeps import FIXED, LONG, accounted, write

from eagleray.cluster.job_package import identify
from eagleray.runs import layout
from eagleray.storage import store

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


def stored() -> list[dict[str, Any]]:
    """The lines about the trials; none before the first."""
    try:
        text = store.store(OUT).get(f"{OUT}/trials.jsonl").decode()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def steps() -> int:
    return sum(r["step"] for r in stored())


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
    return b"eagleray.cli" in words and b"tune" in words and b"sweep.yaml" in words


@pytest.mark.timeout(6 * LONG)
def test_a_sweep_that_is_sent_goes_on_after_its_driver_is_killed_twice(
    head: Head, uri: str, shards: Path, tmp_path: Path
):
    for method in ("mocov3", "byol"):
        (tmp_path / f"{method}.yaml").write_text(small_recipe(method))
    longer = {"optim.epochs": 30, "monitor.every": 15, "checkpoint.steps": 30}
    sweep = write(tmp_path / "sweep.yaml", trials=TRIALS, fixed=FIXED | longer)
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={OUT}"]

    def wait_until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not true():
            assert time.monotonic() < end, head("jobs")[1]
            time.sleep(0.5)

    code, text = head("submit", "tune", sweep, *keys)
    assert code == 0, text
    before: dict[str, Any] = {}
    for times in (1, 2):
        reached = steps()
        wait_until(lambda: steps() >= reached + 45)  # noqa: B023
        os.kill(driver(), signal.SIGKILL)
        wait_until(lambda: head.jobs()[-1]["state"] == "failed")
        before = {r["id"]: r for r in stored()}
        assert any(r["state"] == "running" for r in before.values())
        code, text = head("submit", "tune", sweep, *keys, "--resume", *(["--follow"] if times == 2 else []))
        assert code == 0, text
    assert "continues" in text
    assert head.jobs()[-1]["id"].startswith(identify(OUT, "tune"))
    done = stored()
    assert [r["id"] for r in done] == [f"{n:03d}" for n in range(TRIALS)]
    assert set(Counter(r["state"] for r in done)) <= {"finished", "stopped"}
    assert all(r["values"] == before[r["id"]]["values"] for r in done if r["id"] in before)
    accounted(uri, "small", TRIALS)
    for node in ("node-a", "node-b"):
        ran = (tmp_path / node / "eagleray" / "runs").glob(os.path.join("*", "work", layout.METRICS))
        assert list(ran), f"no trial ran on {node}"
