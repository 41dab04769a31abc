"""Images of an evaluation are read by blocks, in order, in threads and in loader processes."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from eagleray.base import cpu_share, devices
from eagleray.data.index import Index, open_index
from eagleray.protocols import image_batches
from eagleray.protocols.features import image
from eagleray.protocols.image_batches import Reading, batches


@pytest.mark.parametrize("workers", [0, 2])
def test_each_image_comes_once_and_in_order(workers: int, shards: Path):
    index = open_index(str(shards / "train"))
    samples = np.flatnonzero(np.arange(len(index)) % 7 < 5)
    state = torch.random.get_rng_state()
    parts = list(batches(index, samples, 16, 20, 50, reading=Reading(workers=workers)))
    assert [len(rows) for rows, _ in parts] == [50] * (len(samples) // 50) + [len(samples) % 50]
    assert [row for rows, _ in parts for row in rows] == samples.tolist()
    for row, crop in zip(parts[1][0], parts[1][1], strict=True):
        expected = image(index, row, 16, 20)
        assert expected is not None
        assert torch.equal(crop, expected)
    assert torch.equal(state, torch.random.get_rng_state()), "the training's random numbers go on"


def test_neighbours_are_fetched_together(shards: Path, monkeypatch: pytest.MonkeyPatch):
    index, reads = open_index(str(shards / "train")), []
    read = Index.read

    def counted(self: Index, first: int, last: int, **keys: float) -> memoryview:
        reads.append((first, last))
        return read(self, first, last, **keys)

    monkeypatch.setattr(Index, "read", counted)
    list(batches(index, np.arange(len(index)), 16, 16, 64))
    cuts = {*range(0, len(index), 64), *index.starts.tolist()}
    assert sorted(reads) == list(zip(sorted(cuts)[:-1], sorted(cuts)[1:], strict=True)), "one read a block and batch"


def test_a_process_reads_with_its_share_of_the_cpus(shards: Path, monkeypatch: pytest.MonkeyPatch):
    """Loader processes beside a GPU, threads beside a backbone on the CPU."""
    threads: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, most: int) -> None:
            threads.append(most)
            super().__init__(most)

    monkeypatch.setattr(image_batches, "ThreadPoolExecutor", Pool)
    monkeypatch.setenv(cpu_share.NAME, "12")
    assert Reading.beside(torch.device("cuda")) == Reading(workers=10)
    assert Reading.beside(devices.CPU) == Reading(workers=0)
    list(batches(open_index(str(shards / "test")), np.arange(3), 16, 16, reading=Reading.beside(devices.CPU)))
    assert threads == [12]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_changed_are_left_out(workers: int, shards: Path, tmp_path: Path):
    shutil.copytree(shards / "test", tmp_path / "test")
    index = open_index(str(tmp_path / "test"))
    path = Path(index.shards[0].url.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[int(index.offset[3]) + 40] ^= 0xFF
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    parts = list(batches(index, np.arange(8), 16, 16, 4, reading=Reading(workers=workers)))
    assert [rows for rows, _ in parts] == [[0, 1, 2], [4, 5, 6, 7]]
