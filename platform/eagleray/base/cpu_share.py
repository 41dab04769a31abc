"""The CPUs that this process was given of a machine's, as a task or rank on Ray is; processes that it starts share
them."""

import os

NAME = "EAGLERAY_CPUS"


def give_cpus(count: float) -> None:
    """Let this process and those that it starts use so many CPUs."""
    os.environ[NAME] = f"{count:g}"


def cpus() -> float:
    """Return how many CPUs this process may use: those that it was given, or else the machine's, of which each rank
    that torchrun started on it has its share."""
    if NAME in os.environ:
        return float(os.environ[NAME])
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
