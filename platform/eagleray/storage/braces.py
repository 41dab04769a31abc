"""Expand the braces of patterns that name shards."""

import math
import re
from collections.abc import Iterator

from braceexpand import braceexpand

from eagleray.base.errors import UserError

DEEPEST = 20  # most braces inside of each other
NAMES = 1_000_000  # most names that the braces of a pattern may stand for


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield every string that `{a,b}` and `{000..012}` in a pattern stand for, as in a shell. Raises UserError."""
    if (count := _most_names(pattern)) > NAMES:
        raise UserError(f"{pattern[:200]}: braces for up to {count:.3g} names, expected at most {NAMES:,}")
    try:
        yield from braceexpand(pattern, escape=False)
    except ValueError:  # unbalanced braces are part of a name
        yield pattern


def _most_names(pattern: str) -> float:
    """Return a number that the strings which a pattern stands for do not exceed, without making them.

    It is exact unless braces lie inside of braces; those that braceexpand cannot recurse into give infinity."""
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
