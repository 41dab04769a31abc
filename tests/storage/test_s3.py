"""The data plane against a real S3 server: OpenStack Swift on loopback, started once by `tests/s3/swift.sh`."""

import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botocore.exceptions import ClientError
from helpers.naps import pass_at_once
from helpers.pictures import jpeg, write_shards
from helpers.s3.server import Swift, free_block, point_at, running

from eagleray.base.errors import Outage, UserError
from eagleray.config.view import View
from eagleray.data import index_file
from eagleray.data.index import Index, open_index, write_index
from eagleray.data.index_file import NAME
from eagleray.data.loader import Loader
from eagleray.data.reader import StepPart, Stream
from eagleray.datasets import shards as shard_writing
from eagleray.datasets.shards import Sample
from eagleray.storage import remote, retry, store
from eagleray.storage.s3 import S3Store
from eagleray.views.sampling import Views

LARGE = 24 * 2**20  # bytes, more than sockets and the server hold on their way


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with running(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        point_at(patch, server.port)
        patch.setitem(store.STORES, "s3", S3Store())
        yield server


@pytest.fixture
def bucket(swift: Swift, request: pytest.FixtureRequest) -> str:
    """The URL of an empty bucket for one test."""
    name = "b" + "".join(c for c in request.node.name.lower().replace("_", "-") if c.isalnum() or c == "-")[:50] + "x"
    store.STORES["s3"].client().create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Other settings, for a client that is made after they are."""

    def change(**environment: str) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(store.STORES, "s3", S3Store())

    return change


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return pass_at_once(monkeypatch)


def opened(url: str | list[str]) -> Index:
    return open_index(url, note=lambda _: None)


def upload(folder: Path, url: str) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        key = f"{url}/{path.relative_to(folder)}"
        store.store(key).put(key, path)


def one_line(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_are_listed_by_folder_glob_and_braces(bucket: str, tmp_path: Path) -> None:
    for name in ("train/x-000", "train/x-001", "train/x-002", "train/sub/y", "train-b/z", "top"):
        (tmp_path / f"{name}.tar").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.tar").write_bytes(name.encode())
    (tmp_path / "train" / "notes.txt").touch()
    upload(tmp_path, bucket)

    def names(*patterns: str) -> list[str]:
        blobs = store.list_shards([f"{bucket}/{p}" for p in patterns])
        assert all(b.size == len(b.url) - len(f"{bucket}/") - len(".tar") for b in blobs)
        return [b.url.removeprefix(f"{bucket}/").removesuffix(".tar") for b in blobs]

    assert names("train") == names("train/") == names("train/*.tar") == ["train/x-000", "train/x-001", "train/x-002"]
    assert names("train/x-00[12].tar") == names("train/x-{001..002}.tar") == ["train/x-001", "train/x-002"]
    assert names("train/x-001.tar") == ["train/x-001"]
    assert names("{train-b,train/sub}") == ["train-b/z", "train/sub/y"]
    assert names("") == names("*") == ["top"]
    assert names("train/x-{000,001}.tar", "train/*1.tar", "train-b") == ["train-b/z", "train/x-000", "train/x-001"]
    assert "no .tar shards there" in one_line(lambda: names("none"))
    assert f"no shard {bucket}/train/x-003.tar" in one_line(lambda: names("train/x-{002..003}.tar"))
    assert "wildcards are allowed in the file name only" in one_line(lambda: names("*/x-000.tar"))


def test_one_request_lists_a_folder(bucket: str, tmp_path: Path, anew: Callable[..., None]) -> None:
    upload(write_shards(tmp_path, 3, 3), bucket)
    anew()
    asked: list[str] = []
    store.STORES["s3"].client().meta.events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    assert len(store.list_shards(bucket)) == 3
    assert asked == ["ListObjectsV2"]


def keys_of(index: Index) -> list[str]:
    return [index.key(i) for i in range(len(index))]


def test_the_index_is_kept_in_the_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(write_shards(tmp_path / "local", 20, 2), f"{bucket}/train")
    first = opened(f"{bucket}/train")
    assert f"{bucket}/train/{NAME}" in [b.url for b in store.STORES["s3"].list(f"{bucket}/train/")]
    monkeypatch.setattr(S3Store, "read", lambda *_, **__: pytest.fail("a shard is read again"))
    again, local = opened(f"{bucket}/train"), opened(str(tmp_path / "local"))
    assert again.shards == first.shards
    for other in (first, local):
        for name in ("shard", "offset", "size", "label", "starts"):
            assert np.array_equal(getattr(again, name), getattr(other, name))
        assert keys_of(again) == keys_of(other)


ODD = ["a b+c%41", "#?a=b&c", "line\nbreak\t\x01", "ünï😀 [x]{y,z}*", "<&amp;'\"\\;:"]


@pytest.mark.parametrize("name", ODD, ids=map(str, range(len(ODD))))
def test_keys_may_have_any_characters(bucket: str, tmp_path: Path, name: str) -> None:
    folder, photos = f"{bucket}/{name}", f"{bucket}/photos {name}"
    shard = next(write_shards(tmp_path / "local", 8, 1).glob("*.tar"))
    store.STORES["s3"].put(url := f"{folder}/{name}.tar", shard)
    assert [b.url for b in store.STORES["s3"].list(f"{folder}/")] == [url]
    for given in (folder, url):
        index = opened(given)
        assert len(index) == 8
        assert bytes(index.read(0, 1)) == shard.read_bytes()[int(index.offset[0]) :][: int(index.size[0])]
    store.STORES["s3"].write(f"{photos}/{name}/{name}.jpg", jpeg(1))
    images = opened(photos)
    assert images.keys(0, 1) == [f"{name}/{name}.jpg"]
    assert bytes(images.read(0, 1)) == jpeg(1)


def test_an_index_goes_with_its_shards_from_a_folder_into_a_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = opened(str(write_shards(tmp_path / "local", 8, 2)))
    upload(tmp_path / "local", bucket)
    monkeypatch.setattr(S3Store, "read", lambda *_, **__: pytest.fail("a shard is read again"))
    assert keys_of(opened(bucket)) == keys_of(local)


def test_a_changed_shard_is_refused_until_it_is_indexed_anew(bucket: str, tmp_path: Path) -> None:
    """Even where neither its size nor its ends have changed."""
    upload(write_shards(tmp_path, 20, 2), bucket)
    index = opened(bucket)
    path = tmp_path / "x-001.tar"
    data = bytearray(path.read_bytes())
    data[index.offset[15] + index.size[15] // 2] ^= 1
    path.write_bytes(data)
    upload(tmp_path, bucket)
    message = one_line(lambda: opened(bucket))
    assert f"{bucket}/x-001.tar: changed since it was indexed ({len(data)} bytes s3:" in message
    assert write_index(bucket) == [(f"{bucket}/{NAME}", 20, 0)]
    assert len(opened(bucket)) == 20


def test_ranges_are_exact(bucket: str, tmp_path: Path) -> None:
    """Also of an object that was uploaded in several parts."""
    data = np.random.default_rng(0).bytes(LARGE)
    (tmp_path / "large").write_bytes(data)
    url = f"{bucket}/large"
    store.store(url).put(url, tmp_path / "large")
    rng = random.Random(0)
    for start in (0, 1, 2**23 - 1, 2**24, LARGE - 1, LARGE, *(rng.randrange(LARGE) for _ in range(4))):
        length = min(rng.choice([1, 5000, 2**21]), LARGE - start)
        assert store.store(url).read(url, start, length) == data[start : start + length]
    assert store.store(url).get(url) == data
    short = f"{url}: expected 20 bytes from {LARGE - 10} on, but the file ends after 10 of them"
    assert short == one_line(lambda: store.store(url).read(url, LARGE - 10, 20))
    assert url in one_line(lambda: store.store(url).read(url, LARGE, 1))
    assert f"{bucket}/gone: NoSuchKey" in one_line(lambda: store.store(url).read(f"{bucket}/gone", 0, 1))
    with pytest.raises(FileNotFoundError):
        store.store(url).get(f"{bucket}/gone")


def test_an_upload_that_is_given_up_leaves_no_parts(bucket: str, tmp_path: Path, anew: Callable[..., None]) -> None:
    """One part of it stays away; the others cost money as long as they lie there."""
    anew()
    client, url = store.STORES["s3"].client(), f"{bucket}/large"
    (tmp_path / "large").write_bytes(bytes(LARGE))

    def refuse(params: dict[str, Any], **_: Any) -> None:
        if "partNumber=2" in params["url"]:
            raise OSError("no route to host")

    client.meta.events.register("before-call.s3.UploadPart", refuse)
    with pytest.raises(Outage, match=f"^{url}: no route to host; given up after"):
        store.store(url).put(url, tmp_path / "large", patience=0.3)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    assert store.store(url).list(url) == []
    client.meta.events.unregister("before-call.s3.UploadPart", refuse)
    store.store(url).put(url, tmp_path / "large")
    assert store.store(url).get(url) == bytes(LARGE)


def test_an_upload_whose_last_answer_is_lost_counts(bucket: str, tmp_path: Path, anew: Callable[..., None]) -> None:
    """The repeated request finds no such upload, as the file is whole; an older file of the name is no such proof."""
    anew()
    client, url = store.STORES["s3"].client(), f"{bucket}/large"
    (tmp_path / "large").write_bytes(bytes(LARGE))
    events, asked = client.meta.events, []

    def gone(**_: Any) -> None:
        """Answer as S3 does from the second request on; Swift goes on answering that all is well."""
        asked.append(1)
        if len(asked) > 1:
            said = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
            raise ClientError(said, "CompleteMultipartUpload")

    def lose(**_: Any) -> None:
        if len(asked) == 1:
            raise OSError("connection reset")

    events.register("before-call.s3.CompleteMultipartUpload", gone)
    events.register("after-call.s3.CompleteMultipartUpload", lose)
    store.store(url).put(url, tmp_path / "large", patience=20)
    assert len(asked) == 2
    assert store.store(url).get(url) == bytes(LARGE)
    with pytest.raises(OSError, match="NoSuchUpload"):  # the file is still that of the upload before
        store.store(url).put(url, tmp_path / "large", patience=5)


def test_written_shards_are_the_same_as_in_a_folder_and_so_is_the_stream(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 8192)
    samples = [Sample(f"s{i:03d}", "jpg", jpeg(i), i % 5) for i in range(24)]
    places = [str(tmp_path / "train"), f"{bucket}/train"]
    for place in places:
        assert shard_writing.write_shards(samples, place, size=8_000)[1] == 24
    local, remote = (store.list_shards(place) for place in places)
    assert len(local) > 2
    for a, b in zip(local, remote, strict=True):
        assert store.store(b.url).get(b.url) == Path(a.url).read_bytes()
    assert "holds shards already" in one_line(lambda: shard_writing.write_shards(samples, places[1]))
    views = Views.of([View(size=16, count=2)])
    streams = [Stream(opened(place), views, 3, 4, 8) for place in places]
    parts = [list(islice(s.parts(range(4), start=2), 6)) for s in streams]
    for a, b in zip(*parts, strict=True):
        assert not b.error
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    loader = Loader(streams[1], rank=0, ranks=1, workers=1, device=torch.device("cpu"))
    from_processes = [batch.index for batch, _ in islice(loader.batches(2), 6)]
    assert torch.equal(torch.cat(from_processes), torch.cat([p.index for p in parts[0]]))


def tensors(part: StepPart) -> list[torch.Tensor]:
    return [*part.pixels, part.params, part.index, part.label]


def test_a_bucket_that_is_not_there_is_one_line(swift: Swift) -> None:
    url = "s3://no-such-bucket/train"
    for attempt in (
        lambda: opened(url),
        lambda: store.store(url).read(url, 0, 1),
        lambda: shard_writing.write_shards([Sample("a", "jpg", jpeg(0))], url),
    ):
        message = one_line(attempt)
        assert "s3://no-such-bucket/train" in message
        assert "NoSuchBucket" in message


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "test:nobody"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "other:tester", "AWS_SECRET_ACCESS_KEY": "testing2"}, "NoSuchBucket"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "Invalid endpoint"),
        ({"AWS_PROFILE": "none"}, "profile"),
    ],
)
def test_wrong_settings_are_one_line(
    bucket: str, anew: Callable[..., None], settings: dict[str, str], code: str
) -> None:
    anew(**settings)
    message = one_line(lambda: opened(f"{bucket}/train"))
    assert code in message
    assert "s3://" in message


def test_missing_credentials_are_one_line(
    bucket: str, monkeypatch: pytest.MonkeyPatch, anew: Callable[..., None]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    anew()
    assert one_line(lambda: opened(bucket)).endswith("; no AWS credentials were found, so the request was anonymous")


def test_an_endpoint_that_nobody_listens_on_is_one_line_in_a_minute(
    swift: Swift, anew: Callable[..., None], naps: list[float]
) -> None:
    anew(AWS_ENDPOINT_URL=f"http://127.0.0.1:{free_block(1)}")
    message = one_line(lambda: opened("s3://bucket/train"))
    assert 'Could not connect to the endpoint URL: "http://127.0.0.1:' in message
    assert len(naps) >= 3  # it was tried again
    assert sum(naps) < 60


@pytest.fixture(scope="module")
def large(swift: Swift, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    path = tmp_path_factory.mktemp("large") / "large"
    path.write_bytes(np.random.default_rng(1).bytes(LARGE))
    store.STORES["s3"].client().create_bucket(Bucket="large")
    store.STORES["s3"].put("s3://large/x", path)
    return "s3://large/x", path.read_bytes()


def test_a_transfer_that_breaks_off_is_begun_anew(
    swift: Swift, large: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies when the answer is there and its body is not, and comes back before we give up."""
    url, data = large
    broken: list[Exception] = []
    starts: list[threading.Thread] = []
    honest = remote.read_stream

    def receive(body: Any, length: int) -> memoryview:
        if not starts:
            swift("kill9", "object")
            starts.append(threading.Thread(target=swift, args=("start",)))
            starts[0].start()
        try:
            return honest(body, length)
        except Exception as e:
            broken.append(e)
            raise

    monkeypatch.setattr(remote, "read_stream", receive)
    try:
        got = store.store(url).read(url, 1, LARGE - 1, patience=60)
    finally:
        starts[0].join()
    assert got == data[1:]
    assert broken


def test_a_server_that_stalls_for_a_while_is_waited_for(swift: Swift, large: tuple[str, bytes]) -> None:
    url, data = large
    swift("pause", "object")
    timer = threading.Timer(1, swift, ("resume", "object"))
    timer.start()
    got = store.store(url).read(url, 5, LARGE - 5)
    timer.join()
    assert got == data[5:]


def test_a_server_that_does_not_come_back_is_one_line(
    swift: Swift, large: tuple[str, bytes], naps: list[float]
) -> None:
    url, _ = large
    swift("kill9", "object")
    try:
        with pytest.raises(Outage) as caught:
            store.store(url).read(url, 0, LARGE, patience=100)
    finally:
        swift("start")
    message = str(caught.value)
    assert message.startswith(f"{url}: ")
    assert "503" in message or "Service" in message
    assert len(naps) >= 10
    assert 100 - retry.LONGEST < sum(naps) < 100


def test_a_file_is_created_once(bucket: str) -> None:
    s3_store, url = store.STORES["s3"], f"{bucket}/run/.owner-000001"
    assert s3_store.create(url, b"first")
    content, age = s3_store.look(url)
    assert content == b"first"
    assert s3_store.create(url, content)  # the answer to an earlier attempt may have been lost
    assert not s3_store.create(url, b"other")
    assert -2 < age < 60  # in whole seconds, rounded up
    s3_store.write(url, b"again")
    assert s3_store.look(url)[0] == b"again"
    with pytest.raises(FileNotFoundError):
        s3_store.look(url + "x")
    with pytest.raises(OSError, match="NoSuchBucket"):
        s3_store.write("s3://no-such-bucket/a", b"")
