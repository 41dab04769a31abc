"""Images that lie loose in a bucket are read as those of a local folder are; the bucket is on a real S3 server."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import refused, run
from helpers.layouts import tar_bytes
from helpers.pictures import jpeg, write_tar
from helpers.recipes import SMALL
from helpers.runs import assert_same, start, wait_for_step, weights
from helpers.s3.proxy import Faults, Proxy
from helpers.s3.server import Swift, point_at, store_of

import eagleray
from eagleray.base.errors import Outage, UserError
from eagleray.data import image_list, index_file
from eagleray.data.image_list import ImageList
from eagleray.data.index import Index, open_index, write_index
from eagleray.data.index_file import NAME
from eagleray.storage import store
from eagleray.storage.s3 import S3Store

IMAGES = 40
ODD = ("a b", "a+b", "a%20b", "a%b", "ü-中-😀", "a\nb", "a?b#c", "a&b=c", "a//b", "'a\"b", "a.b.c", "~a*[1]{2}")


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with store_of(tmp_path_factory.mktemp("s3"), "photos") as server:
        yield server


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url(swift: Swift, machine: None, request: pytest.FixtureRequest) -> str:
    """A folder of one test in the bucket, with 40 images of two classes and a text."""
    folder = f"s3://photos/{request.node.name}"
    for path, data in files().items():
        write(f"{folder}/{path}", data)
    return folder


def files() -> dict[str, bytes]:
    return {f"{'ab'[i % 2]}/{i:02d}.jpg": jpeg(i) for i in range(IMAGES)} | {"a/notes.txt": b"no image"}


def write(url: str, data: bytes) -> None:
    store.store(url).write(url, data)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The same in a local folder."""
    for path, data in files().items():
        (file := tmp_path / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "photos"


def opened(url: str | Path, **more: Any) -> tuple[Index, list[str]]:
    notes: list[str] = []
    return open_index(str(url), note=notes.append, **more), notes


def keys_of(index: Index) -> list[str]:
    return index.keys(0, len(index))


def loader(data: str | Path, **keys: Any) -> eagleray.Loader:
    return eagleray.loader(data, **{"views": [{"size": 16}], "batch": 8, "workers": 0, "bad_limit": 0.2, **keys})


def equal(one: eagleray.Loader, other: eagleray.Loader) -> None:
    batches = list(zip(one, other, strict=True))
    assert batches
    for a, b in batches:
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.label, b.label)
        assert torch.equal(a.views[0], b.views[0])


def test_the_index_is_that_of_a_local_folder(url: str, photos: Path) -> None:
    (there, notes), (here, _) = opened(url), opened(photos)
    assert notes == [f"indexing {IMAGES} images of {url}; not read: 1 .txt"]
    assert keys_of(there) == keys_of(here)
    for name in ("offset", "size", "label", "crc", "starts"):
        assert getattr(there, name).tolist() == getattr(here, name).tolist(), name
    assert [b.tag for b in there.shards] == [b.tag for b in here.shards]
    assert there.read(3, 9) == here.read(3, 9)
    assert f"{url}/{NAME}" in [b.url for b in store.store(url).list(f"{url}/")]
    assert opened(url)[1] == opened(f"{url}/")[1] == []


def test_the_same_blocks_make_the_same_batches(
    url: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From loose objects, a local folder and a tar, for any blocks, lanes, seed, readers and start."""
    for each, keys in ((7, {"lanes": 2}), (3, {"lanes": 4, "seed": 5, "workers": 2}), (40, {"lanes": 8, "start": 2})):
        monkeypatch.setattr(index_file, "blocks", lambda offset, size, n=each: cut(len(offset), n))
        write_index(url)
        write_index(str(photos))
        index = opened(photos)[0]
        members = [
            (f"{n:03d}.{kind}", data)
            for n in range(len(index))
            for kind, data in (("jpg", bytes(index.read(n, n + 1))), ("cls", b"%d" % index.label[n]))
        ]
        tar = write_tar(tmp_path / f"tars-{each}" / "x.tar", members)
        equal(loader(url, **keys), loader(photos, **keys))
        equal(loader(url, **keys), loader(tar.parent, **keys))
        equal(loader(url, **keys), loader(url, cache=tmp_path / "cache-of-blocks", **keys))


def cut(count: int, each: int) -> list[int]:
    return [each] * (count // each) + [count % each] * bool(count % each)


def test_new_gone_changed_and_broken_images_are_as_in_a_folder(url: str) -> None:
    before = opened(url)[0]
    write(f"{url}/b/new.jpg", jpeg(99))
    index, notes = opened(url)
    assert (len(index), notes) == (IMAGES + 1, [f"indexing {IMAGES + 1} images of {url}; not read: 1 .txt"])
    assert set(before.crc.tolist()) < set(index.crc.tolist())
    one, same = f"{url}/a/00.jpg", f"{url}/a/02.jpg"
    write(same, jpeg(2))  # written again, with the same content
    assert opened(url)[1] == []
    for harm, change in {
        "has changed": lambda: write(one, jpeg(0)[:-1] + b"x"),
        "is gone": lambda: store.store(one).delete(one),
    }.items():
        change()
        with pytest.raises(UserError) as caught:
            opened(url)
        assert str(caught.value) == f"{one}: {harm} since it was indexed; `eagleray index {url}` accepts that"
    write(f"{url}/b/text.jpg", b"no image at all")
    write(f"{url}/b/empty.jpg", b"")
    assert write_index(url) == [(f"{url}/{NAME}", IMAGES + 1, 1)]
    batches = loader(url)
    write(one := f"{url}/a/04.jpg", bytes(len(jpeg(4))))
    write(shorter := f"{url}/a/06.jpg", jpeg(6)[:50])
    write(nothing := f"{url}/a/08.jpg", b"")
    store.store(url).delete(gone := f"{url}/a/10.jpg")
    list(batches)
    bad = {f"{b.shard}/{b.key}": b.reason.split(":")[0] for b in batches.bad}
    changed = dict.fromkeys((one, shorter, nothing, gone), "its bytes have changed since it was indexed")
    assert bad == changed | {
        f"{url}/b/empty.jpg": "the image has no bytes",
        f"{url}/b/text.jpg": "cannot identify image file",
    }


def test_any_name_that_the_store_keeps_is_read(swift: Swift, machine: None, photos: Path) -> None:
    url = "s3://photos/odd names"
    for i, name in enumerate(ODD):
        write(f"{url}/{name}.jpg", jpeg(i))
    write(f"{url}/.hidden.jpg", b"no image, and hidden")
    index, _ = opened(url)
    keys = keys_of(index)
    assert sorted(keys) == sorted(f"{name}.jpg" for name in ODD)
    assert [bytes(index.read(i, i + 1)) for i in range(len(keys))] == [jpeg(ODD.index(k[:-4])) for k in keys]
    assert "a\\x0ab.jpg" in {index.key(i) for i in range(len(index))}
    assert opened(url)[1] == []


def test_what_is_no_set_of_images_is_said_in_a_line(url: str, tmp_path: Path, capsys: Any) -> None:
    assert "s3://photos/none: no .tar shards there, nor anything else; expected" in refused(
        capsys, "index", "s3://photos/none"
    )
    for name, data in (("x.csv", b"1"), ("below/y.json", b"{}"), ("below/z.json", b"{}")):
        write(f"{url}-texts/{name}", data)
    line = refused(capsys, "data", "stats", f"{url}-texts", "--out", str(tmp_path / "stats"))
    assert "no .tar shards there, but 1 .csv, 2 .json in subfolders; expected .tar or .parquet shards in it" in line
    line = refused(capsys, "index", f"{url}/a/*.tar")
    assert f"no .tar shards there, but 20 .jpg, 1 .txt; {url}/a without *.tar takes images, too" in line
    assert "NoSuchBucket" in refused(capsys, "init", "s3://no-such-bucket/x", "--out", str(tmp_path / "x.yaml"))
    (tmp_path / "small.yaml").write_text(SMALL)
    line = refused(capsys, "pretrain", str(tmp_path / "small.yaml"), f"data.train={url}", "optim.batch=64", "out=x")
    assert f"{IMAGES} images do not fill one batch of optim.batch=64" in line


def test_shards_and_images_in_one_folder(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(url)  # its images are indexed before there are shards
    write(f"{url}/b.tar", tar_bytes({"x.jpg": jpeg(5)}))
    index, notes = opened(url)
    assert (len(index), notes) == (1, [f"indexing 1 shards of {url}"])
    monkeypatch.setattr("eagleray.data.image_folder.PAGE", 1)
    write(f"{url}/0.jpg", jpeg(1))
    with pytest.raises(UserError, match=r"there are images and 1 \.tar shards; .*/\*\.tar names the shards"):
        opened(url)


def test_commands_take_the_url(url: str, photos: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """`shard` from a bucket to a bucket writes what it writes from the same local folder to a local one."""
    monkeypatch.chdir(tmp_path)
    assert f"{IMAGES} images are too few to pretrain on" in refused(capsys, "init", url, "--out", "mine.yaml")
    run("data", "stats", url)
    assert "40 images" in capsys.readouterr().out.replace("images    40", "40 images")
    run("index", url)
    assert f"{url}/{NAME}: {IMAGES} images" in capsys.readouterr().out
    run("shard", url, f"{url}-shards")
    run("shard", str(photos), str(tmp_path / "shards"))
    for tar in (tmp_path / "shards").glob("*.tar"):
        assert store.store(url).get(f"{url}-shards/{tar.name}") == tar.read_bytes()


def test_a_bucket_that_may_only_be_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = S3Store.put

    def put(self: S3Store, to: str, *given: Any, **more: Any) -> None:
        if to.startswith(url):
            raise OSError(f"{to}: AccessDenied: no")
        honest(self, to, *given, **more)

    monkeypatch.setattr(S3Store, "put", put)
    index, _ = opened(url, spare=tmp_path / "out")
    assert opened(url, spare=tmp_path / "out")[1] == []
    assert len(index) == IMAGES
    with pytest.raises(UserError, match="AccessDenied"):
        opened(url)


@pytest.fixture
def proxy(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Faults], Proxy]]:
    with Proxy(swift.port) as between:

        def with_faults(faults: Faults) -> Proxy:
            point_at(monkeypatch, between.port)
            monkeypatch.setitem(store.STORES, "s3", S3Store())
            between.faults = faults
            return between

        yield with_faults


def test_a_store_that_is_busy_and_cuts_gives_the_same(url: str, photos: Path, proxy: Callable[[Faults], Proxy]) -> None:
    between = proxy(Faults(refuse=0.15, cut=0.1, reset=0.1))
    (there, _), (here, _) = opened(url), opened(photos)
    assert there.crc.tolist() == here.crc.tolist()
    for _ in range(20):  # until chance has made each fault
        equal(loader(url), loader(photos))
        if between.done.keys() == {"refuse", "cut", "reset"}:
            return
    pytest.fail(f"only {between.done}")


def test_what_may_not_be_read_is_an_error_and_no_broken_image(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = S3Store.read

    def read(self: S3Store, at: str, *given: Any, **more: Any) -> memoryview:
        if at.endswith("/07.jpg"):
            raise UserError(f"{at}: AccessDenied: no")
        return honest(self, at, *given, **more)

    batches = loader(url)
    monkeypatch.setattr(S3Store, "read", read)
    with pytest.raises((UserError, Outage), match=r"b/07\.jpg: AccessDenied"):
        list(batches)
    with pytest.raises(UserError, match=r"b/07\.jpg: AccessDenied"):
        write_index(url)


def test_what_was_read_before_a_kill_is_not_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that indexes is killed after its second piece of work."""
    monkeypatch.setattr(image_list, "SOME", 8)
    honest, pieces = ImageList.keep, list[None]()

    def keep(self: ImageList, rows: Any) -> None:
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        pieces.append(None)
        honest(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ImageList, "keep", keep)
        if not (child := os.fork()):
            try:
                opened(url)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    read, honest_read = list[str](), S3Store.read

    def spy(self: S3Store, at: str, *given: Any, **more: Any) -> memoryview:
        read.append(at)
        return honest_read(self, at, *given, **more)

    monkeypatch.setattr(S3Store, "read", spy)
    assert len(opened(url)[0]) == IMAGES
    assert len(read) == IMAGES - 2 * 8


def test_a_run_that_was_killed_has_the_weights_of_one_that_was_not(
    url: str, photos: Path, tmp_path: Path, quick_runs: None
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    keys = ["data.test=null", "optim.batch=8", "optim.epochs=4", "checkpoint.steps=3", "data.lanes=4"]
    recipe = str(tmp_path / "small.yaml")
    args = [recipe, f"data.train={url}", *keys, f"out={tmp_path / 'killed'}"]
    process = start(args)
    wait_for_step(tmp_path / "killed", 5, process)
    process.kill()
    process.wait()
    run("pretrain", *args)
    for name, data in (("loose", url), ("local", photos)):
        eagleray.pretrain(recipe, [*keys, f"data.train={data}"], out=tmp_path / name)
        assert_same(weights(tmp_path / name), weights(tmp_path / "killed"))
