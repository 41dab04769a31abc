"""Blocks pass from the reader that fetches them to the readers that share its lane."""

from types import SimpleNamespace

import pytest

from eagleray.base.errors import UserError
from eagleray.data import shared_lane
from eagleray.data.blocks import Content
from eagleray.data.shared_lane import Follower, Leader, SharedLane

ENDS = tuple[Leader, Follower]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> ENDS:
    monkeypatch.setattr(shared_lane, "WAIT", 0.1)
    lane = SharedLane(1, 2)
    leader, follower = lane.end_of(1), lane.end_of(0)
    assert isinstance(leader, Leader)
    assert isinstance(follower, Follower)
    return leader, follower


def content(text: bytes) -> Content:
    return Content(7, memoryview(text), {9})


def never() -> Content:
    raise AssertionError("a reader that does not lead the lane fetched a block")


def test_all_readers_get_the_bytes_that_one_has_fetched_also_in_another_order(ends: ENDS) -> None:
    leader, follower = ends
    for number, text in [(1, b"second"), (0, b"first"), (2, b"third")]:
        begin, data, wrong = leader.get(number, lambda text=text: content(text))
        assert (begin, bytes(data), wrong) == (7, text, {9})
    for number, text in enumerate([b"first", b"second", b"third"]):
        begin, data, wrong = follower.get(number, never)
        assert (begin, bytes(data), wrong) == (7, text, {9})


def test_the_leaders_error_is_everybodys(ends: ENDS) -> None:
    leader, follower = ends

    def broken() -> Content:
        raise UserError("no such shard")

    with pytest.raises(UserError, match="no such shard"):
        leader.get(0, broken)
    with pytest.raises(UserError, match="no such shard"):
        follower.get(0, never)


def test_a_leader_that_ends_leaves_nobody_waiting(ends: ENDS) -> None:
    leader, follower = ends
    leader.get(0, lambda: content(b"first"))
    leader.fail(UserError("no usable image is left"))
    assert bytes(follower.get(0, never).data) == b"first"
    for number in (1, 2):
        with pytest.raises(UserError, match="no usable image is left"):
            follower.get(number, never)


def test_nobody_waits_for_the_dead(ends: ENDS, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose training process was killed would stay for ever, with its memory."""
    _, follower = ends
    monkeypatch.setattr(shared_lane, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    with pytest.raises(RuntimeError, match="has died"):
        follower.get(0, never)
