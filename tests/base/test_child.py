"""Helper processes live as long as their parent waits for them, whatever signals their group gets."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.processes import wait_for

from eagleray.base import child

PACKAGE = Path(child.__file__).parents[1]

# A command that notes the requests to stop, as a run does after its last step, while a helper process works.
COMMAND = """
import signal, sys
from eagleray.base import child
for s in child.STOPS:
    signal.signal(s, lambda number, frame: print("heard", number, flush=True))
done = child.run_python(sys.argv[1], sys.argv[2:], text=True)
print("status", done.returncode, done.stdout.split(), flush=True)
"""
HELPER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "part").write_text(str(os.getpid()))
(folder / "part").rename(folder / "pid")
while not (folder / "go").exists():
    time.sleep(0.01)
print("compared", 0.5)
"""


def begin(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start the command in a group of its own, and return it with its helper process, which works until there is a
    file `go`."""
    words = [sys.executable, "-c", COMMAND, HELPER, str(folder)]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((folder / "pid").exists)
    return command, psutil.Process(int((folder / "pid").read_text()))


def test_a_signal_to_the_group_reaches_the_command_alone(tmp_path: Path):
    """Nor does one to each process, as Slurm sends it."""
    command, helper = begin(tmp_path)
    assert command.stdout is not None
    for number in child.STOPS:
        os.killpg(command.pid, number)
        assert command.stdout.readline() == f"heard {number.value}\n"
        helper.send_signal(number)
    assert helper.is_running()
    (tmp_path / "go").touch()
    assert command.communicate()[0] == "status 0 ['compared', '0.5']\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_helper_ends_with_its_parent(number: signal.Signals, tmp_path: Path):
    command, helper = begin(tmp_path)
    os.killpg(command.pid, number)
    command.communicate(timeout=60)
    wait_for(lambda: not helper.is_running())


def test_a_helper_that_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        child.run(["sleep", "1000"], timeout=0.1)
    assert not [p for p in psutil.Process().children() if p.name() == "sleep" and p.cmdline()[1:] == ["1000"]]


def test_input_output_and_failures_are_those_of_subprocess():
    code = "import sys; print(sys.argv[1] + sys.stdin.read()); sys.exit('it\\nfailed')"
    done = child.run_python(code, ["a"], input="b", text=True)
    assert (done.returncode, done.stdout) == (1, "ab\n")
    assert child.words(done) == "failed"
    done = child.run_python("import os; os.kill(os.getpid(), 9)", [], text=True)
    assert child.words(done) == "its process ended with status -9"
    with pytest.raises(subprocess.CalledProcessError):
        child.run(["false"], check=True)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(child.STOPS), "the parent hears its signals again"


def test_nothing_starts_processes_in_another_way():
    """But for the process that training is forked from, which its worker's group of Ray holds, and a job's driver, to
    which signals are passed on."""
    found = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"subprocess\.(run|Popen|call|check_\w+)\(|os\.(system|popen|spawn\w+)\(", file.read_text())
    }
    assert found == {"base/child.py", "cluster/job_start.py", "cluster/spares.py"}
