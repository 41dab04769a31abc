"""A real S3 server on loopback: OpenStack Swift, started and harmed by `swift.sh`."""

import os
import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "swift.sh"


class Swift:
    """The server; its commands are those of the script."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_block(5)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.env = {
            **os.environ,
            "S3_ROOT": str(root),
            "S3_PORT": str(self.port),
            "S3_VENV": str(cache / "eagleray" / "swift-venv"),
        }

    def __call__(self, *command: str) -> None:
        done = subprocess.run(
            [SCRIPT, *command], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{SCRIPT} {' '.join(command)}: {done.stdout}"


@contextmanager
def running(root: Path) -> Iterator[Swift]:
    """A server that keeps everything in `root`; the test is skipped where none can be installed."""
    server = Swift(root)
    Path(server.env["S3_VENV"]).parent.mkdir(parents=True, exist_ok=True)
    try:
        server("install")
    except AssertionError as e:
        pytest.skip(f"Swift cannot be installed here: {e}")
    try:
        server("start")
        yield server
    finally:
        server("stop")


@contextmanager
def store_of(root: Path, *buckets: str) -> Iterator[Swift]:
    """A server with some buckets, which `eagleray.storage.store` talks to meanwhile."""
    from eagleray.storage import store
    from eagleray.storage.s3 import S3Store

    with running(root) as server, pytest.MonkeyPatch.context() as patch:
        point_at(patch, server.port)
        patch.setitem(store.STORES, "s3", S3Store())
        for name in buckets:
            store.STORES["s3"].client().create_bucket(Bucket=name)
        yield server


def point_at(patch: pytest.MonkeyPatch, port: int) -> None:
    """Let the usual AWS settings name a server on loopback, and nothing of this machine's."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test:tester",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "no_proxy": "127.0.0.1",
    }.items():
        patch.setenv(name, value)


def free_block(count: int) -> int:
    """The first of some neighbouring ports that nobody listens on."""
    for first in random.Random(os.getpid()).sample(range(18_000, 32_000), 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")
