"""The server of `helpers.clouds`, which also speaks S3, and whose answers are changed on their way, as proxies do."""

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate

import pytest
from helpers.clouds import Answer, Cloud, _Handler, point_at

from eagleray.storage import store
from eagleray.storage.s3 import S3Store

PAGE = b"<html><body>Please log in.</body></html>"
ERROR = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>x</Message></Error>"
OTHER_XML = b"<?xml version='1.0'?><ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>"
TIMES = ("", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT")
NUMBERS = ("", "-1", "-5", "many", str(2**62), "9" * 30, "9" * 5000, "1e3", "0x10")
RANGES = ("", "bytes 0-x/y", "bytes 1-2/3", "bytes 9-1/900", "bytes */900", "bytes 0-0/" + "9" * 5000, "lines 0-4/9")
PLACES = ("", "/", "file:///etc/passwd", "http://[", "http://127.0.0.1:1/x", "http://other.invalid/x", "//", "http://")
STATUSES = (200, 203, 204, 206, 226, 300, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 405, 409, 411, 416)
HEADERS = ("ETag", "Date", "Last-Modified", "Content-Length", "Content-Range", "x-goog-generation", "Location", "Range")


@dataclass
class Said:
    """An answer before it is sent; with `chunks`, in chunks and without a length."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: bool = False


Lie = Callable[[Said], None]


class LyingCloud(Cloud):
    """Changes its next `times` answers by `lie`; with `swallow`, nothing that was asked for is done meanwhile."""

    lie: Lie | None = None
    times = 0
    swallow = False


class _Liar(_Handler):
    def languages(self) -> dict[str, Callable[[str, str], None]]:
        return super().languages() | {"s3": self.s3}

    def handle_any(self) -> None:
        cloud = self.server.cloud
        assert isinstance(cloud, LyingCloud)
        if cloud.swallow and cloud.times and self.command in ("PUT", "POST", "DELETE"):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_answer(200, {"Content-Length": "0"}, b"")
        else:
            super().handle_any()

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def send_answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        cloud, said = self.server.cloud, Said(status, headers, body)
        assert isinstance(cloud, LyingCloud)
        if cloud.lie and cloud.times:
            cloud.times -= 1
            cloud.lie(said)
            self.close_connection = True
        if said.chunks:
            said.headers.pop("Content-Length", None)
            said.headers["Transfer-Encoding"] = "chunked"
            said.body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(said.body), said.body) if said.body else b"0\r\n\r\n"
        super().send_answer(said.status, said.headers, said.body)

    def s3(self, _: str, rest: str) -> None:
        bucket, _, key = rest.partition("/")
        files, query = self.server.cloud.files[bucket], self.query
        if "list-type" in query:
            keys, folders, marker = self.page(
                bucket, *(query.get(n, "") for n in ("prefix", "delimiter", "continuation-token"))
            )
            inside = "".join(
                f"<Contents><Key>{k}</Key><Size>{len(files[k].data)}</Size><ETag>{files[k].etag}</ETag></Contents>"
                for k in keys
            ) + "".join(f"<CommonPrefixes><Prefix>{f}</Prefix></CommonPrefixes>" for f in folders)
            more = f"<NextContinuationToken>{marker}</NextContinuationToken>" if marker else ""
            text = f"<IsTruncated>{str(bool(marker)).lower()}</IsTruncated>{more}{inside}"
            raise Answer(200, f"<?xml version='1.0'?><ListBucketResult>{text}</ListBucketResult>".encode())
        file = files.get(key)
        if self.command == "PUT":
            if self.headers.get("If-None-Match") and file:
                raise Answer(412, ERROR.replace(b"SlowDown", b"PreconditionFailed"))
            raise Answer(200, ETag=self.server.cloud.write(bucket, key, self.body).etag)
        if self.command == "DELETE":
            files.pop(key, None)
            raise Answer(204)
        if file is None:
            raise Answer(404, ERROR.replace(b"SlowDown", b"NoSuchKey"))
        self.part(file, ETag=file.etag, Last_Modified=formatdate(file.written, usegmt=True))


LyingCloud.handler = _Liar


@contextmanager
def lying() -> Iterator[LyingCloud]:
    """A server that `eagleray.storage.store` talks to meanwhile, also by s3://."""
    with LyingCloud() as cloud, pytest.MonkeyPatch.context() as patch:
        point_at(patch, cloud.port)
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "mykey")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "mysecret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cloud.port}/s3")
        patch.setitem(store.STORES, "s3", S3Store())
        yield cloud


def draw_lie(drawn: random.Random) -> Lie:
    """Return what changes an answer in one or two ways, none of which leaves a true-looking answer with other bytes."""
    changes = drawn.choices((_status, _header, _page, _field, _cut, _chunks, _length), k=drawn.randint(1, 2))
    if _cut in changes and _chunks in changes:  # whose end would look like that of the file
        changes = [_cut]
    rng = random.Random(drawn.getrandbits(64))  # of the thread of the server

    def lie(said: Said) -> None:
        for change in changes:
            change(said, rng)

    return lie


def _status(said: Said, rng: random.Random) -> None:
    said.status = rng.choice((*STATUSES, 418, 500, 502, 503, 504, 599))
    if 300 <= said.status < 400:
        said.headers["Location"] = rng.choice(PLACES)


def _header(said: Said, rng: random.Random) -> None:
    name = rng.choice([h for h in HEADERS if h in said.headers] or ["Date"])
    values = {"Content-Length": NUMBERS[1:], "Content-Range": RANGES, "Date": TIMES, "Last-Modified": TIMES}
    if rng.random() < 0.5:
        said.headers.pop(name, None)
    else:
        said.headers[name] = rng.choice(values.get(name, ("", '"', "W/", "banana")))


def _page(said: Said, rng: random.Random) -> None:
    """A proxy answers in its own words, with headers of its own."""
    said.body = rng.choice((PAGE, PAGE, b"", ERROR, OTHER_XML, b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000))
    kind = "text/html" if said.body == PAGE or rng.random() < 0.5 else "application/xml"
    said.headers = {"Content-Type": kind, "Content-Length": str(len(said.body))}


def _field(said: Said, rng: random.Random) -> None:
    """A field of a listing, or of what is said of a file, goes or has another kind of value."""
    names = rb"Key|Name|Size|ETag|Etag|Content-Length|IsTruncated|name|size|generation|kind|timeCreated"
    found = list(re.finditer(rb"<(%b)>(.*?)</\1>|\"(%b)\": (\"[^\"]*\")" % (names, names), said.body))
    if not found:
        return
    hit = rng.choice(found)
    if hit[1]:
        new = rng.choice((b"", b"-5", b"many", str(2**62).encode(), b"\0"))
        text = b"" if rng.random() < 0.5 else b"<%b>%b</%b>" % (hit[1], new, hit[1])
    else:
        new = rng.choice((b'"-5"', b"null", b"{}", b"7.5"))
        text = b'"other": %b' % hit[4] if rng.random() < 0.5 else b'"%b": %b' % (hit[3], new)
    said.body = said.body[: hit.start()] + text + said.body[hit.end() :]
    said.headers["Content-Length"] = str(len(said.body))


def _cut(said: Said, rng: random.Random) -> None:
    said.body = said.body[: rng.randint(0, max(len(said.body) - 1, 0))]


def _chunks(said: Said, rng: random.Random) -> None:
    said.chunks = True


def _length(said: Said, rng: random.Random) -> None:
    """More bytes are said than come; fewer would look like the end of a file."""
    said.headers["Content-Length"] = str(len(said.body) + rng.choice((1, 100, 2**40)))
