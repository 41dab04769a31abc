"""Bytes of a URL: local paths, file:// and s3:// (any S3-compatible endpoint, by the usual AWS settings)."""

import fnmatch
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagleray.errors import UserError

EDGE = 4096  # bytes at both ends of a local file that tell whether it is still the same


@dataclass(frozen=True, slots=True)
class Blob:
    """One stored file."""

    url: str
    size: int  # bytes
    tag: str = ""  # s3: the ETag; local files get theirs from `Store.tag`, when it is needed


class Store(Protocol):
    """What the data plane needs of a place where bytes are. Every method raises UserError naming the URL."""

    def list(self, url: str) -> list[Blob]:
        """The files directly in a folder, or the one file."""

    def tag(self, blob: Blob) -> str:
        """Changes when the content does."""

    def read(self, url: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`."""

    def get(self, url: str) -> bytes:
        """The whole file; raises FileNotFoundError when there is none."""

    def put(self, url: str, source: Path) -> None:
        """Store a local file; readers see the old content or the new. Raises OSError where nothing can be written."""


class LocalStore:
    def list(self, url: str) -> list[Blob]:
        path = local(url)
        try:
            files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
            return [Blob(str(p), p.stat().st_size) for p in files]
        except OSError as e:
            raise UserError(f"{url}: cannot be read: {e.strerror}") from None

    def tag(self, blob: Blob) -> str:
        try:
            with local(blob.url).open("rb") as f:
                crc = zlib.crc32(f.read(EDGE))
                f.seek(max(blob.size - EDGE, 0))
                return f"crc:{zlib.crc32(f.read(EDGE), crc):08x}"
        except OSError as e:
            raise UserError(f"{blob.url}: cannot be read: {e.strerror}") from None

    def read(self, url: str, start: int, length: int) -> bytes:
        try:
            with local(url).open("rb") as f:
                f.seek(start)
                data = f.read(length)
        except OSError as e:
            raise UserError(f"{url}: cannot be read: {e.strerror}") from None
        if len(data) != length:
            raise UserError(f"{url}: {length} bytes expected at {start}, the file ends after {len(data)} of them")
        return data

    def get(self, url: str) -> bytes:
        try:
            return local(url).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as e:
            raise UserError(f"{url}: cannot be read: {e.strerror}") from None

    def put(self, url: str, source: Path) -> None:
        path = local(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            shutil.copyfile(source, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


class S3Store:
    """boto3 with time-outs and retries; a client belongs to the process that made it."""

    def __init__(self) -> None:
        self._client: tuple[int, Any] = (0, None)

    def client(self) -> Any:
        if self._client[0] != os.getpid():
            import boto3
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "total_max_attempts": 6},
                connect_timeout=10,
                read_timeout=30,
                max_pool_connections=32,
            )
            try:
                self._client = (os.getpid(), boto3.session.Session().client("s3", config=config))
            except ValueError as e:  # an endpoint without http://, say
                raise UserError(f"s3://: {e}") from None
        return self._client[1]

    def list(self, url: str) -> list[Blob]:
        bucket, key = split(url)

        def run() -> list[Blob]:
            asked = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key, Delimiter="/")
            pages = list(asked)  # each walk through it would ask again
            found = [(o["Key"], o["Size"], o["ETag"].strip('"')) for page in pages for o in page.get("Contents", [])]
            folders = [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])]
            if key and not key.endswith("/") and f"{key}/" in folders:
                return self.list(url + "/")
            inside = [f for f in found if key.endswith("/") or not key or f[0] == key]
            return [Blob(f"s3://{bucket}/{k}", size, f"s3:{tag}") for k, size, tag in inside]

        return self._call(url, run)

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        return self._body(url, length, Range=f"bytes={start}-{start + length - 1}")

    def get(self, url: str) -> bytes:
        if url not in [b.url for b in self.list(url)]:
            raise FileNotFoundError(url)
        return self._body(url, None)

    def _body(self, url: str, length: int | None, **options: str) -> bytes:
        """An object or a part of it. A transfer that breaks off is begun anew: boto3 does so for the answer only."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        bucket, key = split(url)
        for _ in range(4):
            got = self._call(url, lambda: self.client().get_object(Bucket=bucket, Key=key, **options))
            try:
                data = got["Body"].read()
            except (BotoCoreError, HTTPError) as e:
                problem = " ".join(str(e).split())
            else:
                if length in (None, len(data)):
                    return data  # type: ignore[no-any-return]
                problem = f"{length} bytes expected, got {len(data)}"
        raise UserError(f"{url}: {problem}")

    def put(self, url: str, source: Path) -> None:
        bucket, key = split(url)
        try:
            self._call(url, lambda: self.client().upload_file(str(source), bucket, key))
        except UserError as e:
            raise OSError(str(e)) from None

    def _call(self, url: str, run: Callable[[], Any]) -> Any:
        """A request, which boto3 repeats where that may help, with any failure as one line."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return run()
        except ClientError as e:
            raise UserError(f"{url}: {e.response['Error'].get('Code')}: {e.response['Error'].get('Message')}") from None
        except (BotoCoreError, Boto3Error) as e:
            raise UserError(f"{url}: {' '.join(str(e).split())}") from None


_LOCAL, _S3 = LocalStore(), S3Store()


def store(url: str) -> Store:
    """The store that a URL belongs to. Raises UserError for a scheme that is not known."""
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme not in ("file", "s3"):
        raise UserError(f"{url}: unknown scheme {scheme!r}; known are plain paths, file:// and s3://")
    return _S3 if scheme == "s3" else _LOCAL


def local(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def split(url: str) -> tuple[str, str]:
    """Bucket and key of an s3:// URL."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


def parent(url: str) -> str:
    return url.rpartition("/")[0]


def absolute(url: str) -> str:
    """The URL with a local path made absolute: a worker's working folder is not the user's."""
    path = url.removeprefix("file://")
    return url if "://" in path else os.path.abspath(os.path.expanduser(path))


def put_bytes(url: str, data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as f:
        f.write(data)
        f.flush()
        store(url).put(url, Path(f.name))


def shards(urls: str | Sequence[str]) -> list[Blob]:
    """The tar files that folders, globs and brace patterns stand for, in order of their URLs, each once.

    Raises UserError when a pattern matches no tar file.
    """
    found: dict[str, Blob] = {}
    for pattern in [urls] if isinstance(urls, str) else urls:
        for url in braces(absolute(pattern)):
            folder, _, name = url.rpartition("/")
            if any(c in folder for c in "*?["):
                raise UserError(f"{pattern}: a wildcard may stand in the file name only")
            glob = any(c in name for c in "*?[")
            listed = store(url).list(folder if glob and not folder.startswith("s3:") else folder + "/" if glob else url)
            picked = [b for b in listed if fnmatch.fnmatchcase(b.url.rpartition("/")[2], name)] if glob else listed
            tars = [b for b in picked if b.url.endswith(".tar")]
            if not tars:
                hint = "; `eagleray shard` makes them from a folder of images" if not url.startswith("s3:") else ""
                raise UserError(f"{pattern}: no .tar shards there{hint}")
            found |= {b.url: b for b in tars}
    if not found:
        raise UserError("no shards are given")
    return [found[url] for url in sorted(found)]


def braces(pattern: str) -> Iterator[str]:
    """Every string that `{a,b}` and `{000..012}` in a pattern stand for, as in a shell."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        yield pattern
        return
    head, tail = pattern[: match.start()], pattern[match.end() :]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span:
        a, b = sorted(span.groups(), key=int)
        width = max(len(a), len(b)) if re.match(r"0\d", a) or re.match(r"0\d", b) else 0
        middles = [str(i).zfill(width) for i in range(int(a), int(b) + 1)]
    else:
        middles = match[1].split(",")
    for middle in middles:
        yield from braces(head + middle + tail)
