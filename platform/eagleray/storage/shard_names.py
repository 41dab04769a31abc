"""Tells by name which files of a folder are shards, and describes the others."""

import mimetypes
import os
import re
from collections import Counter
from collections.abc import Iterable

KINDS = 5  # most kinds of files that are named
PARQUET, INDEX = ".parquet", "index.parquet"
PACKED = re.compile(r"\.(tar\.[a-z0-9]{1,6}|tgz|taz|tbz2?|txz|tlz|tzst)$")


def is_shard(url: str, pattern: str = "") -> bool:
    """Return whether a file of this name or URL is a shard. Hidden files, such as `._x.tar`, which macOS writes beside
    `x.tar`, are shards only if the user's `pattern` also begins with a dot, as in a shell."""
    name = url.rpartition("/")[2]
    return name.lower().endswith(".tar") and (not name.startswith(".") or pattern.startswith("."))


def is_parquet(url: str, pattern: str = "") -> bool:
    """Return whether a file of this name or URL is a Parquet file of data. As for other readers, names that begin with
    a dot or underscore are not, unless `pattern` does, too. Nor is `index.parquet`, which eagleray writes."""
    name = url.rpartition("/")[2]
    hidden = name.startswith((".", "_")) and not pattern.startswith((".", "_"))
    return name.lower().endswith(PARQUET) and name != INDEX and not hidden


def is_data(url: str) -> bool:
    """Return whether a file of this name or URL is a shard or a Parquet file of data."""
    return is_shard(url) or is_parquet(url)


def no_shards(names: Iterable[str], below: Iterable[str] = ()) -> str:
    """Return text saying that a folder has no shards, but other files: `names` in it, and `below` in its subfolders."""
    direct, deeper = kinds_of_files(names), kinds_of_files(below)
    found = [direct] * bool(direct) + [f"{deeper} in subfolders"] * bool(deeper)
    return "no .tar shards there" + (f", but {', '.join(found)}" if found else ", nor anything else")


def unread_files(names: Iterable[str], taken: Iterable[str]) -> str:
    """Return text that counts the files of a folder that are not read, by kind; "" if there are none. If the `taken`
    files are tars, only hidden and compressed tars and images count; if they are Parquet files, all other files count,
    except index.parquet and names that begin with an underscore."""
    if any(is_parquet(name, ".") for name in taken):
        return kinds_of_files(n for n in names if not is_parquet(n) and not n.startswith("_") and n != INDEX)
    loose = (n for n in names if is_shard(n, ".") or PACKED.search(n.lower()) or _is_image(n))
    return kinds_of_files(n for n in loose if not is_shard(n))


def kinds_of_files(names: Iterable[str]) -> str:
    """Return text with the number of files of each kind, the most frequent first; empty if there are none."""
    kinds = sorted(Counter(map(_kind, names)).items(), key=lambda item: (-item[1], item[0]))
    more = sum(n for _, n in kinds[KINDS:])
    return ", ".join([f"{n:,} {kind}" for kind, n in kinds[:KINDS]] + [f"{more:,} more"] * bool(more))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and (mimetypes.guess_type(f"file:{name}", False)[0] or "").startswith("image/")


def _kind(name: str) -> str:
    if is_shard(name, "."):
        return f"{'hidden ' * name.startswith('.')}.tar"
    if packed := PACKED.search(name.lower()):
        return f"{packed[0]} (compressed; shards are plain .tar files)"
    extension = os.path.splitext(name.lower())[1]
    return extension if extension[1:].isalnum() and len(extension) < 20 else "without extension"
