"""Keeps the number of CPUs that this process may use, such as Ray's for a task. Child processes inherit it."""

import os

NAME = "EAGLERAY_CPUS"


def give_cpus(count: float) -> None:
    """Let `cpus` return `count` in this process and in the processes that it starts."""
    os.environ[NAME] = f"{count:g}"


def cpus() -> float:
    """Return how many CPUs this process may use: the `count` of `give_cpus` or, without a call, the CPUs that the
    system allows this process, divided by the number of ranks that torchrun has started on the machine."""
    if NAME in os.environ:
        return float(os.environ[NAME])
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
