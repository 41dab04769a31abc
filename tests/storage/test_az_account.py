"""The account of Azure that the environment names, and signatures compared with those of Microsoft's own library."""

import base64
from typing import Any

import pytest
from helpers.clouds import ACCOUNT, KEY, Cloud, point_at
from helpers.processes import free_port

from eagleray.base.errors import UserError
from eagleray.storage import az_account, store
from eagleray.storage.az_account import Account, read_account
from eagleray.storage.retry import Transient

HOST = f"https://{ACCOUNT}.blob.core.windows.net"


@pytest.mark.parametrize(
    ("request_", "signature"),
    [
        (
            ("GET", "/data/a%20folder/x.tar", {}, {"x-ms-range": "bytes=5-9", "If-Match": '"0x1D"'}, 0),
            "OeDrFqvBcYJR/0J78RG1JLHNTGUzBCFsMft2jeOJXDc=",
        ),
        (
            (
                "GET",
                "/data",
                {"restype": "container", "comp": "list", "prefix": "a folder/", "delimiter": "/"},
                {},
                0,
            ),
            "TwNd277muBxYDqBQNtbn2z6Ze+E7ScS1w8RRLNLt1c4=",
        ),
        (
            ("PUT", "/data/x.tar", {}, {"x-ms-blob-type": "BlockBlob", "If-None-Match": "*"}, 12),
            "eU+ANT1OoxlOgx8QVognS+xfr0wlX8jaq3lL0ecCjRM=",
        ),
    ],
)
def test_signatures_are_those_of_microsofts_library(
    request_: tuple[Any, ...], signature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """azure-storage-blob 12.31.1, SharedKeyCredentialPolicy, at this date."""
    monkeypatch.setattr(az_account, "formatdate", lambda usegmt: "Mon, 23 Nov 2026 12:00:00 GMT")
    account = Account(ACCOUNT, HOST, base64.b64decode(KEY))
    assert account.sign(*request_)["Authorization"] == f"SharedKey {ACCOUNT}:{signature}"


def test_an_account_is_read_from_the_variables_of_the_command_az(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(az_account, "find_token", lambda: None)
    named = {"AZURE_STORAGE_ACCOUNT": ACCOUNT}
    key = base64.b64decode(KEY)
    assert read_account(named) == Account(ACCOUNT, HOST)
    assert read_account(named | {"AZURE_STORAGE_KEY": KEY}) == Account(ACCOUNT, HOST, key)
    assert read_account(named | {"AZURE_STORAGE_SAS_TOKEN": "?sv=1&sig=s"}) == Account(ACCOUNT, HOST, sas="sv=1&sig=s")
    text = f"DefaultEndpointsProtocol=https;AccountName={ACCOUNT};AccountKey={KEY};EndpointSuffix=core.windows.net"
    assert read_account({"AZURE_STORAGE_CONNECTION_STRING": text}) == Account(ACCOUNT, HOST, key)
    text = "BlobEndpoint=http://127.0.0.1:1/a/;SharedAccessSignature=sv=1&sig=s"
    assert read_account({"AZURE_STORAGE_CONNECTION_STRING": text}) == Account(
        "", "http://127.0.0.1:1/a", sas="sv=1&sig=s"
    )
    assert KEY not in repr(read_account(named | {"AZURE_STORAGE_KEY": KEY}))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no account; set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING"),
        ({"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "hunter2!"}, "the account key is not in base64"),
        ({"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_SERVICE_ENDPOINT": "host"}, "expected https://HOST"),
    ],
)
def test_wrong_settings_are_one_line(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=f"^az://: .*{message}") as caught:
        read_account(environment)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_signature_for_urls_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cloud() as cloud:
        point_at(monkeypatch, cloud.port)
        endpoint = f"BlobEndpoint=http://127.0.0.1:{cloud.port}/{ACCOUNT}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{endpoint};SharedAccessSignature=sv=1&sig=hunter2")
        cloud.files["data"] = {}
        store.put_bytes("az://data/x", b"abc")
        assert store.store("az://").get("az://data/x") == b"abc"
        cloud.forced.append((403, "AuthenticationFailed"))
        with pytest.raises(UserError) as caught:
            store.store("az://").get("az://other/x")
    assert "AuthenticationFailed" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_managed_identity_gives_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through azure-identity, as on a machine of Azure's."""
    pytest.importorskip("azure.identity")
    with Cloud() as cloud:
        point_at(monkeypatch, cloud.port)
        endpoint = f"http://127.0.0.1:{cloud.port}"
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{endpoint}/identity")
        monkeypatch.setenv("IDENTITY_HEADER", "header")
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING", f"AccountName={ACCOUNT};BlobEndpoint={endpoint}/{ACCOUNT}"
        )
        cloud.files["data"] = {}
        store.put_bytes("az://data/x", b"abc")
        assert store.store("az://").get("az://data/x") == b"abc"
        assert cloud.tokens == 1


def test_an_identity_that_does_not_answer_makes_nobody_anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.identity")
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{free_port()}/identity")
    monkeypatch.setenv("IDENTITY_HEADER", "header")
    with pytest.raises(Transient):
        az_account.find_token()


def test_without_credentials_a_request_is_anonymous_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(az_account, "find_token", lambda: None)
    with Cloud() as cloud:
        point_at(monkeypatch, cloud.port)
        endpoint = f"BlobEndpoint=http://127.0.0.1:{cloud.port}/{ACCOUNT}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", endpoint)
        cloud.files["data"] = {}
        with pytest.raises(UserError, match=r"ResourceNotFound.*; no Azure credentials were found"):
            store.store("az://").list("az://data/")
