"""Reads and writes s3:// URLs on any S3-compatible server through boto3, with the usual AWS settings only."""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.storage import error_classes
from eagleray.storage.allowed import Allowed, Right
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import CHANGED, Kind, MissingFile
from eagleray.storage.fork_lock import ForkLock
from eagleray.storage.http_body import READ_TIMEOUT, read_stream
from eagleray.storage.metadata_service import failure
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries

T = TypeVar("T")
Blobs = list[Blob]  # inside the class `list` is the method
CONNECTIONS = 32
PART = 16 * 2**20  # bytes; a larger file is uploaded in parts of this size
MOST_PARTS = 10_000  # S3's limit per file; the parts of larger files are longer
UPLOADS = 4  # parts uploaded at once
UPLOAD = "upload"  # metadata of a file in parts: which upload it is from
VANISHED = "the AWS credentials that were found before are gone"
ANONYMOUS = "; no AWS credentials were found, so the request was anonymous"


class S3Store:
    """Reads and writes s3:// URLs with a client per process; `call_with_retries` repeats requests, boto3 does not."""

    lists = True

    def __init__(self) -> None:
        self._client: tuple[int, Any] = (0, None)
        self._signs = False  # whether a client had credentials
        self._lock = ForkLock()
        self.allowed = Allowed()

    def client(self) -> Any:
        """Return the boto3 client of this process.

        Raises Transient where credentials were found before and none are now: their file may be half written."""
        with self._lock:
            if self._client[0] != os.getpid():
                client = make_client()
                signing = signs(client)
                if self._signs and not signing:
                    raise Transient(VANISHED)
                self._client, self._signs = (os.getpid(), client), signing
            return self._client[1]

    def _renew(self, client: Any) -> None:
        """Let the next request create a new client, unless another thread has replaced this one already."""
        with self._lock:
            if self._client[1] is client:
                self._client = (0, None)

    @property
    def anonymous(self) -> bool:
        """Return whether requests are sent without credentials."""
        client = self._client[1]
        return client is not None and not signs(client)

    def list(self, url: str, start: str = "", *, patience: float = PATIENCE) -> Blobs:
        bucket, key = bucket_and_key(url)
        pages = list(self._pages(url, {"Bucket": bucket, "Prefix": key + start, "Delimiter": "/"}, patience))
        folders = [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])]
        if key and not key.endswith("/") and f"{key}/" in folders:
            return self.list(url + "/", patience=patience)
        blobs = [b for page in pages for b in _blobs(bucket, page)]
        return [b for b in blobs if key.endswith("/") or not key or b.url == url]

    def walk(self, url: str) -> Iterator[Blob]:
        """Yield the files below a folder."""
        bucket, key = bucket_and_key(url.rstrip("/") + "/")
        for page in self._pages(url, {"Bucket": bucket, "Prefix": key.lstrip("/")}):
            yield from _blobs(bucket, page)

    def _pages(self, url: str, query: dict[str, str], patience: float = PATIENCE) -> Iterator[Any]:
        """Yield the pages of a listing. A failure repeats one page only, as there may be thousands."""
        while True:
            page = self._call("list", url, lambda: self.client().list_objects_v2(**query), patience)
            yield page
            if not page["IsTruncated"]:
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        if length == 0:
            return memoryview(b"")
        bucket, key = bucket_and_key(url)
        same = {"IfMatch": tag.removeprefix("s3:")} if tag.startswith("s3:") else {}

        def run() -> memoryview:
            response = self.client().get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{start + length - 1}", **same
            )
            if response["ContentLength"] != length:
                raise UserError(
                    f"{url}: expected {length} bytes from {start} on, "
                    f"but the file ends after {response['ContentLength']} of them"
                )
            return read_body(response["Body"], length)

        return self._call("read", url, run, patience)

    def get(self, url: str) -> bytes:
        bucket, key = bucket_and_key(url)

        def run() -> bytes:
            client = self.client()
            try:
                response = client.get_object(Bucket=bucket, Key=key)
            except client.exceptions.NoSuchKey:
                raise FileNotFoundError(url) from None
            return bytes(read_body(response["Body"], response["ContentLength"]))

        return self._call("read", url, run, PATIENCE)

    def put(self, url: str, source: Path, *, patience: float = PATIENCE) -> None:
        size = source.stat().st_size
        try:
            if size > PART:
                self._put_parts(url, source, max(PART, -(-size // MOST_PARTS)), patience)
            else:
                self._put_whole(url, source, patience)
        except UserError as e:
            raise OSError(str(e)) from None

    def _put_whole(self, url: str, source: Path, patience: float) -> None:
        bucket, key = bucket_and_key(url)
        data = source.read_bytes()
        self._call("write", url, lambda: self.client().put_object(Bucket=bucket, Key=key, Body=data), patience)

    def _put_parts(self, url: str, source: Path, length: int, patience: float) -> None:
        """Upload a large file in parts, a few at a time, so that a failure repeats one part only."""
        bucket, key = bucket_and_key(url)
        name: dict[str, Any] = {"Bucket": bucket, "Key": key}

        def ask(request: Callable[[], T]) -> T:
            return self._call("write", url, request, patience)

        def part(number: int) -> dict[str, Any]:
            data = os.pread(file.fileno(), length, (number - 1) * length)
            answer = ask(lambda: self.client().upload_part(**name, PartNumber=number, Body=data))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        def finish() -> None:
            from botocore.exceptions import ClientError

            try:
                self.client().complete_multipart_upload(**name, MultipartUpload=parts)
            except ClientError as e:
                if e.response["Error"].get("Code") != "NoSuchUpload":
                    raise
                there = self.client().head_object(Bucket=bucket, Key=key)
                if (
                    there["Metadata"].get(UPLOAD) != mark
                ):  # else an earlier attempt, whose answer was lost, made the file
                    raise

        mark = uuid.uuid4().hex
        begun = ask(lambda: self.client().create_multipart_upload(**name, Metadata={UPLOAD: mark}))
        name["UploadId"] = begun["UploadId"]
        try:
            with source.open("rb", buffering=0) as file:
                numbers = range(1, -(-os.fstat(file.fileno()).st_size // length) + 1)
                parts = {"Parts": list(ordered_map(part, numbers, width=UPLOADS))}
            ask(finish)
        except BaseException:
            with contextlib.suppress(UserError, Outage):  # an unfinished upload costs money
                self._call("write", url, lambda: self.client().abort_multipart_upload(**name), 0)
            raise

    def write(self, url: str, data: bytes) -> None:
        bucket, key = bucket_and_key(url)
        try:
            self._call("write", url, lambda: self.client().put_object(Bucket=bucket, Key=key, Body=data), PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def create(self, url: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        bucket, key = bucket_and_key(url)

        def run() -> bool:
            try:
                self.client().put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
            except ClientError as e:
                if e.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412, 501):
                    raise
                unconditional = e.response["ResponseMetadata"]["HTTPStatusCode"] == 501
            else:
                return True
            if unconditional:
                self.client().put_object(Bucket=bucket, Key=key, Body=data)
            with contextlib.suppress(FileNotFoundError):  # an earlier attempt, whose answer was lost, may have made it
                return self.get(url) == data
            return False

        try:
            return self._call("write", url, run, PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def look(self, url: str) -> tuple[bytes, float]:
        bucket, key = bucket_and_key(url)

        def run() -> tuple[bytes, float]:
            client = self.client()
            try:
                response = client.get_object(Bucket=bucket, Key=key)
            except client.exceptions.NoSuchKey:
                raise FileNotFoundError(url) from None
            now = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
            age = (now - response["LastModified"]).total_seconds()
            return bytes(read_body(response["Body"], response["ContentLength"])), age

        return self._call("read", url, run, PATIENCE)

    def delete(self, url: str) -> None:
        bucket, key = bucket_and_key(url)
        self._call("delete", url, lambda: self.client().delete_object(Bucket=bucket, Key=key), PATIENCE)

    def _call(self, right: Right, url: str, run: Callable[[], T], patience: float) -> T:
        """Repeat a request until it succeeds; `error_classes` says which errors may pass.

        Raises UserError for what the user has to change, and Outage after `patience` seconds, each with one line."""
        from boto3.exceptions import Boto3Error
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        passing = (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            HTTPError,
            OSError,
            Boto3Error,
            ResponseParserError,  # an answer that is no XML, as a proxy between may send
        )

        def attempt() -> T:
            client = None
            try:
                client = self.client()
                result = run()
            except (FileNotFoundError, UserError, Transient):
                raise
            except boto.ClientError as e:
                status, said = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), e.response["Error"]
                code, line = said.get("Code", ""), f"{said.get('Code')}: {said.get('Message')}"
                self._give_way(client, (right, url), [code, status], line)
                if code == "NoSuchKey":
                    raise MissingFile(f"{url}: {line}") from None
                changed = status == 412 and not self.anonymous
                raise UserError(f"{url}: {CHANGED if changed else line}{ANONYMOUS * self.anonymous}") from None
            except passing as e:
                if not isinstance(e, boto.SSLError):
                    raise Transient(one_line(e)) from None
                self._give_way(client, (right, url), error_classes.names_of(e), one_line(e))
                raise UserError(f"{url}: {one_line(e)}") from None
            except boto.BotoCoreError as e:
                self._give_way(client, (right, url), error_classes.names_of(e), one_line(e))
                raise UserError(f"{url}: {one_line(e)}") from None
            except RuntimeError as e:
                if "refreshed credentials are still expired" not in str(e):  # botocore has no class for it
                    raise
                self._give_way(client, (right, url), ["ExpiredToken"], one_line(e))
                raise
            self.allowed.add(right, url)
            return result

        return call_with_retries(url, attempt, patience=patience)

    def _give_way(self, client: Any, what: "tuple[Right, str]", names: Iterable[str | int], line: str) -> None:
        """Raise Transient for an error that may pass, after dropping a client whose credentials were refused."""
        kind = error_classes.kind_of(*names)
        if error_classes.passes(kind, allowed_before=self.allowed.has(*what)):
            if kind is not Kind.WAIT:
                self._renew(client)
            raise Transient(line) from None


def make_client() -> Any:
    """Create a client from the environment's settings. It is anonymous, as for public buckets, where the chain of
    credentials has none; Transient is raised when a metadata service that may have some fails."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    session = boto3.session.Session()
    region = session.region_name or os.environ.get("AWS_REGION")
    credentials = session.get_credentials()
    if credentials is None and (problem := failure(session._session.get_config_variable)):
        raise Transient(problem)
    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=10,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=CONNECTIONS,
        signature_version=None if credentials else UNSIGNED,
    )
    try:
        return session.client("s3", config=config, region_name=region)
    except ValueError as e:  # an endpoint without http://, say
        raise UserError(f"s3://: {e}") from None


def _blobs(bucket: str, page: Any) -> Blobs:
    """Return the files of a page of a listing."""
    return [
        Blob(f"s3://{bucket}/{o['Key']}", o["Size"], "s3:" + o["ETag"].strip('"')) for o in page.get("Contents", [])
    ]


def signs(client: Any) -> bool:
    """Return whether a client has credentials to sign its requests with."""
    from botocore import UNSIGNED

    return client.meta.config.signature_version is not UNSIGNED


def read_body(body: Any, length: int) -> memoryview:
    """Read the body of a response. Raises Transient when it is too short or the transfer too slow."""
    return read_stream(body._raw_stream, length)


def bucket_and_key(url: str) -> tuple[str, str]:
    """Split an s3:// URL into bucket and key. Raises UserError when it contains credentials."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:  # a secret key may have slashes, so the @ may come later
        raise UserError("s3://: credentials do not belong in a URL; set AWS_ACCESS_KEY_ID or AWS_PROFILE")
    return bucket, key


def one_line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
