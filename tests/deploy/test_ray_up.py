"""`ray up` with aws.yaml and gcp.yaml, as it merges them with its defaults: every command on the machines and in their
containers succeeds, in order."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from helpers import read_only
from helpers.deploy import load
from helpers.ray_up import Machine, start_head, start_worker

pytestmark = pytest.mark.skipif(not read_only.possible(), reason="mounting needs root")


@contextmanager
def machine(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine(folder / name, f"{folder.name}-{name}-{os.getpid()}")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{found.place / 'bin'}:{os.environ['PATH']}")
        patch.setenv("PLACE", str(found.place))
        try:
            yield found
        finally:
            found.close()


LOGINS = {"aws": ["aws ecr get-login-password", "docker login --username AWS"], "gcp": ["gcloud auth configure-docker"]}


@pytest.mark.parametrize("cloud", LOGINS)
def test_ray_up_starts_a_head_and_its_workers(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(f"{cloud}.yaml")
    with machine(tmp_path, "head", monkeypatch) as head:
        start_head(head, config, tmp_path / "user")
        pull = next(i for i, line in enumerate(head.asked) if line.startswith("docker pull"))
        asked = [
            next((i for i, line in enumerate(head.asked) if line.startswith(login)), pull) for login in LOGINS[cloud]
        ]
        assert max(asked) < pull
        stop, start, *rest = head.told
        assert stop == "ray stop"
        assert start.startswith("ray start --head --num-cpus=0 ")
        assert {line.split()[0] for line in rest} <= {"serve.sh"}  # on its own time, behind the start
    for kind in config["available_node_types"].keys() - {"head"}:
        with machine(tmp_path, kind, monkeypatch) as worker:
            start_worker(worker, kind, head.image / "home/ray/ray_bootstrap_config.yaml", tmp_path / f"of-{kind}")
            stop, start, *rest = worker.told
            assert stop == "ray stop"
            assert start.startswith("ray start --address=10.0.0.5:6379 ")
            [run] = [line for line in worker.asked if line.startswith("docker run")]
            assert "--shm-size=" in run
            assert ("--device=/dev/infiniband" in run) == (kind == "efa")


def test_a_second_ray_up_takes_the_settings_as_they_are_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load("aws.yaml")
    with machine(tmp_path, "head", monkeypatch) as head:
        start_head(head, config, tmp_path / "user")
        (tmp_path / "user" / "env").write_text("SETTING=new\n")
        start_head(head, config, tmp_path / "user")
    starts = [line.split()[-1] for line in head.told if line.startswith("ray start")]
    assert starts == ["old", "new"]


def test_what_ray_merges_in_would_not_start_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load("gcp.yaml")
    del config["head_setup_commands"]
    with machine(tmp_path, "head", monkeypatch) as head, pytest.raises(click.ClickException):
        start_head(head, config, tmp_path / "user")
    assert head.told == ["pip install google-api-python-client==1.7.8"]
