"""What a process holds in memory, as Linux counts it."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """MiB."""

    rss: float  # pages that it has mapped, shared ones too
    pss: float  # with a shared page divided by the number of those who share it


def of(pid: int | str = "self") -> Memory:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return Memory(*(int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) / 1024 for name in ("Rss", "Pss")))


def below(pid: int, kind: Callable[[str, list[str]], str]) -> dict[str, list[Memory]]:
    """Return the memory of a process and of all below it, by the kind that a name and a command line are of."""
    import psutil

    found: dict[str, list[Memory]] = defaultdict(list)
    top = psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        try:
            found[kind(process.name(), process.cmdline())].append(of(process.pid))
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found
