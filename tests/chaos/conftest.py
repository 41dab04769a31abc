"""What the chaos tests share: a store, shards in it, and what an uninterrupted run is given."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from chaos.check import Steps, multiset, steps
from chaos.job import COMMAND, Run
from helpers.pictures import jpeg
from helpers.s3.proxy import Proxy
from helpers.s3.server import Swift, point_at, running

SAMPLES, BATCH, LANES = 330, 32, 8  # ten steps an epoch, and some samples left out
LONG, SHORT = 198, 42  # steps, with checkpoints at both
RECIPE = f"""
method: {{name: mocov3, dim: 16, hidden: 32}}
backbone:
  name: vit_tiny_patch16_224
  options: {{img_size: 16, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 3}}
views: [{{size: 16, scale: [0.3, 1.0], solarize: 0.1}}, {{size: 16, scale: [0.3, 1.0], blur: 0.5}}]
data: {{lanes: {LANES}}}
optim: {{batch: {BATCH}, epochs: 20, lr: {{value: 1.0e-3, warmup: 0.2, end: 0.0}}}}
evaluate: {{size: 16, resize: 16, probe_epochs: 0}}
checkpoint: {{steps: 3}}
log_steps: 20
"""


@dataclass(frozen=True)
class Site:
    """The server, the shards as they are in a folder, and the uninterrupted run on them."""

    swift: Swift
    shards: Path
    recipe: Path
    client: Any

    def upload(self, name: str) -> str:
        """The shards, indexed, in a place of their own."""
        for path in self.shards.glob("*.tar"):
            self.client.upload_file(str(path), "chaos", f"{name}/{path.name}")
        subprocess.run([COMMAND, "index", f"s3://chaos/{name}"], check=True, capture_output=True)
        return f"s3://chaos/{name}"


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of LONG steps in one process."""

    run: Run
    steps: Steps


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from eagleray.datasets.shards import Sample, write_shards

    folder = tmp_path_factory.mktemp("chaos")
    (folder / "small.yaml").write_text(RECIPE)
    samples = (Sample(f"s{i:04d}", "jpg", jpeg(i), i % 10) for i in range(SAMPLES))
    write_shards(samples, str(folder / "shards"), size=15_000)
    with running(folder / "s3") as swift, pytest.MonkeyPatch.context() as patch:
        point_at(patch, swift.port)
        client = boto3.client("s3")
        client.create_bucket(Bucket="chaos")
        yield Site(swift, folder / "shards", folder / "small.yaml", client)


@pytest.fixture(scope="module")
def whole(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    with Run(site.recipe, site.upload("train"), tmp_path_factory.mktemp("whole") / "run") as run:
        job = run.start(0, 0, f"max_steps={LONG}", f"checkpoint.steps={SHORT}", "checkpoint.keep=9")
        assert job.finish() == 0, job.said()
    taken = steps(run.lines())
    assert sorted(taken) == list(range(1, LONG + 1))
    assert set(multiset(taken).values()) == {1}, "a sample twice in an epoch"
    return Whole(run, taken)


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Iterator[Run]:
    """A run of the same recipe on the same shards, not started yet."""
    with Run(whole.run.recipe, whole.run.data, tmp_path / "run") as run:
        yield run


@pytest.fixture
def proxy(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server, which the commands of this test talk to."""
    with Proxy(site.swift.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy
