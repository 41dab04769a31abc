"""Connect to Ray for the length of a command: to the cluster of RAY_ADDRESS, or to one started on this machine."""

import functools
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagleray.cluster import private_files

ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # the default of 15 starves workers on a shared machine
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about its own default
}
STORE = 100 * 2**20  # bytes of Ray's object store, which nothing of ours needs more of


@contextmanager
def session(*, cpus: int | None = None) -> Iterator[Any]:
    """A context with a connection to Ray. Ray is started on this machine with `cpus` CPUs, by default all, unless
    RAY_ADDRESS names a cluster. Raises RuntimeError when Ray does not answer."""
    for key, value in ENVIRONMENT.items():
        if not (joining() and key == "RAY_AUTH_MODE"):  # a cluster has its own
            os.environ.setdefault(key, value)
    import ray

    own: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    if not joining():
        own["_temp_dir"] = str(private_files.session_dir())
        if os.environ["RAY_AUTH_MODE"] == "token":
            private_files.protect_token()
    own |= {"num_cpus": cpus} if cpus else {}
    before = signal.getsignal(signal.SIGTERM)
    _connect(ray, {} if joining() else own)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init takes it, and a run saves first
    try:
        yield ray
    finally:
        ray.shutdown()


def joining() -> bool:
    """Return whether RAY_ADDRESS names a cluster, which may grow; else Ray is this machine alone."""
    return bool(os.environ.get("RAY_ADDRESS"))


def machines(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources of each machine that is up."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def aside(path: Path) -> Iterator[None]:
    """A context in which what Ray's libraries print goes to the end of a file, such as dozens of lines after a node was
    lost. They write to the process's standard error; what Python prints there is printed as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    before, kept = sys.stderr, os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    shown = os.fdopen(os.dup(kept), "w", buffering=1)
    if _is_standard(before):
        sys.stderr = shown
    try:
        yield
    finally:
        sys.stderr = before
        shown.close()
        os.dup2(kept, 2)
        os.close(kept)


def _is_standard(stream: Any) -> bool:
    """Return whether a stream writes to the process's standard error, as one that a test has put there does not."""
    try:
        return bool(stream.fileno() == 2)
    except (OSError, ValueError, AttributeError):
        return False


def _connect(ray: Any, options: dict[str, Any]) -> None:
    """Connect to Ray, and try once more after a failure, as Ray gives up on a busy machine after a fixed time."""
    for last in (False, True):
        try:
            with _servers_apart():
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as e:
            ray.shutdown()
            if last:
                where = os.environ.get("RAY_ADDRESS") if not options else "this machine"
                raise RuntimeError(f"Ray on {where} did not answer: {' '.join(str(e).split())[:300]}") from e


@contextmanager
def _servers_apart() -> Iterator[None]:
    """A context in which Ray starts its servers in process groups of their own.

    `timeout` and others send SIGTERM to the whole group of a command. A run saves then, for which it needs Ray.
    """
    services: Any = importlib.import_module("ray._private.services")
    before = services.ConsolePopen
    services.ConsolePopen = functools.partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before
