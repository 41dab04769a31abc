"""Commands that show what strangers named, on a terminal that obeys nothing of it."""

from pathlib import Path

import pytest
from helpers.pictures import jpeg, spoiled, write_tar
from typer.testing import CliRunner

from eagleray.cli.main import app

NAME = "\x1b]0;PWNED\x07\x9b31m"
OBEYED = set("\x1b\x07\x9b")


@pytest.mark.parametrize("command", ["stats", "prepare", "index", "bench"])
def test_names_of_samples_are_shown_and_not_obeyed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    good = [(f"{i}.jpg", jpeg(i)) for i in range(16)]
    write_tar(tmp_path / "in" / "x.tar", [*good, (f"{NAME}.jpg", spoiled(1)), (f"{NAME}b.cls", b"1")])
    words = {
        "stats": ["data", "stats", str(tmp_path / "in")],
        "bench": ["data", "bench", str(tmp_path / "in"), "--seconds", "0.1"],
        "index": ["index", str(tmp_path / "in")],
        "prepare": ["prepare", "webdataset", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"],
    }[command]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = done.output
    assert not OBEYED & set(text)
    assert command in ("index", "bench") or r"\x1b]0;PWNED\x07" in text
