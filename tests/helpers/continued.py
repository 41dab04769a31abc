"""Runs of the tests that go on where an earlier one on the same tree has ended: `pytest -p helpers.continued`.

What has passed is kept in .pytest_cache, in a file for each state of the tree. What fails is named at once."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

FOLDERS = ("platform", "tests", "pipelines", "tune", "deploy", "docs", "benchmarks", ".ci")
KEPT = 10  # trees, the newest


def files(root: Path) -> Iterator[Path]:
    """Yield what tests read of a checkout: its folders, and the files beside them."""
    for path in (*root.glob("*"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def digest(root: Path) -> str:
    """Return a digest of the tree as it lies on the disk, committed or not, and of the interpreter."""
    whole = hashlib.sha256(sys.version.encode())
    for path in sorted(files(root)):
        whole.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return whole.hexdigest()


class Left:
    """Where tests are collected: those that have passed are left out."""

    def __init__(self, passed: set[str]) -> None:
        self.passed, self.number = passed, 0

    @pytest.hookimpl(trylast=True)  # of those that -m and -k have left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        out = [item for item in items if item.nodeid in self.passed]
        items[:] = [item for item in items if item.nodeid not in self.passed]
        self.number = len(out)
        config.hook.pytest_deselected(items=out)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = self.number


class Kept:
    """Where reports come together: each test that passes becomes a line, which outlives a run that is killed."""

    def __init__(self, config: pytest.Config, left: Left) -> None:
        assert config.cache is not None
        self.config, self.left, self.tree = config, left, digest(config.rootpath)
        folder = config.cache.mkdir("passed")
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        self.path = folder / self.tree
        if self.path.exists():
            left.passed |= set(self.path.read_text().split("\n")[:-1])  # a line without an end may be half of one
        self.file: TextIO = self.path.open("a", buffering=1)  # a line at a time
        self.good: dict[str, bool] = {}

    @pytest.hookimpl(trylast=True)  # when there is a terminal
    def pytest_sessionstart(self) -> None:
        self.say(f"{len(self.left.passed)} tests have passed on this tree and are not run again")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = sorted(self.left.passed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left.number = max(self.left.number, getattr(node, "workeroutput", {}).get("left", 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.good[report.nodeid] = self.good.get(report.nodeid, True) and report.passed
        if report.failed:
            self.say(f"FAILED {report.nodeid}: {reason(report)}")
        if report.when == "teardown" and self.good.pop(report.nodeid):
            self.file.write(f"{report.nodeid}\n")

    def say(self, line: str) -> None:
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(line)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.left.number:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self) -> None:
        self.file.close()
        self.say(f"{self.left.number} of these tests had passed before on this tree")
        if digest(self.config.rootpath) != self.tree:
            self.path.unlink()
            self.say("the tree has changed meanwhile: what passed runs again")


def reason(report: pytest.TestReport) -> str:
    """Return the first line of what a test failed with."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return text.strip().partition("\n")[0][:200]


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    left = Left(set(given["passed"]) if given else set())
    config.pluginmanager.register(left)
    if given is None:
        config.pluginmanager.register(Kept(config, left))
