"""A tar from a stranger ends in samples and reasons, in bounded time and memory, and is read as webdataset reads it."""

import contextlib
import itertools
import re
import resource
import time
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import webdataset
from helpers import hostile_tars
from helpers.fuzzing import counts, examples, generators
from helpers.hostile_tars import BLOCK, CASES
from helpers.pictures import jpeg, write_tar
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.data import tar_scan
from eagleray.data.checksum import crc32
from eagleray.data.file_names import from_text, readable, to_text
from eagleray.data.index import open_index
from eagleray.data.index_file import blocks, table_of
from eagleray.data.index_schema import Shard, check_rows
from eagleray.data.tar_scan import Row, key_and_extension, scan
from eagleray.datasets.sources.item import table
from eagleray.datasets.sources.webdataset import _samples
from eagleray.storage.blob import Blob


def scanned(path: Path, data: bytes) -> list[Row]:
    """The rows of a tar, which an index may have."""
    path.write_bytes(data)
    rows = list(scan(Blob(str(path), len(data))))
    table = table_of(sorted(rows, key=lambda r: r.reason is not None))
    usable = [r for r in rows if not r.reason]
    counts = blocks(np.array([r.offset for r in usable]), np.array([r.size for r in usable]))
    check_rows(table, Shard(path.name, len(data), "", len(usable), len(rows) - len(usable), False, counts))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_every_case_of_the_review(tmp_path: Path, case: str) -> None:
    """The samples before the damage are used, also the last one, and those after a bad sample."""
    data, good, reason = CASES[case]
    began = time.process_time()
    rows = scanned(tmp_path / "x.tar", data)
    assert time.process_time() - began < 5
    assert [readable(to_text(r.key)) for r in rows if not r.reason] == good
    wrong = [r.reason for r in rows if r.reason]
    assert len(wrong) == bool(reason)
    assert not reason or re.search(reason, str(wrong[0])), wrong
    assert all(crc32(data[r.offset : r.offset + r.size]) == r.crc for r in rows if not r.reason)
    items = _samples(Blob(str(tmp_path / "x.tar"), len(data)), Counter())
    assert len(table(items)) == len(rows)
    assert [i.reason is None for i in items] == [r.reason is None for r in rows]


def test_a_shard_with_every_harm_does_not_end_the_others(tmp_path: Path) -> None:
    for number, case in enumerate(CASES.values()):
        (tmp_path / f"{number:02d}.tar").write_bytes(case.data)
    index = open_index(str(tmp_path), note=lambda _: None)
    assert [index.key(i) for i in range(len(index))] == [key for case in CASES.values() for key in case.good]
    assert len(index.bad) == sum(bool(case.reason) for case in CASES.values())


def test_a_large_member_is_no_sample_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file on this disk: 20 GB that take none."""
    monkeypatch.setattr(tar_scan, "READ", 4096)
    size, image = 20 * 10**9, jpeg(1)
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        file.write(hostile_tars.header(b"a.jpg", size))
        file.seek(BLOCK + size + -size % BLOCK)
        file.write(hostile_tars.member(b"b.jpg", image * 50) + hostile_tars.END)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large, good = scan(Blob(str(path), path.stat().st_size))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert large.reason == f"the image has {size} bytes, more than {tar_scan.LARGEST}"
    assert (good.reason, good.crc) == (None, crc32(image * 50))


def check(path: Path, data: bytes) -> None:
    """Any bytes end in rows that are true, and in items that a table can hold."""
    rows = scanned(path, data)
    good = [r for r in rows if not r.reason]
    assert all(0 <= r.offset <= r.offset + r.size <= len(data) for r in good)
    assert all(crc32(data[r.offset : r.offset + r.size]) == r.crc for r in good)
    assert all(len(r.reason) < 300 for r in rows if r.reason)
    with contextlib.suppress(UserError):  # it is compressed
        table(_samples(Blob(str(path), len(data)), Counter()))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.tar"


@pytest.mark.parametrize("count", counts(150))
def test_mutated_tars_end_in_rows(path: Path, count: int | None) -> None:
    examples(generators(count).map(hostile_tars.mutate), lambda data: check(path, data), count, many=20_000)


LETTERS = st.sampled_from(["a", "b.c", "v1.0", "ü", "日本", "\udce9", "\udcff\udc80", "\uefe9", " ", "n" * 90, "~2"])
EXTENSIONS = st.sampled_from(["jpg", "JPG", "seg.png", "cls", "json", "x.webp", "txt"])
NAMES = st.builds(lambda parts, end: "/".join(parts) + "." + end, st.lists(LETTERS, min_size=1, max_size=4), EXTENSIONS)


def through_webdataset(path: Path) -> list[tuple[str, bytes, int]]:
    out = []
    for row in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
        images = [v for k, v in row.items() if k.rpartition(".")[2] in ("jpg", "png", "webp")]
        labels = [int(v) for k, v in row.items() if k.rpartition(".")[2] == "cls"]  # as webdataset decodes `c.cls` too
        out += [(row["__key__"], images[0], labels[-1] if labels else -1)] if images else []
    return out


@pytest.mark.parametrize("count", counts(40))
def test_samples_are_those_of_webdataset(path: Path, count: int | None) -> None:
    """Keys, bytes and labels of intact tars in every format, also with names that are not UTF-8."""
    kinds = st.sampled_from([0, 1, 2])  # ustar, GNU, pax

    def compare(drawn: tuple[list[str], int]) -> None:
        names, kind = drawn
        parts = [key_and_extension(name) for name in names]
        runs = [list(group) for _, group in itertools.groupby(parts, key=lambda p: p and p[0])]
        hypothesis.assume(all(len(set(run)) == len(run) for run in runs))  # webdataset refuses the whole shard
        data = [b"%d" % i if n.endswith("cls") else b"image %d" % i * 40 for i, n in enumerate(names)]
        try:
            write_tar(path, zip(names, data, strict=True), kind)
        except ValueError:  # a name that is too long for ustar
            hypothesis.reject()
        rows = [r for r in scanned(path, path.read_bytes()) if not r.reason]
        whole = path.read_bytes()
        ours = [(r.key, whole[r.offset : r.offset + r.size], r.label) for r in rows]
        assert ours == through_webdataset(path)

    examples(st.tuples(st.lists(NAMES, min_size=1, max_size=8), kinds), compare, count, many=3000)


def test_names_survive_a_table() -> None:
    """Two names never become one, and a text that was stored before stands for itself."""

    def check(raw: bytes) -> None:
        name = raw.decode(errors="surrogateescape")
        text = to_text(name)
        assert text.encode().decode() == text
        assert from_text(text) == name
        assert readable(text).isprintable() or not readable(text).isascii()

    examples(st.binary(max_size=12), check, 100, many=0)
    assert to_text("größe/日本.jpg") == "größe/日本.jpg"
    assert len({to_text(n) for n in ("\udcee\udcbe\udc80", "\uef80", "\udc80")}) == 2  # the first two are equal bytes


def test_keys_are_split_as_by_the_pattern_of_webdataset_but_for_hidden_files() -> None:
    """There `photos/._a.jpg`, which macOS writes beside `photos/a.jpg`, is a sample with the key `photos/`."""
    pattern = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]*)")

    def check(name: str) -> None:
        match = pattern.fullmatch(name)
        assert key_and_extension(name) == (match and (match[1], match[2].lower()))

    examples(st.text("a./", max_size=12), check, 200, many=0)
