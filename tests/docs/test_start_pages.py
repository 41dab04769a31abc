"""The page that a beginner follows, own photos: its commands run in their order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, typed
from helpers.pictures import jpeg

PAGES = ROOT / "docs" / "begin"
MAKE = '#!/bin/sh\necho "make $*" >> "$ASKED"\n'  # it would fetch packages that are here already
EAGLERAY = '#!/bin/sh\nexec {python} -m eagleray.cli "$@"\n'
# A day on a CPU: here the recipe only has to load.
LONG = {"eagleray pretrain mine.yaml": "eagleray show mine.yaml"}


def commands(page: str) -> str:
    """Return the commands of a page as one script; where to clone from is the test's."""
    text = "\n".join(typed(PAGES / page))
    text = re.sub(r"^git clone.*\n", "", text, flags=re.M)
    for long, short in LONG.items():
        text = text.replace(long, short)
    return text


def run(page: str, home: Path) -> str:
    """Run the commands of a page in a folder with photos/ and return what they printed."""
    programs = home / "bin"
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").touch()
    programs.mkdir()
    (home / "photos").mkdir()
    for i in range(280):
        (home / "photos" / f"{i}.jpg").write_bytes(jpeg(i))
    for name, text in {"make": MAKE, "eagleray": EAGLERAY}.items():
        (programs / name).write_text(text.replace("{python}", sys.executable))
        (programs / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "ASKED": str(home / "asked")}
    env |= {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(["bash", "-ec", commands(page)], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_own_photos_run(tmp_path: Path):
    run("photos.md", tmp_path)
    assert (tmp_path / "asked").read_text() == "make demo DATA=photos/\n"
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert list((tmp_path / "runs" / "first").rglob("*.safetensors"))
