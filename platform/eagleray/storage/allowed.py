"""Remembers what a store has allowed: what is refused later may pass, as when a role or a key is replaced."""

from collections.abc import Sequence
from typing import Literal

Right = Literal["list", "read", "write", "delete"]
RIGHTS: tuple[Right, ...] = ("list", "read", "write", "delete")


class Allowed:
    """Remembers the rights that a process has had, by folder. What is allowed in a folder of a bucket counts for all
    folders below it, as in most policies."""

    def __init__(self) -> None:
        self._known: set[tuple[Right, str]] = set()

    def add(self, right: Right, url: str) -> None:
        """Remember that a file or a listing was not refused."""
        self._known.add((right, _folder(right, url)))

    def add_folder(self, folder: str, rights: Sequence[Right] = RIGHTS) -> None:
        """Remember that an earlier process had these rights in a folder."""
        self._known |= {(right, folder.rstrip("/")) for right in rights}

    def has(self, right: Right, url: str) -> bool:
        """Return whether the same was allowed in this folder or in one above it, short of the whole bucket."""
        folder = _folder(right, url)
        if (right, folder) in self._known:
            return True
        while (folder := folder.rpartition("/")[0]).count("/") > 2:
            if (right, folder) in self._known:
                return True
        return False


def _folder(right: Right, url: str) -> str:
    return url.rstrip("/") if right == "list" else url.rpartition("/")[0]
