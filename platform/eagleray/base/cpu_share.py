"""The CPUs that this process was given of a machine's, as a task or rank on Ray is; processes that it starts share
them."""

import os

NAME = "EAGLERAY_CPUS"


def give_cpus(count: float) -> None:
    """Let this process and those that it starts use so many CPUs."""
    os.environ[NAME] = f"{count:g}"


def given_cpus() -> float | None:
    """Return how many CPUs this process was given, or None if it was given none in particular."""
    return float(os.environ[NAME]) if NAME in os.environ else None
