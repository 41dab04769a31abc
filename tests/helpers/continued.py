"""Runs of the tests that go on where an earlier one on the same tree has ended: `pytest -p helpers.continued`.

What has passed is kept in .pytest_cache, in a file for each state of the tree without the files of tests. A file of
tests in a room imports no other, so a change to it makes its own tests run again; those in tests/ itself and in
tests/docs read the whole tree. What fails is named at once."""

import hashlib
import sys
from collections.abc import Iterable, Iterator
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


class Tree:
    """A tree as it lies on the disk, committed or not: a digest of each file that tests read.

    `trunk` is a digest of the interpreter and of all files but those of tests in rooms, `whole` one of all files."""

    def __init__(self, root: Path) -> None:
        self.files = {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files(root)
        }
        self.trunk = self._digest(name for name in self.files if not self._is_room_test(name))
        self.whole = self._digest(self.files)

    def _is_room_test(self, name: str) -> bool:
        folder, _, file = name.rpartition("/")
        in_room = folder.startswith("tests/") and folder != "tests/docs"
        return in_room and file.startswith("test_") and file.endswith(".py")

    def _digest(self, names: Iterable[str]) -> str:
        lines = [sys.version, *(f"{name}\0{self.files[name]}" for name in sorted(names))]
        return hashlib.sha256("\0".join(lines).encode()).hexdigest()

    def key(self, nodeid: str) -> str:
        """Return a test's line: its name after a digest of what it reads beside the trunk."""
        file = nodeid.partition("::")[0]
        return f"{(self.files.get(file, '') if self._is_room_test(file) else self.whole)[:16]} {nodeid}"


class Left:
    """Where tests are collected: those that have passed are left out."""

    def __init__(self, passed: set[str]) -> None:
        self.passed, self.number = passed, 0  # names of tests

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
        self.config, self.left, self.tree = config, left, Tree(config.rootpath)
        folder = config.cache.mkdir("passed")
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
        self.path = folder / self.tree.trunk
        if self.path.exists():
            lines = self.path.read_text().split("\n")[:-1]  # a line without an end may be half of one
            names = {line: line.partition(" ")[2] for line in lines}
            left.passed |= {name for line, name in names.items() if line == self.tree.key(name)}
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
            self.file.write(f"{self.tree.key(report.nodeid)}\n")

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
        if Tree(self.config.rootpath).whole != self.tree.whole:
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
