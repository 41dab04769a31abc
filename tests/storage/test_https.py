"""https:// and http:// from a web server on loopback: ranges, tags, redirects, and what a web server does not do."""

import base64
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.clouds import Cloud, point_at, running
from helpers.s3.proxy import Faults, Proxy

from eagleray.base.errors import Outage, UserError
from eagleray.storage import store
from eagleray.storage.https import HttpsStore
from eagleray.storage.rest import Pools

SHARDS = [f"x-{n:03d}.tar" for n in range(4)]


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with running() as server:
        for name in SHARDS:
            server.write("web", f"train/{name}", name.encode() * 100)
        yield server


@pytest.fixture
def web(cloud: Cloud) -> str:
    return f"http://127.0.0.1:{cloud.port}/web/train"


def one_line(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_are_named_by_braces_and_lists(web: str) -> None:
    blobs = store.list_shards([f"{web}/x-{{000..002}}.tar", f"{web}/x-003.tar"])
    assert [(b.url, b.size) for b in blobs] == [(f"{web}/{name}", 900) for name in SHARDS]
    assert all(b.tag for b in blobs)
    for pattern in (web, f"{web}/", f"{web}/*.tar", f"{web}/x-00?.tar"):
        assert "a web server has no listing; expected the names of files" in one_line(
            lambda p=pattern: store.list_shards(p)
        )
    assert f"no shard {web}/x-004.tar" in one_line(lambda: store.list_shards(f"{web}/x-{{003..004}}.tar"))
    assert "no listing" in one_line(lambda: list(store.store(web).walk(web)))


@pytest.mark.parametrize("kind", ["web", "moved", "weak", "dated"])
def test_ranges_are_exact_and_a_replaced_file_is_refused(cloud: Cloud, web: str, kind: str) -> None:
    """Also after a redirect, and where the server knows no If-Match, or sends no ETag."""
    url = f"{web.replace('/web/', f'/{kind}/')}/x-000.tar"
    blob, data = store.list_shards(url)[0], b"x-000.tar" * 100
    assert blob.size == 900
    assert store.store(url).get(url) == data
    for start, length in ((0, 1), (1, 899), (899, 1), (900, 0)):
        assert store.store(url).read(url, start, length, tag=blob.tag) == data[start : start + length]
    assert "but the file ends after 10 of them" in one_line(lambda: store.store(url).read(url, 890, 20))
    cloud.clock = 60.0
    cloud.write("web", "train/x-000.tar", b"X" * 900)
    message = one_line(lambda: store.store(url).read(url, 0, 900, tag=blob.tag))
    assert message == f"{url}: has changed since it was indexed"


def test_a_server_that_ignores_ranges_is_refused(web: str) -> None:
    url = f"{web.replace('/web/', '/whole/')}/x-000.tar"
    for attempt in (lambda: store.list_shards(url), lambda: store.store(url).read(url, 0, 5)):
        assert "the server ignores Range (it answered 200); expected 206" in one_line(attempt)


def test_the_web_server_of_python_ignores_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a real server that somebody will try."""
    (tmp_path / "x.tar").write_bytes(bytes(1000))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        point_at(monkeypatch, server.server_port)
        message = one_line(lambda: store.list_shards(f"http://127.0.0.1:{server.server_port}/x.tar"))
        server.shutdown()
    assert "the server ignores Range" in message


@pytest.mark.parametrize("fault", ["refuse", "cut", "reset"])
def test_what_passes_is_repeated(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with Proxy(cloud.port) as proxy:
        point_at(monkeypatch, proxy.port)
        url = f"http://127.0.0.1:{proxy.port}/web/train/x-001.tar"
        proxy.faults = Faults(**{fault: 1.0}, most=2)
        assert store.store(url).read(url, 0, 900, patience=60) == b"x-001.tar" * 100
        assert proxy.done[fault] == 2
        proxy.faults = Faults(refuse=1.0)
        with pytest.raises(Outage, match=f"^{url}: 503 Service Unavailable; given up"):
            store.store(url).read(url, 0, 900, patience=0.3)


@pytest.mark.parametrize("status", [401, 403, 410])
def test_what_a_server_denies_is_one_line(cloud: Cloud, web: str, status: int) -> None:
    cloud.forced.append((status, ""))
    assert f"{web}/x-000.tar: {status} " in one_line(lambda: store.store(web).read(f"{web}/x-000.tar", 0, 1))


def test_nothing_is_written_to_a_web_server(web: str, tmp_path: Path) -> None:
    url, storage = f"{web}/new", store.store(web)
    (tmp_path / "x").touch()
    writers = [
        lambda: storage.put(url, tmp_path / "x"),
        lambda: storage.write(url, b""),
        lambda: storage.create(url, b""),
    ]
    for attempt in (*writers, lambda: storage.delete(url), lambda: store.check_writable(url)):
        assert one_line(attempt).startswith(f"{url}: a web server can only be read; expected a folder, or an s3://")


def test_a_proxy_of_the_environment_is_used(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{cloud.port}")
    monkeypatch.setattr("eagleray.storage.rest.proxy_bypass", lambda host: False)
    monkeypatch.setitem(store.STORES, "http", HttpsStore())
    # The server sees the whole address instead of a path, and so speaks as itself.
    assert store.store("http://").get("http://no.such.host/web/train/x-002.tar") == b"x-002.tar" * 100


def test_a_password_of_a_proxy_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:p%40ss@127.0.0.1:1")
    monkeypatch.setattr("eagleray.storage.rest.proxy_bypass", lambda host: False)
    sent = Pools().to("http://no.such.host/x").proxy_headers["proxy-authorization"]
    assert base64.b64decode(sent.partition(" ")[2]) == b"me:p@ss"
