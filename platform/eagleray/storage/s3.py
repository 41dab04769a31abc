"""Reads and writes s3:// URLs on any S3-compatible server through boto3, with the usual AWS settings only."""

import io
import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray.base.errors import UserError, explained, one_line
from eagleray.storage import error_classes
from eagleray.storage.answers import understood
from eagleray.storage.blob import Blob
from eagleray.storage.http_body import READ_TIMEOUT, with_floor
from eagleray.storage.listing import Page
from eagleray.storage.metadata_service import failure
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.remote import Refused, RemoteStore, bucket_and_key
from eagleray.storage.retry import Transient

CONNECTIONS = 32
PART = 16 * 2**20  # bytes; a larger file is uploaded in parts of this size
MOST_PARTS = 10_000  # S3's limit of parts per file; files above PART * MOST_PARTS have longer parts
UPLOADS = 4  # parts uploaded at once
UPLOAD = "upload"  # key of a file's metadata with the id of the multipart upload that made it
VANISHED = "the AWS credentials that were found before are gone"
PAYER, REQUESTER = "AWS_REQUEST_PAYER", "requester"  # variable of GDAL that lets the sender pay, and its only value
ANONYMOUS = "; no AWS credentials were found, so the request was anonymous"


class S3Store(RemoteStore):
    """Reads and writes s3:// URLs. Failed requests are repeated by `call_with_retries`, not by boto3."""

    scheme = "s3"
    seeks = True
    unsigned = ANONYMOUS

    def __init__(self) -> None:
        super().__init__()
        self._client: Any = None
        self._signs = False  # whether a client had credentials
        self._lock = threading.Lock()

    def client(self) -> Any:
        """Return the boto3 client. Raises Transient where credentials were found before and none are now: their file
        may be half written."""
        with self._lock:
            if self._client is None:
                client = make_client()
                signing = signs(client)
                if self._signs and not signing:
                    raise Transient(VANISHED)
                self._client, self._signs = client, signing
            return self._client

    def _renew(self, sender: Any) -> None:
        """Let the next request create a new client, unless another thread has replaced this one already."""
        with self._lock:
            if self._client is sender:
                self._client = None

    @property
    def anonymous(self) -> bool:
        """Return whether requests are sent without credentials."""
        return self._client is not None and not signs(self._client)

    def _ask(self, operation: str, **request: Any) -> Mapping[str, Any]:
        """Send a request, and return the fields of the answer. Raises Refused for an error of S3, and Transient for a
        broken connection or an answer that botocore cannot read."""
        from boto3.exceptions import Boto3Error
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError

        passing = boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, Boto3Error, ResponseParserError
        client = None
        try:
            client = self.client()
            if "Body" in request:  # botocore sends bytes in one call, which must end within its connect_timeout
                request["Body"] = io.BytesIO(request["Body"])
            with understood("an answer"):
                return getattr(client, operation)(**request)  # type: ignore[no-any-return]
        except boto.ClientError as e:
            said = e.response
            status, error = said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), said.get("Error", {})
            code = error.get("Code", "")  # empty if the answer is not an error of S3
            line = f"{code or status}: {error.get('Message') or 'no reason is given'}"
            raise Refused(status, code, line, code == "NoSuchKey", sender=client) from None
        except (*passing, boto.BotoCoreError) as e:
            if isinstance(e, passing) and not isinstance(e, boto.SSLError):
                raise Transient(one_line(e)) from None
            raise Refused(0, "", one_line(e), False, *error_classes.names_of(e), sender=client) from None
        except RuntimeError as e:
            if "refreshed credentials are still expired" not in str(e):  # botocore has no class for it
                raise
            raise Refused(0, "ExpiredToken", one_line(e), False, sender=client) from None

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str, after: str = "") -> Page:
        query = {"Prefix": prefix, "Delimiter": delimiter, "ContinuationToken": marker, "StartAfter": after}
        page = self._ask("list_objects_v2", Bucket=bucket, **{k: v for k, v in query.items() if v})
        blobs = [
            Blob(f"s3://{bucket}/{o['Key']}", o["Size"], "s3:" + o["ETag"].strip('"')) for o in page.get("Contents", [])
        ]
        folders = [p["Prefix"] for p in page.get("CommonPrefixes", [])]
        more, marker = page["IsTruncated"], page.get("NextContinuationToken", "")
        if more != bool(marker):
            raise Transient(f"a listing that says truncated: {more}, and where it goes on: {marker[:100]!r}")
        return Page(blobs, folders, marker)

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        bucket, key = bucket_and_key(url)
        same = {"IfMatch": tag.removeprefix("s3:")} if tag else {}
        part = {"Range": span} if span else {}
        return self._ask("get_object", Bucket=bucket, Key=key, **part, **same)["Body"]._raw_stream

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        return "s3:" + headers["ETag"].strip('"') if "ETag" in headers else ""

    def _put(self, url: str, source: Path, patience: float) -> None:
        size = source.stat().st_size
        if size > PART:
            self._put_parts(url, source, max(PART, -(-size // MOST_PARTS)), patience)
        else:
            data = source.read_bytes()
            self._call("write", url, lambda: self._upload(url, data), patience)

    def _upload(self, url: str, data: bytes, *, new: bool = False) -> None:
        bucket, key = bucket_and_key(url)
        condition = {"IfNoneMatch": "*"} if new else {}
        try:
            answer = self._ask("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        except Refused as e:
            if new and e.status == 501:  # the server has no conditional writes, so the last writer's data stays
                self._upload(url, data)
            raise
        if "ETag" not in answer:
            raise Transient("an answer that does not name the version that was written")

    def _exists(self, error: Refused) -> bool:
        return error.status in (409, 412, 501)

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
            try:
                with understood("an answer"):
                    self._ask("complete_multipart_upload", **name, MultipartUpload=parts)["ETag"]
            except Refused as e:
                if e.code != "NoSuchUpload":
                    raise
                there = self._ask("head_object", Bucket=bucket, Key=key)
                # An earlier attempt, whose answer was lost, may have made the file.
                if there.get("Metadata", {}).get(UPLOAD) != mark:
                    raise

        mark = uuid.uuid4().hex
        name["UploadId"] = ask("UploadId", "create_multipart_upload", Metadata={UPLOAD: mark})
        with self._given_up(url, lambda: self._ask("abort_multipart_upload", **name)):
            with source.open("rb", buffering=0) as file:
                numbers = range(1, -(-os.fstat(file.fileno()).st_size // length) + 1)
                parts = {"Parts": list(ordered_map(part, numbers, width=UPLOADS))}
            self._call("write", url, finish, patience)

    def _delete(self, url: str) -> None:
        bucket, key = bucket_and_key(url)
        self._ask("delete_object", Bucket=bucket, Key=key)


def make_client() -> Any:
    """Create a client from the environment's settings. If no credentials are found, it is anonymous, as for public
    buckets. Raises Transient when a metadata service that may have credentials fails."""
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
    with explained("s3://", ValueError):  # an endpoint without http://, say
        client = session.client("s3", config=config, region_name=region)
        sender = client._endpoint.http_session  # botocore has no option for the classes of its pools
        sender._pool_classes_by_scheme.update(with_floor(sender._pool_classes_by_scheme))
        # An answer to the header Expect would be read by a class of botocore that does not check the speed.
        client.meta.events.register("request-created.s3", _send_at_once)
        if (payer := os.environ.get(PAYER, REQUESTER)) != REQUESTER:
            raise UserError(f"{PAYER}={payer}: expected {REQUESTER}, or no such variable")
        if PAYER in os.environ:
            client.meta.events.register("before-call.s3", _pay)
        return client


def _pay(params: Any, **_: Any) -> None:
    """Add the header that says that a request's sender pays for it, before the request is signed."""
    params["headers"]["x-amz-request-payer"] = REQUESTER


def _send_at_once(request: Any, **_: Any) -> None:
    """Remove the header Expect, so that a request sends its body without waiting for permission."""
    del request.headers["Expect"]


def signs(client: Any) -> bool:
    """Return whether a client has credentials to sign its requests with."""
    from botocore import UNSIGNED

    return client.meta.config.signature_version is not UNSIGNED
