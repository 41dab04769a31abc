"""How a store is asked: by the usual settings, as nobody where there are none, and never with a secret in a URL."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError
from helpers.naps import pass_at_once

from eagleray.base.errors import UserError
from eagleray.storage import s3, store
from eagleray.storage.s3 import S3Store

LISTING = """<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>
<Contents><Key>train/x-000.tar</Key><Size>7</Size><ETag>"abc"</ETag></Contents></ListBucketResult>"""


class Server(ThreadingHTTPServer):
    """A bucket that everybody may read. It notes what it is asked."""

    asked: list[tuple[str, dict[str, str]]]
    pages: list[bytes]  # of a proxy, which come before its answers

    def handle_error(self, *_: object) -> None:
        """Of a client that has gone."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        listing = "list-type=2" in self.path
        body = LISTING.encode() if listing else b"0123456"[2:5]
        body = self.server.pages.pop() if self.server.pages else body
        self.send_response(200 if listing else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"abc"')
        self.send_header("Content-Range", "bytes 2-4/7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked, server.pages = [], []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def settings(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """The environment, and nothing else of the machine's."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")

    def use(**environment: str) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(store.STORES, "s3", S3Store())

    return use


def test_a_public_bucket_is_read_without_credentials(server: Server, settings: Callable[..., None]) -> None:
    settings()
    [blob] = store.list_shards("s3://b/train")
    assert blob.url == "s3://b/train/x-000.tar"
    assert bytes(store.store(blob.url).read(blob.url, 2, 3, tag=blob.tag)) == b"234"
    assert len(server.asked) == 2
    assert not any("authorization" in headers for _, headers in server.asked)
    path, headers = server.asked[1]
    assert path == "/b/train/x-000.tar"  # path style, as an endpoint of one's own expects
    assert headers["range"] == "bytes=2-4"
    assert headers["if-match"].strip('"') == "abc"  # another content would be refused


KEYS = {"AWS_ACCESS_KEY_ID": "mykey", "AWS_SECRET_ACCESS_KEY": "mysecret"}


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_credentials_and_region_of_the_environment(server: Server, settings: Callable[..., None], name: str) -> None:
    settings(**KEYS, **{name: "eu-central-7"})
    store.list_shards("s3://b/train")
    [(_, headers)] = server.asked
    assert "Credential=mykey/" in headers["authorization"]
    assert "/eu-central-7/s3/" in headers["authorization"]


def test_a_profile_of_the_configuration(server: Server, settings: Callable[..., None], tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile lab]\nregion = sa-west-3\naws_access_key_id = labkey\naws_secret_access_key = labsecret\n"
    )
    settings(AWS_CONFIG_FILE=str(config), AWS_PROFILE="lab")
    store.list_shards("s3://b/train")
    assert "Credential=labkey/" in server.asked[0][1]["authorization"]
    assert "/sa-west-3/" in server.asked[0][1]["authorization"]


def test_requests_say_who_pays_for_them(server: Server, settings: Callable[..., None]) -> None:
    settings(**KEYS, AWS_REQUEST_PAYER="requester")
    [blob] = store.list_shards("s3://b/train")
    store.store(blob.url).read(blob.url, 2, 3, tag=blob.tag)
    assert [headers["x-amz-request-payer"] for _, headers in server.asked] == ["requester"] * 2
    assert all("x-amz-request-payer" in headers["authorization"] for _, headers in server.asked), "it is signed"
    settings(AWS_REQUEST_PAYER="me")
    with pytest.raises(UserError, match="AWS_REQUEST_PAYER=me: expected requester, or"):
        store.list_shards("s3://b/train")


def test_nobody_pays_without_the_variable(server: Server, settings: Callable[..., None]) -> None:
    settings(**KEYS)
    store.list_shards("s3://b/train")
    assert "x-amz-request-payer" not in server.asked[0][1]


@pytest.mark.parametrize("secret", ["mysecret", "my/secret"])
def test_credentials_in_a_url_are_refused_and_not_repeated(settings: Callable[..., None], secret: str) -> None:
    settings()
    with pytest.raises(UserError, match="credentials do not belong in a URL") as caught:
        store.list_shards(f"s3://mykey:{secret}@b/train")
    assert "my" not in str(caught.value)


def test_presigned_urls_are_refused_without_their_signature(server: Server, settings: Callable[..., None]) -> None:
    settings(**KEYS)
    asked = {"Bucket": "b", "Key": "train/x-000.tar"}
    url = store.STORES["s3"].client().generate_presigned_url("get_object", Params=asked)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="signed URLs are not read, as they expire; expected an s3://") as caught:
        store.list_shards([url])
    assert url.partition("Signature=")[2][:20] not in str(caught.value)
    assert not server.asked


def test_an_answer_that_is_no_xml_is_asked_for_again(server: Server, settings: Callable[..., None]) -> None:
    settings()
    server.pages.append(b"<html><p>Please log in")
    assert [b.url for b in store.store("s3://b").list("s3://b/train/")] == ["s3://b/train/x-000.tar"]
    assert len(server.asked) == 2


class LongListing:
    """A client of a bucket with 4 pages of files, each of which takes four seconds; the last one fails once."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.asked, self.meta = (
            clock,
            list[str](),
            SimpleNamespace(config=SimpleNamespace(signature_version="s3v4")),
        )

    def list_objects_v2(self, *, ContinuationToken: str = "0", **_: str) -> dict[str, Any]:
        self.asked.append(ContinuationToken)
        self.clock.append(4)
        if len(self.asked) == 4:
            raise ConnectionClosedError(endpoint_url="http://b")
        page = int(ContinuationToken)
        files = [{"Key": f"train/{page}.tar", "Size": 7, "ETag": '"abc"'}]
        more = {"NextContinuationToken": str(page + 1)} if page < 3 else {}
        return {"Contents": files, "IsTruncated": page < 3} | more


def test_one_page_of_a_long_listing_is_repeated_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    client = LongListing(pass_at_once(monkeypatch))
    monkeypatch.setattr(s3, "make_client", lambda: client)
    assert [b.url for b in S3Store().list("s3://b/train/")] == [f"s3://b/train/{n}.tar" for n in range(4)]
    assert client.asked == ["0", "1", "2", "3", "3"]
