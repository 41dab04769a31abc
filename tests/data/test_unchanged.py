"""A local file that was replaced in place is noticed by its content, and only what may have changed is read again."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import jpeg, write_tar
from helpers.s3.server import store_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagleray.base.errors import UserError
from eagleray.data import unchanged
from eagleray.data.index import open_index
from eagleray.storage import store
from eagleray.storage.store import LocalStore

SHARDS, IMAGES = 4, 6  # images in each shard


class Spy:
    """Counts the bytes that are read of shards and images."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes, honest = 0, LocalStore.read

        def read(self_: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
            self.bytes += length
            return honest(self_, url, start, length, **more)

        patch.setattr(LocalStore, "read", read)

    def during(self, run: Callable[[], object]) -> int:
        self.bytes = 0
        run()
        return self.bytes


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's cache, which is that of another machine when it is deleted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def write_shards(folder: Path) -> Path:
    """Tars whose samples have a label, and metadata that no run reads."""
    folder.mkdir()
    for shard in range(SHARDS):
        numbers = range(shard * IMAGES, (shard + 1) * IMAGES)
        members = [(f"{i}.{kind}", data) for i in numbers for kind, data in sample(i)]
        write_tar(folder / f"x-{shard}.tar", members)
    return folder


def sample(i: int) -> list[tuple[str, bytes]]:
    return [("jpg", jpeg(i)), ("cls", b"%d" % (i % 3)), ("json", b'{"title": "image %d"}' % i)]


def write_images(folder: Path) -> Path:
    for i in range(SHARDS * IMAGES):
        path = folder / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    return folder


def opened(folder: Path | str) -> list[str]:
    notes: list[str] = []
    open_index(str(folder), note=notes.append)
    return notes


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


WRITERS = {"shards": write_shards, "images": write_images}


@pytest.fixture(params=list(WRITERS))
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of shards or of images that is indexed."""
    opened(folder := WRITERS[request.param](tmp_path / "data"))
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".tar", ".jpg"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_bit_of_any_file_is_noticed_until_it_is_put_back_or_indexed(data: Path, draw: st.DataObject):
    path = draw.draw(st.sampled_from(files(data)))
    at, bit = draw.draw(st.integers(0, path.stat().st_size - 1)), draw.draw(st.integers(0, 7))
    before = path.stat()
    flip(path, at, bit)
    if draw.draw(st.booleans()):  # a program sets the time back
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError) as caught:
        opened(data)
    assert f"{path}: " in str(caught.value)
    assert "changed since it was indexed" in str(caught.value)
    assert f"`eagleray index {data}` accepts" in str(caught.value)
    flip(path, at, bit)
    assert opened(data) == []


def test_a_start_that_changed_nothing_reads_nothing(data: Path, spy: Spy):
    assert spy.during(lambda: opened(data)) == 0


def touched(data: Path) -> Path:
    for path in files(data):
        path.touch()
    return data


def copied(data: Path) -> Path:
    return Path(shutil.copytree(data, data.with_name("copy"), copy_function=shutil.copyfile))


def copied_with_times(data: Path) -> Path:
    return Path(shutil.copytree(data, data.with_name("copy")))


def other_mode(data: Path) -> Path:
    for path in files(data):
        path.chmod(0o600)
    return data


@pytest.mark.parametrize(("change", "times"), [(touched, 1), (copied, 1), (other_mode, 1), (copied_with_times, 0)])
def test_other_times_are_no_change_and_each_file_is_read_once(
    change: Callable[[Path], Path], times: int, data: Path, spy: Spy
):
    place = change(data)
    size = sum(path.stat().st_size for path in files(place))
    assert spy.during(lambda: opened(place)) == times * size
    assert spy.during(lambda: opened(place)) == 0, "this machine remembers it"


def test_one_file_with_other_times_is_the_only_one_that_is_read(data: Path, spy: Spy):
    path = files(data)[2]
    path.touch()
    assert spy.during(lambda: opened(data)) == path.stat().st_size


@pytest.fixture
def read_only(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written beside the data."""

    def put(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalStore, "put", put)


@pytest.mark.usefixtures("read_only")
def test_a_copy_that_cannot_be_written_is_read_once_by_each_machine(data: Path, spy: Spy, machine: Path):
    size = sum(path.stat().st_size for path in files(touched(data)))
    assert [spy.during(lambda: opened(data)) for _ in range(2)] == [size, 0]
    shutil.rmtree(machine)
    assert [spy.during(lambda: opened(data)) for _ in range(2)] == [size, 0]


def test_a_copy_that_can_be_written_is_read_once_by_all_machines(data: Path, spy: Spy, machine: Path):
    size = sum(path.stat().st_size for path in files(touched(data)))
    assert spy.during(lambda: opened(data)) == size
    shutil.rmtree(machine)
    assert spy.during(lambda: opened(data)) == 0


@pytest.mark.usefixtures("read_only")
def test_a_damaged_memory_is_none(data: Path, machine: Path, spy: Spy):
    touched(data)
    opened(data)
    for path in (machine / "eagleray" / "verified").iterdir():
        path.write_bytes(b"what is this?")
    assert spy.during(lambda: opened(data)) == sum(path.stat().st_size for path in files(data))


def test_new_images_are_read_and_the_others_are_not(tmp_path: Path, spy: Spy):
    opened(data := write_images(tmp_path / "data"))
    (data / "a" / "new.jpg").write_bytes(jpeg(99))
    assert spy.during(lambda: opened(data)) == len(jpeg(99))
    flip(data / "a" / "0.jpg", 300, 1)
    with pytest.raises(UserError, match=r"a/0.jpg: has changed since it was indexed; `eagleray index"):
        opened(data)


def test_much_that_is_read_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened(data := write_shards(tmp_path / "data"))
    monkeypatch.setattr(unchanged, "MUCH", 1000)
    touched(data)
    assert opened(data) == [f"reading {SHARDS} shards of {data} again: their files have other times than those indexed"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with store_of(tmp_path_factory.mktemp("s3"), "data"):
        yield "s3://data"


def put_all(folder: Path, url: str) -> None:
    for path in folder.glob("*.tar"):
        store.store(url).put(f"{url}/{path.name}", path)


def test_any_bit_of_a_shard_in_a_bucket_is_noticed(bucket: str, tmp_path: Path):
    rng, folder, url = random.Random(8), write_shards(tmp_path / "data"), f"{bucket}/flipped"
    put_all(folder, url)
    opened(url)
    for path in files(folder):
        before = path.read_bytes()
        flip(path, rng.randrange(len(before)), rng.randrange(8))
        store.store(url).put(f"{url}/{path.name}", path)
        with pytest.raises(UserError, match=f"{url}/{path.name}: changed since it was indexed"):
            opened(url)
        path.write_bytes(before)
        store.store(url).put(f"{url}/{path.name}", path)
        assert opened(url) == []


def test_a_bucket_that_was_copied_here_is_compared_with_its_index(bucket: str, tmp_path: Path, spy: Spy):
    folder, url = write_shards(tmp_path / "data"), f"{bucket}/copied"
    put_all(folder, url)
    opened(url)
    (folder / "index.parquet").write_bytes(store.store(url).get(f"{url}/index.parquet"))
    images = sum(len(jpeg(i)) for i in range(SHARDS * IMAGES))
    assert spy.during(lambda: opened(folder)) == images
    assert spy.during(lambda: opened(folder)) == 0
    index = open_index(str(folder))
    flip(folder / "x-2.tar", int(index.offset[2 * IMAGES]) + 20, 3)
    with pytest.raises(UserError, match=r"x-2\.tar: changed since it was indexed"):
        opened(folder)
