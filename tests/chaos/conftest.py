"""What the chaos tests share: a store, shards in it, and what an uninterrupted run is given."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from chaos.check import multiset, steps
from chaos.job import Run
from chaos.site import LONG, RECIPE, SAMPLES, SHORT, Site, Whole
from helpers.pictures import jpeg
from helpers.s3.proxy import Proxy
from helpers.s3.server import point_at, running


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
