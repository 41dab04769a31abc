"""Connect to Ray for the length of a command: to the cluster at RAY_ADDRESS or, without it, to a local Ray.

Whoever connects to a local Ray can run code as this user, so other users of this machine are kept out."""

import functools
import importlib
import logging
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from eagleray.base.contexts import replaced

ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # the default of 15 starves workers on a shared machine
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences Ray's warning that this default will change
}
STORE = 100 * 2**20  # size of a local Ray's object store in bytes, more than tasks and results need


@contextmanager
def session(*, cpus: int | None = None) -> Iterator[Any]:
    """A context with a connection to Ray: to the cluster at RAY_ADDRESS or, without it, to a local Ray that is started
    with `cpus` CPUs, by default all; the caller's own, if any, stays. Raises RuntimeError when Ray does not answer."""
    if (known := sys.modules.get("ray")) and known.is_initialized():  # `ray.shutdown` would end the caller's actors
        yield known
        return
    for key, value in ENVIRONMENT.items():
        if not (joining() and key == "RAY_AUTH_MODE"):  # a cluster decides how to authenticate
            os.environ.setdefault(key, value)
    import ray

    own: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    if not joining():
        own["_temp_dir"] = str(session_dir())
        if os.environ["RAY_AUTH_MODE"] == "token":
            protect_token()
    own |= {"num_cpus": cpus} if cpus else {}
    before = signal.getsignal(signal.SIGTERM)
    _connect(ray, {} if joining() else own)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init replaces the handler that lets a run save first
    try:
        yield ray
    finally:
        ray.shutdown()


def joining() -> bool:
    """Return whether RAY_ADDRESS names a cluster, which may grow; otherwise Ray is local to this machine."""
    return bool(os.environ.get("RAY_ADDRESS"))


def machines(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources of each machine that is up, by Ray's names."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def divert_stderr(path: Path) -> Iterator[None]:
    """A context in which what native libraries write to file descriptor 2 is appended to a file, such as Ray's dozens
    of lines after a node was lost. What Python code writes to sys.stderr is printed as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    before, kept = sys.stderr, os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    shown = os.fdopen(os.dup(kept), "w", buffering=1)
    if before is sys.__stderr__:  # a test or a notebook may have replaced it
        sys.stderr = shown
    try:
        yield
    finally:
        sys.stderr = before
        shown.close()
        os.dup2(kept, 2)
        os.close(kept)


def _connect(ray: Any, options: dict[str, Any]) -> None:
    """Connect to Ray. A failure is retried once, as Ray's fixed time limit may be too short on a busy machine."""
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


def _servers_apart() -> AbstractContextManager[None]:
    """A context in which Ray starts its servers in process groups of their own.

    Programs such as `timeout` send SIGTERM to a command's whole process group. The run then saves, which needs Ray."""
    services: Any = importlib.import_module("ray._private.services")
    return replaced(services, "ConsolePopen", functools.partial(services.ConsolePopen, process_group=0))


def session_dir() -> Path:
    """Return a folder for Ray's sessions inside a folder that only this user can enter, unlike the default of Ray.

    Its path is short, as paths of sockets have at most 107 characters."""
    base = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    path = base / f"ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(path, stat.S_ISDIR):  # it is a file, or belongs to another user
        path = Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    path.chmod(0o700)
    return path / "ray"


def protect_token() -> None:
    """Create Ray's token file, or make an existing one private. Does nothing if a variable sets the token."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_ours(path.parent, stat.S_ISDIR):
        path.parent.chmod(0o700)
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        if _is_ours(path, stat.S_ISREG):
            path.chmod(0o600)


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    about = path.lstat()
    return about.st_uid == os.getuid() and is_kind(about.st_mode)
