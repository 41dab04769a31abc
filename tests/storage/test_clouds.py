"""gs:// and az:// against a server on loopback that speaks their protocols, with the faults that S3 is tested with.

AZ_TEST_CONNECTION and GS_TEST_SERVER may name real servers, such as Azurite's connection string and the address of
Google's storage-testbench; the tests that ask for no fault are then repeated on them."""

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.clouds import Cloud, point_at, running
from helpers.naps import pass_at_once
from helpers.s3.proxy import Faults, Proxy

from eagleray.base.errors import Outage, UserError
from eagleray.data import index_file
from eagleray.data.tar_scan import Row
from eagleray.datasets import pack
from eagleray.storage import az, error_classes, gs, http_body, rest, retry, store
from eagleray.storage.blob import Blob
from eagleray.storage.http_body import body_of
from eagleray.storage.store import Store

SCHEMES = ("gs", "az")


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with running() as server:
        yield server


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs, "PIECE", 2**18)
    monkeypatch.setattr(az, "PART", 2**18)


@pytest.fixture(params=[*SCHEMES, "gs-real", "az-real"])
def folder(request: pytest.FixtureRequest, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder for one test, also on a real server where one is named."""
    scheme, _, real = request.param.partition("-")
    if not real:
        return new_folder(cloud, scheme)
    name = {"gs": "GS_TEST_SERVER", "az": "AZ_TEST_CONNECTION"}[scheme]
    if name not in os.environ:
        pytest.skip(f"{name} names no real server")
    bucket = f"b{secrets.token_hex(6)}"
    if scheme == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", os.environ[name])
        storage: Any = gs.GsStore()
        body_of(storage._ask("POST", "/storage/v1/b", {"project": "p"}, body=json.dumps({"name": bucket}).encode()))
    else:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", os.environ[name])
        storage = az.AzStore()
        body_of(storage._ask("PUT", bucket, query={"restype": "container"}))
    monkeypatch.setitem(store.STORES, scheme, storage)
    return f"{scheme}://{bucket}/a folder"


@pytest.fixture(params=SCHEMES)
def faulty(
    request: pytest.FixtureRequest, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Proxy]]:
    """The URL of an empty folder behind a proxy."""
    with Proxy(cloud.port) as proxy:
        point_at(monkeypatch, proxy.port)
        yield new_folder(cloud, request.param), proxy


def new_folder(cloud: Cloud, scheme: str) -> str:
    bucket = f"b{secrets.token_hex(6)}"
    cloud.files[bucket] = {}
    return f"{scheme}://{bucket}/a folder"


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return pass_at_once(monkeypatch)


def one_line(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def at(url: str) -> Store:
    return store.store(url)


def test_files_are_listed_by_folder_and_by_tree(folder: str) -> None:
    """Also where a listing has several pages, and names need to be encoded."""
    names = [f"x-{n:03d}.tar" for n in range(7)] + ["ü &<+%41.tar", "sub/y.tar", "sub/deep/z.tar", "notes.txt"]
    for name in names:
        at(folder).write(f"{folder}/{name}", name.encode())
    at(folder).write(f"{folder}-2/other.tar", b"")
    above, direct = {f"{folder}/{n}" for n in names}, {f"{folder}/{n}" for n in names if "/" not in n}
    for url in (folder, f"{folder}/"):
        blobs = at(url).list(url)
        assert {b.url for b in blobs} == direct
        assert all(b.size == len(b.url.removeprefix(f"{folder}/").encode()) for b in blobs)
        assert {b.url for b in at(url).walk(url)} == above
    assert [b.url for b in at(folder).list(f"{folder}/", "x-00")] == [f"{folder}/x-{n:03d}.tar" for n in range(7)]
    assert [b.url for b in at(folder).list(f"{folder}/x-003.tar")] == [f"{folder}/x-003.tar"]
    assert at(folder).list(f"{folder}/x-00") == at(folder).list(f"{folder}/gone/") == []
    assert [b.url for b in store.list_shards(f"{folder}/x-{{001..002}}.tar")] == [
        f"{folder}/x-001.tar",
        f"{folder}/x-002.tar",
    ]
    assert "no .tar shards there" in one_line(lambda: store.list_shards(f"{folder}/gone"))
    assert {b.url for b in at(folder).each(f"{folder}/")} == direct
    for after in (f"{folder}/x-003.tar", f"{folder}/sub/n"):
        if at(folder).seeks:
            assert [b.url for b in at(folder).walk(folder, after)] == sorted(url for url in above if url > after)


def test_ranges_are_exact_also_of_a_file_that_was_sent_in_pieces(folder: str, tmp_path: Path) -> None:
    data, url = secrets.token_bytes(2**20 + 7), f"{folder}/large"
    (tmp_path / "large").write_bytes(data)
    at(url).put(url, tmp_path / "large")
    blob = at(url).list(url)[0]
    assert (blob.size, at(url).get(url)) == (len(data), data)
    for start, length in ((0, 1), (1, 5000), (2**18 - 1, 2), (len(data) - 1, 1), (len(data), 0), (0, len(data))):
        assert at(url).read(url, start, length, tag=blob.tag) == data[start : start + length]
    short = one_line(lambda: at(url).read(url, len(data) - 10, 20))
    assert short == f"{url}: expected 20 bytes from {len(data) - 10} on, but the file ends after 10 of them"
    assert url in one_line(lambda: at(url).read(url, len(data), 1))
    (tmp_path / "empty").touch()
    at(url).put(url, tmp_path / "empty")
    assert at(url).get(url) == b""


def test_a_replaced_file_is_refused(folder: str) -> None:
    """Also where its size has not changed."""
    url = f"{folder}/x.tar"
    at(url).write(url, b"before")
    tag = at(url).list(url)[0].tag
    assert at(url).read(url, 0, 6, tag=tag) == b"before"
    at(url).write(url, b"behind")
    assert one_line(lambda: at(url).read(url, 0, 6, tag=tag)) == f"{url}: has changed since it was indexed"
    assert at(url).list(url)[0].tag != tag


def test_what_is_missing_is_one_line(folder: str) -> None:
    url = f"{folder}/gone"
    with pytest.raises(error_classes.MissingFile, match=f"^{url}: "):
        at(url).read(url, 0, 1)
    for ask in (at(url).get, at(url).look):
        with pytest.raises(FileNotFoundError):
            ask(url)
    at(url).delete(url)
    nowhere = f"{folder.partition(':')[0]}://no-such-bucket-{secrets.token_hex(4)}/x"
    for attempt in (lambda: at(url).list(nowhere), lambda: at(url).get(nowhere), lambda: at(url).read(nowhere, 0, 1)):
        message = one_line(attempt)
        assert nowhere in message
        assert "not exist" in message or "ContainerNotFound" in message
    with pytest.raises(OSError, match=nowhere):
        at(url).write(nowhere, b"")


def test_a_file_is_created_once(folder: str) -> None:
    url = f"{folder}/.owner-000001"
    assert at(url).create(url, b"first")
    content, age = at(url).look(url)
    assert content == b"first"
    assert at(url).create(url, content)  # the answer to an earlier attempt may have been lost
    assert not at(url).create(url, b"other")
    assert -2 < age < 60
    at(url).write(url, b"again")
    assert at(url).look(url)[0] == b"again"
    at(url).delete(url)
    assert at(url).create(url, b"third")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_several_that_create_a_file_at_once_one_does(cloud: Cloud, scheme: str) -> None:
    url, made = f"{new_folder(cloud, scheme)}/owner", list[bool]()
    threads = [threading.Thread(target=lambda n=n: made.append(at(url).create(url, b"%d" % n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ages_are_by_the_clock_of_the_store(cloud: Cloud, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{new_folder(cloud, scheme)}/x"
    monkeypatch.setattr(cloud, "clock", -7200.0)
    at(url).write(url, b"x")
    monkeypatch.setattr(cloud, "clock", -7100.0)
    assert 98 < at(url).look(url)[1] < 130


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_answer_that_cannot_be_read_is_asked_for_again(
    cloud: Cloud, scheme: str, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page of a proxy, which has the status 200."""
    module, answers = {"gs": gs, "az": az}[scheme], [b"<html>"]
    url = f"{new_folder(cloud, scheme)}/x"
    at(url).write(url, b"x")
    monkeypatch.setattr(module, "body_of", lambda response: answers.pop() if answers else body_of(response))
    assert [blob.url for blob in at(url).list(url)] == [url]
    answers.append(b"<html>")
    assert at(url).look(url)[0] == b"x"
    assert naps


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_took_hours_waits_for_a_store_that_is_away_for_a_minute(
    cloud: Cloud, scheme: str, naps: list[float], tmp_path: Path
) -> None:
    folder = new_folder(cloud, scheme)
    (tmp_path / "x").write_bytes(b"shard")
    cloud.forced.extend([(503, "ServerBusy")] * 11)
    pack.put(f"{folder}/x", tmp_path / "x")
    cloud.forced.extend([(503, "ServerBusy")] * 11)
    rows = [(Blob(f"{folder}/x.tar", 512), index_file.table_of([Row()]))]
    index_file.save(rows, [f"{folder}/index.parquet"], {})
    assert sum(naps) > 60
    assert len(at(folder).list(f"{folder}/")) == 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_page_of_a_long_listing_is_repeated_not_all(
    cloud: Cloud, scheme: str, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the listing takes: each page takes four seconds here, and ten are waited for a failure."""
    folder, storage, asked = new_folder(cloud, scheme), at(f"{scheme}://b/x"), list[str]()
    for number in range(18):
        cloud.write(folder.split("/")[2], f"a folder/{number:02d}.tar", b"x")
    page = storage._page

    def slow(bucket: str, prefix: str, delimiter: str, marker: str) -> Any:
        naps.append(4)
        asked.append(marker)
        if len(asked) == 4:
            raise retry.Transient("reset")
        return page(bucket, prefix, delimiter, marker)

    monkeypatch.setattr(storage, "_page", slow)
    assert len(storage.list(f"{folder}/")) == 18
    assert len(asked) == 5


@pytest.mark.parametrize("fault", ["refuse", "cut", "reset", "stall"])
def test_what_passes_is_repeated(
    faulty: tuple[str, Proxy], fault: str, tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "stall":
        monkeypatch.setattr(rest, "READ_TIMEOUT", 2.0)
    (folder, proxy), data = faulty, secrets.token_bytes(2**20)
    url = f"{folder}/x"
    (tmp_path / "x").write_bytes(data)
    at(url).put(url, tmp_path / "x")
    proxy.faults = Faults(**{fault: 1.0}, most=2)
    assert at(url).read(url, 1, 2**20 - 1, patience=60) == data[1:]
    assert proxy.done[fault] == 2
    assert len(naps) >= 2
    assert at(url).list(url)[0].size == len(data)


def test_an_upload_goes_on_where_it_was(
    cloud: Cloud, faulty: tuple[str, Proxy], tmp_path: Path, naps: list[float]
) -> None:
    """Also where the answer to a piece was lost, after which the store has it."""
    (folder, proxy), data = faulty, secrets.token_bytes(2**20 + 3)
    url = f"{folder}/x"
    (tmp_path / "x").write_bytes(data)
    proxy.faults = Faults(refuse=0.4, most=6)
    cloud.lost.extend(["PUT", "PUT"])
    at(url).put(url, tmp_path / "x")
    assert not cloud.lost
    assert naps
    assert at(url).get(url) == data


def test_an_upload_begins_anew_whose_first_piece_was_refused(
    cloud: Cloud, tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google answers without Range when it has no byte yet."""
    begin, data = gs.GsStore._begin, secrets.token_bytes(2**19)

    def begin_and_fail(self: gs.GsStore, url: str) -> str:
        session = begin(self, url)
        cloud.forced.append((503, "backendError"))
        return session

    monkeypatch.setattr(gs.GsStore, "_begin", begin_and_fail)
    url = f"{new_folder(cloud, 'gs')}/x"
    (tmp_path / "x").write_bytes(data)
    at(url).put(url, tmp_path / "x")
    assert naps
    assert at(url).get(url) == data


def test_a_lost_answer_to_a_creation_does_not_lose_it(
    cloud: Cloud, faulty: tuple[str, Proxy], naps: list[float]
) -> None:
    url = f"{faulty[0]}/owner"
    cloud.lost.append("PUT" if url.startswith("az:") else "POST")
    assert at(url).create(url, b"mine")
    assert not cloud.lost
    assert not at(url).create(url, b"other")


def test_a_slow_transfer_is_begun_anew(
    faulty: tuple[str, Proxy], naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = faulty
    url = f"{folder}/x"
    at(url).write(url, bytes(2**18))
    monkeypatch.setattr(http_body, "GRACE", 0.3)
    proxy.faults = Faults(rate=32 * 2**10)
    with pytest.raises(Outage, match=r"stalled: .* bytes in"):
        at(url).read(url, 0, 2**18, patience=0.1)


def test_a_server_that_is_away_is_one_line(cloud: Cloud, faulty: tuple[str, Proxy], naps: list[float]) -> None:
    folder, proxy = faulty
    proxy.faults = Faults(refuse=1.0)
    with pytest.raises(Outage, match=f"^{folder}/x: .*; given up after") as caught:
        at(folder).read(f"{folder}/x", 0, 1, patience=100)
    assert "\n" not in str(caught.value)
    assert 100 - retry.LONGEST < sum(naps) < 100


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_allowed_before_is_waited_for(cloud: Cloud, scheme: str, naps: list[float]) -> None:
    """A role or a key may be about to be replaced. What was never allowed is one line at once."""
    folder = new_folder(cloud, scheme)
    cloud.forced.append((403, "AuthorizationFailure"))
    assert "AuthorizationFailure" in one_line(lambda: at(folder).read(f"{folder}/x", 0, 1))
    assert not naps
    at(folder).write(f"{folder}/x", b"abc")
    assert at(folder).get(f"{folder}/x") == b"abc"
    cloud.forced.extend([(403, "AuthorizationFailure")] * 2)
    assert at(folder).read(f"{folder}/x", 0, 3) == b"abc"
    assert len(naps) == 2


def test_a_google_token_that_is_refused_is_replaced(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    """The key of a service account, the token and its refusal go through google-auth."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    account = {
        "type": "service_account",
        "client_email": "a@b",
        "private_key_id": "k",
        "private_key": key.private_bytes(*form).decode(),
        "token_uri": f"http://127.0.0.1:{cloud.port}/token",
    }
    (tmp_path / "key.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setitem(store.STORES, "gs", gs.GsStore())
    monkeypatch.setattr(cloud, "signed", True)
    url = f"{new_folder(cloud, 'gs')}/x"
    at(url).write(url, b"abc")
    cloud.tokens += 1  # the token that was given before is no longer valid
    assert at(url).get(url) == b"abc"
    assert len(naps) == 1
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    monkeypatch.setitem(store.STORES, "gs", gs.GsStore())
    assert "GOOGLE_APPLICATION_CREDENTIALS" in one_line(lambda: at(url).get(url))


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    for url in ("gs://key:hunter2@bucket/x", "az://account@container/x", "https://me:hunter2@host/x.tar"):
        message = one_line(lambda url=url: at(url).get(url))
        assert "credentials" in message
        assert "hunter2" not in message
