"""Where the mission takes place: a real S3 server, MLflow's server, nodes of Ray, and a terminal with addresses."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import psutil
from botocore.exceptions import ClientError
from helpers import mlflow_server, ray_head
from helpers.s3.server import Swift, store_of
from mission.checks import Wrong

EAGLERAY = Path(sys.executable).parent / "eagleray"
TRACING = Path(__file__).parents[1] / "chaos" / "trace"
BUCKET = "mission"
LIMIT = 1200  # seconds for any wait: machines are shared
PACE = "0.1"  # seconds that a step takes at least, so that some are left when processes are killed
SUBREAPER = 36  # of prctl: orphans below this process become its children, so that none is forgotten


class Command:
    """A command as a user types it, whose output goes into files."""

    def __init__(self, words: Sequence[Any], folder: Path, name: str) -> None:
        self.words = " ".join(map(str, words[1:]))
        self.out, self.err = (folder / "logs" / f"{name}.{end}" for end in ("out", "err"))
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [str(word) for word in words]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder)

    def end(self) -> str:
        """Return what it printed. Raises Wrong when it does not end in time, or with another status than 0."""
        try:
            status = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Wrong(f"eagleray {self.words}: found no end in {LIMIT} s") from None
        if status:
            said = f"{self.out.read_text()}\n{self.err.read_text()}".split("\n")
            why = [s for s in said if s.startswith("error: ")] or [s for s in said if s] or ["it said nothing"]
            raise Wrong(f"eagleray {self.words}: found status {status}, expected 0: {why[-1]}")
        return self.out.read_text()


class Site:
    """A folder with all that the servers keep, which a later walk may begin from, and commands as a user types them."""

    def __init__(self, folder: Path, swift: Swift) -> None:
        self.folder, self.swift = folder, swift
        self.head: ray_head.Head | None = None
        self.nodes: dict[str, psutil.Process] = {}
        self.logs, self.read = folder / "logs", folder / "read"  # what commands printed; what ranks were given
        for made in (self.logs, self.read):
            made.mkdir(exist_ok=True)

    def start(self, *words: Any) -> "Command":
        return Command([EAGLERAY, *words], self.folder, f"{len(list(self.logs.glob('*.out'))):02d}-{words[0]}")

    def __call__(self, *words: Any) -> str:
        """Return what a command printed. Raises Wrong when it does not end in time, or with another status than 0."""
        return self.start(*words).end()

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("jobs", "--json"))
        return found

    def client(self) -> Any:
        """Return a client of the bucket that is not Eagleray's own."""
        return boto3.client("s3")

    def objects(self, folder: str) -> dict[str, bytes]:
        """Return the files in a folder of the bucket by their names."""
        listed = self.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{folder}/", Delimiter="/").get("Contents", [])
        keys = [entry["Key"] for entry in listed]
        return {k.rpartition("/")[2]: self.client().get_object(Bucket=BUCKET, Key=k)["Body"].read() for k in keys}

    def join(self, name: str) -> None:
        """Add a node of one CPU, which keeps its files in a folder of its own, and records what its ranks are given."""
        assert self.head
        (self.folder / "trace").mkdir(exist_ok=True)
        trace = {"PYTHONPATH": str(TRACING), "EAGLERAY_TRACE": str(self.folder / "trace"), "EAGLERAY_PACE": PACE}
        trace["RAY_worker_niceness"] = "0"  # else they wait for whatever else runs on this machine
        self.head.join(name, XDG_CACHE_HOME=str(self.folder / name), **trace)
        self.nodes[name] = psutil.Process(self.head.nodes[-1].pid)

    def lose(self, name: str) -> None:
        """Kill a node with all that runs on it."""
        node = self.nodes.pop(name)
        for process in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train, of all nodes."""
        return [p for n in self.nodes.values() for p in n.children(recursive=True) if p.name() == "eagleray-rank"]

    def wait(self, what: str, come: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not come():
            if time.monotonic() > end:
                raise Wrong(f"{what}: not found in {LIMIT} s")
            time.sleep(0.2)


@contextmanager
def opened(folder: Path, cluster: bool) -> Iterator[Site]:
    """A context with the S3 server and, if asked for, MLflow's and a head of Ray; afterwards no process is left."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    with ExitStack() as stack:
        stack.callback(end_all)
        site = Site(folder, stack.enter_context(store_of(folder / "s3")))
        with suppress(ClientError):  # of a kept folder
            site.client().create_bucket(Bucket=BUCKET)
        os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "MLFLOW_DISABLE_TELEMETRY": "true"}
        if cluster:
            (folder / "mlflow").mkdir(exist_ok=True)
            os.environ["MLFLOW_TRACKING_URI"] = stack.enter_context(mlflow_server.running(folder / "mlflow")).uri
            site.head = stack.enter_context(ray_head.running(cpus=0))
            stack.callback(keep_logs, site.head.folder, folder / "ray")
            os.environ |= {"RAY_API_SERVER_ADDRESS": site.head.address, "RAY_AUTH_TOKEN": ray_head.TOKEN}
            os.environ["RAY_AUTH_MODE"] = "token"
        yield site


def keep_logs(session: Path, folder: Path) -> None:
    """Copy what Ray's processes wrote."""
    for log in session.rglob("session_2*/logs/*"):
        if log.is_file():
            (folder / log.relative_to(session)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, folder / log.relative_to(session))


def end_all() -> None:
    """End what the servers and nodes have left, and wait for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
