"""What passes is waited for with fresh credentials, what lasts ends at once, and nobody reads as nobody by accident."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.naps import of_this_test

from eagleray.base.errors import Outage, UserError
from eagleray.storage import error_classes, retry, store
from eagleray.storage.error_classes import Kind, kind_of, passes
from eagleray.storage.s3 import S3Store

URL = "s3://b/train/x-000.tar"
ROLE = "/latest/meta-data/iam/security-credentials/"
GRANTED = (
    '{"Code": "Success", "AccessKeyId": "role-key", "SecretAccessKey": "s", "Token": "t", '
    '"Expiration": "2099-01-01T00:00:00Z"}'
)


class Server(ThreadingHTTPServer):
    """A bucket and a metadata service. `answers` come first, each once; then all is well."""

    answers: list[tuple[int, str]]
    metadata: list[int]  # statuses that the metadata service answers first
    role: bool
    keys: list[str]  # who asked the bucket; empty for nobody

    def handle_error(self, *_: object) -> None:
        """Of a client that has gone."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_PUT(self) -> None:
        if self.path.startswith("/latest"):
            self.of_metadata("token")
        else:
            self.of_bucket()

    def do_GET(self) -> None:
        if self.path.startswith("/latest"):
            names = {ROLE: "worker", ROLE + "worker": GRANTED} if self.server.role else {}
            self.of_metadata(names.get(self.path))
        else:
            self.of_bucket()

    def of_metadata(self, text: str | None) -> None:
        status = self.server.metadata.pop(0) if self.server.metadata else 200 if text else 404
        self.answer(status, (text or "").encode())

    def of_bucket(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.keys.append(self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0])
        if self.server.answers:
            status, code = self.server.answers.pop(0)
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said so</Message></Error>"
            self.answer(status, body.encode())
        else:
            self.answer(206, b"234")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", "bytes 2-4/7")
        self.send_header("ETag", '"abc"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers, server.metadata, server.role, server.keys = [], [], False, []
        place = f"http://127.0.0.1:{server.server_port}"
        settings = {"AWS_ENDPOINT_URL": place, "AWS_EC2_METADATA_SERVICE_ENDPOINT": place, "no_proxy": "127.0.0.1"}
        settings |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(store.STORES, "s3", S3Store())
        naps: list[float] = []
        clock = SimpleNamespace(sleep=of_this_test(naps.append), monotonic=lambda: sum(naps))
        monkeypatch.setattr(retry, "time", clock)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def keys(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Write other keys into the file that the credentials come from, as those who renew them do."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def write(name: str) -> None:
        path.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = secret\n")

    write("first")
    return write


def read() -> bytes:
    return bytes(store.store(URL).read(URL, 2, 3, patience=4))


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ExpiredToken"), (403, "RequestTimeTooSkewed"), (401, "Unauthorized"), (400, "InvalidToken")],
)
def test_an_expired_token_is_renewed(
    server: Server, keys: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    assert read() == b"234"
    server.answers = [(status, code), (status, code)]
    monkeypatch.setattr(retry.time, "sleep", of_this_test(lambda _: keys("second")))
    assert read() == b"234"
    assert server.keys == ["first", "first", "second", "second"]


def test_keys_that_are_just_being_written_anew_do_not_make_anyone_anonymous(
    server: Server, keys: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read() == b"234"
    server.answers = [(400, "ExpiredToken")]
    states = iter(["half", "second"])
    file = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])

    def write(_: float) -> None:
        file.write_text("") if next(states) == "half" else keys("second")

    monkeypatch.setattr(retry.time, "sleep", of_this_test(write))
    assert read() == b"234"
    assert server.keys == ["first", "first", "second"]


def test_what_was_allowed_before_is_waited_for_and_ends_as_an_outage(server: Server, keys: object) -> None:
    assert read() == b"234"
    server.answers = [(403, "AccessDenied")] * 3
    assert read() == b"234"
    server.answers = [(403, "AccessDenied")] * 10_000
    with pytest.raises(Outage, match=r"AccessDenied: said so; given up after \d+ attempts"):
        read()


def test_what_was_allowed_is_waited_for_in_folders_below_and_after_a_restart(server: Server, keys: object) -> None:
    assert read() == b"234"
    below = URL.replace("/x-", "/export/x-")
    server.answers = [(403, "AccessDenied")] * 2
    assert bytes(store.store(below).read(below, 2, 3, patience=4)) == b"234"
    elsewhere = "s3://b/other/export/x"
    store.expect_access("s3://b/other/")
    server.answers = [(403, "AccessDenied")] * 2
    assert bytes(store.store(elsewhere).read(elsewhere, 2, 3, patience=4)) == b"234"
    assert not server.answers


def test_what_an_earlier_process_only_read_is_not_waited_for_when_it_is_written(
    server: Server, keys: object, tmp_path: Path
) -> None:
    """Such as an index beside shards that may be read alone: it has its place elsewhere."""
    elsewhere = "s3://b/other/export/x"
    store.expect_access("s3://b/other/", ("list", "read"))
    server.answers = [(403, "AccessDenied")] * 2
    assert bytes(store.store(elsewhere).read(elsewhere, 2, 3, patience=4)) == b"234"
    server.answers = [(403, "AccessDenied")]
    (tmp_path / "x").write_text("x")
    with pytest.raises(OSError, match="AccessDenied"):
        store.store(elsewhere).put(elsewhere, tmp_path / "x")


def test_what_was_never_allowed_ends_at_once(server: Server, keys: object, tmp_path: Path) -> None:
    server.answers = [(403, "AccessDenied")]
    with pytest.raises(UserError, match="AccessDenied"):
        read()
    assert read() == b"234"
    server.answers = [(403, "AccessDenied")]  # reading is allowed, but not writing
    (tmp_path / "x").write_text("x")
    with pytest.raises(OSError, match="AccessDenied"):
        store.store(URL).put(URL, tmp_path / "x")
    server.answers = [(403, "AccessDenied")]  # nor reading elsewhere
    with pytest.raises(UserError, match="AccessDenied"):
        store.store(URL).read("s3://b/other/x", 2, 3)


@pytest.mark.parametrize(
    "metadata", [[503, 503], [429, 429], [200, 503, 200, 503], [200, 200, 500]], ids=lambda m: "-".join(map(str, m))
)
def test_a_metadata_service_that_fails_makes_nobody_anonymous(server: Server, metadata: list[int]) -> None:
    """botocore asks first, and says that there are no credentials; then we ask why."""
    server.role, server.metadata = True, metadata
    assert read() == b"234"
    assert server.keys == ["role-key"]


def test_a_metadata_service_that_has_no_role_leaves_the_request_anonymous(server: Server) -> None:
    assert read() == b"234"
    assert server.keys == [""]


def test_a_metadata_service_that_stays_away_is_an_outage(server: Server) -> None:
    server.role, server.metadata = True, [503] * 10_000
    with pytest.raises(Outage, match=r"the metadata service at http://127.0.0.1:[0-9]+/ answered 503"):
        read()
    assert server.keys == []


def test_every_rule_has_a_source_and_no_error_has_two_classes() -> None:
    listed = [error for rule in error_classes.TABLE for error in rule.errors]
    assert len(listed) == len(set(listed))
    assert all(rule.source for rule in error_classes.TABLE)
    assert kind_of("NoSuchBucket", 404) is Kind.LASTING
    assert kind_of("Unheard", 599) is Kind.WAIT  # whatever a server calls it
    assert kind_of("ExpiredToken", 403) is Kind.RENEW  # the code is more exact than the status
    assert not passes(Kind.DENIED, allowed_before=False)
