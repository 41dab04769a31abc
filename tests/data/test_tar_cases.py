"""Shards as people report them: what is in them is read or said in words with numbers, on this disk and in a bucket."""

import bz2
import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.bucket import CountingBucket
from helpers.hostile_tars import BLOCK
from helpers.pictures import Member, encode, jpeg, picture, sample, write_tar

from eagleray.base.errors import UserError
from eagleray.data.index import open_index, write_index
from eagleray.data.index_faults import faults_of
from eagleray.data.index_file import NAME
from eagleray.datasets import card, shards
from eagleray.datasets.describe import describe
from eagleray.datasets.stats import ImageStats
from eagleray.storage import store

APPLE = bytes.fromhex("00051607000200004d6163204f532058") + bytes(128)  # what macOS keeps beside a file
LINKS = {"hard": tarfile.LNKTYPE, "symbolic": tarfile.SYMTYPE}
SHARED = "; a sample is all files whose names are equal up to the first dot"


def tar(members: Sequence[Member | tarfile.TarInfo]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for each in members:
            info, data = (each, b"") if isinstance(each, tarfile.TarInfo) else (tarfile.TarInfo(each[0]), each[1])
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def link(name: str, kind: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = LINKS[kind], f"/images/{name}"
    return info


def images(count: int, form: str = "{:04d}.jpg") -> list[Member]:
    return [(form.format(i), jpeg(i)) for i in range(count)]


def interleave(*parts: Sequence[Member]) -> list[Member]:
    return [member for group in zip(*parts, strict=True) for member in group]


def apple(form: str) -> bytes:
    names = [f"img{i:04d}.jpg" for i in range(32)]
    beside = [(form.format(f"._{name}"), APPLE) for name in names]
    return tar(interleave(beside, [(form.format(name), jpeg(i)) for i, name in enumerate(names)]))


def whole(count: int = 200) -> bytes:
    """A shard of samples with their labels, whose images take some blocks each."""
    return tar(
        [m for i in range(count) for m in ((f"a{i:04d}.jpg", encode(picture(i, 96, 96))), (f"a{i:04d}.cls", b"1"))]
    )


def zeros(start: float, stop: float) -> bytes:
    """Overwrite a part of the shard, in fractions of its size."""
    data = whole()
    first, last = int(len(data) * start), int(len(data) * stop)
    return data[:first] + bytes(last - first) + data[last:]


def joined(*ends: int) -> bytes:
    """Join archives of 20 images, each with so many bytes at its end; 0 stands for the end as it is."""
    parts = []
    for number, end in enumerate(ends):
        data = tar(images(20, f"p{number}_{{:04d}}.jpg"))
        parts.append(data.rstrip(b"\0") if end else data)
        if end:
            parts.append(bytes(-len(parts[-1]) % BLOCK + end))
    return b"".join(parts)


Tell = Callable[[bytes], tuple[int, int, list[str]]]  # says how many images and faults a shard has, and the lines


class Case(NamedTuple):
    data: Callable[[], bytes]
    images: int
    bad: int
    said: list[str]  # what the lines begin with


def masked() -> bytes:
    mask = encode(picture(1).mean(2).astype("uint8"), "PNG")
    return tar(interleave([(f"{i:04d}.mask.png", mask) for i in range(32)], images(32)))


HIDDEN, SUM = "not read  32 hidden files, which are no samples (most in s.tar)", "which are no samples (most in s.tar)"
ALSO = "not read  {} images, as another of their sample is (most in s.tar)" + SHARED
CASES = {
    "a file of macOS beside each image, in a folder": Case(lambda: apple("photos/{}"), 32, 0, [HIDDEN]),
    "a file of macOS beside each image": Case(lambda: apple("{}"), 32, 0, [HIDDEN]),
    "a file of macOS beside each image, below ./": Case(lambda: apple("./{}"), 32, 0, [HIDDEN]),
    "two archives": Case(lambda: joined(0, 0), 40, 0, ["joined    1 archives behind the end of another one, read"]),
    "archives that end in one block": Case(lambda: joined(512, 512, 512), 60, 0, ["joined    2 archives behind"]),
    "archives that end in two blocks": Case(lambda: joined(1024, 0, 1024), 60, 0, ["joined    2 archives behind"]),
    "links that are symbolic": Case(
        lambda: tar([link(f"a{i}.jpg", "symbolic") for i in range(32)]),
        0,
        1,
        ["not used  1: the shard holds no samples, only 32 symbolic links", f"not read  32 symbolic links, {SUM}"],
    ),
    "some links": Case(
        lambda: tar([link(n, "symbolic") if i % 2 else (n, d) for i, (n, d) in enumerate(images(32))]),
        16,
        0,
        [f"not read  16 symbolic links, {SUM}"],
    ),
    "hard links": Case(
        lambda: tar([*images(32), *(link(f"b{i}.jpg", "hard") for i in range(32))]),
        32,
        0,
        [f"not read  32 hard links, {SUM}"],
    ),
    "dots in names": Case(
        lambda: tar(images(60, "Screen Shot 2015-10-11 at 10.{:02d}.01 PM.jpg")), 1, 0, [ALSO.format(59)]
    ),
    "versions in names": Case(lambda: tar(images(60, "scan_v1.{:02d}.jpg")), 1, 0, [ALSO.format(59)]),
    "labels behind all images": Case(
        lambda: tar([*images(32), *((f"{i:04d}.cls", b"1") for i in range(32))]),
        32,
        0,
        ["not used  32: no image: only"],
    ),
    "img2dataset": Case(
        lambda: tar(interleave(images(32), *([(f"{i:04d}.{e}", b"{}") for i in range(32)] for e in ("json", "txt")))),
        32,
        0,
        [],
    ),
    "names of parts": Case(
        lambda: tar(interleave(images(32, "s{:08d}.input.jpg"), [(f"s{i:08d}.outputs.cls", b"1") for i in range(32)])),
        32,
        0,
        [],
    ),
    "left and right": Case(
        lambda: tar(interleave(images(32, "d.v1/im{}.LEFT.JPG"), images(32, "d.v1/im{}.right.jpg"))),
        32,
        0,
        [ALSO.format(32)],
    ),
    "a mask before each image": Case(masked, 32, 0, [ALSO.format(32)]),
}
PACKED = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zstd": lambda data: bytes.fromhex("28b52ffd") + data[:4000],
    "lz4": lambda data: bytes.fromhex("04224d18") + data[:300],
    "zip": lambda data: b"PK\3\4" + data[:4000],
}


def told(url: str) -> tuple[int, int, list[str]]:
    [(place, good, bad)] = write_index(url)
    return good, bad, list(faults_of(place).lines())


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Says what an index says of a shard, which is the same in a bucket."""
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()

    def tell(data: bytes) -> tuple[int, int, list[str]]:
        for folder in ("here", "there"):
            (tmp_path / folder / "s.tar").write_bytes(data)
        here, there = told(str(tmp_path / "here")), told("s3://there")
        assert here == there
        return here

    return tell


@pytest.mark.parametrize("case", CASES)
def test_what_is_in_a_shard_is_read_or_said(case: str, both: Tell) -> None:
    data, good, bad, said = CASES[case]
    found = both(data())
    assert found[:2] == (good, bad)
    assert len(found[2]) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(found[2], said, strict=True)), found[2]


@pytest.mark.parametrize("part", [(0.4, 1.0), (0.5, 0.6), (0.9, 1.0), (0.0, 0.01)])
def test_zeros_in_a_shard_are_damage_and_the_images_before_them_are_used(part: tuple[float, float], both: Tell) -> None:
    data = zeros(*part)
    good, bad, lines = both(data)
    said = [line for line in lines if "the shard is cut off or damaged after" in line or "not a tar archive" in line]
    assert len(said) == 1
    assert bad == 1 + ("its last bytes are zeros" in "".join(lines))
    assert abs(good - 200 * part[0]) < 4
    if good:
        assert f"after {good + bad - 1} samples: zeros that are no end of an archive; " in said[0]
        assert f" of {len(data):,} bytes are not read" in said[0]


def test_zeros_from_a_header_on_are_damage(both: Tell) -> None:
    data = whole()
    start = data.index(b"a0100.jpg")
    assert both(data[:start] + bytes(len(data) - start))[:2] == (100, 1)


@pytest.mark.parametrize(
    "end",
    [b"\n", b"junk" * 300, bytes(40_000), gzip.compress(b"x" * 9, mtime=0)],
    ids=["line", "junk", "zeros", "gzip"],
)
def test_what_stands_behind_the_end_is_said(end: bytes, both: Tell) -> None:
    good, bad, [line] = both(tar(images(8)) + end)
    assert (good, bad) == (8, 1)
    assert "damaged after 8 samples: zeros that are no end of an archive; " in line


def test_a_shard_without_an_end_is_cut_off(both: Tell) -> None:
    data = whole(9)
    good, bad, [line] = both(data[: data.index(b"a0007.jpg")])
    assert (good, bad) == (7, 1)
    assert line == (
        "not used  1: the shard is cut off or damaged after 7 samples: it lacks the zeros that end an archive "
        "(the shard in s.tar)"
    )


@pytest.mark.parametrize("record", [1, 2, 4, 8, 16, 20])
def test_archives_of_any_usual_record_are_intact(record: int, both: Tell) -> None:
    data = tar(images(7)).rstrip(b"\0")
    data += bytes(-len(data) % BLOCK + 2 * BLOCK)
    assert both(data + bytes(-len(data) % (record * BLOCK))) == (7, 0, [])


def test_many_hazards_at_once(both: Tell) -> None:
    first = tar([*images(3), link("l.jpg", "hard"), ("d/._x.jpg", APPLE), ("README", b"words")])
    second = tar([*images(3), *(link(f"m{i}.jpg", "symbolic") for i in range(2))])
    third = whole(9)
    cut = third[: third.index(b"a0004.jpg") + 700]
    good, bad, lines = both(first + second + cut)
    assert (good, bad) == (10, 1)
    assert re.match(r"not used  1: cut off: \d+ bytes from \d+, the shard ends at \d+ \(a0004 in s.tar\)", lines[0])
    assert lines[1:] == [
        f"not read  2 symbolic links, 1 extensionless file, 1 hard link, 1 hidden file, {SUM}",
        "joined    2 archives behind the end of another one, read as well (most in s.tar)",
    ]


def test_neighbours_of_one_key_in_joined_archives_are_two_samples(both: Tell) -> None:
    assert both(2 * tar(sample(1)))[:2] == (2, 0)


@pytest.mark.parametrize("kind", PACKED)
def test_the_reason_names_how_a_shard_is_compressed(kind: str, both: Tell) -> None:
    assert both(PACKED[kind](tar(images(20)))) == (
        0,
        1,
        [f"not used  1: not a tar archive: compressed with {kind}; unpack it (the shard in s.tar)"],
    )


def test_a_first_use_and_data_stats_say_what_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar([*images(4), *(link(f"m{i}.jpg", "symbolic") for i in range(2))]))
    notes: list[str] = []
    open_index(str(tmp_path), note=notes.append)
    line = f"not read  2 symbolic links, {SUM}"
    assert notes[1:] == [line]
    assert line in list(card.lines(describe(str(tmp_path), tmp_path)[0]))


def test_data_stats_say_so_beside_a_card_too(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shards.write_shards([shards.Sample(f"a{i}", "jpg", jpeg(i)) for i in range(4)], str(folder))
    stats = ImageStats()
    for i in range(4):
        stats.count(jpeg(i), 20, 20)
    about = {"source": "folder", "command": "", "licence": "", "listed": 4, "classes": 0, "shards": 1}
    card.write(str(folder), about | stats.to_json())
    path = folder / "shard-000000.tar"
    path.write_bytes(path.read_bytes() + b"junk")
    write_index(str(folder))
    said = "\n".join(card.lines(describe(str(folder), tmp_path)[0]))
    assert "source   folder" in said
    assert "damaged after 4 samples" in said


@pytest.mark.parametrize("remote", [False, True])
def test_which_files_of_a_folder_are_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    """The suffix in any case, no hidden ones, and what is compressed is named."""
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "x"
    for number, name in enumerate(
        ("a.tar", "S.TAR", "._a.tar", ".h.tar", "b.tar.gz", "c.tgz", "d.tar.zst", "e.json", "f.JPG")
    ):
        write_tar(folder / name, sample(number))
    url = "s3://x" if remote else str(folder)
    notes: list[str] = []
    index = open_index(url, note=notes.append)
    assert [index.key(i) for i in range(len(index))] == ["s0001", "s0000"]
    packed = ", ".join(
        f"1 {kind} (compressed; shards are plain .tar files)" for kind in (".tar.gz", ".tar.zst", ".tgz")
    )
    assert notes[0] == f"{url}: not read: 2 hidden .tar, 1 .jpg, {packed}"
    assert [b.url for b in store.list_shards(f"{url}/*.tar")] == [f"{url}/a.tar"]
    assert [b.url for b in store.list_shards([f"{url}/.h.tar", f"{url}/._*.tar", f"{url}/S.TAR"])] == [
        f"{url}/._a.tar",
        f"{url}/.h.tar",
        f"{url}/S.TAR",
    ]
    assert (folder / NAME).is_file()


@pytest.mark.parametrize("remote", [False, True])
def test_a_folder_without_shards_says_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    for name in ("a.tar.gz", "b.tar.gz", "._a.tar", "notes.txt", "README"):
        write_tar(tmp_path / "x" / name, sample(1))
    (tmp_path / "x" / "a").mkdir()
    (tmp_path / "x" / "a" / "b.gif.txt").touch()
    with pytest.raises(UserError) as caught:
        open_index("s3://x" if remote else str(tmp_path / "x"))
    hint = ", 1 .txt in subfolders; expected .tar or .parquet shards in it, "
    hint += "or images such as .jpg and .png in it or below it"
    assert str(caught.value).endswith(
        "no .tar shards there, but 2 .tar.gz (compressed; shards are plain .tar files), 1 .txt, 1 hidden .tar, "
        f"1 without extension{hint}"
    )
