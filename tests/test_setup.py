"""What `make setup` and `make demo` install, and what they say where packages cannot be installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.pages import ROOT

# An interpreter whose environments have a pip that says 30 lines and fails.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") i=0; while [ $i -lt 30 ]; do i=$((i + 1)); echo "pip line $i"; done; exit 1 ;;
esac
"""

# One whose environments note what their pip is to install, and what else they are to run.
NOTES = PYTHON.replace("i=0; while [ $i -lt 30 ]; do", 'echo "$*" >> installed; exit 0; while false; do').replace(
    "esac", '  "-m eagleray.cli.demo") echo demo >> installed ;;\nesac'
)


def make(folder: Path, target: str, python: str) -> "subprocess.CompletedProcess[str]":
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        if not (folder / name).exists():  # one that is copied again is newer than the environment
            shutil.copy(ROOT / name, folder / name)
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--silent", target, f"PYTHON={folder / 'python'}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


AUDIT = """#!/bin/sh
echo "$*" > said; cp .venv-audit/requirements.txt asked
[ "$1" = --strict ] && { echo "ERROR:pip_audit._cli:eagle: not found on PyPI"; exit 1; }
"""


def test_an_audit_fails_where_a_package_cannot_be_looked_up(tmp_path: Path):
    (tmp_path / ".venv-audit" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-audit" / ".done").touch()
    (tmp_path / ".venv-audit" / "bin" / "pip-audit").write_text(AUDIT)
    (tmp_path / ".venv-audit" / "bin" / "pip-audit").chmod(0o755)
    (tmp_path / "constraints.txt").write_text("# with a + in it\neagle==1.0\ntorch==2.13.0+cu130\n")
    done = make(tmp_path, "audit", PYTHON)
    assert done.returncode == 2
    assert "eagle: not found on PyPI" in done.stdout
    assert (tmp_path / "asked").read_text() == "# with a + in it\neagle==1.0\ntorch==2.13.0\n"
    assert "--requirement .venv-audit/requirements.txt" in (tmp_path / "said").read_text()


def test_a_setup_that_fails_shows_the_end_of_its_log(tmp_path: Path):
    done = make(tmp_path, "setup", PYTHON)
    assert done.returncode == 2
    first, *tail, last = done.stdout.splitlines()
    assert first.startswith("setup: packages come into .venv")
    assert tail == [f"pip line {i}" for i in range(11, 31)]
    assert last == "error: setup failed; the whole log is .venv/setup.log"
    assert len((tmp_path / ".venv" / "setup.log").read_text().splitlines()) == 30
    assert not (tmp_path / ".venv" / ".done").exists(), "the next `make setup` tries again"


def test_a_demo_needs_no_tools_of_developers_and_keeps_those_that_are_there(tmp_path: Path):
    package, tools = (f"-m pip install --no-compile -c constraints.txt -e {what}" for what in (".", ".[dev]"))
    installed = tmp_path / "installed"
    first, again = ("demo", [package, "demo"]), ("demo", ["demo"])
    for target, new in (first, again, ("setup", [tools]), ("setup", []), again):
        installed.write_text("")
        done = make(tmp_path, target, NOTES)
        assert done.returncode == 0, done.stderr
        assert installed.read_text().splitlines() == new
    (tmp_path / "constraints.txt").touch()
    make(tmp_path, "demo", NOTES)
    assert installed.read_text().splitlines()[-2:] == [tools, "demo"], "new versions, and still all tools"


def test_a_setup_with_an_old_python_is_one_line(tmp_path: Path):
    old = f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10); exec(sys.argv[1])' \"$2\"\n"
    done = make(tmp_path, "setup", old)
    assert (done.returncode, done.stdout) == (2, "error: Python 3.11 or newer is needed\n")
    assert not (tmp_path / ".venv").exists()
