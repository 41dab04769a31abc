"""Name checkpoints by their step and the epoch of their writer, and sort them.

`step-000000110-e000002` is of the second writer of a run. The names of a run whose folder is locked have no epoch."""

import re
from collections.abc import Iterable


def step_name(step: int, epoch: int = 0) -> str:
    """Return the name of the checkpoint of a step, without the ending of a file."""
    return f"step-{step:09d}" + (f"-e{epoch:06d}" if epoch else "")


def step_of(name: str) -> int:
    """Return the step of a checkpoint of this name."""
    step = re.match(r"step-(\d+)", name)
    return int(step[1]) if step else 0


def epoch_of(name: str) -> int:
    """Return the epoch of the writer of a checkpoint; 0 for one without an epoch in its name."""
    epoch = re.search(r"-e(\d+)$", name)
    return int(epoch[1]) if epoch else 0


def last_epoch(urls: Iterable[str]) -> int:
    """Return the highest epoch in the URLs of checkpoints."""
    return max((epoch_of(stem(url)) for url in urls), default=0)


def names_in(urls: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints that have a manifest, newest first."""
    return sorted((stem(url) for url in urls if url.endswith(".json")), key=order, reverse=True)


def order(name: str) -> tuple[int, str]:
    """Return what checkpoints are sorted by: the epoch of the writer, then the step."""
    return epoch_of(name), name


def stem(url: str) -> str:
    """Return the name of the checkpoint that a file belongs to, also one in the folder of a sharded checkpoint."""
    return re.findall(r"step-[^/.]*", url)[-1]
