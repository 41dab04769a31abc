"""Protocols whose features are divided among ranks compute what one rank does."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.features import clusters

from eagleray.base import dist
from eagleray.protocols.features import LabelledFeatures, Shard, own_samples
from eagleray.protocols.image_batches import BATCH
from eagleray.protocols.knn import knn
from eagleray.protocols.linear import linear
from eagleray.protocols.probes import renumber

RANKS = (1, 2, 3)


def sets() -> tuple[LabelledFeatures, LabelledFeatures]:
    """Features of classes that overlap; of the last 200 there are two each, in different classes."""
    train, test = clusters(1500, spread=3.0, seed=0), clusters(500, spread=3.0, seed=1)
    train.x[-200:], train.y[-200:] = train.x[:200], 4 - train.y[:200]
    return LabelledFeatures(train.x, 10 * train.y), LabelledFeatures(test.x, 10 * test.y)


def divided(most: int) -> list[LabelledFeatures]:
    """This rank's share of the first features of each set, with classes counted from 0."""
    rows = [own_samples(np.arange(min(len(s.y), most))) for s in sets()]
    parts = (LabelledFeatures(s.x[mine], s.y[mine]) for s, mine in zip(sets(), rows, strict=True))
    return list(renumber(*parts, torch.device("cpu")))


def _measure(rank: int, ranks: int, store: Path, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    shares = [own_samples(np.arange(len(s.y))) for s in sets()]
    train, test = divided(len(sets()[0].y))
    few = divided(BATCH)  # one rank has them all
    of_few = knn(*few, k=7) | linear(*few, epochs=1, scaled=True)
    shard = Shard.of(len(train.y))
    numbers = knn(train, test, k=7, ks=(1, 5, 2000))
    half = knn(LabelledFeatures(train.x.bfloat16(), train.y), test)
    probe = linear(train, test, epochs=3)
    assert torch.equal(shard.read(train.x, 250, 600), sets()[0].x[250:600])
    error = ""
    try:
        dist.together(lambda: 1 // (rank - 1) if ranks > 1 else 1 // 0)
    except (ZeroDivisionError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}"
    queue.put((rank, shares[0].tolist(), numbers, half, probe, error, of_few))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each rank measured, by the number of ranks. The processes are copies of this one."""
    context, out = multiprocessing.get_context("fork"), {}
    for ranks in RANKS:
        queue: Any = context.SimpleQueue()
        store = tmp_path_factory.mktemp("store") / "store"
        processes = [context.Process(target=_measure, args=(r, ranks, store, queue)) for r in range(ranks)]
        for process in processes:
            process.start()
        out[ranks] = sorted(queue.get() for _ in processes)
        for process in processes:
            process.join()
    return out


def test_ranks_share_whole_batches(measured: dict[int, list[Any]]):
    for parts in measured.values():
        assert [s for part in parts for s in part[1]] == list(range(1500))
        assert all(part[1][0] % BATCH == 0 for part in parts)


def test_neighbours_are_the_same_on_any_number_of_ranks(measured: dict[int, list[Any]]):
    """To the last digit, also where features are equal; bfloat16 changes them, on all ranks alike."""
    for column in 2, 3:
        first, *others = [part[column] for parts in measured.values() for part in parts]
        assert all(other == first for other in others)
    assert 20 < measured[1][0][2]["knn/top1"] < 100


def test_features_that_one_rank_holds_reach_the_others(measured: dict[int, list[Any]]):
    one = measured[1][0][6]
    for part in (p for ranks in RANKS[1:] for p in measured[ranks]):
        assert part[6] == pytest.approx(one, abs=0.5)
        assert part[6]["knn/top1"] == one["knn/top1"]


def test_the_probe_takes_the_same_batches(measured: dict[int, list[Any]]):
    one = measured[1][0][4]
    for ranks in RANKS[1:]:
        assert all(part[4] == measured[ranks][0][4] for part in measured[ranks])
        assert measured[ranks][0][4] == pytest.approx(one, abs=0.5)  # gradients are added in another order


def test_what_fails_on_one_rank_fails_on_all(measured: dict[int, list[Any]]):
    mine = "ZeroDivisionError: integer division or modulo by zero"
    assert [part[5] for part in measured[3]] == [f"RuntimeError: rank 1: {mine}", mine, f"RuntimeError: rank 1: {mine}"]
