"""Settings of MLflow's client, and names that its server accepts."""

import os
import re
import time

REPLY = 10  # seconds that a server may take for one answer
STORED = 120  # and for one file, which it may have to hand on to a store


def configure(timeout: int) -> None:
    """Set MLflow's timeout in seconds. Its own retries are turned off, as retries are made here."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # its tables and migrations are no news to anyone
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")  # no model needs the files of the working folder


def name(metric: str) -> str:
    """Return a metric's name with the characters and the length that MLflow allows."""
    return re.sub(r"[^\w./ :-]", "_", metric)[:250]


def now() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)
