"""Fixtures for tests of checkpoints: a folder, an S3 server, and a proxy in front of the server."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.checkpoints import Place, s3_place
from helpers.s3.proxy import Proxy
from helpers.s3.server import Swift, store_of

from eagleray.storage import store
from eagleray.storage.s3 import S3Store

STORES = ("folder", "s3")


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with store_of(tmp_path_factory.mktemp("s3"), "runs") as server:
        yield server


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "checkpoints"), tmp_path / "scratch")
    return s3_place(request.getfixturevalue("swift"), tmp_path)


@pytest.fixture
def remote(swift: Swift, tmp_path: Path) -> Place:
    return s3_place(swift, tmp_path)


@pytest.fixture
def proxy(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Start a proxy in front of the S3 server, through which all requests go."""
    with Proxy(swift.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setitem(store.STORES, "s3", S3Store())
        yield proxy


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("eagleray"), "propagate", True)
    return lambda: [r.getMessage() for r in caplog.records if r.name == "eagleray.engine.checkpoint" and r.levelno > 20]
