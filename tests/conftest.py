"""What tests share: one thread, a quiet environment, and small labelled shards."""

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from helpers import forked, ray_auth
from helpers.recipes import SMALL
from helpers.table import Table
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadGroupScheduling

os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["MLFLOW_LOGGING_LEVEL"] = "ERROR"  # whichever test imports MLflow first
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.setdefault("RAY_AUTH_MODE", "token")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, also by commands that tests start
torch.set_num_threads(1)
# The same inputs each time, however long each takes on a busy machine, so that a commit that passed once passes again;
# `make fuzz` looks for new ones.
hypothesis.settings.register_profile(
    "same",
    derandomize="FUZZ" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")
if "FUZZ" not in os.environ:  # else hypothesis draws constants of all modules that earlier tests have imported, too
    providers._get_local_constants = lambda: providers._local_constants

ONE_AT_A_TIME = {"chaos", "cluster", "docs", "mission", "sweeps"}  # folders of tests that start clusters


class Scheduler(LoadGroupScheduling):
    """Under `--dist loadgroup` the tests of some folders run one at a time, beside the others."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/docs/test_paper_commands.py"):
            return "pages"  # one after the other, as they share what takes a minute to make, but beside the clusters
        return "clusters" if nodeid.split("/")[1] in ONE_AT_A_TIME else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler | None:
    return Scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rules of the tree take a minute and come first: as the last file they would leave other processes idle."""
    items.sort(key=lambda item: item.path.name != "test_house.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    ray_auth.read_again()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/ shards of drawn pictures, 320 and 80."""
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import write_shards

    folder = tmp_path_factory.mktemp("shards")
    for seed, (split, count) in enumerate((("train", 320), ("test", 80))):
        write_shards(pictures(seed, count), str(folder / split), size=300_000)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recipe that trains in seconds: 10 steps an epoch on `shards`."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def small_dino(tmp_path: Path) -> Path:
    """The same with DINO, drop path and two crop sizes."""
    path = tmp_path / "small_dino.yaml"
    path.write_text(
        SMALL.replace("name: mocov3, dim: 16, hidden: 32", "name: dino, prototypes: 64, hidden: 32, bottleneck: 16")
        .replace("backbone: {", "backbone: {drop_path: 0.2, ")
        .replace("blur: 0.5}]", "blur: 0.5}, {size: 8, count: 2, scale: [0.1, 0.4]}]")
    )
    return path


@pytest.fixture(scope="module")
def untracked_runs() -> Iterator[None]:
    """Runs of this process have no history in MLflow, nor the report and the picture that go there, which other tests
    look at: these take half of a short run."""
    from eagleray.api import pretrain as api
    from eagleray.runs import evaluations, plots
    from eagleray.runs.tracking import Tracking

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "tracking_of", lambda *_: Tracking("none"))
        patch.setattr(api, "send_report", lambda *_: None)
        patch.setattr(plots, "draw", lambda *_: None)
        patch.setattr(evaluations, "draw_neighbours", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def quick_runs(untracked_runs: None) -> Iterator[None]:
    """The same, and they write no export."""
    from eagleray.runs import pretrain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "write_export", lambda *_: None)
        yield


NEW_PROCESS = {"exports", "methods", "models"}  # folders of tests whose exports are checked in another process


@pytest.fixture
def every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is saved when it is due, however long the one before it takes."""
    from eagleray.engine import checkpoint

    monkeypatch.setattr(checkpoint.Writer, "busy", False)


def check_here(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run what an export is checked with in this process: to start Python and to import timm takes four seconds."""
    from eagleray.engine import export

    printed: list[str] = []
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", *arguments])
        try:
            exec(export.CHECK, {"print": lambda value: printed.append(f"{value}\n")})  # threads of runs print too
        except Exception:
            return subprocess.CompletedProcess(arguments, 1, "", traceback.format_exc())
    return subprocess.CompletedProcess(arguments, 0, "".join(printed), "")


@pytest.fixture(scope="module", autouse=True)
def exports_are_checked_here(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Runs of this process check their exports in it; those of NEW_PROCESS do it in a copy of one that has imported
    what that needs, as commands do. Yields what starts the one of users."""
    from eagleray.engine import export

    theirs = export.run_check
    with pytest.MonkeyPatch.context() as patch:
        there = request.path.relative_to(Path(__file__).parent).parts[0] in NEW_PROCESS
        patch.setattr(export, "run_check", forked.check_export if there else check_here)
        yield theirs


@pytest.fixture
def new_process(exports_are_checked_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are checked as those of users are, in a process that starts cold."""
    from eagleray.engine import export

    monkeypatch.setattr(export, "run_check", exports_are_checked_here)


TABLE = Table()


@pytest.fixture
def copied_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes are copies of this one, with what a test has changed in it."""
    from eagleray.base import fork_server

    monkeypatch.setattr(fork_server, "CONTEXT", multiprocessing.get_context("fork"))


@pytest.fixture(scope="session")
def table() -> Table:
    return TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE.cells:
        terminalreporter.section("relative difference of the gradient from that of one process and the whole batch")
        terminalreporter.write_line("\n".join(TABLE.lines()))
