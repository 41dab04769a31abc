"""Memory of blocks is used again, and never while somebody looks at it."""

import gc

import pytest

from eagleray.storage import blob
from eagleray.storage.blob import SMALL, UNIT, new_buffer


@pytest.fixture(autouse=True)
def nothing_spare() -> None:
    gc.collect()
    blob.spare_buffers.clear()


def test_a_block_that_nobody_holds_is_used_again_and_one_with_a_reader_is_not() -> None:
    first = new_buffer(5 * SMALL)
    first[7] = 42
    part = first[5:10]
    del first
    other = new_buffer(5 * SMALL)
    other[7] = 1
    assert part[2] == 42
    del part
    again = new_buffer(16 * SMALL - 3)
    assert again[7] == 42  # the first one's bytes
    assert len(again) == 16 * SMALL - 3


def test_memory_that_is_kept_is_bounded_and_fits() -> None:
    held = [new_buffer(2 * SMALL) for _ in range(3 * blob.SPARE)]
    del held
    assert len(blob.spare_buffers) == blob.SPARE
    large = new_buffer(9 * UNIT)
    assert len(large) == 9 * UNIT
    assert len(new_buffer(100)) == 100
