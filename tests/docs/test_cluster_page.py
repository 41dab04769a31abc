"""Every command of docs/cluster.md, in the order of the page: what can run here runs, with a head that answers as Ray's
does and a real object store; clouds, containers and Slurm are programs that write down what they were asked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fake_head import FakeHead
from helpers.pictures import jpeg
from helpers.s3.server import store_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cluster.md"
ABSENT = ("docker", "kubectl", "ssh")  # no engine, no cluster and no cloud here
GIVEN = {"RECIPE": "small.yaml", "NAME": "cifar10_small", "BUCKET": "eagleray", "KEY": "key", "photos/": "photos/"}
STUB = '#!/bin/sh\necho "$(basename "$0") $*" >> "$ASKED"\n'
# Ray's own command where it needs no cluster; `eagleray` of this checkout; Slurm's script gets a recipe that must load.
RAY = """#!/bin/sh
case "$1" in get-auth-token) exec {python} -m ray.scripts.scripts "$@" ;; *) echo "ray $*" >> "$ASKED" ;; esac
"""
EAGLERAY = '#!/bin/sh\necho "eagleray $*" >> "$ASKED"\nexec {python} -m eagleray.cli "$@"\n'
SBATCH = """#!/bin/sh
while [ "$1" != "${1#--}" ]; do shift; done
[ -x "$1" ] || exit 3
echo "sbatch $*" >> "$ASKED"
[ "$2" = tune ] || { shift 2; eagleray show "$@" > /dev/null; }
"""


def blocks(text: str) -> list[str]:
    """The blocks of commands of a page; a line that only sets variables belongs into a file, not into a shell."""
    return [b for b in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) if not re.fullmatch(r"(\w+=\S+\n)+", b)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_runs(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, programs = tmp_path / "home", tmp_path / "bin"
    for folder in (home, programs, home / "photos"):
        folder.mkdir()
    scripts = dict.fromkeys(ABSENT, STUB) | {"ray": RAY, "eagleray": EAGLERAY, "sbatch": SBATCH, "activate": ""}
    for name, text in scripts.items():
        (programs / name).write_text(text.replace("{python}", sys.executable))
        (programs / name).chmod(0o755)
    for i in range(4):
        (home / "photos" / f"{i}.jpg").write_bytes(jpeg(i))
    (home / "small.yaml").write_text(small.read_text())
    (home / "deploy").symlink_to(ROOT / "deploy")
    head = FakeHead()
    head.then = lambda: [head.set(name, "SUCCEEDED", 0) for name in head.jobs]  # the first run is followed to its end
    with store_of(tmp_path / "store", "eagleray"):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}
        env |= {"HOME": str(home), "ASKED": str(tmp_path / "asked"), "EDITOR": "true"}
        env |= {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT / "platform")}
        line = "\n".join(blocks(PAGE.read_text())).replace("http://127.0.0.1:8265", head.address)
        line = line.replace("/shared/venv/bin/activate", str(programs / "activate"))
        for name, value in GIVEN.items():
            line = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", value, line)
        done = subprocess.run(["bash", "-ec", line], cwd=home, env=env, capture_output=True, text=True, timeout=800)
    head.server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [line.split()[:2] for line in (tmp_path / "asked").read_text().splitlines()]
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    assert (home / ".eagleray.env").stat().st_mode & 0o077 == 0
    assert [j["metadata"]["eagleray"] for j in head.jobs.values()] == ["pretrain", "tune", "pretrain", "tune"]
    assert "eagleray/photos" in done.stdout
    said = {word for words in asked for word in words[:1]}
    assert said == {"docker", "kubectl", "ssh", "ray", "eagleray", "sbatch"}
    # Every line of the page begins with one of these, so none is left out unseen.
    known = said | {"umask", "cp", "export", ".", "AWS_ENDPOINT_URL=http://store:7070"}
    text = "\n".join(blocks(PAGE.read_text())).replace("\\\n", " ")
    assert {row.split()[0] for row in text.splitlines() if row.strip()} <= known


def test_a_sweep_that_a_queue_starts_again_continues():
    """Slurm after a requeue, and a RayJob after its cluster died, run the same words again."""
    commands = re.findall(r"eagleray(?:\.sbatch)? tune NAME[^\n`]*", PAGE.read_text())
    assert len(commands) == 2
    assert all(words.endswith(" --resume") for words in commands)
