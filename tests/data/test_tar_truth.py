"""Nothing in a shard is passed over in silence: the images and what is said add up to what is known to be in it."""

import re
from collections import Counter
from pathlib import Path

import pytest
from helpers import known_tars
from helpers.bucket import CountingBucket
from helpers.fuzzing import counts, examples, generators
from helpers.known_tars import RECORD, Known

from eagleray.data import tar_scan
from eagleray.data.checksum import crc32
from eagleray.data.tar_headers import ARCHIVE, BLOCK
from eagleray.data.tar_scan import Row, scan
from eagleray.storage import store
from eagleray.storage.blob import Blob

ALL = 2**62  # bytes: more than any tar has
SAID = re.compile(r"the shard is cut off or damaged after (\d+) samples: .+?(?:; ([\d,]+) of ([\d,]+) bytes .*)?")


class Answer:
    """What is said of a tar: its rows, what is counted, and from which byte on it is said not to be read."""

    def __init__(self, known: Known, rows: list[Row], passed: Counter[str]) -> None:
        size = len(known.data)
        self.joined, self.passed = passed.pop(ARCHIVE, 0), passed
        self.used = {row.offset: row for row in rows if not row.reason}
        self.refused = {row.key: row.reason or "" for row in rows if row.reason and row.key}
        damage = [row for row in rows if not row.key]
        self.damage = damage[0].reason or "" if damage else ""
        self.read = 0 if self.damage.startswith(("not a tar archive", "the file is empty")) else ALL
        if said := SAID.fullmatch(self.damage):
            self.read = damage[0].offset
            assert int(said[1]) == len(rows) - 1
            left = [int(number.replace(",", "")) for number in said.groups()[1:] if number]
            assert left == ([size - self.read, size] if self.read < size else [])
        elif cut := [key for key, reason in self.refused.items() if reason.startswith("cut off: ")]:
            self.read = max(part.start for part in known.parts if part.key == cut[0] and part.start < size)
        assert len(damage) < 2
        assert len(self.used) == sum(not row.reason for row in rows)


def check(known: Known, answer: Answer) -> str:
    """Compare what is said of a tar with what is known of it, and return how all of it was said."""
    data, joints = known.data, [part.stop for part in known.parts if part.kind == "end"][:-1]
    parts = [part for part in known.parts if part.start < answer.read and part.kind != "end"]
    gone = [part for part in parts if not data[part.start :][:BLOCK].strip(b"\0")]  # overwritten, or behind a cut
    images = {part.data: part for part in parts if part.kind == "image"}
    for row in answer.used.values():
        part = images.pop(row.offset)
        assert (row.key, row.size) == (part.key, part.size) or part in gone
        assert row.crc == crc32(data[part.data : part.data + part.size])
    silent = [p for p in images.values() if p.key not in answer.refused]
    assert set(silent) <= set(gone) or "holds no samples" in answer.damage
    expected = sum(joint <= answer.read for joint in joints)
    if not gone:
        assert (answer.passed, answer.joined) == (known.counts(answer.read), expected)
        assert known.changes or not answer.damage or "holds no samples" in answer.damage
        assert known.changes or not answer.refused
    if "zeros that are no end" in answer.damage and answer.used:
        last = answer.used[max(answer.used)]
        end = last.offset + last.size
        assert -(-end // BLOCK) * BLOCK != answer.read or data[end - 1]
    if parts and answer.read == ALL:  # the zeros at the end are an end
        end = next(p.start for p in known.parts if not data[p.start :].strip(b"\0"))
        assert 0 < len(data) - end <= RECORD + BLOCK
    if not silent or answer.damage:
        return "the images, counts and reasons add up"
    return "an archive seems joined, and is said to be" if answer.joined > expected else "the bytes are those of others"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known")


@pytest.mark.parametrize("count", counts(60))
def test_images_and_what_is_said_add_up_to_what_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    """The same on this disk and in a bucket. Some changes make the bytes of another tar, which nothing can tell: zeros
    over whole members before an end. They are counted."""
    bucket, ways = CountingBucket(folder), Counter[str]()
    monkeypatch.setitem(store.STORES, "s3", bucket)

    def compare(known: Known) -> None:
        (folder / "x.tar").write_bytes(known.data)
        answers = []
        for url in (str(folder / "x.tar"), "s3://x.tar"):
            bucket.lengths.clear()
            passed = Counter[str]()
            rows = list(scan(Blob(url, len(known.data)), passed))
            answers.append((rows, Counter(passed)))
        assert answers[0] == answers[1]
        assert sum(bucket.lengths) <= len(known.data) or any(row.reason for row in answers[0][0])
        ways[check(known, Answer(known, *answers[0]))] += 1

    examples(generators(count).map(known_tars.changed), compare, count, many=5000)
    print(dict(ways))
    assert ways["the bytes are those of others"] <= 0.02 * ways.total()


@pytest.mark.parametrize("count", counts(20))
def test_intact_tars_have_no_faults_however_they_are_cut_into_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    def compare(known: Known) -> None:
        (folder / "y.tar").write_bytes(known.data)
        for size in (700, 4096, 2**22):
            monkeypatch.setattr(tar_scan, "READ", size)
            passed = Counter[str]()
            rows = list(scan(Blob(str(folder / "y.tar"), len(known.data)), passed))
            assert check(known, Answer(known, rows, passed)) == "the images, counts and reasons add up"

    examples(generators(count).map(known_tars.intact), compare, count, many=500)
