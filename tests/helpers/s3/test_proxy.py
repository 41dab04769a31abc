"""The proxy does what it is told to, and counts it."""

import http.client
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from helpers.s3.proxy import Faults, Proxy

BODY = bytes(range(256)) * 1000


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.send_header("X-Host", self.headers["Host"])
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else BODY)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        got = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()  # without a length, so that the end is the end of the connection
        self.wfile.write(got[::-1])
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as upstream:
        Thread(target=upstream.serve_forever, args=(0.02,), daemon=True).start()
        with Proxy(upstream.server_address[1]) as proxy:
            yield proxy
        upstream.shutdown()


def ask(proxy: Proxy, method: str = "GET", body: bytes | None = None, *, timeout: float = 60) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        connection.request(method, "/bucket/key?part=1", body)
        answer = connection.getresponse()
        assert answer.getheader("X-Host") in (None, f"127.0.0.1:{proxy.port}")
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_passes_on_and_counts(proxy: Proxy) -> None:
    assert ask(proxy) == (200, BODY)
    assert ask(proxy, "HEAD") == (200, b"")
    assert ask(proxy, "PUT", b"abc") == (200, b"cba")
    assert proxy.requests == {"/bucket/key": 3}
    assert proxy.bytes == {"/bucket/key": len(BODY) + 3}
    proxy.clear()
    assert not proxy.requests
    assert not proxy.bytes


def test_one_connection_serves_many_requests(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    for faults in (Faults(), Faults(refuse=1.0), Faults()):
        proxy.faults = faults
        connection.request("GET", "/x")
        socket, answer = connection.sock, connection.getresponse()
        assert (answer.read() == BODY) == (faults == Faults())
        assert connection.sock is socket
    connection.close()


def test_it_refuses(proxy: Proxy) -> None:
    proxy.faults = Faults(refuse=0.2)
    answers = [ask(proxy) for _ in range(100)]
    refused = [body for status, body in answers if status == 503]
    assert 10 <= len(refused) <= 30
    assert proxy.done == {"refuse": len(refused)}
    assert all(b"<Code>SlowDown</Code>" in body for body in refused)


def test_it_breaks_off_as_often_as_it_should(proxy: Proxy) -> None:
    proxy.faults = Faults(cut=1.0, most=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy)
    assert caught.value.partial == BODY[: len(BODY) // 2]
    assert ask(proxy) == (200, BODY)
    assert proxy.done == {"cut": 1}
    assert proxy.bytes["/bucket/key"] == len(BODY) * 3 // 2


def test_it_resets(proxy: Proxy) -> None:
    proxy.faults = Faults(reset=1.0)
    with pytest.raises(ConnectionResetError):
        ask(proxy)


def test_it_stalls(proxy: Proxy) -> None:
    proxy.faults = Faults(stall=1.0)
    with pytest.raises(TimeoutError):
        ask(proxy, timeout=1)


def test_it_throttles(proxy: Proxy) -> None:
    proxy.faults = Faults(rate=4 * len(BODY))
    began = time.monotonic()
    assert ask(proxy) == ask(proxy) == (200, BODY)
    assert time.monotonic() - began > 0.4


def test_a_server_that_is_down_is_an_end_of_the_connection(proxy: Proxy) -> None:
    proxy.upstream = 9
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask(proxy)
