"""Twenty kills at random moments, with checkpoints between the lines of the log: every line of every history, and every
bit of the weights, is that of a run that nobody killed. In a folder, and in a bucket by processes of two machines."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.killed_runs import assert_same_story, told, train_with_kills, write_data, write_recipe
from helpers.runs import assert_same
from helpers.s3.server import store_of

from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.runs import layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS, KILLS = 200, 20


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("uneven")
    write_data(folder)
    return [str(write_recipe(folder)), *(f"data.{s}={folder / s}" for s in ("train", "test")), f"max_steps={STEPS}"]


@pytest.fixture(scope="module")
def whole(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that nobody kills, which has everything in its histories that there may be."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_with_kills(args, str(folder / "run"), 0, random.Random(0), [folder / "cache"]) == 0
    found = told(str(folder / "run"), folder)
    assert len(found[layout.STEPS]) == STEPS
    assert len(found[layout.SKIPPED]) == 2 * 10 + 2
    assert len(found[layout.QUARANTINE]) == 7
    assert sum("knn/top1" in line for line in found[layout.METRICS]) == STEPS // 20 - 1
    assert {"spike", "non-finite"} <= {line["kind"] for line in found[layout.HEALTH]}
    return str(folder / "run")


@pytest.fixture(params=["folder", "bucket"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "run")
    else:
        with store_of(tmp_path / "s3", "runs"):
            yield "s3://runs/killed"


def test_a_killed_run_has_every_line(args: list[str], whole: str, out: str, tmp_path: Path):
    machines = [tmp_path / "one", tmp_path / "other"]
    rng = random.Random(int(os.environ.get("SEED") or 11))
    assert train_with_kills(args, out, KILLS, rng, machines) == KILLS, "it had ended before the last kill"
    assert_same_story(out, whole, tmp_path)
    states = [
        checkpoint.newest(f"{place}/checkpoints", tmp_path / f"state-{i}") for i, place in enumerate((out, whole))
    ]
    assert all(state is not None and state["step"] == STEPS for state in states)
    assert_same(*(state["method"] for state in states if state))
    starts = [line for line in read_lines(Path(whole) / layout.STARTS) if "ranks" in line]
    assert len(starts) == 1, "the whole run was started once"
