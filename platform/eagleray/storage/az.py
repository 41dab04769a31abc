"""Reads and writes az://CONTAINER/... URLs through the REST API of Azure Blob Storage.

The API is learn.microsoft.com/rest/api/storageservices/blob-service-rest-api. A blob's ETag is used as its tag."""

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from eagleray.storage.az_account import Accounts
from eagleray.storage.blob import Blob
from eagleray.storage.http_body import body_of
from eagleray.storage.listing import Page
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.remote import Refused, bucket_and_key
from eagleray.storage.rest import RestStore
from eagleray.storage.retry import Transient

PART = 16 * 2**20  # bytes; larger files are uploaded in blocks of this size or, above PART * MOST_PARTS, longer ones
MOST_PARTS = 50_000  # Azure's limit of blocks per blob
UPLOADS = 4  # concurrent uploads of blocks
UNSIGNED = (
    "; no Azure credentials were found, so the request was anonymous (AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, or "
    "pip install 'eagleray[stores]' for those of a machine and of `az login`)"
)
BLOB = {"x-ms-blob-type": "BlockBlob"}


class AzStore(RestStore):
    """Reads and writes az:// URLs in the storage account that the environment names."""

    scheme = "az"
    unsigned = UNSIGNED

    def __init__(self) -> None:
        super().__init__()
        self._accounts = Accounts()

    @property
    def anonymous(self) -> bool:
        return self._accounts.anonymous

    def _renew(self, sender: Any) -> None:
        self._accounts.renew()

    def _ask(
        self,
        method: str,
        bucket: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Any:
        account = self._accounts.current()
        path = f"/{quote(bucket)}" + (f"/{quote(key, safe='/~')}" if key else "")
        signed = account.sign(method, path, query or {}, headers or {}, len(body or b""))
        text = "&".join(t for t in (urlencode(query or {}, quote_via=quote), account.sas) if t)
        return self._send(method, f"{account.endpoint}{path}" + (f"?{text}" if text else ""), headers=signed, body=body)

    def _open(self, url: str, tag: str = "", span: str = "") -> Any:
        headers = ({"Range": span} if span else {}) | ({"If-Match": tag.removeprefix("az:")} if tag else {})
        return self._ask("GET", *bucket_and_key(url), headers=headers)

    def _page(self, bucket: str, prefix: str, delimiter: str, marker: str, after: str = "") -> Page:
        query = {"restype": "container", "comp": "list", "prefix": prefix, "delimiter": delimiter, "marker": marker}
        body = body_of(self._ask("GET", bucket, query={k: v for k, v in query.items() if v}))
        try:
            tree = ElementTree.fromstring(body.removeprefix(b"\xef\xbb\xbf"))
        except ElementTree.ParseError as e:
            raise Transient(f"a listing that is no XML: {e}") from None
        if tree.tag != "EnumerationResults":
            raise Transient(f"expected a listing, got XML of the kind {tree.tag[:40]!r}")
        blobs = [
            Blob(f"az://{bucket}/{_name(b)}", int(b.findtext("Properties/Content-Length", "none")), _tag(b))
            for b in tree.iterfind("Blobs/Blob")
            if b.findtext("Properties/ResourceType") != "directory"
        ]
        folders = [_name(f) for f in tree.iterfind("Blobs/BlobPrefix")]
        return Page(blobs, folders, tree.findtext("NextMarker") or "")

    def _error(self, status: int, headers: Mapping[str, str], body: bytes) -> Refused:
        text = body.decode(errors="replace")
        found = re.search(r"<Message>(.*?)(?:\n|RequestId:|</Message>)", text, re.DOTALL)
        inside = re.search(r"<Code>(\w+)</Code>", text)
        code = headers.get("x-ms-error-code") or (inside[1] if inside else "")
        line = f"{code or status}: {' '.join(found[1].split())}" if found else code or f"status {status}"
        return Refused(status, code, line[:400], missing=code == "BlobNotFound")

    def _tag_said(self, headers: Mapping[str, str]) -> str:
        return f"az:{headers['ETag']}" if "ETag" in headers else ""

    def _upload(self, url: str, data: bytes, *, new: bool = False) -> None:
        headers = BLOB | ({"If-None-Match": "*"} if new else {})
        stored(self._ask("PUT", *bucket_and_key(url), headers=headers, body=data))

    def _exists(self, error: Refused) -> bool:
        return super()._exists(error) or error.code == "BlobAlreadyExists"

    def _delete(self, url: str) -> None:
        body_of(self._ask("DELETE", *bucket_and_key(url)))

    def _put(self, url: str, source: Path, patience: float) -> None:
        size = source.stat().st_size
        if size <= PART:
            data = source.read_bytes()
            self._call("write", url, lambda: self._upload(url, data), patience)
            return
        where, length = bucket_and_key(url), max(PART, -(-size // MOST_PARTS))

        def ask(query: dict[str, str], body: bytes) -> None:
            self._call("write", url, lambda: stored(self._ask("PUT", *where, query=query, body=body)), patience)

        def part(number: int) -> str:
            name = base64.b64encode(f"{number:08d}".encode()).decode()
            ask({"comp": "block", "blockid": name}, os.pread(file.fileno(), length, number * length))
            return name

        with source.open("rb", buffering=0) as file:
            names = list(ordered_map(part, range(-(-size // length)), width=UPLOADS))
        # Blocks of a failed upload, which are in no list, are deleted by Azure after a week.
        blocks = "".join(f"<Latest>{name}</Latest>" for name in names)
        ask({"comp": "blocklist"}, f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode())


def stored(response: Any) -> None:
    """Read the answer to a PUT. Raises Transient unless its status is 201; a proxy's page, for example, has 200."""
    body_of(response)
    if response.status != 201:
        raise Transient(f"expected 201 for what was written, got {response.status}")


def _name(element: ElementTree.Element) -> str:
    """Return the name of a blob or folder. It is URL-encoded if it has characters that XML does not allow."""
    name = element.find("Name")
    if name is None:
        raise Transient("a listing in which a file has no name")
    return unquote(name.text or "") if name.get("Encoded") == "true" else name.text or ""


def _tag(blob: ElementTree.Element) -> str:
    """Return the tag of a blob in a listing. Its ETag gets the quotes that headers have and listings leave out."""
    if not (etag := (blob.findtext("Properties/Etag") or "").strip('"')):
        raise Transient("a listing in which a file has no ETag")
    return f'az:"{etag}"'
