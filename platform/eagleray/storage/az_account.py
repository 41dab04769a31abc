"""The storage account of Azure that the environment names, and the signatures of its requests.

The signatures follow learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key. The environment variables
are those of the command `az`."""

import base64
import binascii
import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from eagleray.base.errors import UserError, explained, one_line
from eagleray.storage.retry import Transient

VERSION = "2021-12-02"  # version of the API
SCOPE = "https://storage.azure.com/.default"
CONTENT = ("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date")
CONDITIONS = ("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range")
MARGIN = 300  # seconds by which a new token is requested before the old one expires
# Variables that are set where a service or a file provides an identity. To find no token then is a temporary failure.
IDENTITIES = ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID")


@dataclass(frozen=True)
class Account:
    """An account, its server, and its credentials: a key, a shared access signature (SAS), a token, or none."""

    name: str
    endpoint: str  # URL that begins with https:// and has no slash at its end
    key: bytes = field(default=b"", repr=False)
    sas: str = field(default="", repr=False)
    token: Callable[[], str] | None = None

    def sign(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], length: int
    ) -> dict[str, str]:
        """Return the headers of a request, including its date, version and signature or token."""
        named = {**headers, "x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}
        if self.token:
            return named | {"Authorization": f"Bearer {self.token()}"}
        if not self.key:
            return named
        lower = {k.lower(): v for k, v in named.items()} | ({"content-length": str(length)} if length else {})
        text = [method, *(lower.get(name, "") for name in CONTENT + CONDITIONS)]
        text += [f"{name}:{value}" for name, value in sorted(lower.items()) if name.startswith("x-ms-")]
        text += [f"/{self.name}{urlsplit(self.endpoint).path}{path}"]
        text += [f"{name}:{value}" for name, value in sorted(query.items())]
        digest = hmac.new(self.key, "\n".join(text).encode(), hashlib.sha256).digest()
        return named | {"Authorization": f"SharedKey {self.name}:{base64.b64encode(digest).decode()}"}


class Accounts:
    """Reads the account that the environment names, and keeps it until `renew` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._account: Account | None = None
        self.anonymous = True  # whether no credentials were found yet

    def renew(self) -> None:
        """Read the environment and the credentials again for the next request."""
        self._account = None

    def current(self) -> Account:
        """Return the account. Raises UserError when none is named, Transient when its credentials have disappeared."""
        with self._lock:
            if self._account is None:
                account = read_account(os.environ)
                anonymous = not (account.key or account.sas or account.token)
                if anonymous and not self.anonymous:
                    raise Transient("the Azure credentials that were found before are gone")
                self._account, self.anonymous = account, anonymous
            return self._account


def read_account(environ: Mapping[str, str]) -> Account:
    """Return the account that environment variables name. Raises UserError if there is none, or the key is not
    base64."""
    text = environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    said = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    name = said.get("AccountName") or environ.get("AZURE_STORAGE_ACCOUNT", "")
    endpoint = said.get("BlobEndpoint") or environ.get("AZURE_STORAGE_SERVICE_ENDPOINT", "")
    if not name and not endpoint:
        raise UserError("az://: no account; set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING")
    suffix, scheme = said.get("EndpointSuffix", "core.windows.net"), said.get("DefaultEndpointsProtocol", "https")
    endpoint = (endpoint or f"{scheme}://{name}.blob.{suffix}").rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise UserError("az://: AZURE_STORAGE_SERVICE_ENDPOINT: expected https://HOST")
    key = said.get("AccountKey") or environ.get("AZURE_STORAGE_KEY", "")
    sas = said.get("SharedAccessSignature") or environ.get("AZURE_STORAGE_SAS_TOKEN", "")
    with explained("az://: the account key is not in base64; set AZURE_STORAGE_KEY", binascii.Error, why=False):
        secret = base64.b64decode(key, validate=True)
    token = None if secret or sas else find_token()
    return Account(name, endpoint, secret, "" if secret else sas.lstrip("?"), token)


def find_token() -> Callable[[], str] | None:
    """Return a function that returns a valid token, or None if azure-identity is not installed or finds no credentials.

    Raises Transient when a service that should have a token does not answer."""
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    logging.getLogger("azure").setLevel(logging.ERROR)  # our own errors say the same in fewer lines
    credential, lock, held = DefaultAzureCredential(), threading.Lock(), dict[str, Any]()

    def token() -> str:
        with lock:
            if held.get("until", 0) < time.time() + MARGIN:
                new = credential.get_token(SCOPE)
                held.update(until=new.expires_on, token=new.token)
            return str(held["token"])

    def patient() -> str:
        try:
            return token()
        except AzureError as e:
            raise Transient(one_line(e)) from None

    try:
        token()
    except ClientAuthenticationError as e:  # azure-identity raises this also when a service does not answer
        if any(os.environ.get(name) for name in IDENTITIES):
            raise Transient(one_line(e)) from None
        return None
    except AzureError as e:
        raise Transient(one_line(e)) from None
    return patient
