"""A server on loopback that speaks the parts of Google Cloud Storage, Azure Blob Storage and of a web server that
Eagleray uses. It keeps its files in memory; `helpers.s3.proxy` does to its answers what bad networks do.

with Cloud() as cloud:
    point_at(patch, cloud.port)
"""

import hashlib
import json
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

ACCOUNT = "devstoreaccount1"
# Of Azurite; it is public.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PAGE = 5  # files of a page of a listing


@dataclass
class File:
    data: bytes
    generation: int
    written: float = field(default_factory=time.time)

    @property
    def etag(self) -> str:
        return f'"{self.generation}-{hashlib.md5(self.data).hexdigest()}"'


class Cloud:
    """Listens inside its `with`. Buckets and containers are the same thing, by name; a web server's is `web`."""

    handler: type["_Handler"]

    def __init__(self) -> None:
        self.files: dict[str, dict[str, File]] = {"web": {}}
        self.clock = 0.0  # seconds that this server is ahead
        self.forced: deque[tuple[int, str]] = deque()  # statuses and codes of the next answers
        self.lost: deque[str] = deque()  # methods of which the next request is done, and not answered
        self.tokens, self.sessions = 0, dict[str, bytearray]()
        self.signed = False  # whether Google's requests need the newest token
        self.asked: Counter[str] = Counter()  # requests by method
        self.blocks: dict[tuple[str, str, str], bytes] = {}
        self.lock, self.generation = threading.Lock(), 1_700_000_000_000_000
        self._server = _Server(("127.0.0.1", 0), self.handler)
        self._server.cloud = self
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> "Cloud":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="cloud", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write(self, bucket: str, key: str, data: bytes) -> File:
        with self.lock:
            self.generation += 1
            file = self.files[bucket][key] = File(data, self.generation, time.time() + self.clock)
            return file

    def serve(self, folder: Path, bucket: str = "web", below: str = "") -> None:
        """Take all files of a folder."""
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            self.write(bucket, f"{below}{path.relative_to(folder)}", path.read_bytes())


class _Server(ThreadingHTTPServer):
    cloud: Cloud
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error."""


class Answer(Exception):
    """What a request is answered with."""

    def __init__(self, status: int, body: bytes = b"", **headers: str) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, {k.replace("_", "-"): v for k, v in headers.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle_any(self) -> None:
        cloud, parts = self.server.cloud, urlsplit(self.path)
        cloud.asked[self.command] += 1
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        first, _, rest = parts.path[1:].partition("/")
        self.speaks = self.languages().get(first, self.web)
        try:
            if parts.path == "/token":
                self.token()
            if parts.path == "/identity":
                self.identity()
            if cloud.forced:
                self.error(*cloud.forced.popleft())
            if first in ("storage", "upload") and cloud.signed:
                self.check_token()
            self.speaks(first, rest)
        except Answer as e:
            answer = e
        if cloud.lost and cloud.lost[0] == self.command:
            cloud.lost.popleft()
            self.close_connection = True
            return
        sent = {"Content-Length": str(len(answer.body)), "Date": formatdate(time.time() + cloud.clock, usegmt=True)}
        self.send_answer(answer.status, sent | answer.headers, answer.body)

    def send_answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def languages(self) -> dict[str, Callable[[str, str], None]]:
        """Return what is spoken, by the first part of paths."""
        return {ACCOUNT: self.azure, "storage": self.google, "upload": self.upload, "session": self.piece}

    def error(self, status: int, code: str = "") -> None:
        if self.speaks == self.azure:
            body = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>It is {code}.\nRequestId:1</Message></Error>"
            )
            raise Answer(status, body.encode(), **{"x-ms-error-code": code})
        said = {"error": {"code": status, "message": f"It is {code}.", "errors": [{"reason": code}]}}
        raise Answer(status, json.dumps(said).encode())

    def bucket(self, name: str) -> dict[str, File]:
        if name not in self.server.cloud.files:
            if self.speaks == self.azure:
                self.error(404, "ContainerNotFound")
            said = {"error": {"code": 404, "message": "The specified bucket does not exist.", "errors": []}}
            raise Answer(404, json.dumps(said).encode())
        return self.server.cloud.files[name]

    def part(self, file: File, **headers: str) -> None:
        """Answer with the bytes that Range names, or all."""
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not span:
            raise Answer(200, file.data, **headers)
        first, last = int(span[1]), min(int(span[2]), len(file.data) - 1)
        if first >= len(file.data):
            self.error(416, "InvalidRange")
        raise Answer(
            206, file.data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(file.data)}", **headers
        )

    def page(
        self, bucket: str, prefix: str, delimiter: str, marker: str, first: str = ""
    ) -> tuple[list[str], list[str], str]:
        """Return keys, folders and where the next page begins."""
        keys = sorted(k for k in self.bucket(bucket) if k.startswith(prefix) and k >= max(marker, first))
        page, rest = keys[:PAGE], keys[PAGE:]
        below = {k: k[len(prefix) :].partition(delimiter) for k in page} if delimiter else {}
        folders = sorted({f"{prefix}{below[k][0]}/" for k in below if below[k][1]})
        return [k for k in page if k not in below or not below[k][1]], folders, rest[0] if rest else ""

    # Google Cloud Storage

    def token(self) -> None:
        self.server.cloud.tokens += 1
        said = {"access_token": f"t{self.server.cloud.tokens}", "expires_in": 3600, "token_type": "Bearer"}
        raise Answer(200, json.dumps(said).encode(), Content_Type="application/json")

    def check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer t{self.server.cloud.tokens}":
            self.error(401, "authError")

    def google(self, _: str, rest: str) -> None:
        _, _, bucket, _, *key = rest.split("/")
        files = self.bucket(bucket)
        if not key:
            names, folders, marker = self.page(
                bucket, *(self.query.get(n, "") for n in ("prefix", "delimiter", "pageToken", "startOffset"))
            )
            items = [
                {"name": n, "size": str(len(files[n].data)), "generation": str(files[n].generation)} for n in names
            ]
            said = {"kind": "storage#objects", "items": items, "prefixes": folders, "nextPageToken": marker}
            raise Answer(200, json.dumps(said).encode())
        file = files.get(unquote(key[0]))
        if file is None:
            raise Answer(404, f"No such object: {bucket}/{key[0]}".encode())
        if self.query.get("ifGenerationMatch", str(file.generation)) != str(file.generation):
            self.error(412, "conditionNotMet")
        if self.command == "DELETE":
            del files[unquote(key[0])]
            raise Answer(204)
        if self.query.get("alt") == "media":
            self.part(file, **{"x-goog-generation": str(file.generation)})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(file.written)) + f".{int(file.written % 1 * 1000):03d}Z"
        said = {"kind": "storage#object", "generation": str(file.generation), "timeCreated": when}
        raise Answer(200, json.dumps(said).encode())

    def upload(self, _: str, rest: str) -> None:
        bucket, cloud = rest.split("/")[3], self.server.cloud
        files, key = self.bucket(bucket), self.query["name"]
        if self.query.get("ifGenerationMatch") == "0" and key in files:
            self.error(412, "conditionNotMet")
        if self.query["uploadType"] == "resumable":
            cloud.sessions[f"{bucket}/{key}"] = bytearray()
            raise Answer(200, Location=f"http://{self.headers['Host']}/session/{quote(f'{bucket}/{key}')}")
        cloud.write(bucket, key, self.body)
        raise Answer(200, b'{"kind": "storage#object"}')

    def piece(self, _: str, rest: str) -> None:
        cloud, rest = self.server.cloud, unquote(rest)
        if rest not in cloud.sessions:
            self.error(404, "notFound")
        if self.command == "DELETE":
            del cloud.sessions[rest]
            raise Answer(499)
        data, said = cloud.sessions[rest], self.headers["Content-Range"]
        first, size = re.fullmatch(r"bytes (?:\*|(?P<first>\d+)-\d+)/(?P<size>\d+)", said).group("first", "size")
        if first is not None:
            assert int(first) == len(data), "not where the upload is"
            data += self.body
        if len(data) == int(size):
            bucket, _, key = rest.partition("/")
            if key not in cloud.files[bucket] or cloud.files[bucket][key].data != data:
                cloud.write(bucket, key, bytes(data))
            raise Answer(200, b'{"kind": "storage#object"}')
        raise Answer(308, **({"Range": f"bytes=0-{len(data) - 1}"} if data else {}))

    # Azure Blob Storage

    def azure(self, _: str, rest: str) -> None:
        container, _, key = unquote(rest).partition("/")
        files = self.bucket(container)
        proofs = (f"SharedKey {ACCOUNT}:", "Bearer identity")
        if "sig" not in self.query and not self.headers.get("Authorization", "").startswith(proofs):
            self.error(404, "ResourceNotFound")
        if not key:
            names, folders, marker = self.page(
                container, *(self.query.get(n, "") for n in ("prefix", "delimiter", "marker"))
            )
            blobs = "".join(
                f"<Blob><Name>{escape(n)}</Name><Properties><Content-Length>{len(files[n].data)}</Content-Length>"
                f"<Etag>{files[n].etag[1:-1]}</Etag></Properties></Blob>"
                for n in names
            ) + "".join(f"<BlobPrefix><Name>{escape(f)}</Name></BlobPrefix>" for f in folders)
            text = f"<Blobs>{blobs}</Blobs><NextMarker>{escape(marker)}</NextMarker>"
            raise Answer(200, f"\ufeff<EnumerationResults>{text}</EnumerationResults>".encode())
        file = files.get(key)
        if self.command == "PUT":
            self.put_blob(container, key, file)
        if file is None:
            self.error(404, "BlobNotFound")
        assert file
        if self.headers.get("If-Match", file.etag) != file.etag:
            self.error(412, "ConditionNotMet")
        if self.command == "DELETE":
            del files[key]
            raise Answer(202)
        self.part(file, ETag=file.etag, Last_Modified=formatdate(file.written, usegmt=True))

    def put_blob(self, container: str, key: str, file: File | None) -> None:
        cloud, data = self.server.cloud, self.body
        if self.query.get("comp") == "block":
            cloud.blocks[container, key, self.query["blockid"]] = data
            raise Answer(201)
        if self.query.get("comp") == "blocklist":
            names = re.findall(r"<Latest>(.*?)</Latest>", data.decode())
            data = b"".join(cloud.blocks.pop((container, key, name)) for name in names)
        elif self.headers.get("If-None-Match") == "*" and file:
            self.error(409, "BlobAlreadyExists")
        raise Answer(201, ETag=cloud.write(container, key, data).etag)

    def identity(self) -> None:
        """Answer as the service that gives tokens to what runs on Azure's machines."""
        self.server.cloud.tokens += 1
        said = {"access_token": "identity", "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"}
        raise Answer(
            200, json.dumps(said | {"resource": self.query["resource"]}).encode(), Content_Type="application/json"
        )

    # A web server: /web/NAME as it should be, and the same files with one thing amiss

    def web(self, kind: str, key: str) -> None:
        file = self.server.cloud.files["web"].get(unquote(key))
        if file is None:
            raise Answer(404)
        if kind == "moved":
            raise Answer(302, Location=f"http://{self.headers['Host']}/web/{key}")
        if kind == "whole":
            raise Answer(200, file.data, ETag=file.etag)
        when = formatdate(file.written, usegmt=True)
        if kind == "dated":
            self.part(file, Last_Modified=when)
        if kind == "weak":
            self.part(file, ETag=f"W/{file.etag}")
        if kind == "web" and self.headers.get("If-Match", file.etag) != file.etag:
            raise Answer(412)
        self.part(file, ETag=file.etag, Last_Modified=when)

    def log_message(self, *_: Any) -> None:
        pass


Cloud.handler = _Handler


def point_at(patch: pytest.MonkeyPatch, port: int) -> None:
    """Let the clouds' usual settings name a server on loopback, and nothing of this machine's."""
    from eagleray.storage import store
    from eagleray.storage.az import AzStore
    from eagleray.storage.gs import GsStore
    from eagleray.storage.https import HttpsStore

    for name in [n for n in os.environ if n.startswith(("GOOGLE_", "AZURE_", "STORAGE_", "IDENTITY_"))]:
        patch.delenv(name)
    patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    patch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}",
    )
    patch.setenv("no_proxy", "127.0.0.1")
    for scheme, kind in {"gs": GsStore, "az": AzStore, "http": HttpsStore}.items():
        patch.setitem(store.STORES, scheme, kind())


@contextmanager
def running() -> Iterator[Cloud]:
    """A server that `eagleray.storage.store` talks to meanwhile."""
    with Cloud() as cloud, pytest.MonkeyPatch.context() as patch:
        point_at(patch, cloud.port)
        yield cloud
