"""Processes that tests start: what runs below a command, and ports for them."""

import socket
import subprocess
import time
from collections.abc import Callable


def below(process: subprocess.Popen[str], title: str) -> list[int]:
    """Processes with such a name or title below a command."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,comm,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()[1:]]
    parents = {int(pid): int(ppid) for pid, ppid, _ in rows}

    def inside(pid: int) -> bool:
        while pid > 1 and pid != process.pid:
            pid = parents.get(pid, 0)
        return pid == process.pid

    return [int(pid) for pid, _, args in rows if title in args and inside(int(pid))]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until a condition holds, for two minutes at most."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
