"""Selections: how often a sample is read in an epoch is its weight, exactly."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pictures import write_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import index_file, selection
from eagleray.data.index import Index, open_index
from eagleray.data.order import lanes_of
from eagleray.data.reader import Stream
from eagleray.data.sample_uses import samples_with, steps_with
from eagleray.data.selection import Selection, check_weights, visits_of
from eagleray.storage.block_cache import Cache
from eagleray.storage.store import LocalStore
from eagleray.views.sampling import Views

WEIGHTS = arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([0, 0.1, 0.5, 1, 1 / 3, 2, 2.3, 7]))


def of(*weight: float) -> Selection:
    return Selection(np.array(weight, np.float32))


@pytest.fixture(autouse=True, params=[7, 2**20])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn at a time, few samples or many."""
    monkeypatch.setattr(selection, "CHUNK", request.param)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WEIGHTS, st.integers(0, 2**31), st.integers(0, 1000))
def test_readings_are_the_weight_rounded_down_or_up(weight: np.ndarray, seed: int, epoch: int):
    chosen = Selection(weight)
    copies = chosen.copies(seed=seed, epoch=epoch)
    assert copies.sum() == chosen.total
    assert abs(chosen.total - float(weight.sum(dtype=np.float64))) <= 0.5 or 0 < chosen.rest < 0.5
    assert (np.floor(weight) <= copies).all()
    assert (copies <= np.ceil(weight)).all()


def test_one_fraction_changes_no_whole_weight():
    weight = np.full(min(5000, 100 * selection.CHUNK), 2, np.float32)  # each chunk costs as much as many samples
    weight[17] = 0.5
    for epoch in range(200):
        copies = Selection(weight).copies(seed=3, epoch=epoch)
        assert (np.delete(copies, 17) == 2).all()
        assert copies[17] == 1, "it is read, as nothing else could be instead"


def test_whole_weights_are_read_just_so():
    weight = np.random.default_rng(0).integers(0, 4, 5000).astype(np.float32)
    for epoch in range(5):
        assert (Selection(weight).copies(seed=3, epoch=epoch) == weight).all()


def test_the_mean_over_epochs_is_the_weight():
    weight = np.random.default_rng(0).uniform(0, 3, min(500, 10 * selection.CHUNK)).astype(np.float32)
    weight *= round(weight.sum()) / weight.sum()
    mean = np.mean([Selection(weight).copies(seed=0, epoch=e) for e in range(2000)], 0)
    assert abs(mean - weight).max() < 0.06


def test_seed_and_epoch_change_what_is_drawn():
    chosen = Selection(np.full(1000, 0.5, np.float32))
    first = chosen.copies(seed=0, epoch=0)
    assert (first == chosen.copies(seed=0, epoch=0)).all()
    drawn = {chosen.copies(seed=s, epoch=e).tobytes() for s in range(3) for e in range(3)}
    assert len(drawn) == 9


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=9))
def test_the_visits_of_a_block_read_each_sample_as_often_as_it_is_to_be_read(blocks: list[list[int]]):
    copies = np.array([c for b in blocks for c in b], np.uint16)
    starts = np.r_[0, np.cumsum([len(b) for b in blocks])]
    visits = visits_of(copies, starts)
    read = np.zeros(len(copies), int)
    for visit, block in enumerate(visits.blocks.tolist()):
        mine = starts[block] + np.flatnonzero(copies[starts[block] : starts[block + 1]] > visits.number(visit))
        assert len(mine) == visits.sizes[visit] > 0
        read[mine] += 1
    assert (read == copies).all()
    assert (np.diff(visits.blocks) >= 0).all()


def test_one_large_weight_costs_visits_of_its_block_alone():
    copies, starts = np.ones(300_000, np.uint16), np.arange(0, 300_001, 30)
    copies[[40, 41]] = 1000, 7
    began = time.process_time()
    visits = visits_of(copies, starts)
    assert time.process_time() - began < 0.2  # 0.01, and 0.5 when each visit counts in all blocks
    assert len(visits.blocks) == 10_000 + 999
    assert visits.sizes[visits.blocks == 1].tolist() == [30] + [2] * 6 + [1] * 993
    assert (visits.sizes[visits.blocks != 1] == 30).all()


@pytest.mark.parametrize(
    ("weight", "line"),
    [
        ([1, -0.5, 1], "data.train.weight: 1 samples have a weight such as -0.5; expected 0 or more"),
        ([np.nan, 1], "data.train.weight: 1 samples have a weight such as nan"),
        ([np.inf, 1], "such as inf"),
        ([0, 0], "data.train.weight: leaves none of 2 samples"),
        ([1, 5000], "a sample has a weight of 5000; expected at most 1000"),
    ],
)
def test_weights_that_cannot_be_used(weight: list[float], line: str):
    with pytest.raises(UserError, match=line):
        check_weights(np.array(weight), "data.train.weight")


# The stream of a selection.

SAMPLES, BATCH = 160, 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_file, "BLOCK", 16_384)
        return open_index(str(write_shards(tmp_path_factory.mktemp("data") / "s", SAMPLES, 3)), note=lambda _: None)


def stream(index: Index, weight: np.ndarray | None, **more: Any) -> Stream:
    chosen = None if weight is None else Selection(weight.astype(np.float32))
    return Stream(index, Views.of([View(size=8)]), 5, 4, BATCH, selection=chosen, **more)


def read(given: Stream, start: int, stop: int, readers: int = 1) -> list[list[tuple[int, int, bytes]]]:
    """The rows of each step: image, label and pixels, in the order of the lanes."""
    parts = [
        list(given.parts(lanes_of(given.lanes, reader=r, readers=readers), start=start, stop=stop))
        for r in range(readers)
    ]
    return [
        [
            row
            for part in of_step
            for row in zip(
                part.index.tolist(), part.label.tolist(), [bytes(x.numpy()) for x in part.pixels[0][0]], strict=True
            )
        ]
        for of_step in zip(*parts, strict=True)
    ]


DRAWN = {
    "half": lambda draw: draw.integers(0, 2, SAMPLES),
    "few": lambda draw: draw.random(SAMPLES) < 0.08,
    "weights": lambda draw: draw.choice([0, 0.3, 1, 2.5], SAMPLES),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_an_epoch_reads_every_sample_by_its_weight(index: Index, kind: str):
    weight = DRAWN[kind](np.random.default_rng(1)).astype(float)
    given = stream(index, weight)
    for epoch in range(3):
        steps = range(epoch * given.steps_per_epoch, (epoch + 1) * given.steps_per_epoch)
        rows = [row for step in read(given, steps.start, steps.stop) for row in step]
        copies = Selection(weight.astype(np.float32)).copies(seed=5, epoch=epoch)
        seen = np.bincount([sample for sample, *_ in rows], minlength=SAMPLES)
        assert (seen <= copies).all()
        assert copies.sum() - seen.sum() < BATCH  # those that do not fill a batch
        assert [label for _, label, _ in rows] == [int(index.label[sample]) for sample, *_ in rows]
        assert len({pixels for *_, pixels in rows}) == len(rows)  # another crop at every reading


@pytest.mark.parametrize("kind", DRAWN)
def test_any_readers_and_any_start_give_the_same_batches(index: Index, kind: str):
    given = stream(index, DRAWN[kind](np.random.default_rng(2)).astype(float))
    stop = 2 * given.steps_per_epoch + 1
    whole = read(given, 0, stop)
    for readers in range(2, 5):
        assert read(given, 0, stop, readers) == whole
    for start in range(1, stop, max(stop // 5, 1)):
        assert read(given, start, stop) == whole[start:]


def test_what_is_kept_as_it_is_reads_as_without_a_selection(index: Index):
    assert read(stream(index, np.ones(SAMPLES)), 0, 25) == read(stream(index, None), 0, 25)


def test_little_is_fetched_but_what_is_kept(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fetched: list[int] = []
    honest = LocalStore.read

    def counted(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        fetched.append(length)
        return honest(self, url, start, length, **more)

    monkeypatch.setattr(LocalStore, "read", counted)
    weight = (np.random.default_rng(3).random(SAMPLES) < 0.5).astype(float)
    mine, end = np.flatnonzero(weight), index.offset + index.size
    gaps = index.offset[mine[1:]] - end[mine[:-1]]
    kept = int(index.size[mine].sum() + gaps[np.diff(mine) == 1].clip(0).sum())  # with the headers between neighbours
    given = stream(index, weight)
    for start, stop in (0, 3), (3, given.steps_per_epoch):  # a stop in the middle
        read(given, start, stop)
    assert sum(fetched) <= 1.1 * kept + 4 * 2 * 6000  # and the two blocks that each lane had asked for at the stop
    fetched.clear()
    cached = stream(index, weight, cache=Cache(tmp_path / "cache", 10**8))
    first = read(cached, 0, 2 * given.steps_per_epoch)
    assert sum(fetched) <= 1.3 * kept  # pieces that a lane's boundary cuts are fetched by both lanes
    assert first == read(given, 0, 2 * given.steps_per_epoch)


@pytest.mark.parametrize("kind", [*DRAWN, "all", "repeated"])
def test_the_steps_of_a_sample_are_those_that_read_it(index: Index, kind: str):
    weight = DRAWN[kind](np.random.default_rng(4)).astype(float) if kind in DRAWN else None
    of = replace(index, sources=[replace(s, repeat=2) for s in index.sources]) if kind == "repeated" else index
    given = stream(of, weight)
    stop = 2 * given.steps_per_epoch + 1
    read_in: dict[int, list[int]] = {sample: [] for sample in range(SAMPLES)}
    for step, rows in enumerate(read(given, 0, stop)):
        for sample, *_ in rows:
            read_in[sample].append(step)
    assert steps_with(given, list(read_in), stop) == list(read_in.values())
    assert list(samples_with(index, index.key(90))) == [90]


def test_broken_samples_are_replaced_by_kept_ones(index: Index, tmp_path: Path):
    folder = write_shards(tmp_path / "s", SAMPLES, 3)
    own = open_index(str(folder), note=lambda _: None)
    weight = (np.arange(SAMPLES) % 4 == 1).astype(float)
    broken = np.flatnonzero(weight)[::6]
    for sample in broken.tolist():
        path = Path(own.shards[own.shard[sample]].url)
        data = bytearray(path.read_bytes())
        data[own.offset[sample] : own.offset[sample] + 40] = bytes(40)
        path.write_bytes(data)
    given = stream(own, weight)
    rows = [sample for step in read(given, 0, given.steps_per_epoch) for sample, *_ in step]
    assert set(rows) <= set(np.flatnonzero(weight)) - set(broken)
    parts = list(given.parts(range(4), start=0, stop=given.steps_per_epoch))
    assert {b.key for part in parts for b in part.bad} <= {own.key(s) for s in broken.tolist()}
