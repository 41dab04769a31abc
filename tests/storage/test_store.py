"""Which files a pattern stands for, exact reads, and writes that are whole or not there."""

import errno
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.storage import store
from eagleray.storage.store import Blob, LocalStore, absolute, list_shards, put_bytes
from eagleray.storage.url_patterns import expand_braces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards x-000 to x-011, one of another name, what is no shard, and a folder inside."""
    (tmp_path / "sub").mkdir()
    for i in range(12):
        (tmp_path / f"x-{i:03d}.tar").write_bytes(b"." * i)
    for name in ("y.tar", "index.parquet", ".hidden", "x.tar.gz", "sub/z.tar"):
        (tmp_path / name).touch()
    return tmp_path


def names(urls: str | list[str]) -> list[str]:
    blobs = list_shards(urls)
    assert [b.url for b in blobs] == sorted({b.url for b in blobs})
    assert all(Path(b.url).stat().st_size == b.size for b in blobs)
    return [b.url.rpartition("/")[2] for b in blobs]


def x(*numbers: int) -> list[str]:
    return [f"x-{i:03d}.tar" for i in numbers]


def test_a_folder_is_the_tars_directly_in_it(folder: Path) -> None:
    assert names(str(folder)) == names(f"{folder}/") == names(f"file://{folder}") == [*x(*range(12)), "y.tar"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.tar", [*x(*range(12)), "y.tar"]),
        ("x-*", x(*range(12))),
        ("x-00[1-3].tar", x(1, 2, 3)),
        ("x-01?.tar", x(10, 11)),
        ("x-003.tar", x(3)),
        ("x-{003..011}.tar", x(*range(3, 12))),
        ("x-{005..003}.tar", x(3, 4, 5)),
        ("x-0{00,11}.tar", x(0, 11)),
        ("{x-00{1,2},y}.tar", [*x(1, 2), "y.tar"]),
        ("x-0{0..1}{0..1}.tar", x(0, 1, 10, 11)),
        ("x-0{0,1}*.tar", x(*range(12))),
        ("{sub/z,y}.tar", ["z.tar", "y.tar"]),
        ("*", [*x(*range(12)), "y.tar"]),
    ],
)
def test_patterns(folder: Path, pattern: str, expected: list[str]) -> None:
    assert names(f"{folder}/{pattern}") == expected


def test_lists_are_joined_and_every_shard_counts_once(folder: Path) -> None:
    urls = [f"{folder}/x-00[5-7].tar", f"{folder}/x-{{006..008}}.tar", f"file://{folder}/x-006.tar", f"{folder}/y.tar"]
    assert names(urls) == [*x(5, 6, 7, 8), "y.tar"]


def test_paths_may_be_relative_or_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "sub")
    monkeypatch.setenv("HOME", str(folder))
    assert names("..") == names("~") == names(str(folder))
    assert names("../x-{001,002}.tar") == x(1, 2)


PATTERNS = [
    *(
        "a{b,c}d",
        "{1..3}",
        "{001..012}",
        "{9..11}",
        "{098..101}",
        "{08..101}",
        "{98..101}",
        "{1..010}",
        "{0..2}",
        "{00..2}",
    ),
    *("{3..1}", "{010..008}", "{5..5}", "no", "{,a}b", "{a,b}{1..2}{x,y}", "{a,{b,c{1..2}}}z", "a{1..2}b{01..02}c"),
    *("{a}", "a{b", "a}b", "{a..c}"),
]


@pytest.mark.skipif(not shutil.which("bash"), reason="compares with bash")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_braces_are_those_of_a_shell(pattern: str) -> None:
    shell = subprocess.run(["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True)
    assert set(expand_braces(pattern)) == set(shell.stdout.splitlines())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("sub/none", "none: cannot be read: No such file or directory"),
        ("x-{010..013}.tar", "x-012.tar"),
        ("q*.tar", "no .tar shards there"),
        ("empty", "empty: no .tar shards there, nor anything else; expected .tar or .parquet shards in it, or images"),
        ("index.parquet", "index.parquet: no .tar shards there"),
        ("*/z.tar", "wildcards are allowed in the file name only"),
    ],
)
def test_what_is_not_there_is_one_line(folder: Path, pattern: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        list_shards(f"{folder}/{pattern}")
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [[], "", ["", "x"]])
def test_no_pattern_at_all_is_refused(given: str | list[str]) -> None:
    with pytest.raises(UserError, match="no shards are given"):
        list_shards(given)


@pytest.mark.parametrize("url", ["gcs://bucket/x.tar", "ftp://host/x-{0..3}.tar", "hdfs://host/folder"])
def test_an_unknown_scheme_is_named(url: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(
        UserError, match=f"{scheme}://.*: unknown scheme '{scheme}'; known are plain paths, file://, s3://, gs://"
    ):
        list_shards(url)


def test_absolute_leaves_other_schemes_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("s3://bucket/a/../b") == "s3://bucket/a/../b"
    assert absolute("a/{0..3}.tar") == f"{tmp_path}/a/{{0..3}}.tar"
    assert absolute(f"file://{tmp_path}/./a/") == f"{tmp_path}/a"


@pytest.mark.parametrize("url", ["s3://bucket/a", "https://host/a", "file:///a"])
def test_a_url_that_was_made_a_path_is_no_folder(url: str) -> None:
    with pytest.raises(UserError, match=r":/.*: expected a URL with two slashes, as text"):
        absolute(str(Path(url)))


def test_reads_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    read = LocalStore().read
    assert read(str(path), 10, 20) == bytes(range(10, 30))
    assert read(f"file://{path}", 99, 1) == b"c"
    assert read(str(path), 100, 0) == b""
    with pytest.raises(UserError, match=f"{path}: expected 20 bytes from 90 on, but the file ends after 10 of them"):
        read(str(path), 90, 20)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Every method names the file, but `get` of what is not there, which is no mistake."""
    gone, local = str(tmp_path / "gone"), LocalStore()
    for attempt in (lambda: local.read(gone, 0, 1), lambda: local.list(gone), lambda: local.tag(Blob(gone, 1))):
        with pytest.raises(UserError, match=f"{gone}: cannot be read: No such file or directory"):
            attempt()
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read: Is a directory"):
        local.get(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        local.get(gone)


@pytest.mark.parametrize("size", [1, 100, 4096, 5000, 20_000])
def test_the_tag_changes_with_either_end_of_a_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    data = bytearray(os.urandom(size))
    path.write_bytes(data)
    tag = LocalStore().tag(Blob(str(path), size))
    shutil.copy(path, tmp_path / "copy")
    assert LocalStore().tag(Blob(str(tmp_path / "copy"), size)) == tag
    for at in (0, size - 1):
        other = bytearray(data)
        other[at] ^= 1
        path.write_bytes(other)
        assert LocalStore().tag(Blob(str(path), size)) != tag


def test_put_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file"
    put_bytes(str(target), b"one")
    put_bytes(f"file://{target}", b"two")
    assert target.read_bytes() == b"two"
    assert list(target.parent.iterdir()) == [target]


def test_put_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sees the old content until the new one is complete; a copy that fails leaves no trace."""
    target, sources = tmp_path / "to" / "file", [tmp_path / "bad", tmp_path / "new"]
    target.parent.mkdir()
    target.write_bytes(b"old")
    for source in sources:
        source.write_bytes(source.name.encode())
    seen: list[bytes] = []

    def copy(source: Path, to: Path) -> None:
        Path(to).write_bytes(b"half of the n")
        seen.append(target.read_bytes())
        if source.read_bytes() == b"bad":
            raise OSError(28, "No space left on device")
        Path(to).write_bytes(source.read_bytes())
        seen.append(target.read_bytes())

    monkeypatch.setattr(store.shutil, "copyfile", copy)
    with pytest.raises(OSError, match="No space"):
        LocalStore().put(str(target), sources[0])
    assert target.read_bytes() == b"old"
    LocalStore().put(str(target), sources[1])
    assert seen == [b"old"] * 3
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_of_several_creators_of_a_file_one_makes_it(tmp_path: Path):
    url = str(tmp_path / "run" / ".owner-000001")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: LocalStore().create(url, b"%d" % n), range(8)))
    assert sum(made) == 1
    content, age = LocalStore().look(url)
    assert content == b"%d" % made.index(True)
    assert -1 < age < 10
    assert [p.name for p in Path(url).parent.iterdir()] == [".owner-000001"]
    with pytest.raises(FileNotFoundError):
        LocalStore().look(url + "x")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("x-{000000000..099999999}.tar", "1e+08"),
        ("{0..999}{0..999}{a,b}.tar", "2e+06"),
        ("{0..9999999999999999999999..1}", "1e+22"),
        ("{a,b}" * 30, "1.07e+09"),
        ("{" * 200_000 + "}" * 200_000, "inf"),
        ("{a," * 100 + "b" + "}" * 100, "inf"),
    ],
)
def test_braces_for_too_many_names_are_refused_at_once(pattern: str, count: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"braces for up to {count} names, expected at most 1,000,000")):
        next(expand_braces(pattern))


def test_many_names_in_braces_are_allowed() -> None:
    assert sum(1 for _ in expand_braces("s3://b/{000..099}/x-{0000..0999}.{tar,TAR}")) == 200_000
    assert list(expand_braces("x-{3..1}{a,b{c,d}}")) == [f"x-{n}{c}" for n in "321" for c in ("a", "bc", "bd")]
    assert list(expand_braces("{x")) == ["{x"]


def test_a_file_is_created_once_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    made = [LocalStore().create(str(tmp_path / "x"), data) for data in (b"first", b"first", b"other")]
    assert made == [True, True, False]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
