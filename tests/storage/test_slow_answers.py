"""A server that trickles holds nobody: the floor on speed counts for heads, bodies, listings and errors alike."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.clouds import point_at
from helpers.naps import pass_at_once

from eagleray.base.errors import Outage, UserError
from eagleray.storage import http_body, store
from eagleray.storage.s3 import S3Store

HEAD = b'HTTP/1.1 %d X\r\nETag: "x"\r\nx-goog-generation: 1\r\nContent-Range: bytes 0-99999/100000\r\n'
LONG = HEAD % 206 + b"Content-Length: 100000\r\n\r\n"
ANSWERS = {  # what comes at once, before one byte after the other
    "head": b"HTTP/1.1 206 X\r\nX-",
    "status": b"HTTP/1.1 2",
    "body": LONG,
    "chunks": HEAD % 206 + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n",
    "error": HEAD % 500 + b"Content-Length: 100000\r\n\r\n",
    "refusal": HEAD % 403 + b"Content-Length: 100000\r\n\r\n<?xml version='1.0'?><Error><Code>AccessDenied</Code>",
    "listing": HEAD % 200 + b"Content-Length: 100000\r\n\r\n<?xml version='1.0'?><ListBucketResult>",
}
URLS = {"s3": "s3://b/x", "gs": "gs://b/x", "az": "az://b/x", "http": "http://127.0.0.1:PORT/b/x"}


class Trickle:
    """Answers each request with some bytes, and then with one every hundredth of a second, or as fast as it can."""

    def __init__(self, first: bytes, flood: bytes = b"") -> None:
        self.first, self.flood, self.sent, self.over = first, flood, 0, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                threading.Thread(target=self.answer, args=(self.listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    def answer(self, client: socket.socket) -> None:
        try:
            client.recv(2**16)
            client.sendall(self.first)
            while not self.over.wait(0 if self.flood else 0.01):
                client.sendall(self.flood or b"a")
                self.sent += max(len(self.flood), 1)
        except OSError:
            return
        finally:
            client.close()


@contextmanager
def trickling(monkeypatch: pytest.MonkeyPatch, first: bytes, flood: bytes = b"") -> Iterator[Trickle]:
    server = Trickle(first, flood)
    point_at(monkeypatch, server.port)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setitem(store.STORES, "s3", S3Store())
    monkeypatch.setattr(http_body, "GRACE", 0.3)
    pass_at_once(monkeypatch)
    try:
        yield server
    finally:
        server.over.set()
        server.listener.close()


@pytest.mark.parametrize("answer", [name for name in ANSWERS if name != "listing"])
@pytest.mark.parametrize("scheme", URLS)
def test_a_read_of_a_trickle_ends(monkeypatch: pytest.MonkeyPatch, scheme: str, answer: str) -> None:
    with trickling(monkeypatch, ANSWERS[answer]) as server:
        url = URLS[scheme].replace("PORT", str(server.port))
        with pytest.raises(Outage, match=r"stalled: |[Tt]imed out|timeout|IncompleteRead|broken"):
            store.store(url).read(url, 0, 100_000, patience=0.0)
    assert server.sent < 1000  # of a hundred thousand


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("call", ["list", "get", "look", "write", "create", "delete", "put"])
def test_any_other_request_ends(monkeypatch: pytest.MonkeyPatch, scheme: str, call: str, tmp_path: Path) -> None:
    """One attempt is enough to see that: patience would repeat it."""
    monkeypatch.setattr(http_body, "PROCESSING", 0.3)
    (tmp_path / "x").write_bytes(b"x")
    with trickling(monkeypatch, ANSWERS["listing"]) as server:
        url, at = URLS[scheme], store.store(URLS[scheme])
        monkeypatch.setattr("eagleray.storage.retry.FIRST", 100.0)
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: at.list(url),
            "get": lambda: at.get(url),
            "look": lambda: at.look(url),
            "write": lambda: at.write(url, b"x"),
            "create": lambda: at.create(url, b"x"),
            "delete": lambda: at.delete(url),
            "put": lambda: at.put(url, tmp_path / "x"),
        }
        with pytest.raises(Outage):
            calls[call]()
    assert server.sent < 1000


@pytest.mark.parametrize("scheme", URLS)
def test_an_error_without_an_end_takes_no_memory(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(http_body._Floor, "most", float(2**20))
    with trickling(monkeypatch, HEAD % 500 + b"Content-Length: 9999999999\r\n\r\n", bytes(2**16)) as server:
        url = URLS[scheme].replace("PORT", str(server.port))
        with pytest.raises((Outage, UserError)):
            store.store(url).read(url, 0, 100_000, patience=0.0)
    assert server.sent < 2**25


STORED = {
    "gs": b'HTTP/1.1 200 X\r\nContent-Length: 25\r\n\r\n{"kind":"storage#object"}',
    "az": b"HTTP/1.1 201 X\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("scheme", STORED)
def test_a_body_may_take_longer_than_a_connection(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    point_at(monkeypatch, listener.getsockname()[1])
    monkeypatch.setattr("eagleray.storage.rest.CONNECT_TIMEOUT", 2.0)
    monkeypatch.setattr("eagleray.storage.retry.FIRST", 100.0)  # one attempt

    def sip() -> None:
        client, got = listener.accept()[0], 0
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1)
        while got < 2**24 and (data := client.recv(2**16)):
            if (got + len(data)) // 2**19 > got // 2**19:  # one pause, far below the limit, for each piece
                time.sleep(0.1)
            got += len(data)
        client.sendall(STORED[scheme])

    threading.Thread(target=sip, daemon=True).start()
    store.store(f"{scheme}://b/x").write(f"{scheme}://b/x", bytes(2**24))
    listener.close()
