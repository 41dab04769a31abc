"""Connect to Ray for the length of a command: to the cluster of RAY_ADDRESS, or to one started on this machine."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    joining = bool(os.environ.get("RAY_ADDRESS"))
    for key, value in ENVIRONMENT.items():
        if not (joining and key == "RAY_AUTH_MODE"):  # a cluster has its own
            os.environ.setdefault(key, value)
    import ray

    own: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    own |= {"num_cpus": cpus} if cpus else {}
    before = signal.getsignal(signal.SIGTERM)
    _connect(ray, {} if joining else own)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # ray.init takes it, and a run saves first
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, options: dict[str, Any]) -> None:
    """Connect to Ray, and try once more after a failure, as Ray gives up on a busy machine after a fixed time."""
    for last in (False, True):
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as e:
            ray.shutdown()
            if last:
                where = os.environ.get("RAY_ADDRESS") if not options else "this machine"
                raise RuntimeError(f"Ray on {where} did not answer: {' '.join(str(e).split())[:300]}") from e
