"""Containers whose root file system is read-only: what deploy/ starts, under one, with the volumes that it is given."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import read_only
from helpers.deploy import load
from helpers.runs import arguments
from helpers.s3.server import free_block

needs_root = pytest.mark.skipif(not read_only.possible(), reason="mounting needs root")


def test_what_ray_and_its_libraries_write_is_a_volume():
    pods = [group["template"]["spec"] for group in groups("raycluster") + groups("rayjob")]
    assert len(pods) == 4
    for pod in pods:
        [container] = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert volumes(container) == ["/dev/shm", "/tmp", "/home/ray"]
    services = load("compose.yaml")["services"]
    assert services["ray"]["read_only"]
    assert {v.split(":")[1] for v in services["ray"]["volumes"]} == {"/runs", "/data", "/tmp", "/home/ray"}
    assert services["mlflow"]["read_only"]
    assert {v.split(":")[1] for v in services["mlflow"]["volumes"]} == {"/tmp"}


def groups(name: str) -> list[dict[str, Any]]:
    spec = load(f"kuberay/{name}.yaml")["spec"]
    spec = spec.get("rayClusterSpec", spec)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def volumes(container: dict[str, Any]) -> list[str]:
    return [mount["mountPath"] for mount in container["volumeMounts"]]


# A head, the readiness probe of a pod, and a run sent to it.
NODE = """
set -e
ray start --head --num-cpus=2 --num-gpus=0 --node-ip-address=127.0.0.1 --port=$PORT --dashboard-port=$((PORT + 1)) \
    --dashboard-agent-listen-port=$((PORT + 2)) --min-worker-port=$((PORT + 4)) --max-worker-port=$((PORT + 63)) \
    --object-store-memory=100000000
curl --silent --fail 127.0.0.1:$((PORT + 1))/api/gcs_healthz
python -m eagleray.cli submit "$@" --address http://127.0.0.1:$((PORT + 1)) --follow
touch /written
"""


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_is_sent_to_a_head_that_cannot_write(small: Path, shards: Path, tmp_path: Path):
    port, hold, given = free_block(64), tmp_path / "hold", tmp_path / "given"
    hold.mkdir()
    given.mkdir()
    small = small.rename(given / small.name)
    keys = arguments(small, shards, Path("/tmp/run"), "workers=1", "evaluate.probe_epochs=0")
    words = ["bash", "-c", NODE, "node", *map(str, keys)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"PORT": str(port), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-the-test-0123", "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(read_only.ROOT / "platform")}
    command = read_only.command(hold, ["/tmp", env["HOME"]], *words, keep=(given, shards))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1400)
    text = done.stdout + done.stderr
    assert "touch: cannot touch '/written': Read-only file system" in text
    assert text.count("Read-only file system") == 1, text
    assert json.loads((hold / "volumes/tmp/run/summary.json").read_text())["steps"] == 20
