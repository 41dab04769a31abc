"""The index says what is in a shard as webdataset reads it, is made once, and notices when a shard is another."""

import io
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import webdataset
from helpers import corrupt
from helpers.bucket import CountingBucket
from helpers.pictures import Member, encode, jpeg, picture, sample, write_shards, write_tar
from pyarrow import parquet

from eagleray.base.errors import UserError
from eagleray.data import index as indexing
from eagleray.data import index_file, kinds
from eagleray.data import tar_scan as scanning
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index, open_index, write_index
from eagleray.data.index_file import NAME, blocks
from eagleray.data.quarantine import BadSample
from eagleray.data.tar_scan import UNLABELLED, Row, scan
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.store import LocalStore

PNG = encode(picture(1), "PNG")
MEMBERS: list[Member] = [
    *sample(1),
    ("key.with.dots.jpg", jpeg(2)),
    ("key.cls", b"2"),
    ("dir a/sub/UPPER.JPG", jpeg(3)),
    ("dir a/sub/UPPER.cls", b" 3 \n"),
    ("v1.0/a.png", PNG),
    ("v1.0/a.cls", b"4"),
    ("unicode_äöü_日本_😀.jpg", jpeg(5)),
    ("unicode_äöü_日本_😀.cls", b"5"),
    ("twice.jpg", jpeg(6)),
    ("twice.cls", b"6"),
    ("label_first.cls", b"7"),
    ("label_first.json", b"{}"),
    ("label_first.jpg", jpeg(7)),
    ("no_label.jpg", jpeg(8)),
    ("twice.jpg", jpeg(9)),  # not next to its namesake
    ("twice.cls", b"9"),
    ("./dot.webp", encode(picture(2), "WEBP")),
    ("./dot.cls", b"123456789012"),
    ("d" * 60 + "/" + "l" * 95 + ".jpg", jpeg(10)),  # longer than a plain header has room for
    ("d" * 60 + "/" + "l" * 95 + ".cls", b"10"),
    *sample(11),
]
KINDS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def opened(where: Path | str | list[str], spare: Path | str | None = None) -> Index:
    return open_index(where if isinstance(where, list) else str(where), spare, note=lambda _: None)


def keys_of(index: Index) -> list[str]:
    return [index.key(i) for i in range(len(index))]


def found(index: Index) -> list[tuple[str, bytes, int]]:
    """Key, image bytes and label of every sample, by way of the offsets."""
    out = []
    for i, key in enumerate(keys_of(index)):
        url = index.shards[index.shard[i]].url
        data = store.store(url).read(url, int(index.offset[i]), int(index.size[i]))
        out.append((key, data, int(index.label[i])))
    return out


def plain(urls: list[str]) -> list[tuple[str, bytes, int]]:
    """The same through webdataset."""
    out = []
    for row in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False):
        [data] = [v for k, v in row.items() if k.rpartition(".")[2] in ("jpg", "png", "webp")]
        out.append((row["__key__"], data, int(row.get("cls", -1))))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_size", [700, 4096, scanning.READ])
def test_samples_are_those_that_webdataset_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, request_size: int
) -> None:
    """Keys, bytes and labels, in every header format, however the file is cut into requests."""
    monkeypatch.setattr(scanning, "READ", request_size)
    members = [m for m in MEMBERS if kind != "ustar" or m[0].isascii()]
    for i, part in enumerate((members, members[2:9], [m for k in range(20) for m in sample(k)])):
        write_tar(tmp_path / f"x-{i}.tar", part, KINDS[kind])
    index = opened(tmp_path)
    assert found(index) == plain([b.url for b in index.shards])
    assert len(index) > 30
    assert index.bad == []


def test_keys_are_written_out(tmp_path: Path) -> None:
    """As an example for a reader."""
    index = opened(write_tar(tmp_path / "x.tar", MEMBERS))
    keys = ["s0001", "key", "dir a/sub/UPPER", "v1.0/a", "unicode_äöü_日本_😀", "twice", "label_first", "no_label"]
    assert keys_of(index)[: len(keys)] == keys
    assert index.label.tolist()[: len(keys)] == [1, 2, 3, 4, 5, 6, 7, -1]
    assert index.labelled
    assert not opened(write_tar(tmp_path / "other" / "y.tar", [("a.jpg", jpeg(1))])).labelled
    assert index.bad_sample(2, "why") == BadSample(
        str(tmp_path / "x.tar"), "dir a/sub/UPPER", int(index.offset[2]), "why (its .jpg)"
    )


def test_links_folders_and_names_without_a_dot_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("folder.jpg", tarfile.DIRTYPE), ("link.jpg", tarfile.SYMTYPE), ("README", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
        info = tarfile.TarInfo("a.jpg")
        info.size = len(jpeg(1))
        tar.addfile(info, io.BytesIO(jpeg(1)))
    index = opened(path)
    assert found(index) == [("a", jpeg(1), -1)]
    assert index.bad == []


class Spy:
    """Notes every read from a shard, and which shards are scanned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        self.scans: list[str] = []
        honest_read, honest_scan = LocalStore.read, kinds.scan

        def read(store: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
            self.reads.append(url)
            return honest_read(store, url, start, length, **more)

        def scan(blob: store.Blob, passed: Counter[str]) -> Iterator[Row]:
            self.scans.append(Path(blob.url).name)
            return honest_scan(blob, passed)

        monkeypatch.setattr(LocalStore, "read", read)
        monkeypatch.setattr(kinds, "scan", scan)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def equal(a: Index, b: Index, *, shards: bool = True) -> bool:
    arrays = ("shard", "offset", "size", "label", "starts")
    same = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays)
    return same and keys_of(a) == keys_of(b) and (not shards or (a.shards == b.shards and a.bad == b.bad))


def test_the_second_time_no_shard_is_read(tmp_path: Path, spy: Spy) -> None:
    write_shards(tmp_path, 20, 3)
    notes: list[str] = []
    first = open_index(str(tmp_path), note=notes.append)
    assert sorted(spy.scans) == ["x-000.tar", "x-001.tar", "x-002.tar"]
    assert notes == [f"indexing 3 shards of {tmp_path}"]
    spy.reads.clear()
    second = open_index(str(tmp_path), note=notes.append)
    assert spy.reads == []
    assert len(notes) == 1
    assert equal(first, second)


def test_a_shard_more_is_indexed_alone(tmp_path: Path, spy: Spy) -> None:
    write_shards(tmp_path, 20, 2)
    before = opened(tmp_path)
    spy.scans.clear()
    write_tar(tmp_path / "x-0005.tar", sample(99))  # between the two others
    after = opened(tmp_path)
    assert spy.scans == ["x-0005.tar"]
    assert [Path(b.url).name for b in after.shards] == ["x-000.tar", "x-0005.tar", "x-001.tar"]
    assert found(after) == [*found(before)[:10], ("s0099", jpeg(99), 9), *found(before)[10:]]
    spy.scans.clear()
    assert found(opened(tmp_path / "x-001.tar")) == found(before)[10:]
    assert found(opened([f"{tmp_path}/x-00{{1,0}}.tar"])) == found(before)
    assert spy.scans == []


def test_bad_samples_are_remembered(tmp_path: Path, spy: Spy) -> None:
    write_tar(tmp_path / "x.tar", [*sample(1), ("a.cls", b"1"), ("b.jpg", b"")])
    first = opened(tmp_path)
    spy.scans.clear()
    assert opened(tmp_path).bad == first.bad != []
    assert spy.scans == []


def test_a_folder_that_moves_takes_its_index_along(tmp_path: Path, spy: Spy) -> None:
    before = opened(write_shards(tmp_path / "here", 12, 2))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    spy.reads.clear()
    after = opened(tmp_path / "there")
    assert spy.reads == []
    assert equal(before, after, shards=False)
    assert [b.url for b in after.shards] == [str(tmp_path / "there" / f"x-00{i}.tar") for i in range(2)]


def grow(path: Path) -> None:
    write_tar(path, [m for k in range(50, 58) for m in sample(k)])


def overwrite(path: Path) -> None:
    """Another first image of the same length."""
    with path.open("r+b") as f:
        f.seek(700)
        f.write(b"other")


@pytest.mark.parametrize("change", [grow, overwrite])
def test_a_changed_shard_is_refused_until_it_is_indexed_anew(tmp_path: Path, change: Any) -> None:
    opened(write_shards(tmp_path, 10, 2))
    path = tmp_path / "x-001.tar"
    old = path.stat().st_size
    change(path)
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    message = str(caught.value)
    assert re.fullmatch(
        rf"{path}: changed since it was indexed \({old} bytes \S+, now {path.stat().st_size} \S+\); "
        rf"`eagleray index {tmp_path}` accepts the new one",
        message,
    )
    assert len(opened(tmp_path / "x-000.tar")) == 5
    assert write_index(str(tmp_path)) == [(f"{tmp_path}/{NAME}", 5 + 8 if change is grow else 10, 0)]
    index = opened(tmp_path)
    assert found(index) == plain([b.url for b in index.shards])


def test_write_index_tells_what_it_found_and_how_far_it_is(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 10, 3)
    write_tar(tmp_path / "b" / "x.tar", [*sample(1), ("a.cls", b"1")])
    (tmp_path / "b" / "y.tar").touch()
    ticks: list[tuple[int, int]] = []
    written = write_index([str(tmp_path / "b"), str(tmp_path / "a")], tick=lambda *t: ticks.append(t))
    assert written == [
        (f"{tmp_path}/a/{NAME}", 10, 0),
        (f"{tmp_path}/b/{NAME}", 1, 1),
    ]  # a label alone is nothing broken
    assert ticks == [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2)]


def test_write_index_of_one_shard_keeps_what_is_known_of_the_others(tmp_path: Path, spy: Spy) -> None:
    write_shards(tmp_path, 10, 2)
    whole = opened(tmp_path)
    spy.scans.clear()
    write_index(str(tmp_path / "x-001.tar"))
    assert equal(opened(tmp_path), whole)
    assert spy.scans == ["x-001.tar"]


def test_commands_that_index_other_shards_of_a_folder_at_once_keep_each_others_rows(tmp_path: Path) -> None:
    write_shards(tmp_path, 10, 2)

    def scan_while_another_command_runs(blobs: Sequence[Blob]) -> Iterator[tuple[Blob, pyarrow.Table]]:
        open_index(str(tmp_path / "x-001.tar"), note=lambda _: None)
        return indexing.scan_here(blobs)

    open_index(str(tmp_path / "x-000.tar"), note=lambda _: None, scan_all=scan_while_another_command_runs)
    assert index_file.load(f"{tmp_path}/{NAME}", again=False).keys() == {"x-000.tar", "x-001.tar"}


def test_folders_inside_folders_keep_their_own_index(tmp_path: Path, spy: Spy) -> None:
    """Even where their shards' names alternate in the order of URLs."""
    for name, key in (("b.tar", 1), ("b/x.tar", 2), ("c.tar", 3)):
        write_tar(tmp_path / name, sample(key))
    urls = [str(tmp_path), str(tmp_path / "b")]
    assert keys_of(opened(urls)) == ["s0001", "s0002", "s0003"]
    spy.scans.clear()
    assert keys_of(opened(urls)) == ["s0001", "s0002", "s0003"]
    assert spy.scans == []
    assert (tmp_path / NAME).exists()
    assert (tmp_path / "b" / NAME).exists()


@pytest.fixture
def readonly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shards where nothing can be written, not even by root."""
    folder = write_shards(tmp_path / "readonly", 12, 2)
    honest = LocalStore.put

    def put(self: LocalStore, url: str, source: Path, **how: Any) -> None:
        if url.startswith(str(folder)):
            raise PermissionError(13, "Permission denied")
        honest(self, url, source, **how)

    monkeypatch.setattr(LocalStore, "put", put)
    return folder


def test_where_nothing_can_be_written_the_index_is_kept_aside(readonly: Path, tmp_path: Path, spy: Spy) -> None:
    spare = tmp_path / "spare"
    first = opened(readonly, spare)
    assert not (readonly / NAME).exists()
    assert [p.suffix for p in spare.iterdir()] == [".parquet"]
    spy.reads.clear()
    assert equal(opened(readonly, spare), first)
    assert spy.reads == []


def test_an_index_in_a_store_is_found_by_another_machine(
    readonly: Path, tmp_path: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = opened(readonly, "s3://runs/run")
    assert len(spy.scans) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert equal(opened(readonly, "s3://runs/run"), first)
    assert len(spy.scans) == 2
    assert {b.url for b in index_file.aside_in("s3://runs/run")} == {f.url for f in first.files}


def test_an_index_beside_and_one_aside_complete_each_other(readonly: Path, tmp_path: Path, spy: Spy) -> None:
    opened(readonly, tmp_path / "spare")
    [aside] = (tmp_path / "spare").iterdir()
    shutil.copy(aside, readonly / NAME)
    write_tar(readonly / "x-002.tar", sample(99))
    whole = opened(readonly, tmp_path / "spare")
    spy.reads.clear()
    assert equal(opened(readonly, tmp_path / "spare"), whole)
    assert spy.reads == []


def test_with_no_place_for_the_index_there_is_one_line(readonly: Path) -> None:
    with pytest.raises(UserError, match=f"{readonly}/{NAME}: cannot be written: Permission denied"):
        opened(readonly)


@pytest.mark.parametrize("content", [b"", b"not parquet", b"PAR1" * 8, None])
def test_a_file_that_is_no_index_is_refused_until_it_is_written_anew(tmp_path: Path, content: bytes | None) -> None:
    write_shards(tmp_path, 6, 1)
    if content is None:
        parquet.write_table(pyarrow.table({"of": ["another program"]}), tmp_path / NAME)
    else:
        (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/{NAME}: not an index.parquet written by eagleray"):
        opened(tmp_path)
    write_index(str(tmp_path))
    assert len(opened(tmp_path)) == 6


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corrupt.write(tmp_path_factory.mktemp("broken"))


def rows(path: Path) -> list[Row]:
    return list(scan(*store.list_shards(str(path))))


def test_a_corrupt_shard_gives_exactly_its_bad_samples(broken: Path) -> None:
    """By its headers and labels first, then by decoding what is left."""
    found = rows(broken / "bad-000000.tar")
    assert [(r.key, r.reason) for r in found if r.reason] == corrupt.INDEXED
    good = [r for r in found if not r.reason]
    labels = {f"odd_label_{kind}": -1 for kind in ("empty", "text", "negative")}
    assert [r.unlabelled for r in good if r.key in labels] == [1, 1, 1]
    assert sum(r.unlabelled for r in good) == 3
    labels |= {"odd_label_blanks": 7, "miss_label": -1, "ünï_日本_😀": 2, "key": 6, "dir a/sub/UPPER": 8, "s0000": 0}
    assert all(r.label == labels.get(r.key, 3) for r in good if r.key != "twice")
    assert [r.label for r in good if r.key == "twice"] == [1, 5]
    refused = {}
    data = (broken / "bad-000000.tar").read_bytes()
    for row in good:
        try:
            assert decode(data[row.offset : row.offset + row.size]).shape[0] == 3
        except BadImage as e:
            refused[row.key] = str(e)
    assert refused.keys() == corrupt.DECODED.keys()
    assert all(part in refused[key] for key, part in corrupt.DECODED.items())


@pytest.mark.parametrize(
    ("name", "good", "reason"),
    [
        ("trunc-000000.tar", 10, r"cut off: \d+ bytes from \d+, the shard ends at \d+"),
        ("trunc-000001.tar", 5, "the shard is cut off or damaged after 5 samples: a header ends .+"),
        ("notatar-000000.tar", 0, "not a tar archive: .+"),
        ("empty-000000.tar", 0, "the file is empty"),
        ("nomembers-000000.tar", 0, "the shard holds no samples"),
    ],
)
def test_corrupt_shards_give_what_is_whole_and_one_reason(broken: Path, name: str, good: int, reason: str) -> None:
    *whole, last = rows(broken / name)
    assert [(r.key, r.label, r.reason) for r in whole] == [(f"s{i:04d}", i, None) for i in range(good)]
    assert re.fullmatch(reason, last.reason or "")
    assert last.key == ("s0010" if name == "trunc-000000.tar" else "")


def test_a_broken_shard_among_others_is_one_bad_entry(broken: Path, tmp_path: Path) -> None:
    shutil.copytree(broken, tmp_path / "x")
    index = opened(tmp_path / "x")
    shards = [(Path(b.shard).name, b.key) for b in index.bad if not b.key]
    names = ("empty-000000.tar", "nomembers-000000.tar", "notatar-000000.tar", "trunc-000001.tar")
    assert shards == [(name, "") for name in names]
    assert len(index.bad) == len(corrupt.INDEXED) + 5


def test_a_shard_cut_anywhere_gives_its_whole_samples_and_never_a_wrong_one(tmp_path: Path) -> None:
    members = [m for k in range(4) for m in (sample(k)[0], (f"s{k:04d}.cls", b"1234567"))]
    data = write_tar(tmp_path / "whole.tar", members).read_bytes()
    whole = {r.key: r for r in scan(*store.list_shards(str(tmp_path / "whole.tar")))}
    with tarfile.open(tmp_path / "whole.tar") as tar:
        headers = [m.offset for m in tar.getmembers()]
    end = headers[-1] + 1024
    path = tmp_path / "cut.tar"
    for cut in [*range(1, end, 211), *(h + d for h in headers[1:] for d in (1, 511, 513, 515, 518))]:
        path.write_bytes(data[:cut])
        rows = list(scan(*store.list_shards(str(path))))
        unlabelled = [r for r in rows if not r.reason and r.label == -1]
        assert len(unlabelled) <= 1  # cut before its label
        assert all(r == whole[r.key] for r in rows if not r.reason and r not in unlabelled)
        assert all((r.offset, r.size) == (whole[r.key].offset, whole[r.key].size) for r in unlabelled)
        assert sum(bool(r.reason) for r in rows) <= 1
        assert any(r.reason for r in rows)  # also where one member ends and the next one would begin


@pytest.mark.parametrize("text", [b"-1", b"1.5", b"cat", b"", b"\xff\xfe", b"1 2", b"9" * 19, "٣".encode()])
def test_an_image_whose_label_cannot_be_read_has_none(tmp_path: Path, text: bytes) -> None:
    index = opened(write_tar(tmp_path / "x.tar", [*sample(1), ("b.jpg", jpeg(2)), ("b.cls", text)]))
    assert index.bad == []
    assert keys_of(index) == ["s0001", "b"]
    assert index.label.tolist() == [1, -1]
    assert index.files[0].passed == {"x.tar": {UNLABELLED: 1}}


def test_shards_without_any_usable_image_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.json", b"{}"), ("a.cls", b"1")])
    with pytest.raises(UserError, match=r"no usable image in 1 shard\(s\); no image: only json, cls"):
        opened(tmp_path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [1, 1000, 10**9])
def test_blocks_cover_the_samples_lie_in_one_shard_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch, seed: int, limit: int
) -> None:
    monkeypatch.setattr(index_file, "BLOCK", limit)
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, 7)
    shard = np.repeat(np.arange(7, dtype=np.int32), counts)
    size = rng.integers(1, 400, len(shard))
    size[rng.integers(len(shard))] = 5000  # larger than a block
    offset = np.concatenate([np.cumsum(512 + s) - s for s in np.split(size, np.cumsum(counts)[:-1])])
    counted = [blocks(offset[shard == i], size[shard == i]) for i in range(7)]
    starts = np.r_[0, np.cumsum(np.concatenate(counted))]
    assert starts[0] == 0
    assert starts[-1] == len(shard)
    assert (np.diff(starts) > 0).all()
    spans = []
    for a, b in pairwise(starts):
        assert len(set(shard[a:b])) == 1
        spans.append(offset[b - 1] + size[b - 1] - offset[a])
        assert spans[-1] < limit + size[a]
    whole = [offset[s][-1] + size[s][-1] - offset[s][0] for s in (shard == i for i in range(7))]
    assert len(spans) <= sum(w // limit + 1 for w in whole)  # no more than it takes


def test_the_index_has_the_blocks_of_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 4096)
    index = opened(write_shards(tmp_path, 30, 3))
    counted = [blocks(index.offset[index.shard == i], index.size[index.shard == i]) for i in range(3)]
    assert index.block_sizes.tolist() == np.concatenate(counted).tolist()
    assert index.block_sizes.sum() == len(index) == 30
    assert len(index.block_sizes) > 6


class ManyShards(LocalStore):
    """A bucket of many shards."""

    def list(self, url: str, start: str = "", *, patience: float = 0.0) -> list[Blob]:
        return [Blob(f"{url}{n:04d}.tar", 2048, "s3:tag") for n in range(2000)] if url.endswith("/") else []

    def tag(self, blob: Blob) -> str:
        return blob.tag


def test_the_time_for_many_shards_grows_with_their_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A set of 100,000 would take half an hour where each is compared with each."""
    compared: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        honest = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: compared.update([name]) or honest(*given))

    monkeypatch.setitem(store.STORES, "s3", ManyShards())
    rows = [(blob, index_file.table_of([Row("a", 512, 9, crc=1)])) for blob in ManyShards().list("s3://b/x/")]
    index_file.write(rows, tmp_path / NAME)
    known = index_file.File(tmp_path / NAME)
    monkeypatch.setattr(index_file, "load", lambda url, again: dict.fromkeys(known.groups, known))
    monkeypatch.setattr(index_file, "save", lambda rows, urls, stamps: len(list(rows)))
    count(Blob, "__eq__")
    count(store.Pattern, "matches")
    assert len(opened("s3://b/x/{0000..0999}.tar")) == 1000
    assert write_index("s3://b/x", scan_all=lambda blobs: rows) == [("s3://b/x/index.parquet", 2000, 0)]
    assert max(compared.values()) <= 4 * 2000
