"""Settings of MLflow's client, and names that its server accepts."""

import os
import re


def configure(timeout: int) -> None:
    """Set MLflow's timeout in seconds. Its own retries are turned off, as retries are made here."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")  # its tables and migrations are no news to anyone
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def name(metric: str) -> str:
    """Return a metric's name with the characters and the length that MLflow allows."""
    return re.sub(r"[^\w./ :-]", "_", metric)[:250]
