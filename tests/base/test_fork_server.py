"""A server that is forked from a process that waits, and that is forked anew when it has died."""

import subprocess
import sys
from pathlib import Path

from eagleray.base import fork_server

PROGRAM = """
import os, signal, sys
from multiprocessing import forkserver
from eagleray.base import fork_server

def work():
    fork_server.start([])
    process = fork_server.CONTEXT.Process(target=os.write, args=(1, b"forked "))
    process.start()
    process.join()
    os._exit(process.exitcode)

for _ in range(2):
    for _ in range(2):
        fork_server.start_here()
        os.write(1, b"%d " % os.waitstatus_to_exitcode(os.waitpid(os.fork() or work(), 0)[1]))
    server = forkserver._forkserver._forkserver_pid
    os.write(1, b"torch " * ("torch" in sys.modules))
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
"""


def test_processes_use_the_server_of_the_one_that_they_are_forked_from() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "forked 0 " * 4


def test_the_server_imports_from_where_its_parent_does(tmp_path: Path) -> None:
    (tmp_path / "lies_elsewhere.py").write_text("import os\nserver = os.getpid()\n")
    program = f"""
import os, sys
from eagleray.base import fork_server
sys.path.append({str(tmp_path)!r})
fork_server.start(["lies_elsewhere"])
code = "import lies_elsewhere as l, os; os.write(1, b'%d' % (l.server == os.getppid()))"
process = fork_server.CONTEXT.Process(target=exec, args=(code,))
process.start()
process.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1", "")


def test_the_module_is_light() -> None:
    """The process that waits imports it before anything else."""
    code = f"import sys, {fork_server.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
