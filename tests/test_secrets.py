"""Secrets of every kind are planted, and searched for in everything that commands wrote, sent and printed."""

import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.fake_head import FakeHead
from helpers.mlflow_server import running as mlflow_running
from helpers.recipes import small_recipe
from helpers.sweeps import LONG, accounted, write
from ray._private.authentication_test_utils import reset_auth_token_state

from eagleray.cli import main

pytestmark = pytest.mark.slow

PLANTED = {
    "AWS_ACCESS_KEY_ID": "plantedAccessKey",
    "AWS_SECRET_ACCESS_KEY": "planted/Secret+Key",
    "AWS_SESSION_TOKEN": "plantedSessionToken",
    "AZURE_STORAGE_KEY": "plantedAzureKey",
    "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=plantedAzureSignature",
    "MLFLOW_TRACKING_USERNAME": "plantedUser",
    "MLFLOW_TRACKING_PASSWORD": "plantedPassword",
    "EAGLERAY_API_TOKEN": "plantedApiToken",
    "NCCL_SECRET_KEY": "plantedNcclKey",
    "RAY_AUTH_TOKEN": "planted0123456789abcdef0123456789abcdef",
}
IN_A_URI = "http://plantedLogin:planted/Login%20Pass@127.0.0.1:9"  # nobody listens there
SIGNED = "https://host/x?X-Amz-Credential=plantedCredential&X-Amz-Signature=plantedSignature&sig=plantedSig"
WITH_KEYS = "s3://plantedUrlKey:planted/Url+Secret@bucket/run"


class Ran:
    """Commands in this process, with all secrets in the environment."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capsys, self.said = folder, patch, capsys, [b""][:0]
        for name in [n for n in os.environ if n.startswith(("AWS_", "MLFLOW_", "RAY_"))]:
            patch.delenv(name)
        self.environment = PLANTED | {"HOME": str(folder), "RAY_API_SERVER_ADDRESS": ""}
        for name, value in self.environment.items():
            patch.setenv(name, value)
        patch.chdir(folder)

    def __call__(self, *words: str, code: int = 0, **settings: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["eagleray", *words])
            try:
                main.main()
                status: object = 0
            except SystemExit as e:
                status = e.code or 0
        self.said += [text.encode() for text in self.capsys.readouterr()]
        assert status == code, self.said[-2:]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ran]:
    yield Ran(tmp_path, monkeypatch, capsys)
    monkeypatch.undo()
    reset_auth_token_state()


def leaks(data: bytes) -> list[str]:
    """The planted secrets in what was written; each begins with the same word, in whatever way it is written."""
    spellings = {"planted", "planted".encode("utf-16-le").decode("latin-1")}
    return [
        data[max(at - 60, 0) : at + 60].decode(errors="replace")
        for s in spellings
        if (at := data.find(s.encode("latin-1"))) >= 0
    ]


def assert_clean(folder: Path, said: list[bytes]) -> None:
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert files
    found = {str(p.relative_to(folder)): leaks(p.read_bytes()) for p in files}
    assert {name: where for name, where in found.items() if where} == {}
    assert [where for text in said for where in leaks(text)] == []


def test_the_search_finds_what_is_planted(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f"x {PLANTED['AWS_SECRET_ACCESS_KEY']}")
    with pytest.raises(AssertionError):
        assert_clean(tmp_path, [])
    with pytest.raises(AssertionError):
        assert_clean(Path(__file__).parent / "helpers", [b"plantedUser"])


@pytest.mark.timeout(LONG)
def test_a_run_its_history_and_its_report_hold_no_secret(shards: Path, tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    keys = [f"data.train={shards / 'train'}", "workers=0", "max_steps=2", "evaluate.probe_epochs=0", "log_steps=1"]
    ran("pretrain", "small.yaml", *keys, "out=runs/a")
    assert (tmp_path / "runs" / "mlflow.db").exists()
    ran("pretrain", "small.yaml", *keys, "out=other/b", MLFLOW_TRACKING_URI=IN_A_URI)
    ran("report", "runs/a")
    ran("report", "other/b", MLFLOW_TRACKING_URI=IN_A_URI)
    for word in (f"out={WITH_KEYS}", f"data.train={WITH_KEYS}", f"data.train={SIGNED}", f"data.train={IN_A_URI}"):
        ran("pretrain", "small.yaml", *keys, "out=runs/c", word, code=2)
    for words in (["index", WITH_KEYS], ["report", WITH_KEYS], ["export", WITH_KEYS], ["index", SIGNED]):
        ran(*words, code=2)
    assert_clean(tmp_path, ran.said)


@pytest.mark.timeout(LONG)
def test_a_sweep_its_ray_and_the_server_of_its_history_hold_no_secret(shards: Path, tmp_path: Path, ran: Ran) -> None:
    """The server takes what is sent, with the planted name and password."""
    for method in ("mocov3", "byol"):
        (tmp_path / f"{method}.yaml").write_text(small_recipe(method))
    write(tmp_path / "sweep.yaml", trials=2)
    (tmp_path / "server").mkdir()
    with mlflow_running(tmp_path / "server") as server, TemporaryDirectory(prefix="er") as ray:  # a short path
        keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}"]
        ran("tune", "sweep.yaml", *keys, "out=sweep", MLFLOW_TRACKING_URI=server.uri, RAY_TMPDIR=ray)
        ran("report", "sweep", MLFLOW_TRACKING_URI=server.uri)
        assert len(accounted(server.uri, "sweep", 2)) == 2
        assert list(Path(ray).rglob("raylet.out"))
        assert_clean(Path(ray), [])
    assert_clean(tmp_path, ran.said)


@pytest.mark.timeout(LONG)
def test_a_job_holds_no_secret(tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    head = FakeHead()
    submit = ["submit", "small.yaml", "data.train=s3://b/t", "--address", head.address]
    ran(*submit, "out=s3://b/run")
    ran(*submit, f"out={WITH_KEYS}", code=2)
    ran(*submit, "out=s3://b/2", code=2, MLFLOW_TRACKING_URI=IN_A_URI)
    head.server.shutdown()
    [job], [package] = head.jobs.values(), head.packages
    assert leaks(json.dumps(job).encode()) == []
    files = zipfile.ZipFile(io.BytesIO(package))
    assert [where for name in files.namelist() for where in leaks(files.read(name))] == []
    assert_clean(tmp_path, ran.said)
