"""The ranks that tests start: none that hangs or dies leaves the others waiting for as long as a test may take."""

import os
from pathlib import Path

import pytest
from helpers.ranks import on_ranks

from eagleray.base import dist


def waits_for_the_dead() -> None:
    if dist.rank():
        os._exit(3)
    dist.gather_objects(0)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, start: str):
    with pytest.raises(AssertionError, match="a rank died"):
        on_ranks(2, waits_for_the_dead, tmp_path, start=start)
