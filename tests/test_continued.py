"""A run of tests that goes on where an earlier one ended: `make test-all`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest

@pytest.mark.parametrize("i", range(3))
def test_a(i):
    assert i != 1, "one is wrong"

def test_skipped():
    pytest.skip("no GPU")

@pytest.fixture
def torn():
    yield
    raise RuntimeError("in the end")

def test_b(torn):
    pass

def test_end():
    if os.environ.get("END"):
        os._exit(9)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "room" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    return tmp_path


def run(tree: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Return the exit status of a run, and what it printed before its summary."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | environment
    env |= {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.continued", *words]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.partition("short test summary")[0]


def numbers(said: str) -> tuple[int, int]:
    """Return how many tests had passed at the start of a run, and how many of them it left out."""
    [before] = re.findall(r"^(\d+) tests have passed on this tree", said, re.M)
    [left] = re.findall(r"^(\d+) of these tests had passed", said, re.M)
    return int(before), int(left)


@pytest.mark.slow
def test_what_has_passed_is_not_run_again_until_the_tree_changes(tree: Path):
    parallel = ("-p", "xdist", "-n", "2")
    code, said = run(tree, *parallel)
    assert (code, numbers(said)) == (1, (0, 0))
    named = re.findall(r"FAILED (tests/room/test_it.py::.*)", said)
    assert sorted(named) == [
        "tests/room/test_it.py::test_a[1]: AssertionError: one is wrong",
        "tests/room/test_it.py::test_b: RuntimeError: in the end",
    ]
    code, said = run(tree, *parallel)
    assert (code, numbers(said)) == (1, (3, 3))
    code, said = run(tree, "-k", "test_end")
    assert (code, numbers(said)) == (0, (3, 1)), "nothing is left to run of this part"
    assert run(tree, "-k", "test_nothing")[0] == 5, "a part that has no tests is a mistake"
    (tree / "tests" / "conftest.py").touch()
    code, said = run(tree)
    assert (code, numbers(said)) == (1, (0, 0))


def test_a_changed_file_of_tests_runs_its_own_tests_and_those_of_the_whole_tree_again(tree: Path):
    (tree / "tests" / "room" / "test_other.py").write_text("def test_other(): pass\n")
    (tree / "tests" / "test_house.py").write_text("def test_house(): pass\n")
    assert numbers(run(tree)[1]) == (0, 0)
    assert numbers(run(tree)[1]) == (5, 5)
    (tree / "tests" / "room" / "test_it.py").write_text(TESTS.replace("i != 1", "True"))
    assert numbers(run(tree)[1]) == (1, 1), "test_other alone has read nothing that changed"


def test_a_run_that_is_killed_has_kept_what_passed(tree: Path):
    assert run(tree, END="1")[0] == 9
    assert numbers(run(tree)[1]) == (2, 2)


def test_a_tree_that_changes_during_a_run_keeps_nothing(tree: Path):
    (tree / "tests" / "room" / "test_it.py").write_text("def test_change(): open('new', 'w')\n")
    code, said = run(tree)
    assert code == 0
    assert "the tree has changed meanwhile" in said
    assert numbers(run(tree)[1]) == (0, 0)
