"""Ranks and loader processes: every split of the work gives the same global batches."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.pictures import sample, spoiled, write_shards, write_tar

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import index_file
from eagleray.data.batch import Batch
from eagleray.data.index import open_index
from eagleray.data.loader import Loader, rows
from eagleray.data.quarantine import BadSample
from eagleray.data.reader import Stream
from eagleray.views import photometric
from eagleray.views.sampling import Views

LANES, BATCH, SAMPLES = 6, 12, 45  # 3 steps in an epoch
VIEWS = Views.of([View(size=16, count=2, blur=0.5, solarize=0.5), View(size=8, scale=(0.05, 0.3))])
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
Step = tuple[Batch, list[BadSample]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), SAMPLES, 3, broken=(5, 17, 40))


def stream(folder: Path, *, lanes: int = LANES, batch: int = BATCH) -> Stream:
    return Stream(open_index(str(folder), note=lambda _: None), VIEWS, 7, lanes, batch)


def run(s: Stream, rank: int, ranks: int, workers: int, start: int, steps: int) -> list[Step]:
    return list(islice(Loader(s, rank=rank, ranks=ranks, workers=workers, device=CPU).batches(start), steps))


def read(s: Stream, *, ranks: int, workers: int, start: int, steps: int) -> list[Step]:
    """Global batches, each joined from the ranks' shares."""
    shares = [run(s, rank, ranks, workers, start, steps) for rank in range(ranks)]
    return [join(step) for step in zip(*shares, strict=True)]


def join(shares: tuple[Step, ...]) -> Step:
    batches = [batch for batch, _ in shares]
    for rank, b in enumerate(batches):
        assert len(b.index) == len(b.label) == b.rows[rank]
        assert b.rows == batches[0].rows
    whole = Batch(
        views=[torch.cat(v) for v in zip(*[b.views for b in batches], strict=True)],
        index=torch.cat([b.index for b in batches]),
        label=torch.cat([b.label for b in batches]),
        rows=batches[0].rows,
    )
    return whole, [bad for _, share in shares for bad in share]


def assert_same(ours: list[Step], theirs: list[Step], *, tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for (a, bad), (b, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.label, b.label)
        assert bad == expected
        for x, y in zip(a.views, b.views, strict=True):
            assert x.shape == y.shape
            assert (x - y).abs().max() <= tolerance


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (1, 1), (1, 3), (2, 2)])
def test_any_split_of_the_work_gives_the_same_global_batches(folder: Path, ranks: int, workers: int) -> None:
    """Across an epoch's end, with broken samples; bit for bit where the photometric operations see equal batches."""
    s = stream(folder)
    alone = read(s, ranks=1, workers=0, start=0, steps=5)
    assert any(bad for _, bad in alone)
    assert_same(read(s, ranks=ranks, workers=workers, start=0, steps=5), alone, tolerance=2e-5 if ranks > 1 else 0)


@pytest.mark.parametrize(("start", "workers"), [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (3, 2)])
def test_starting_at_a_step_is_the_tail_of_the_whole(folder: Path, start: int, workers: int) -> None:
    """Bit for bit, also in another number of loader processes."""
    s = stream(folder)
    whole = read(s, ranks=1, workers=0, start=0, steps=7)
    assert_same(read(s, ranks=1, workers=workers, start=start, steps=7 - start), whole[start:], tolerance=0)


def test_a_batch_holds_what_the_stream_gives(folder: Path) -> None:
    s = stream(folder)
    [(batch, _)] = read(s, ranks=1, workers=0, start=2, steps=1)
    part = next(s.parts(range(LANES), start=2))
    assert [tuple(v.shape) for v in batch.views] == [(BATCH, 3, 16, 16)] * 2 + [(BATCH, 3, 8, 8)]
    pixels = [view for group in part.pixels for view in group]
    for view, raw, params in zip(batch.views, pixels, part.params, strict=True):
        assert (view - photometric.apply(raw, params)).abs().max() <= 2e-5
    assert torch.equal(batch.index, part.index)


@pytest.mark.parametrize(("lanes", "ranks", "workers"), [(6, 4, 0), (7, 2, 3), (8, 3, 2), (64, 5, 3)])
def test_rows_are_what_every_rank_owns(lanes: int, ranks: int, workers: int) -> None:
    batch = 3 * lanes
    counts = rows(lanes, batch, ranks=ranks, workers=workers)
    assert len(counts) == ranks
    assert sum(counts) == batch
    assert max(counts) - min(counts) <= 3 * max(workers, 1)


@pytest.mark.parametrize(("ranks", "workers"), [(7, 0), (1, 7), (2, 4)])
def test_more_readers_than_lanes_are_refused(folder: Path, ranks: int, workers: int) -> None:
    with pytest.raises(UserError, match=rf"workers={ranks} data\.workers={workers} data\.lanes=6: .* 6 lanes"):
        Loader(stream(folder), rank=0, ranks=ranks, workers=workers, device=CPU)


def one_line(steps: Iterator[Step]) -> str:
    """The error that a loader ends with, soon.

    Without `pytest.raises`, which would keep the loader in a circle of references: where the garbage collector ends
    one, not the last reference, PyTorch waits 5 seconds for each loader process.
    """
    text = ""
    try:
        list(islice(steps, 40))
    except UserError as e:
        text = str(e)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_fails_is_one_line(tmp_path: Path, workers: int) -> None:
    s = stream(write_shards(tmp_path, SAMPLES, 3))
    steps = Loader(s, rank=0, ranks=1, workers=workers, device=CPU).batches(0)
    next(steps)
    (tmp_path / "x-001.tar").unlink()
    assert one_line(steps) == f"{tmp_path / 'x-001.tar'}: cannot be read: No such file or directory"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lane_of_broken_samples_is_one_line(tmp_path: Path, workers: int) -> None:
    write_tar(tmp_path / "x.tar", [m for k in range(8) for m in sample(k, spoiled(k))])
    steps = Loader(stream(tmp_path, lanes=2, batch=4), rank=0, ranks=1, workers=workers, device=CPU).batches(0)
    assert one_line(steps).startswith("no usable image is left in a whole lane of the data")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_larger_than_the_data_is_one_line(folder: Path, workers: int) -> None:
    steps = Loader(stream(folder, batch=48), rank=0, ranks=1, workers=workers, device=CPU).batches(0)
    assert "45 samples do not fill one global batch of 48" in one_line(steps)
