"""A run that reads one in two samples, killed in the middle of an epoch, fetches little more than these samples."""

from pathlib import Path

import numpy as np
import pytest
from chaos.job import Run
from chaos.site import BATCH, Site
from helpers.pictures import encode
from helpers.s3.proxy import Proxy

from eagleray.config.source import Source
from eagleray.data import index_file
from eagleray.data.columns import select
from eagleray.data.index import open_index, write_index
from eagleray.datasets.shards import Sample, write_shards

pytestmark = pytest.mark.slow

IMAGES, SIDE = 2400, 195  # noise, of about 30 kB
BLOCK = 2**18  # so that those lost by a kill are as small beside an epoch as blocks of large data
WHERE = "hash(key) % 2 = 0"


@pytest.mark.timeout(600)
def test_a_killed_run_fetches_the_kept_bytes_and_a_tenth(
    site: Site, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, folder = np.random.default_rng(0), tmp_path / "shards"
    images = (encode(draw.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8), quality=85) for _ in range(IMAGES))
    write_shards((Sample(f"{i:06d}", "jpg", data, i % 10) for i, data in enumerate(images)), str(folder), size=10**7)
    monkeypatch.setattr(index_file, "BLOCK", BLOCK)
    write_index(str(folder))
    for path in folder.iterdir():
        site.client.upload_file(str(path), "chaos", f"bytes/{path.name}")
    index = open_index([Source(url=str(folder), where=WHERE)], note=lambda _: None)
    chosen = select(index)
    assert chosen
    assert 25_000 < index.size.mean() < 35_000
    assert 0.45 < chosen.kept / IMAGES < 0.55
    steps = chosen.total // BATCH
    keys = (f"max_steps={steps}", "checkpoint.steps=1", "log_steps=1")
    with Run(site.recipe, f'{{url: "s3://chaos/bytes", where: "{WHERE}"}}', tmp_path / "run") as run:
        job = run.start(0, 1, *keys)
        job.wait_for(steps // 2)
        job.kill_all()
        job = run.start(0, 1, *keys)
        assert job.finish() == 0, job.said()
    fetched = sum(count for path, count in proxy.bytes.items() if path.endswith(".tar"))
    print(f"{fetched / chosen.kept_bytes:.3f} of the kept bytes in {steps} steps")
    assert chosen.kept_bytes < fetched <= 1.1 * chosen.kept_bytes
