"""One test that looks at many things and names all that are wrong: one for each takes longer to begin than to run."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def check_all(check: Callable[..., None], things: Iterable[Any], name: Callable[[Any], object] = str) -> None:
    """Call a check with each thing, or with the values of each tuple, and fail with a line for each that it refused.

    `name` says what a thing is called in its line. Nothing to look at is a failure, too."""
    wrong, seen = [], 0
    for seen, thing in enumerate(things, 1):  # noqa: B007
        try:
            check(*thing) if type(thing) is tuple else check(thing)
        except (Exception, pytest.fail.Exception) as e:
            wrong.append(f"{name(thing)}: {type(e).__name__}: {e}")
    assert not wrong, f"{len(wrong)} of {seen}:\n" + "\n".join(wrong)
    assert seen, "there was nothing to look at"
