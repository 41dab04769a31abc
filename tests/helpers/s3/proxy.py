"""A proxy on loopback in front of an S3 server that does to requests what bad networks and busy stores do.

with Proxy(port_of_the_server) as proxy:
    proxy.faults = Faults(refuse=0.2)  # from now on
"""

import http.client
import io
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECE = 16 * 2**10  # bytes sent at a time
ONE_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}  # headers of one connection
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares from 0 to 1; where in the sequence of requests they fall is the seed's."""

    refuse: float = 0.0  # of requests: answered 503 SlowDown
    cut: float = 0.0  # of bodies that are fetched: the connection is closed in the middle
    stall: float = 0.0  # of these: nothing comes after the middle until the client goes away
    reset: float = 0.0  # of these: the connection is reset in the middle
    most: int | None = None  # faults in all; None: no end
    rate: float | None = None  # bytes per second of all bodies together; None: as fast as they come


class Proxy:
    """Listens inside its `with`. What is counted is by path, without the query."""

    def __init__(self, upstream: int, *, seed: int = 0) -> None:
        self.upstream, self.faults = upstream, Faults()
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # of bodies that were passed on
        self.done: Counter[str] = Counter()  # faults, by their names
        self.ended = threading.Event()
        self._lock, self._random = threading.Lock(), random.Random(seed)
        self._free = 0.0  # when the next byte may go
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def clear(self) -> None:
        """Count from zero."""
        with self._lock:
            for counter in (self.requests, self.bytes, self.done):
                counter.clear()

    def asked(self, path: str) -> None:
        with self._lock:
            self.requests[path] += 1

    def passed(self, path: str, count: int) -> None:
        with self._lock:
            self.bytes[path] += count

    def draw(self, *names: str) -> str:
        """The fault that is due, or nothing."""
        with self._lock:
            chance = self._random.random()
            if self.faults.most is not None and self.done.total() >= self.faults.most:
                return ""
            for name in names:
                chance -= getattr(self.faults, name)
                if chance < 0:
                    self.done[name] += 1
                    return name
            return ""

    def throttle(self, count: int) -> None:
        """Wait until so many bytes may go."""
        rate = self.faults.rate
        if rate:
            with self._lock:
                self._free = max(self._free, time.monotonic()) + count / rate
                pause = self._free - time.monotonic()
            self.ended.wait(pause)


class _Server(ThreadingHTTPServer):
    proxy: Proxy
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client or a server that goes away is what all this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle_any(self) -> None:
        proxy, path = self.server.proxy, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy.asked(path)
        if proxy.draw("refuse"):
            self._head(503, {"Content-Type": "application/xml"}, len(SLOW_DOWN))
            self.wfile.write(b"" if self.command == "HEAD" else SLOW_DOWN)
            return
        connection = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=120)
        try:
            self._pass_on(path, self._ask(connection, body))
        finally:
            connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ONE_HOP:
                connection.putheader(name, value)  # the host too, as it is part of what was signed
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse()

    def _pass_on(self, path: str, answer: http.client.HTTPResponse) -> None:
        source: io.BufferedIOBase = answer
        said = answer.getheader("Content-Length")
        if said is None:
            whole = answer.read()
            source, said = io.BytesIO(whole), str(len(whole))
        self._head(answer.status, dict(answer.getheaders()), int(said))
        if self.command != "HEAD":
            self._body(path, source, int(said))

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ONE_HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _body(self, path: str, source: io.BufferedIOBase, length: int) -> None:
        proxy = self.server.proxy
        fault = proxy.draw("cut", "stall", "reset") if self.command == "GET" and length else ""
        left = length // 2 if fault else length
        while left:
            piece = source.read(min(PIECE, left))
            if not piece:  # the server broke off
                fault = "cut"
                break
            proxy.throttle(len(piece))
            proxy.passed(path, len(piece))  # before the client can know of them
            self.wfile.write(piece)
            left -= len(piece)
        if fault:
            self._break_off(fault)

    def _break_off(self, fault: str) -> None:
        self.close_connection = True
        if fault == "stall":
            while not self.server.proxy.ended.is_set() and not select.select([self.connection], [], [], 0.1)[0]:
                pass
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            socket.close(self.connection.detach())  # at once: the server's own way to close says goodbye first

    def log_message(self, *_: Any) -> None:
        pass
