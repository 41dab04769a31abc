"""Reads and writes gs:// URLs through the JSON API of Google Cloud Storage.

The API is cloud.google.com/storage/docs/json_api/v1. An object's tag is its generation, which each write changes."""

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from eagleray.base.errors import UserError, explained, one_line
from eagleray.storage.answers import LARGEST, understood
from eagleray.storage.blob import Blob
from eagleray.storage.http_body import body_of, whole_number
from eagleray.storage.listing import Page
from eagleray.storage.remote import Refused, bucket_and_key
from eagleray.storage.rest import RestStore
from eagleray.storage.retry import PATIENCE, Transient

HOST = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
PIECE = 32 * 2**20  # most bytes per request of an upload, a multiple of 256 KiB as the API requires
FIELDS = "kind,nextPageToken,prefixes,items(name,size,generation)"
UNSIGNED = "; no Google credentials were found, so the request was anonymous"
INCOMPLETE = 308  # HTTP status that answers every piece of an upload but the last


class GsStore(RestStore):
    """Reads and writes gs:// URLs. STORAGE_EMULATOR_HOST names another server."""

    scheme = "gs"
    seeks = True
    unsigned = UNSIGNED

    def __init__(self) -> None:
        super().__init__()
        self._token = Token(self.pools)

    @property
    def anonymous(self) -> bool:
        return self._token.anonymous

    def _renew(self, sender: Any) -> None:
        self._token.renew()

    def _ask(self, method: str, path: str, query: Mapping[str, str] | None = None, **request: Any) -> Any:
        """Send a request to a path of the API, or to the full address of an upload."""
        host = os.environ.get("STORAGE_EMULATOR_HOST") or HOST
        address = path if "://" in path else (host if "://" in host else f"http://{host}").rstrip("/") + path
        headers = self._token.headers() | request.pop("headers", {})
        return self._send(method, address + (f"?{urlencode(query)}" if query else ""), headers=headers, **request)

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        query = {"alt": "media"} | ({"ifGenerationMatch": tag.removeprefix("gs:")} if tag else {})
        return self._ask("GET", _path(url), query, headers={"Range": span} if span else {})

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str, after: str = "") -> Page:
        query = {"prefix": prefix, "delimiter": delimiter, "pageToken": marker, "fields": FIELDS}
        query["startOffset"] = after
        answer = self._ask("GET", f"/storage/v1/b/{quote(bucket)}/o", {k: v for k, v in query.items() if v})
        said = _json(answer, "storage#objects")
        return Page(
            [
                Blob(f"gs://{bucket}/{o['name']}", whole_number(o["size"], most=LARGEST), f"gs:{o['generation']}")
                for o in said.get("items", [])
                if o["name"] != after  # the answer includes the name `startOffset`
            ],
            said.get("prefixes", []),
            said.get("nextPageToken", ""),
        )

    def _error(self, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        text = "".join(c if c.isprintable() else " " for c in body.decode(errors="replace"))
        text = " ".join(text.split())[:300]
        reason = ""
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, AttributeError):
            error = json.loads(body)["error"]
            text = " ".join(str(error["message"]).split())[:300]
            reason = str(error["errors"][0]["reason"])
        no_bucket = re.search(r"(?i)bucket\b.*\bdoes not exist", text)
        proxy = body.lstrip().startswith(b"<")  # Google answers in JSON or, for a missing file, in plain text
        return Refused(status, reason, f"{status} {text}".strip(), status == 404 and not no_bucket and not proxy)

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        return f"gs:{headers['x-goog-generation']}" if "x-goog-generation" in headers else ""

    def look(self, url: str) -> tuple[bytes, float]:
        def run() -> tuple[bytes, float]:
            try:
                about = _json(self._ask("GET", _path(url), {"fields": "kind,generation,timeCreated"}), OBJECT)
                with understood("what is said of a file"):
                    generation = int(about["generation"])
                    written = datetime.fromisoformat(about["timeCreated"].replace("Z", "+00:00"))
                data, headers = self._whole(url, f"gs:{generation}")
            except Refused as e:
                if e.missing:
                    raise FileNotFoundError(url) from None
                if e.status == 412:
                    raise Transient("has been written a moment ago") from None
                raise
            with understood("the time of an answer"):
                return data, (parsedate_to_datetime(headers["Date"]) - written).total_seconds()

        return self._call("read", url, run, PATIENCE)

    def _delete(self, url: str) -> None:
        body_of(self._ask("DELETE", _path(url)))

    def _upload(self, url: str, data: bytes, *, new: bool = False) -> None:
        bucket, key = bucket_and_key(url)
        query = {"uploadType": "media", "name": key} | ({"ifGenerationMatch": "0"} if new else {})
        _json(self._ask("POST", f"/upload/storage/v1/b/{quote(bucket)}/o", query, headers=BINARY, body=data), OBJECT)

    def _put(self, url: str, source: Path, patience: float) -> None:
        with source.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PIECE:
                data = file.read()
                self._call("write", url, lambda: self._upload(url, data), patience)
                return
            session = self._call("write", url, lambda: self._begin(url), patience)
            upload = _Upload(self._ask, session, file.fileno(), size)
            with self._given_up(url, upload.abort):
                while not upload.done:
                    self._call("write", url, upload.piece, patience)

    def _begin(self, url: str) -> str:
        """Begin an upload in pieces, and return the URL of its session."""
        bucket, key = bucket_and_key(url)
        query = {"uploadType": "resumable", "name": key}
        response = self._ask("POST", f"/upload/storage/v1/b/{quote(bucket)}/o", query, headers=BINARY, body=b"")
        body_of(response)
        with understood("the beginning of an upload"):
            return str(response.headers["Location"])


OBJECT = "storage#object"
BINARY = {"Content-Type": "application/octet-stream"}


class _Upload:
    """An upload of a file in pieces, as cloud.google.com/storage/docs/performing-resumable-uploads describes."""

    def __init__(self, ask: Callable[..., Any], session: str, file: int, size: int) -> None:
        self.ask, self.session, self.file, self.size = ask, session, file, size
        self.done = False
        self._at: int | None = 0  # number of bytes that the store has; None: the store must be asked
        self._sent = 0

    def piece(self) -> None:
        """Send the next piece. If the last answer may have been lost, first ask the store how many bytes it has."""
        if self._at is None:
            self._note(self._send({"Content-Range": f"bytes */{self.size}"}, b""), self._sent)
            if self.done:
                return
        at, self._at = self._at or 0, None
        data = os.pread(self.file, PIECE, at)
        self._sent = max(self._sent, at + len(data))
        self._note(self._send({"Content-Range": f"bytes {at}-{at + len(data) - 1}/{self.size}"}, data), self._sent)
        if not self.done and self._at == at:
            raise Transient(f"an upload that stays at {at} of {self.size} bytes")

    def _send(self, headers: dict[str, str], data: bytes) -> Any:
        return self.ask("PUT", self.session, headers=headers, body=data, expected=(200, 201, INCOMPLETE))

    def _note(self, response: Any, sent: int) -> None:
        """Record from an answer how many bytes the store has. Raises Transient if these are more than `sent`."""
        if response.status != INCOMPLETE:
            _json(response, OBJECT)
            self.done = True
            return
        body_of(response)
        said = response.headers.get("Range")  # None before the first byte
        with understood("how far an upload is"):
            at = int(said.rpartition("-")[2]) + 1 if said else 0
        if not 0 <= at <= sent or at == self.size:
            raise Transient(f"the store says that it has {at} of {self.size} bytes, of which {sent} were sent")
        self._at = at

    def abort(self) -> None:
        """Ask the store to discard the pieces."""
        body_of(self.ask("DELETE", self.session, expected=(200, 204, 404, 410, 499)))


class Token:
    """The access token from google-auth's chain of credentials."""

    def __init__(self, pools: Any) -> None:
        self._pools, self._lock = pools, threading.Lock()
        self._credentials: Any = None  # None: not searched yet; False: there are no credentials
        self.anonymous = True  # whether no credentials were found yet

    def renew(self) -> None:
        """Read the credentials again for the next request."""
        self._credentials = None

    def headers(self) -> dict[str, str]:
        """Return the header with a valid token, or no header without credentials.

        Raises Transient when getting a token fails temporarily, Refused when the credentials are refused for good, and
        UserError when google-auth is missing or the file of credentials is wrong."""
        if os.environ.get("STORAGE_EMULATOR_HOST") and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            return {}  # an emulator gets no token, as from Google's own libraries
        with self._lock:
            if self._credentials is None:
                self._credentials = self._find() or False
            if not (found := self._credentials):
                return {}
            if not found.valid:
                self._refresh(found)
            return {"Authorization": f"Bearer {found.token}"}

    def _find(self) -> Any:
        missing = "gs://: google-auth is not installed: pip install 'eagleray[stores]'"
        with explained(missing, ImportError, why=False):
            import google.auth
        logging.getLogger("google.auth").setLevel(logging.ERROR)  # warns about a missing project, which is not needed
        try:
            found, _ = google.auth.default(scopes=[SCOPE])
        except google.auth.exceptions.DefaultCredentialsError as e:
            if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
                raise UserError(f"gs://: GOOGLE_APPLICATION_CREDENTIALS: {one_line(e)}") from None
            if not self.anonymous:
                raise Transient("the Google credentials that were found before are gone") from None
            return None
        self.anonymous = False
        return found

    def _refresh(self, found: Any) -> None:
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.urllib3 import Request

        try:
            found.refresh(Request(self._pools.to(HOST)))
        except GoogleAuthError as e:
            self.renew()
            if e.retryable or "TransportError" in type(e).__name__:
                raise Transient(one_line(e)) from None
            raise Refused(403, "", one_line(e), missing=False) from None


def _path(url: str) -> str:
    bucket, key = bucket_and_key(url)
    return f"/storage/v1/b/{quote(bucket)}/o/{quote(key, safe='')}"


def _json(response: Any, kind: str) -> Any:
    """Return the JSON of an answer. Raises Transient when it is not of this `kind`, as an answer of a proxy."""
    try:
        said = json.loads(body_of(response))
    except (ValueError, RecursionError) as e:
        raise Transient(f"an answer that is no JSON: {e}") from None
    if not isinstance(said, dict) or said.get("kind") != kind:
        raise Transient(f"expected a {kind}, got another answer")
    return said
