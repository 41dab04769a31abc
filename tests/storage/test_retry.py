"""What may pass is tried again, less and less often, and not for ever."""

import itertools
import multiprocessing
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.naps import of_this_test

from eagleray.base.errors import Outage, UserError
from eagleray.storage import retry
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.retry import Transient, call_with_retries


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, [0.0][:0]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=of_this_test(clock.sleep), monotonic=clock.monotonic))
    return clock


def failing(times: int) -> tuple[list[int], object]:
    """What fails so often and then returns 7."""
    count = itertools.count(1)
    made: list[int] = []

    def attempt() -> int:
        made.append(next(count))
        if len(made) <= times:
            raise Transient("SlowDown")
        return 7

    return made, attempt


def test_a_start_waits_longer_than_its_requests_say(clock: Clock) -> None:
    def seconds(patience: float) -> float:
        began = clock.now
        with pytest.raises(Outage):
            call_with_retries("s3://b", failing(10**6)[1], patience=patience)  # type: ignore[arg-type]
        return clock.now - began

    with retry.at_least(100):
        assert 80 < seconds(10) <= 100
        assert seconds(300) > 200
        assert min(ordered_map(lambda _: seconds(10), range(2), width=1)) > 80
        with ThreadPoolExecutor(1) as other:  # of another thread, such as that of MLflow
            assert other.submit(seconds, 10).result() <= 10
    assert seconds(10) <= 10


def test_it_is_tried_until_it_works_with_growing_pauses_that_differ(clock: Clock) -> None:
    for _ in range(2):
        made, attempt = failing(12)
        assert call_with_retries("u", attempt, patience=600) == 7  # type: ignore[arg-type]
        assert len(made) == 13
    first, second = clock.pauses[:12], clock.pauses[12:]
    assert first != second
    for i, pause in enumerate(first):
        full = min(retry.FIRST * 2**i, retry.LONGEST)
        assert full / 2 <= pause <= full


def pauses_of_a_process(clock: Clock, pauses: Any) -> None:
    call_with_retries("u", failing(5)[1], patience=600)  # type: ignore[arg-type]
    pauses.put(clock.pauses)


def test_processes_that_are_forked_together_do_not_retry_together(clock: Clock) -> None:
    forking = multiprocessing.get_context("fork")
    pauses = forking.SimpleQueue()
    processes = [forking.Process(target=pauses_of_a_process, args=(clock, pauses)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert pauses.get() != pauses.get()


def test_it_is_given_up_within_its_time_with_one_line(clock: Clock) -> None:
    made, attempt = failing(10**9)
    with pytest.raises(Outage) as caught:
        call_with_retries("s3://b/x.tar", attempt, patience=60)  # type: ignore[arg-type]
    assert 60 - retry.LONGEST <= clock.now <= 60
    assert str(caught.value) == f"s3://b/x.tar: SlowDown; given up after {len(made)} attempts in {clock.now:.0f} s"


def test_somebody_is_told_of_a_long_wait_and_not_at_every_attempt(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    call_with_retries("u", failing(3)[1], patience=600)  # type: ignore[arg-type]
    assert not caplog.records
    with pytest.raises(Outage):
        call_with_retries("u", failing(10**9)[1], patience=600)  # type: ignore[arg-type]
    assert 2 <= len(caplog.records) <= 10
    assert "u: SlowDown; tried" in caplog.text
    seconds = [int(re.search(r"in (\d+) s", r.getMessage())[1]) for r in caplog.records]  # type: ignore[index]
    assert seconds[0] < 30
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 80 + 2 * retry.LONGEST


@pytest.mark.parametrize("error", [UserError("no"), KeyError("bug")])
def test_what_does_not_pass_is_not_tried_again(clock: Clock, error: Exception) -> None:
    def attempt() -> None:
        raise error

    with pytest.raises(type(error)):
        call_with_retries("u", attempt, patience=600)
    assert not clock.pauses


def test_half_a_day_is_waited_for(clock: Clock):
    with pytest.raises(Outage):
        call_with_retries("u", failing(10**9)[1], patience=12 * 3600)  # type: ignore[arg-type]
    assert clock.now > 12 * 3600 - retry.LONGEST
