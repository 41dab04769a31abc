"""Histories in a store: parts of a constant size, of which readers see the beginning of the file, whatever happens."""

import json
import re
from pathlib import Path

import pytest
from helpers.bucket import CountingBucket
from helpers.rank_zero import close, rank_zero
from helpers.run_folder import write_run

from eagleray.base.errors import Outage
from eagleray.base.files import JsonLines, read_lines
from eagleray.reports.listing import list_runs
from eagleray.reports.read import read
from eagleray.runs import bucket_files, layout, lease
from eagleray.runs.bucket_files import Mirror, RunCopy
from eagleray.runs.run_store import run_store
from eagleray.storage import store

OUT = "s3://runs/run"


class CrashingBucket(CountingBucket):
    """A store that stops answering after so many changes."""

    left = 10**9

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Outage("the process has ended")

    def write(self, url: str, data: bytes) -> None:
        self._change()
        super().write(url, data)

    def delete(self, url: str) -> None:
        self._change()
        super().delete(url)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CrashingBucket:
    bucket = CrashingBucket(tmp_path)
    monkeypatch.setitem(store.STORES, "s3", bucket)
    monkeypatch.setattr(lease, "SETTLE", 0.0)
    return bucket


class Site:
    """Machines on which one start of a run after the other writes, each with a working folder of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.number = folder, patch, 0

    def start(self, step: int | None = None) -> Mirror:
        """Start on a machine that is new, and drop the lines after a step."""
        self.number += 1
        self.patch.setenv("XDG_CACHE_HOME", str(self.folder / f"machine{self.number}"))
        mirror = rank_zero(OUT, "the same command", thread=False)
        mirror.folder.mkdir(parents=True, exist_ok=True)
        if step is not None:
            JsonLines(mirror.folder / layout.METRICS, step=step)
        return mirror

    def read(self) -> list[int]:
        """The steps that a reader finds who sees the run for the first time."""
        self.number += 1
        folder = self.folder / f"reader{self.number}"
        RunCopy(OUT, folder).fetch()
        text = (folder / layout.METRICS).read_text(errors="replace")  # a part may end within a line
        return [json.loads(line)["step"] for line in text.split("\n")[:-1]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: CrashingBucket) -> Site:
    return Site(tmp_path, monkeypatch)


def log(mirror: Mirror, steps: range) -> None:
    JsonLines(mirror.folder / layout.METRICS).log(*({"step": step, "text": "ä" * 20} for step in steps))


def test_what_is_sent_in_a_minute_does_not_grow(bucket: CrashingBucket, site: Site):
    """As at a checkpoint, at which nothing waits; of the first minutes and of those 2 MB later."""
    mirror, minutes = site.start(), list[tuple[int, int]]()
    for minute in range(20):
        bucket.requests.clear()
        bucket.written.clear()
        for n in range(20):
            log(mirror, range(100 * (20 * minute + n), 100 * (20 * minute + n + 1)))
            mirror.copy()
        minutes.append((sum(bucket.written), bucket.requests.total()))
    assert sum(p.stat().st_size for p in Path(bucket.folder, "runs", "run").glob("metrics*")) > 2_500_000
    assert max(size for size, _ in minutes) <= 20 * bucket_files.PART + 200_000
    assert max(size for size, _ in minutes[-5:]) < 1.5 * max(size for size, _ in minutes[:5])
    assert max(count for _, count in minutes[-5:]) <= max(count for _, count in minutes[:5])
    assert site.read() == list(range(40_000))
    bucket.written.clear()
    again = site.start(step=39_990)  # of the lines that are kept only the last part is sent again
    again.copy()
    assert sum(bucket.written) < 2 * bucket_files.PART
    assert site.read() == list(range(39_991))


@pytest.mark.parametrize("cut", [3, 7, 12, 19])
def test_a_start_that_ends_between_any_two_changes_leaves_no_line_doubled_or_lost(
    bucket: CrashingBucket, site: Site, cut: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_files, "PART", 200)  # three lines
    first = site.start()
    for step in range(20):
        log(first, range(step, step + 1))
        first.copy()
    assert site.read() == list(range(20))
    for changes in range(40):
        ahead = site.start()
        log(ahead, range(20, 30))
        ahead.copy()  # lines that the checkpoint from which the next start goes on does not have yet
        second = site.start(step=cut)
        bucket.left = changes
        try:
            for step in range(cut + 1, cut + 12):
                log(second, range(step, step + 1))
                second.copy()
        except Outage:
            ended = False
        else:
            ended = True
        bucket.left = 10**9
        found = site.read()
        assert found == list(range(len(found)))
        assert len(found) > cut
        third = site.start(step=cut)
        third.copy()
        assert site.read() == list(range(cut + 1))
        log(third, range(cut + 1, 20))
        third.copy()
        assert site.read() == list(range(20))
        if ended:
            break
    assert ended
    assert len(list(Path(bucket.folder, "runs", "run").glob("metrics*"))) < 30  # those that no longer count are deleted


def test_what_an_earlier_writer_sends_late_changes_nothing(bucket: CrashingBucket, site: Site):
    old = site.start()
    log(old, range(10))
    for name in (layout.HEALTH, layout.METRICS):
        (old.folder / name).write_text((old.folder / layout.METRICS).read_text())
    old.copy()
    new = site.start(step=4)
    log(new, range(5, 8))
    new.copy()  # also the history in which nothing is new
    log(old, range(10, 20))
    (old.folder / layout.HEALTH).write_text((old.folder / layout.METRICS).read_text())
    for path in (old.folder / layout.METRICS, old.folder / layout.HEALTH):
        old.uploads[path].send(store.put_bytes)
    assert site.read() == list(range(8))
    RunCopy(OUT, site.folder / "here").fetch()
    assert len(read_lines(site.folder / "here" / layout.HEALTH)) == 10
    assert new.claim.epoch == 2


def test_a_part_that_was_shortened_is_sent_again_by_the_next_start(
    bucket: CrashingBucket, site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_files, "PART", 200)
    first = site.start()
    log(first, range(20))
    first.copy()
    url = bucket_files.part_url(OUT, layout.METRICS, 1, 200)
    line = store.store(url).get(url).index(b"\n") + 1
    store.put_bytes(url, store.store(url).get(url)[:line])  # a request that a server carried out late
    lost = set(range(20)) - {r["step"] for r in fetched(site)}
    assert 0 < len(lost) <= 4
    second = site.start()
    second.copy()
    assert {r["step"] for r in fetched(site)} == set(range(20)) - lost
    parts = bucket_files.histories(store.store(OUT).list(f"{OUT}/"))[layout.METRICS]
    assert parts.whole == parts.size


def fetched(site: Site) -> list[dict[str, int]]:
    site.number += 1
    RunCopy(OUT, site.folder / f"reader{site.number}").fetch()
    return read_lines(site.folder / f"reader{site.number}" / layout.METRICS)


def test_report_and_runs_read_a_run_in_parts_as_one_in_a_folder(
    bucket: CrashingBucket, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bucket_files, "PART", 1000)
    local = write_run(tmp_path / "local")
    mirror = site.start()
    for path in local.iterdir():
        (mirror.folder / path.name).write_bytes(path.read_bytes())
    close(mirror)
    names = [p.name for p in Path(bucket.folder, "runs", "run").iterdir()]
    assert sum(bool(re.fullmatch(r"metrics\.jsonl-e000001-\d{12}", name)) for name in names) > 3
    assert layout.METRICS not in names
    there, here = read(OUT), read(str(local))
    assert there.records == here.records
    assert there.starts == here.starts != []
    assert [list_runs(place, "knn/top1")[0].step for place in ("s3://runs", str(tmp_path / "local"))] == [200, 200]
    for out in (OUT, str(local)):
        assert run_store(out).list(layout.METRICS)
        assert not run_store(out).list(layout.HEALTH)
    run_store(OUT).append(layout.METRICS, '{"step": 777}\n')
    assert read(OUT).last == 777
