"""A Ray of our own, or the cluster of RAY_ADDRESS, for as long as a command needs it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # the default of 15 starves workers on a shared machine
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about its own default
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
}
STORE = 100 * 2**20  # bytes of Ray's object store, which nothing of ours needs more of


@contextmanager
def session(*, cpus: int | None = None) -> Iterator[Any]:
    """Ray, connected; `cpus` of our own, or all there are."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import ray

    own: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": STORE}
    own |= {"num_cpus": cpus} if cpus else {}
    ray.init(**({} if os.environ.get("RAY_ADDRESS") else own), log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()
