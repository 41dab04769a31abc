"""Which steps use a sample: what is computed from the order equals what a stream has read, whatever stands in."""

import dataclasses
import os
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from helpers.pictures import jpeg, write_shards

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import index_file
from eagleray.data.file_names import to_text
from eagleray.data.index import open_index
from eagleray.data.reader import Stream
from eagleray.data.sample_uses import broken_samples, first_step_with, samples_with, steps_with
from eagleray.data.selection import Selection
from eagleray.views.sampling import Views

LANES, BATCH, SAMPLES, STEPS = 6, 12, 65, 17  # 5 steps in an epoch
BROKEN = (3, 20, 21, 40, 64)
VIEWS = Views.of([View(size=16, count=2)])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 8192)


@pytest.fixture(scope="module")
def dented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these samples some are broken, neighbours among them."""
    return write_shards(tmp_path_factory.mktemp("dented"), SAMPLES, 3, broken=BROKEN)


def stream_of(folder: Path, forgotten: set[int], weight: float = 1.0) -> Stream:
    index = dataclasses.replace(open_index(str(folder), note=lambda _: None), forgotten=frozenset(forgotten))
    chosen = None if weight == 1 else Selection(np.full(SAMPLES, weight, np.float32))
    return Stream(index, VIEWS, 7, LANES, BATCH, selection=chosen)


def all_but(stream: Stream, lane_of: int, kept: int) -> set[int]:
    """All samples of the first run of a lane in the first epoch, and of the next run all but so many."""
    epoch = stream.epoch(0)
    lane = epoch.order.lane(lane_of, lanes=LANES, batch=BATCH)
    return {*epoch.samples(lane[0]).tolist(), *epoch.samples(lane[1])[kept:].tolist()}


@pytest.mark.parametrize("weight", [1.0, 1.6])
@pytest.mark.parametrize("forgotten", [set(), {0, 4, 5, 41}, {3, 19, 22}, "a whole run"])
def test_the_steps_of_every_sample_are_those_that_a_stream_has_read(
    dented: Path, forgotten: set[int] | str, weight: float
) -> None:
    """Also where a lane's part of a block has no good sample left, and a sample of another block stands in."""
    plain = stream_of(dented, set(), weight)
    gone = {s for lane in range(LANES) for s in all_but(plain, lane, 1)} if isinstance(forgotten, str) else forgotten
    stream = stream_of(dented, gone, weight)
    parts = list(islice(stream.parts(range(LANES), start=0), STEPS))
    assert not any(part.error for part in parts)
    read = defaultdict(list)
    for step, part in enumerate(parts):
        for sample in part.index.tolist():
            read[sample].append(step)
    met = set(broken_samples(stream.index, [bad for part in parts for bad in part.bad]))
    assert met <= set(BROKEN) - gone
    assert met or isinstance(forgotten, str)
    assert steps_with(stream, range(SAMPLES), STEPS, met | gone) == [read[s] for s in range(SAMPLES)]
    for some in [{7}, {8, 30}, set(range(10, 20)), gone]:
        steps = [step for s in some for step in read[s]]
        assert first_step_with(stream, some, STEPS, met | gone) == min(steps, default=None)


def test_a_forgotten_sample_changes_nothing_but_its_own_rows(dented: Path) -> None:
    """A row has the same random numbers, whoever stands in: where it is the first sample that was not forgotten, the
    row is the same."""
    gone = {0, 4, 5, 41}
    before, after = (list(islice(stream_of(dented, g).parts(range(LANES), start=0), STEPS)) for g in (set(), gone))
    changed = 0
    for a, b in zip(before, after, strict=True):
        same = (a.index == b.index).numpy()
        changed += int((~same).sum())
        assert set(a.index.numpy()[~same].tolist()) <= gone
        assert not gone & set(b.index.tolist())
        assert (a.params[:, same] == b.params[:, same]).all()
        assert all((x[:, same] == y[:, same]).all() for x, y in zip(a.pixels, b.pixels, strict=True))
    assert changed


def test_a_name_that_is_not_utf8_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shell passes it, and as tables have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (photos := tmp_path / "photos").mkdir()
    (photos / (name := os.fsdecode(b"caf\xe9.jpg"))).write_bytes(jpeg(0))
    index = open_index(str(photos), note=lambda _: None)
    assert [list(samples_with(index, key)) for key in (name, to_text(name), "caf")] == [[0], [0], []]


def test_a_lane_without_any_image_left_is_an_error(dented: Path) -> None:
    part = next(stream_of(dented, set(range(SAMPLES))).parts(range(LANES), start=0))
    assert isinstance(part.error, UserError)
    assert "no usable image is left in a whole lane of the data, as all are forgotten" in str(part.error)
