"""Tells by their names which files of a folder are shards, and says what the others are."""

import os
import re
from collections import Counter
from collections.abc import Iterable

KINDS = 5  # kinds of files that are named
PACKED = re.compile(r"\.(tar\.[a-z0-9]{1,6}|tgz|taz|tbz2?|txz|tlz|tzst)$")


def is_shard(url: str, pattern: str = "") -> bool:
    """Return whether a file of this name or URL is a shard. Hidden ones are none, as in folders of images: macOS writes
    `._x.tar` beside `x.tar`. A pattern that begins with a dot asks for them, as in a shell."""
    name = url.rpartition("/")[2]
    return name.lower().endswith(".tar") and (not name.startswith(".") or pattern.startswith("."))


def no_shards(names: Iterable[str]) -> str:
    """Say that none of the files in a folder is a shard, and what they are."""
    found = _counted(names)
    return "no .tar shards there" + f", but {found}" * bool(found)


def unread_tars(names: Iterable[str]) -> str:
    """Say which tars in a folder are no shards, as they are hidden or compressed; an empty string without any."""
    return _counted(n for n in names if not is_shard(n) and (is_shard(n, ".") or PACKED.search(n.lower())))


def _counted(names: Iterable[str]) -> str:
    kinds = sorted(Counter(map(_kind, names)).items(), key=lambda item: (-item[1], item[0]))
    more = sum(n for _, n in kinds[KINDS:])
    return ", ".join([f"{n:,} {kind}" for kind, n in kinds[:KINDS]] + [f"{more:,} more"] * bool(more))


def _kind(name: str) -> str:
    if is_shard(name, "."):
        return f"{'hidden ' * name.startswith('.')}.tar"
    if packed := PACKED.search(name.lower()):
        return f"{packed[0]} (compressed; shards are plain .tar files)"
    extension = os.path.splitext(name.lower())[1]
    return extension if extension[1:].isalnum() and len(extension) < 20 else "without extension"
