"""Reads and writes s3:// URLs on any S3-compatible server through boto3, with the usual AWS settings only."""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from eagleray.base.errors import Outage, UserError
from eagleray.storage import error_classes
from eagleray.storage.allowed import Allowed, Right
from eagleray.storage.answers import check_file, check_part, check_tag, understood
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import CHANGED, Kind, MissingFile
from eagleray.storage.fork_lock import ForkLock
from eagleray.storage.http_body import READ_TIMEOUT, body_of, read_stream, with_floor
from eagleray.storage.listing import Listing, Page
from eagleray.storage.metadata_service import failure
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.retry import PATIENCE, Transient, call_with_retries

T = TypeVar("T")
CONNECTIONS = 32
PART = 16 * 2**20  # bytes; a larger file is uploaded in parts of this size
MOST_PARTS = 10_000  # S3's limit per file; the parts of larger files are longer
UPLOADS = 4  # parts uploaded at once
UPLOAD = "upload"  # metadata of a file in parts: which upload it is from
VANISHED = "the AWS credentials that were found before are gone"
ANONYMOUS = "; no AWS credentials were found, so the request was anonymous"


class S3Store(Listing):
    """Reads and writes s3:// URLs with a client per process; `call_with_retries` repeats requests, boto3 does not."""

    scheme = "s3"
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

    def _split(self, url: str) -> tuple[str, str]:
        return bucket_and_key(url)

    def _ask(self, operation: str, **request: Any) -> Mapping[str, Any]:
        """Send a request, and return the fields of the answer. Raises Transient where botocore cannot read them."""
        send = getattr(self.client(), operation)
        with understood("an answer"):
            return send(**request)  # type: ignore[no-any-return]

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str) -> Page:
        query = {"Prefix": prefix, "Delimiter": delimiter, "ContinuationToken": marker}
        page = self._ask("list_objects_v2", Bucket=bucket, **{k: v for k, v in query.items() if v})
        blobs = [
            Blob(f"s3://{bucket}/{o['Key']}", o["Size"], "s3:" + o["ETag"].strip('"')) for o in page.get("Contents", [])
        ]
        folders = [p["Prefix"] for p in page.get("CommonPrefixes", [])]
        more, marker = page["IsTruncated"], page.get("NextContinuationToken", "")
        if more != bool(marker):
            raise Transient(f"a listing that says truncated: {more}, and where it goes on: {marker[:100]!r}")
        return Page(blobs, folders, marker)

    def tag(self, blob: Blob) -> str:
        return blob.tag

    def read(self, url: str, start: int, length: int, *, tag: str = "", patience: float = PATIENCE) -> memoryview:
        if length == 0:
            return memoryview(b"")
        bucket, key = bucket_and_key(url)
        same = {"IfMatch": tag.removeprefix("s3:")} if tag.startswith("s3:") else {}

        def run() -> memoryview:
            span = f"bytes={start}-{start + length - 1}"
            answer = self._ask("get_object", Bucket=bucket, Key=key, Range=span, **same)
            status, headers = _head(answer)
            try:
                check_part(url, start, length, status, headers)
                check_tag(tag.removeprefix("s3:"), headers.get("ETag", "") if same else "")
            except BaseException:
                answer["Body"].close()
                raise
            return read_body(answer["Body"], length)

        return self._call("read", url, run, patience)

    def get(self, url: str) -> bytes:
        return self._call("read", url, lambda: self._whole(url)[0], PATIENCE)

    def _whole(self, url: str) -> tuple[bytes, Mapping[str, Any]]:
        """Return a file and the other fields of the answer. Raises FileNotFoundError when there is none."""
        bucket, key = bucket_and_key(url)
        try:
            answer = self._ask("get_object", Bucket=bucket, Key=key)
        except self.client().exceptions.NoSuchKey:
            raise FileNotFoundError(url) from None
        return check_file(body_of(answer["Body"]._raw_stream), answer.get("ETag", "")), answer

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
        self._call("write", url, lambda: self._send(bucket, key, data), patience)

    def _send(self, bucket: str, key: str, data: bytes, **condition: str) -> None:
        """Send a file in one request. Raises Transient for an answer that is not the store's."""
        answer = self._ask("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        if "ETag" not in answer:
            raise Transient("an answer that does not name the version that was written")

    def _put_parts(self, url: str, source: Path, length: int, patience: float) -> None:
        """Upload a large file in parts, a few at a time, so that a failure repeats one part only."""
        bucket, key = bucket_and_key(url)
        name: dict[str, Any] = {"Bucket": bucket, "Key": key}

        def ask(field: str, operation: str, **more: Any) -> str:
            """Send a request, and return a field of the answer."""

            def run() -> str:
                with understood("an answer"):
                    return str(self._ask(operation, **name, **more)[field])

            return self._call("write", url, run, patience)

        def part(number: int) -> dict[str, Any]:
            data = os.pread(file.fileno(), length, (number - 1) * length)
            return {"PartNumber": number, "ETag": ask("ETag", "upload_part", PartNumber=number, Body=data)}

        def finish() -> None:
            from botocore.exceptions import ClientError

            try:
                with understood("an answer"):
                    self._ask("complete_multipart_upload", **name, MultipartUpload=parts)["ETag"]
            except ClientError as e:
                if _refusal(e)[1] != "NoSuchUpload":
                    raise
                there = self._ask("head_object", Bucket=bucket, Key=key)
                # An earlier attempt, whose answer was lost, may have made the file.
                if there.get("Metadata", {}).get(UPLOAD) != mark:
                    raise

        mark = uuid.uuid4().hex
        name["UploadId"] = ask("UploadId", "create_multipart_upload", Metadata={UPLOAD: mark})
        try:
            with source.open("rb", buffering=0) as file:
                numbers = range(1, -(-os.fstat(file.fileno()).st_size // length) + 1)
                parts = {"Parts": list(ordered_map(part, numbers, width=UPLOADS))}
            self._call("write", url, finish, patience)
        except BaseException:
            with contextlib.suppress(UserError, Outage):  # an unfinished upload costs money
                self._call("write", url, lambda: self.client().abort_multipart_upload(**name), 0)
            raise

    def write(self, url: str, data: bytes) -> None:
        bucket, key = bucket_and_key(url)
        try:
            self._call("write", url, lambda: self._send(bucket, key, data), PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def create(self, url: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        bucket, key = bucket_and_key(url)

        def run() -> bool:
            try:
                self._send(bucket, key, data, IfNoneMatch="*")
            except ClientError as e:
                if (status := _refusal(e)[0]) not in (409, 412, 501):
                    raise
                unconditional = status == 501
            else:
                return True
            if unconditional:
                self._send(bucket, key, data)
            with contextlib.suppress(FileNotFoundError):  # an earlier attempt, whose answer was lost, may have made it
                return self.get(url) == data
            return False

        try:
            return self._call("write", url, run, PATIENCE)
        except UserError as e:
            raise OSError(str(e)) from None

    def look(self, url: str) -> tuple[bytes, float]:
        def run() -> tuple[bytes, float]:
            data, answer = self._whole(url)
            with understood("the age of a file"):
                now = parsedate_to_datetime(_head(answer)[1]["Date"])
                return data, (now - answer["LastModified"]).total_seconds()

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
                status, code = _refusal(e)
                line = f"{code or status}: {e.response.get('Error', {}).get('Message') or 'no reason is given'}"
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
        client = session.client("s3", config=config, region_name=region)
        sender = client._endpoint.http_session  # botocore has no option for it
        sender._pool_classes_by_scheme.update(with_floor(sender._pool_classes_by_scheme))
        # An answer to "may I send?" would be read by a class of botocore's own, without the floor.
        client.meta.events.register("request-created.s3", _send_at_once)
        return client
    except ValueError as e:  # an endpoint without http://, say
        raise UserError(f"s3://: {e}") from None


def _send_at_once(request: Any, **_: Any) -> None:
    """Let a request not wait for the permission to send its body."""
    del request.headers["Expect"]


def _head(answer: Mapping[str, Any]) -> tuple[int, Mapping[str, str]]:
    """Return the status and the headers of an answer, as they came."""
    from urllib3 import HTTPHeaderDict

    said = answer["ResponseMetadata"]
    return said["HTTPStatusCode"], HTTPHeaderDict(said["HTTPHeaders"])


def _refusal(error: Any) -> tuple[int, str]:
    """Return the status and the code of botocore's error, of which an answer that is no error of S3 has none."""
    said = error.response
    return said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), said.get("Error", {}).get("Code", "")


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
