"""What a process holds in memory, as Linux counts it."""

import re
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """MiB."""

    rss: float  # pages that it has mapped, shared ones too
    pss: float  # with a shared page divided by the number of those who share it


def of(pid: int | str = "self") -> Memory:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return Memory(*(int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) / 1024 for name in ("Rss", "Pss")))
