"""Commands that tests fork from a process that has imported everything end as those that start cold."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import forked

SAYS = """
import atexit, multiprocessing, os, sys, threading
print(os.getcwd(), sys.argv, __name__, [p for p in sys.path if p.startswith(os.environ["PYTHONPATH"])])
print(os.getpgid(0) == os.getpid(), sys.stdin.read(), os.environ["COLUMNS"], sorted(os.environ))
print(multiprocessing.parent_process(), multiprocessing.current_process().name, len(threading.enumerate()))
atexit.register(print, "the end")
sys.exit(3)
"""


def both(tmp_path: Path, *words: str, environment: dict[str, str] | None = None) -> list[tuple[int, str, str]]:
    """What a program of Python returns and prints where it starts cold, and where it is forked."""
    options: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": tmp_path,
        "env": os.environ | {"COLUMNS": "40", "PYTHONPATH": str(tmp_path)} | (environment or {}),
        "process_group": 0,
    }
    ends = []
    for start in (subprocess.Popen, forked.Popen):
        with start([sys.executable, *words], **options) as process:
            out, err = process.communicate("given", timeout=120)
        ends.append((process.returncode, out, err))
    return ends


@pytest.mark.slow
def test_a_forked_program_finds_what_one_that_starts_cold_does(tmp_path: Path) -> None:
    cold, copied = both(tmp_path, "-c", SAYS, "a", "b c")
    assert cold == copied
    assert cold[0] == 3
    assert cold[1].endswith("the end\n")
    (tmp_path / "says.py").write_text(SAYS)
    for words in (["says.py", "a"], ["-m", "says", "a"]):
        cold, copied = both(tmp_path, *words)
        assert cold == copied
        assert cold[0] == 3


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('x', end='')", 0),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError('no')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0),
    ],
)
def test_it_ends_as_one_that_starts_cold(code: str, status: int, tmp_path: Path) -> None:
    cold, copied = both(tmp_path, "-c", code)
    assert cold[:2] == copied[:2]
    assert cold[0] == status
    assert cold[2].splitlines()[-1:] == copied[2].splitlines()[-1:]  # a trace has more calls


def test_a_command_that_refuses_starts_cold_and_forked(tmp_path: Path) -> None:
    """The message of a wrong word is as wide as the environment says."""
    cold, copied = both(tmp_path, "-m", "eagleray.cli", "list", "recipees")
    assert cold == copied
    assert cold[0] == 2
    assert "recipees" in cold[2]
    cold, copied = both(tmp_path, "-m", "eagleray.cli", "show", "nothing.yaml", environment={"COLUMNS": "200"})
    assert cold == copied
    assert (cold[0], cold[1]) == (2, "")


def test_a_forked_program_gets_signals_and_timeouts(tmp_path: Path) -> None:
    sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with forked.Popen(sleeps, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(120) == -signal.SIGTERM
    with pytest.raises(subprocess.CalledProcessError):
        forked.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)


def test_a_forked_program_forks_another(tmp_path: Path) -> None:
    code = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); from helpers import forked\n"
    code += "print(forked.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True).stdout)"
    assert forked.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "7\n\n"
