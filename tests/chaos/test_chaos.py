"""Whatever is killed, paused, cut or spoiled: a run is given every sample of every epoch once, and the same ones.

What runs are given is traced from inside them (`trace/sitecustomize.py`) and compared with an uninterrupted run.
"""

import os
import random
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.check import verify, with_stand_ins
from chaos.job import Job, Run
from chaos.site import LANES, LONG, READERS, SHORT, Site, Whole, outage
from helpers.s3.proxy import Faults, Proxy

from eagleray.base.files import read_lines
from eagleray.engine import checkpoint

pytestmark = pytest.mark.slow

KINDS = ("loader", "rank", "ray", "job", "object", "proxy")  # killed in turn; the last two are servers of the store
KILLS = 20
SHORTLY = f"max_steps={SHORT}"


@pytest.mark.timeout(1800)
def test_twenty_kills(site: Site, whole: Whole, run: Run) -> None:
    rng, readers = random.Random(3), iter(READERS)
    step, job = 0, run.start(*next(readers), f"max_steps={LONG}")
    for number in range(KILLS):
        step += rng.randint(5, 12)
        kind = KINDS[number % len(KINDS)]
        job.wait_for(step)
        print(f"step {step}: {kind}")
        if kind in ("object", "proxy"):
            outage(site, rng.uniform(1, 4), kind)
        elif not survives(job, kind, rng):
            job = run.start(*next(readers), f"max_steps={LONG}")
    assert job.finish() == 0, job.said()
    verify(run.lines(), whole.steps, LONG)


def survives(job: Job, kind: str, rng: random.Random) -> bool:
    """Kill a part of the job, or all of it. With Ray all ranks begin again when one of them is lost."""
    if kind == "job":
        job.kill_all()
        return False
    ranks = job.ranks()
    workers = {"rank": job.ranks, "ray": job.ray_workers, "loader": job.loader_workers}[kind]()
    job.kill(rng.choice(workers))
    if ranks:
        return True
    assert job.finish() == 1, job.said()
    assert job.complaint()
    return False


def test_a_pause_of_the_store(site: Site, whole: Whole, run: Run) -> None:
    job = run.start(0, 2, SHORTLY)
    job.wait_for(15)
    site.swift("pause", "all")
    time.sleep(5)
    site.swift("resume", "all")
    assert job.finish() == 0, job.said()
    assert_same(run, whole)


def assert_same(run: Run, whole: Whole) -> None:
    """The same samples, the same weights to the bit, and none of them taken for broken."""
    verify(run.lines(), whole.steps, SHORT)
    mine, wanted = run.weights(SHORT), whole.run.weights(SHORT)
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert not (run.out / "quarantine.jsonl").exists()


@pytest.mark.parametrize(
    "faults",
    [Faults(refuse=0.2), Faults(cut=0.1), Faults(reset=0.1), Faults(stall=0.1, most=2)],
    ids=["refused", "cut", "reset", "stalled"],
)
def test_a_store_that_fails_now_and_then(whole: Whole, run: Run, proxy: Proxy, faults: Faults) -> None:
    proxy.faults = faults
    job = run.start(0, 2, SHORTLY)
    assert job.finish() == 0, job.said()
    assert proxy.done.total() == faults.most or proxy.done.total() > 5
    assert_same(run, whole)


def test_flipped_bytes_are_found_by_their_checksums(site: Site, whole: Whole, run: Run) -> None:
    run.data = site.upload("flipped")
    broken = random.Random(5).sample(sorted({s for step in whole.steps.values() for s in step.samples}), 5)
    for sample in broken:
        flip(site, *sample.split(":"))
    job = run.start(0, 2, SHORTLY, "data.bad_limit=0.05")
    assert job.finish() == 0, job.said()
    verify(run.lines(), with_stand_ins(whole.steps, broken, LANES), SHORT)
    found = read_lines(run.out / "quarantine.jsonl")
    assert sorted(f"{bad['shard'].rpartition('/')[2]}:{bad['offset']}" for bad in found) == sorted(broken)
    assert all(bad["shard"].startswith(run.data) and "checksum" in bad["reason"] for bad in found)


def flip(site: Site, shard: str, offset: str) -> None:
    """One bit in the middle of an image, on the server's disk and behind its back."""
    with tarfile.open(site.shards / shard) as tar:
        [image] = [m for m in tar if m.offset_data == int(offset)]
    key = f"/chaos/flipped/{shard}".encode()  # Swift notes it in the attributes of the file
    [file] = [p for p in (site.swift.root / "data").rglob("*.data") if key in os.getxattr(p, "user.swift.metadata")]
    with file.open("r+b") as f:
        f.seek(image.offset_data + image.size // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_stays_away_ends_the_run_with_a_checkpoint(
    site: Site, whole: Whole, run: Run, workers: int
) -> None:
    command = (workers, 1, SHORTLY, "data.patience=0.1")
    job = run.start(*command)
    job.wait_for(13)
    site.swift("kill9", "all")
    try:
        status = job.finish()
    finally:
        site.swift("start")
    assert status == os.EX_TEMPFAIL, job.said()
    assert "s3://chaos/train/" in job.complaint()
    state = checkpoint.newest(run.out / "checkpoints")
    assert state is not None
    assert state["step"] == run.last()
    job = run.start(*command)
    assert job.finish() == 0, job.said()
    verify(run.lines(), whole.steps, SHORT)


def gone(site: Site, key: str) -> None:
    site.client.delete_object(Bucket="chaos", Key=key)


def replaced(site: Site, key: str) -> None:
    """By another shard of the same size."""
    content = bytearray(site.client.get_object(Bucket="chaos", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    site.client.put_object(Bucket="chaos", Key=key, Body=bytes(content))


@pytest.mark.parametrize("harm", [gone, replaced])
def test_a_shard_that_is_not_the_one_that_was_indexed_is_refused(site: Site, run: Run, harm: Any) -> None:
    run.data = site.upload(harm.__name__)
    harm(site, f"{harm.__name__}/shard-000007.tar")
    job = run.start(0, 0, SHORTLY)
    assert job.finish() == 2, job.said()
    assert f"{run.data}/shard-000007.tar" in job.complaint()
    assert not run.lines()


def test_a_cache_that_two_runs_share(site: Site, whole: Whole, run: Run, proxy: Proxy, tmp_path: Path) -> None:
    """One is killed while both fill it; afterwards it needs the store no more."""
    size = sum(p.stat().st_size for p in site.shards.glob("*.tar"))
    cached = (f"max_steps={LONG}", f"data.cache={tmp_path / 'cache'}", "data.cache_size=1GiB")
    with Run(run.recipe, run.data, tmp_path / "other") as other:
        proxy.faults = Faults(rate=size / 4)  # an epoch takes some seconds where nothing is cached
        jobs = [run.start(0, 2, *cached), other.start(0, 1, *cached)]
        jobs[0].wait_for(5)
        jobs[0].kill_all()
        jobs[1].wait_for(SHORT)
        jobs[1].stop()
        assert fetched(proxy) < 2 * size  # and not once for each of four epochs
        proxy.clear()
        job = run.start(0, 3, *cached)
        job.wait_for(SHORT)
        job.stop()
        assert fetched(proxy) == 0
        for one in (run, other):
            verify(one.lines(), whole.steps, one.last())


def fetched(proxy: Proxy) -> int:
    """Bytes of shards."""
    return sum(count for path, count in proxy.bytes.items() if path.endswith(".tar"))
