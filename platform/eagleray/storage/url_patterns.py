"""Patterns of URLs: which part is literal, what braces stand for, and which files of a folder match."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from braceexpand import braceexpand

from eagleray.base.errors import UserError
from eagleray.storage.shard_names import is_parquet, is_shard

SPECIAL = frozenset("*?[]{}")  # characters of wildcards and braces
DEEPEST = 20  # deepest nesting of braces
NAMES = 1_000_000  # most names that the braces of a pattern may stand for


@dataclass(frozen=True, slots=True)
class Pattern:
    """The files that a URL selects in one folder: by a file name, by a glob, or every .tar if the name is empty.
    Parquet files are selected if no tar matches."""

    url: str  # as the user wrote it
    folder: str
    name: str
    literal: bool = False  # whether a file of exactly this name exists

    @property
    def is_glob(self) -> bool:
        """Return whether the pattern may select several files."""
        return not self.name or (not self.literal and any(c in self.name for c in "*?["))

    def matches(self, name: str, of_parquet: bool = False) -> bool:
        """Return whether the pattern selects a tar, or with `of_parquet` a Parquet file, of this name in its folder."""
        return (is_parquet if of_parquet else is_shard)(name, self.name) and (
            name == self.name or (self.is_glob and fnmatch.fnmatchcase(name, self.name or "*"))
        )

    def choose(self, names: Iterable[str]) -> list[str]:
        """Return the file names that the pattern selects from the names in its folder."""
        there = list(names)
        return [n for n in there if self.matches(n)] or [n for n in there if self.matches(n, of_parquet=True)]


def split_literal(url: str, exists: Callable[[str, bool], bool]) -> tuple[str, str]:
    """Divide a URL after its longest beginning, up to a slash or its end, that exists literally. The rest is a pattern.
    Parts without wildcards and braces count as existing.

    For other parts, `exists` is called with the URL up to the part's end, and whether more follows."""
    begin = url.find("://") + 3 if "://" in url else 0
    while begin < len(url):
        end = url.find("/", begin)
        end = len(url) if end < 0 else end
        part = url[end:].strip("/") != ""
        if SPECIAL & set(url[begin:end]) and not exists(url[:end], part):
            return url[:begin], url[begin:]
        begin = end + 1
    return url, ""


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield all strings that a pattern's `{a,b}` and `{000..012}` give, as in a shell. Raises UserError above NAMES."""
    if (count := _most_names(pattern)) > NAMES:
        raise UserError(f"{pattern[:200]}: braces for up to {count:.3g} names, expected at most {NAMES:,}")
    try:
        yield from braceexpand(pattern, escape=False)
    except ValueError:  # unbalanced braces are a part of a name
        yield pattern


def _most_names(pattern: str) -> float:
    """Return an upper bound on the number of strings that a pattern stands for, without forming them.

    It is exact unless braces are nested. Deeper nesting than braceexpand's recursion allows gives infinity."""
    count, commas = 1.0, list[int]()
    for part in re.finditer(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}|[{},]", pattern):
        if part[1]:
            first, last, step = (float(number or 1) for number in part.groups())
            count *= abs(last - first) // max(step, 1) + 1
        elif part[0] == "{":
            commas.append(0)
        elif commas and part[0] == ",":
            commas[-1] += 1
        elif commas:
            count *= commas.pop() + 1
        if len(commas) > DEEPEST:
            return math.inf
    return count
