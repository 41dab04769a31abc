"""Two processes and one run in a store: one of them holds it, and one that lost it knows, whatever clocks say."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.bucket import CountingBucket
from helpers.rank_zero import close, end, rank_zero

from eagleray.base.errors import Busy, Outage, Superseded
from eagleray.runs import bucket_files, command, layout, lease
from eagleray.runs.background import Background
from eagleray.runs.bucket_files import Mirror, RunCopy
from eagleray.runs.lease import Lease
from eagleray.runs.run_store import run_store
from eagleray.storage import store
from eagleray.storage.blob import Blob

OUT = "s3://runs/run"


class CarelessBucket(CountingBucket):
    """A store that ignores conditions, as some do: every creator believes to be the first."""

    def create(self, url: str, data: bytes) -> bool:
        self.write(url, data)
        return True


class SkewedBucket(CountingBucket):
    """A store whose clock jumps: signs of life seem older than they are by so many seconds."""

    skew = 0.0

    def look(self, url: str) -> tuple[bytes, float]:
        data, age = super().look(url)
        return data, age + self.skew


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "DEAD", 2.0)
    monkeypatch.setattr(lease, "BEAT", 1.0)  # an answer of the store may take as long, also on a busy machine
    monkeypatch.setattr(lease, "SETTLE", 0.1)
    monkeypatch.setattr(Background, "seconds", 0.1)
    monkeypatch.setattr(bucket_files, "SOON", 0.1)


@pytest.fixture(params=[CountingBucket, CarelessBucket])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> CountingBucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket: CountingBucket = request.param(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    return bucket


def test_epochs_grow(bucket: CountingBucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "DEAD", 60.0)  # nobody gives signs of life here
    first = Lease(OUT, layout.OWNER, "a")
    first.claim()
    assert first.epoch == 1
    first.close()
    assert not run_store(OUT).is_claimed()
    again = Lease(OUT, layout.OWNER, "b")
    again.claim(after=7)
    assert again.epoch == 8
    assert run_store(OUT).is_claimed()
    assert [b.url for b in store.store(OUT).list(OUT + "/")] == [f"{OUT}/.owner-000008"]
    with pytest.raises(Superseded):
        first.renew()
    first.close()
    assert run_store(OUT).is_claimed()


@pytest.mark.parametrize("skew", [-60.0, 60.0])
def test_one_that_comes_back_has_lost_it_and_changes_nothing(
    bucket: CountingBucket, skew: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its machine's clock is a minute off, and it was paused for as long as it took another one to take over."""
    old = rank_zero(OUT, "a")
    old.folder.mkdir(parents=True, exist_ok=True)
    (old.folder / layout.METRICS).write_text("old\n")
    old.copy()
    end(old)
    time.sleep(lease.DEAD)
    honest = time.time
    monkeypatch.setattr(time, "time", lambda: honest() + skew)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    new = rank_zero(OUT, "b")
    (new.folder / layout.METRICS).write_text("old\nnew\n")
    new.copy()
    before = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("metrics.jsonl*")}
    assert before
    with (old.folder / layout.METRICS).open("a") as file:
        file.write("and more\n")
    for attempt in (old.claim.check, old.copy, old.claim.renew):
        with pytest.raises(Superseded, match="another process has taken this run over"):
            attempt()
    close(old)
    assert {p: p.read_bytes() for p in (tmp_path / "runs").rglob("metrics.jsonl*")} == before
    new.claim.check()
    close(new)
    assert not new.claim.lost


def test_one_that_stood_still_between_two_files_sends_no_other(
    bucket: CountingBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file that it was sending comes late. The other one sends its own again at its end."""
    old = rank_zero(OUT, "a")
    old.folder.mkdir(parents=True, exist_ok=True)
    for name in (layout.HEALTH_PLOT, layout.METRICS):
        (old.folder / name).write_text("old\n")
    end(old)
    send, clock, others = store.put_bytes, time.monotonic, list[Mirror]()

    def stand_still(url: str, data: bytes) -> None:
        if not others:
            time.sleep(lease.DEAD)
            with monkeypatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
                others.append(rank_zero(OUT, "b"))
            others[0].folder.mkdir(parents=True, exist_ok=True)
            for name in (layout.HEALTH_PLOT, layout.METRICS):
                (others[0].folder / name).write_text("new\n")
            others[0].copy()
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)
        send(url, data)

    monkeypatch.setattr(store, "put_bytes", stand_still)
    with pytest.raises(Superseded):
        old.copy()
    RunCopy(OUT, tmp_path / "reader").fetch()
    stored = {p.name: p.read_text() for p in (tmp_path / "reader").glob("[!.]*")}
    assert stored == {layout.HEALTH_PLOT: "old\n", layout.METRICS: "new\n"}
    close(others[0])
    assert [p.read_text() for p in (tmp_path / "runs").rglob(layout.HEALTH_PLOT)] == ["new\n"]


def race(count: int, claim: Callable[[int], object], all_but_one: threading.Event) -> list[str]:
    """What became of so many that claim at once. The event is set when all but one were refused."""
    results, start = [""] * count, threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        try:
            claim(number)
            results[number] = "held"
        except Busy:
            results[number] = "refused"
            if results.count("refused") == count - 1:
                all_but_one.set()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("count", [2, 3, 4])
def test_of_commands_that_begin_at_once_one_holds_the_run(
    bucket: CountingBucket, count: int, monkeypatch: pytest.MonkeyPatch
):
    """The slowest has made its claim before the first looks at its own again, as a store that is careless needs."""
    for name, seconds in {"SETTLE": 1.0, "BEAT": 0.2, "DEAD": 60.0}.items():
        monkeypatch.setattr(lease, name, seconds)
    refused = threading.Event()

    def claim(number: int) -> None:
        with command.hold(OUT, f"command {number}"):
            refused.wait(60)

    results = race(count, claim, refused)
    assert results.count("held") == 1, results
    assert results.count("refused") == count - 1


def test_a_store_whose_clock_jumps_ends_one_of_two_and_harms_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
):
    bucket = SkewedBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    first, second = (Lease(OUT, layout.OWNER, name) for name in "ab")
    first.claim()
    bucket.skew = 1000.0
    second.claim()  # as if the first had long been dead
    bucket.skew = 0.0
    second.renew()
    with pytest.raises(Superseded):
        first.renew()
    assert second.epoch == 2


class BehindBucket(CountingBucket):
    """A store whose listing is behind: it names no claim, or claims that have gone."""

    listed: ClassVar[list[str]] = []

    def list(self, url: str, start: str = "", *, patience: float = 0.0) -> list[Blob]:
        return [Blob(f"{OUT}/{name}", 5) for name in self.listed]


@pytest.fixture
def behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> BehindBucket:
    bucket = BehindBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    return bucket


def test_a_claim_that_is_listed_and_has_gone_ends_no_wait_and_supersedes_earlier_ones(behind: BehindBucket):
    old, new = (Lease(OUT, layout.OWNER, name) for name in "ab")
    old.claim()
    behind.listed = [".owner-000003"]
    new.claim()
    assert new.epoch == 4
    new.check()
    with pytest.raises(Superseded):
        old.check()


def test_a_claim_that_is_not_listed_keeps_others_away(behind: BehindBucket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "DEAD", 60.0)
    first, second = (Lease(OUT, layout.OWNER, name) for name in "ab")
    first.claim()
    first.start()
    with pytest.raises(Busy, match="another command is training this run"):
        second.claim()
    first.ended.set()
    first.join()
    monkeypatch.setattr(lease, "DEAD", 2.0)
    second.claim()  # once the first has been silent for so long
    assert second.epoch == 2


def test_a_store_that_accepts_no_claim_is_given_up(behind: BehindBucket, monkeypatch: pytest.MonkeyPatch):
    behind.create = lambda url, data: False  # type: ignore[method-assign]
    monkeypatch.setattr(lease, "TRIES", 3)
    with pytest.raises(Outage, match="3 claims of the run in a row were not accepted by its store"):
        Lease(OUT, layout.OWNER, "a").claim()


def test_a_note_that_is_no_claim_ends_no_thread(bucket: CountingBucket, caplog: pytest.LogCaptureFixture):
    rank = rank_zero(OUT, "a")
    latest = time.monotonic() + 60
    while not rank.claim.lost and time.monotonic() < latest:
        run_store(OUT).put(".owner-000001", "[")  # until it stays: a sign of life may be on its way
        time.sleep(0.05)
    assert rank.claim.lost
    assert rank.is_alive()
    assert rank.claim.is_alive()
    close(rank)

    class Broken(Background):
        ticks = 0

        def tick(self) -> None:
            self.ticks += 1
            raise RecursionError("what nobody thought of")

    broken = Broken("broken")
    broken.start()
    while broken.ticks < 3:
        time.sleep(0.05)
    broken.close()
    assert sum("RecursionError: what nobody thought of" in r.getMessage() for r in caplog.records) == 1


def test_a_store_whose_answers_are_old_when_they_come_gets_nothing(
    bucket: CountingBucket, monkeypatch: pytest.MonkeyPatch
):
    rank = rank_zero(OUT, "a", thread=False)
    (rank.folder / layout.METRICS).write_text("line\n")
    honest = rank.claim.check
    monkeypatch.setattr(rank.claim, "check", lambda: [time.sleep(lease.BEAT + 0.05), honest()])
    with pytest.raises(Outage, match="takes over 1 s to say whether this process holds the run"):
        rank.copy()
    assert not run_store(OUT).list(layout.METRICS)
