"""The page on plug-ins is executed: its files are written, its commands and its Python are run, one after the other."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.layouts import fill
from typer.testing import CliRunner

from eagleray.cli import main
from eagleray.config import plugins

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
BLOCK = re.compile(r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.M | re.S)
pytestmark = pytest.mark.filterwarnings("ignore:Overwriting my_vit")


@pytest.fixture
def folder(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the data that the page names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").symlink_to(shards)
    fill(tmp_path / "photos", ["a1.jpg", "a2.jpg", "b1.jpg"])
    yield tmp_path
    plugins.unload()


def words(line: str) -> list[str]:
    """The words of a command; a value in brackets is one of them, as a person would quote it."""
    quoted = re.sub(r" ([\w.]+=[\[{].*[\]}])(?= |$)", lambda m: f" {shlex.quote(m[1])}", line)
    return shlex.split(quoted)


@pytest.mark.slow
def test_everything_on_the_page_runs(folder: Path):
    ran = 0
    for block in BLOCK.finditer(PAGE.read_text()):
        file, kind, text = block["file"], block["kind"], block["text"]
        if file:
            (folder / file).write_text(text)
        elif kind == "python":
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert "two ranks differ from one by" in done.stdout
        else:
            for line in text.splitlines():
                plugins.unload()
                program, *arguments = words(line)
                assert program == "eagleray"
                result = CliRunner().invoke(main.app, arguments, catch_exceptions=False)
                assert result.exit_code == 0, (line, result.output)
                ran += 1
    assert ran == 9
    assert (folder / "runs" / "best" / "best.txt").exists()
    assert (folder / "runs" / "cut" / "plugins" / "my_views.py").exists()
    assert (folder / "prepared" / "dataset.json").exists()
