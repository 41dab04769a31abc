"""The list of a folder's images: what was listed and read before a kill is there, in memory that does not grow."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from helpers.named_store import NamedStore, Numbers

from eagleray.data import image_folder, image_list
from eagleray.data.image_folder import list_images, part_names
from eagleray.data.image_list import Found, ImageList, Read
from eagleray.data.stamps import Stamp
from eagleray.storage import store

IMAGES = 40_000


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(store.STORES, "s3", there := NamedStore(Numbers(IMAGES)))
    return there


def listed(url: str = "s3://b") -> tuple[list[str], Stamp]:
    with image_list.image_list(url, pytest.fail) as images:
        list_images(url, images)
        return [row.path for part in images.parts() for row in part], images.stamp


def killed_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: int, run: Any) -> None:
    """Run something in a process that is killed in a call of a method of ImageList."""
    honest, done = getattr(ImageList, name), list[None]()

    def method(self: ImageList, *given: Any) -> None:
        done.append(None)
        if len(done) > calls:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ImageList, name, method)
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL


def kept() -> Path:
    [file] = (Path(os.environ["XDG_CACHE_HOME"]) / "eagleray" / "images").glob("*.sqlite")
    return file


def test_a_listing_that_was_killed_goes_on(there: NamedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(monkeypatch, "add", 25, listed)
    with contextlib.closing(sqlite3.connect(file := kept())) as db:
        [[before]] = db.execute("SELECT COUNT(*) FROM images")
    added, honest = list[int](), ImageList.add

    def add(self: ImageList, images: list[Found], *rest: Any) -> None:
        added.append(len(images))
        honest(self, images, *rest)

    monkeypatch.setattr(ImageList, "add", add)
    after = listed()
    assert sum(added) == IMAGES - before < IMAGES
    assert not file.exists()
    assert listed() == after
    assert sorted(after[0]) == list(there.names)


def test_an_old_listing_is_begun_anew(there: NamedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(monkeypatch, "add", 10, listed)
    file, there.names = kept(), Numbers(50)
    monkeypatch.setattr(image_list, "STALE", -1.0)
    assert len(listed()[0]) == 50
    assert not file.exists()


def test_a_file_that_is_no_list_is_replaced() -> None:
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "eagleray" / "images"
    first = listed()
    for name in [p.name for p in folder.iterdir() if p.suffix == ".lock"]:
        (folder / name).with_suffix(".sqlite").write_bytes(b"no list" * 1000)
    assert listed() == first


def test_a_long_listing_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds go by at each look at the clock, so lines come ever more seldom."""
    clock, notes = itertools.count(0.0, 2.0), list[str]()
    monkeypatch.setattr(image_folder.time, "monotonic", clock.__next__)
    with image_list.image_list("s3://b", pytest.fail) as images:
        list_images("s3://b", images, notes.append)
        assert images.count == IMAGES
    assert re.fullmatch(r"listing s3://b/: [\d,]+ files so far, [\d,]+ files/s", notes[0])
    assert 2 < len(notes) < next(clock) / 8
    assert max(int(re.findall(r"([\d,]+) files so far", note)[0].replace(",", "")) for note in notes) <= IMAGES


def test_parts_are_the_order_of_hashes_in_pieces_of_some_thousand(there: NamedStore) -> None:
    with image_list.image_list("s3://b", pytest.fail) as images:
        list_images("s3://b", images)
        parts = list(images.parts())
        assert len(parts) == images.part_count == len(part_names(images.part_count)) == 16
    assert max(map(len, parts)) < image_list.PART
    hashes = [image_list._hash(row.path) for part in parts for row in part]
    assert hashes == sorted(hashes)
    assert all(map(image_folder.is_part, part_names(16)))
    assert part_names(1) == [image_folder.NAME]


def test_what_is_known_gone_changed_or_new_is_told_apart(tmp_path: Path) -> None:
    images = ImageList(tmp_path / "list")
    rng = Random(3)
    paths = [f"{rng.random()}.jpg" for _ in range(1000)]
    images.begin(resume=False)
    images.add([Found(path, 5, Stamp(1, 1, 1)) for path in paths], ["x"], [])
    images.end()
    version = Found("", 0, Stamp(1, 1, 1)).version
    images.know([Read(path, 5, version, 9, None) for path in paths[:500]])
    assert images.difference() is None
    assert (images.has_new, images.left) == (True, 500)
    assert {row.path for some in images.unread() for row in some} == set(paths[500:])
    images.keep([Read(path, 5, version, 3, None) for path in paths[500:600]])
    images.keep([Read(path, 5, version + 1, 3, None) for path in paths[600:650]])  # another version was read
    images.keep([Read(paths[650], 5, version, None, "is broken")])
    assert {row.path for some in images.unread() for row in some} == set(paths[600:650] + paths[651:])
    images.know([Read(paths[0], 5, None, 9, None), Read(paths[1], 5, version + 1, 9, None)])
    assert {row.path for some in images.doubtful() for row in some} == set(paths[:2])
    images.know([Read(paths[7], 6, version, 9, None)])
    assert images.difference() == (paths[7], False)
    images.know([Read(paths[7], 5, version, 9, None), Read("gone.jpg", 5, version, 9, None)])
    assert images.difference() == ("gone.jpg", True)
    images.close()


MEASURE = """
import resource, sys
from helpers.named_store import NamedStore, Numbers
from eagleray.data import image_folder, image_list
from eagleray.storage import store

def mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

count = int(sys.argv[1])
store.STORES["s3"] = NamedStore(Numbers(count))
before = mib()
with image_list.image_list("s3://b", print) as images:
    image_folder.list_images("s3://b", images)
    assert sum(len(part) for part in images.parts()) == count
print(mib() - before)
"""


def mib_of(count: int) -> float:
    command = [sys.executable, "-c", MEASURE, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_four_times_as_many_images_take_no_more_memory() -> None:
    """What is more than the file's cache of 32 MiB is on the disk: a million take as much as a hundred thousand."""
    few, many = mib_of(150_000), mib_of(600_000)
    assert many < 1.3 * few + 8


def test_what_a_killed_command_knew_of_an_index_is_forgotten(tmp_path: Path) -> None:
    for left in 0, 2:
        images = ImageList(tmp_path / "list")
        images.begin(resume=False)
        images.add([Found(path, 5, Stamp(1, 1, 1)) for path in ("a.jpg", "b.jpg")], [], [])
        images.end()
        if left == 0:
            images.know([Read(path, 5, Found("", 0, Stamp(1, 1, 1)).version, 9, None) for path in ("a.jpg", "b.jpg")])
        assert images.left == left
        images.close()
