"""A real head of Ray with token authentication, nodes that join it, and commands that are sent to it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import forked
from helpers.s3.server import free_block

from eagleray.cli import main

TOKEN = "test-0123456789abcdef"
STARTS = 4  # of a head or a node, until it is up


class Head:
    """A head of two CPUs, or of none, so that it only directs. `memory` is what it has for jobs, in bytes."""

    def __init__(self, folder: Path, cpus: int = 2, memory: int | None = None) -> None:
        self.port = free_block(64)
        self.address = f"http://127.0.0.1:{self.port + 1}"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self.env |= {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self.env["RAY_memory_monitor_refresh_ms"] = "0"  # what others use of this machine shall end no job
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.folder = folder
        options = {"port": self.port, "dashboard-port": self.port + 1, "dashboard-host": "127.0.0.1"}
        options |= {"min-worker-port": self.port + 4, "max-worker-port": self.port + 63, "temp-dir": folder}
        options |= {"memory": memory} if memory else {}
        self.process = self._ray("head", cpus, self.port + 2, options, "--head")
        self.nodes: list[subprocess.Popen[bytes]] = []

    def join(self, name: str, **env: str) -> None:
        """Add a node with one CPU, whose processes have `env` in their environment."""
        for _ in range(STARTS):
            port = free_block(64)
            options = {"address": f"127.0.0.1:{self.port}", "min-worker-port": port + 1, "max-worker-port": port + 63}
            options["temp-dir"] = self.folder / name  # in a shared one, nodes unpack a job's files over each other's
            node = self._ray(name, 1, port, options, **env)
            if self._up(node, name):
                self.nodes.append(node)
                return
        raise AssertionError(f"{name} did not come up")

    def _ray(
        self, name: str, cpus: int, agent: int, more: dict[str, Any], *flags: str, **env: str
    ) -> subprocess.Popen[bytes]:
        options = {"node-ip-address": "127.0.0.1", "num-cpus": cpus, "object-store-memory": 100_000_000}
        options |= {"dashboard-agent-listen-port": agent} | more
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, "--block"]
        command += [f"--{k}={v}" for k, v in options.items()]
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                command,
                env=self.env | env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    def up(self) -> bool:
        return self._up(self.process, "head")

    def _up(self, process: subprocess.Popen[bytes], name: str) -> bool:
        """Wait for it; one that does not see itself within 30 s gives up, and on a busy machine that happens."""
        end, log = time.monotonic() + 600, self.folder / f"{name}.log"
        while "block forever" not in log.read_text():
            if process.poll() is not None and "timed out during startup" in log.read_text():
                return False
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, f"no {name} within ten minutes"
            time.sleep(0.5)
        return True

    def start(self, *args: Any, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eagleray.cli", *map(str, args), "--address", self.address]
        path = str(Path(main.__file__).parents[2])
        return forked.Popen(
            command,
            env=self.env | {"PYTHONPATH": path} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def __call__(self, *args: Any, **env: str) -> tuple[int, str]:
        process = self.start(*args, **env)
        text = process.communicate(timeout=500)[0]
        return process.returncode, text

    def jobs(self) -> list[dict[str, Any]]:
        return json.loads(self("jobs", "--json")[1])

    def close(self) -> None:
        for process in (*self.nodes, self.process):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running(**settings: Any) -> Iterator[Head]:
    """A context with a head that is up; a start that Ray gives up is repeated."""
    for _ in range(STARTS):
        head = Head(Path(tempfile.mkdtemp(prefix="er")), **settings)  # a short path: Ray's sockets are in it
        try:
            if head.up():
                yield head
                return
        finally:
            head.close()
    raise AssertionError("no head came up")
