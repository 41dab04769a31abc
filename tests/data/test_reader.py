"""The stream of global batches on real shards: whoever reads it, wherever it starts, whatever is broken."""

import dataclasses
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import sample, spoiled, write_shards, write_tar
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import index_file, reader
from eagleray.data.index import open_index
from eagleray.data.order import Epoch, lanes_of
from eagleray.data.reader import StepPart, Stream, size_groups
from eagleray.storage import store
from eagleray.storage.store import LocalStore
from eagleray.views import sampling
from eagleray.views.sampling import Views

LANES, BATCH, SAMPLES = 6, 12, 65  # 5 steps in an epoch
BROKEN = (3, 20, 21, 40, 64)
VIEWS = Views.of([View(size=16, count=2, blur=0.5, solarize=0.5), View(size=8, scale=(0.05, 0.3))])


def stream(
    folder: Path, *, seed: int = 7, lanes: int = LANES, batch: int = BATCH, note: Callable = lambda _: None
) -> Stream:
    return Stream(open_index(str(folder), note=note), VIEWS, seed, lanes, batch)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "BLOCK", 8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), SAMPLES, 3)


@pytest.fixture(scope="module")
def dented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these samples some are broken, neighbours among them."""
    return write_shards(tmp_path_factory.mktemp("dented"), SAMPLES, 3, broken=BROKEN)


def read(stream: Stream, *, readers: int, start: int, steps: int) -> list[StepPart]:
    """Some global batches, each joined from the parts of all readers."""
    own = [lanes_of(stream.lanes, reader=r, readers=readers) for r in range(readers)]
    parts = zip(*[stream.parts(lanes, start=start) for lanes in own], strict=True)
    return [join(p) for p in islice(parts, steps)]


def join(parts: tuple[StepPart, ...]) -> StepPart:
    assert not any(p.error for p in parts)
    return StepPart(
        pixels=[torch.cat(group, 1) for group in zip(*[p.pixels for p in parts], strict=True)],
        params=torch.cat([p.params for p in parts], 1),
        index=torch.cat([p.index for p in parts]),
        label=torch.cat([p.label for p in parts]),
        bad=[b for p in parts for b in p.bad],
    )


def tensors(part: StepPart) -> list[Tensor]:
    return [*part.pixels, part.params, part.index, part.label]


def assert_equal(ours: list[StepPart], theirs: list[StepPart]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
        assert a.bad == b.bad


def indices(parts: list[StepPart]) -> list[int]:
    return torch.cat([p.index for p in parts]).tolist()


def test_an_epoch_gives_every_sample_once_with_its_own_label(folder: Path) -> None:
    s = stream(folder)
    assert len(s.index.block_sizes) > LANES
    assert s.steps_per_epoch == SAMPLES // BATCH
    for epoch in range(2):
        parts = read(s, readers=1, start=epoch * s.steps_per_epoch, steps=s.steps_per_epoch)
        order = indices(parts)
        assert len(set(order)) == len(order) == s.steps_per_epoch * BATCH
        assert torch.cat([p.label for p in parts]).tolist() == [i % 10 for i in order]


@pytest.mark.parametrize("readers", [2, 3, 4, 5, 6])
def test_any_number_of_readers_gives_the_same_batches(folder: Path, readers: int) -> None:
    """Pixels, parameters, samples and labels, over an epoch's end."""
    s = stream(folder)
    assert_equal(read(s, readers=readers, start=0, steps=7), read(s, readers=1, start=0, steps=7))


@pytest.mark.parametrize("start", range(1, 12))
def test_resume_equals_no_stop(folder: Path, start: int) -> None:
    """From any step on, in any epoch, on another number of readers."""
    s = stream(folder)
    whole = read(s, readers=2, start=0, steps=13)
    assert_equal(read(s, readers=1 + start % LANES, start=start, steps=13 - start), whole[start:])


def in_phases(stream: Stream) -> tuple[Stream, list[Views]]:
    """The stream with smaller views in its first epoch and in the next two, and the views of each of four epochs."""
    full = [View(size=16, count=2, blur=0.5, erasing=0.5), View(size=16, scale=(0.05, 0.3))]
    tiny, half, whole = (
        Views.of([dataclasses.replace(v, size=size) for v, size in zip(full, sizes, strict=True)])
        for sizes in ((8, 4), (12, 12), (16, 16))
    )
    return dataclasses.replace(stream, views=whole, phases=((1, tiny), (3, half))), [tiny, half, half, whole]


def test_every_epoch_has_the_batches_of_views_of_its_size(folder: Path) -> None:
    """The sizes alone change: samples, the places of crops and their colours are those of the same epoch."""
    s, of_epochs = in_phases(stream(folder))
    for epoch, views in enumerate(of_epochs):
        first, steps = epoch * s.steps_per_epoch, s.steps_per_epoch
        alike = dataclasses.replace(s, views=views, phases=())
        ours, theirs = (read(x, readers=2, start=first, steps=steps) for x in (s, alike))
        assert_equal(ours, theirs)
        shapes = [tuple(p.shape[2:]) for p in ours[0].pixels]
        assert shapes == [(3, size, size) for _, size in size_groups(views)]
        plain = read(dataclasses.replace(s, phases=()), readers=1, start=first, steps=steps)
        assert indices(ours) == indices(plain)
        drawn = [c for c, name in enumerate(sampling.COLUMNS) if not name.startswith(("erase", "noise"))]  # in pixels
        assert all(torch.equal(a.params[..., drawn], b.params[..., drawn]) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("start", [1, 4, 5, 6, 14, 15, 16])
def test_resume_equals_no_stop_at_a_change_of_size(folder: Path, start: int) -> None:
    """Before the step where sizes change, at it and after it, on another number of readers."""
    s, _ = in_phases(stream(folder))
    whole = read(s, readers=1, start=0, steps=17)
    assert_equal(read(s, readers=2 + start % 4, start=start, steps=17 - start), whole[start:])


@pytest.mark.parametrize("readers", [2, 4])
def test_views_by_policies_are_the_same_whoever_reads_them(folder: Path, readers: int) -> None:
    views = [View(size=16, count=2, jitter=0.0, randaugment="rand-m9-mstd0.5-inc1", erasing=0.5), View(size=8)]
    augmented = dataclasses.replace(stream(folder), views=Views.of(views))
    plain = dataclasses.replace(stream(folder), views=Views.of([View(size=16, count=2, jitter=0.0), View(size=8)]))
    before = random.getstate(), np.random.get_state()[1].copy()
    [one], [ours] = (read(augmented, readers=r, start=3, steps=1) for r in (1, readers))
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert_equal([one], [ours])
    [other] = read(plain, readers=1, start=3, steps=1)
    assert torch.equal(other.pixels[1], one.pixels[1])  # a view without a policy is as it was
    differ = (other.pixels[0] != one.pixels[0]).flatten(2).any(2)
    # Two operations, each by a chance of a half; a crop that neither changed is cut from the same place.
    assert 0.4 < differ.float().mean() < 1


def test_other_epochs_and_seeds_look_and_come_otherwise(folder: Path) -> None:
    s, other = stream(folder), stream(folder, seed=8)
    first, second = (read(s, readers=1, start=start, steps=5) for start in (0, 5))
    seeded = read(other, readers=1, start=0, steps=5)
    for again in (second, seeded):
        assert np.mean(np.array(indices(first)) == indices(again)) < 0.2
    rows = [{i: p.params[:, r] for p in parts for r, i in enumerate(p.index.tolist())} for parts in (first, second)]
    both = rows[0].keys() & rows[1].keys()
    assert len(both) > SAMPLES // 2
    assert not any(torch.equal(rows[0][i], rows[1][i]) for i in both)


def test_views_do_not_depend_on_the_lanes(folder: Path) -> None:
    """A sample looks the same in an epoch wherever it is read."""
    a = read(stream(folder), readers=1, start=0, steps=5)
    b = read(stream(folder, lanes=4), readers=1, start=0, steps=5)
    rows = [{i: p.pixels[0][:, r] for p in parts for r, i in enumerate(p.index.tolist())} for parts in (a, b)]
    assert indices(a) != indices(b)
    assert all(torch.equal(rows[0][i], rows[1][i]) for i in rows[0].keys() & rows[1].keys())


Read = tuple[str, int, int]  # URL, first byte, end


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What has been read of the shards so far."""
    log: list[Read] = []
    honest = LocalStore.read

    def spy(self: LocalStore, url: str, start: int, length: int, **more: Any) -> memoryview:
        log.append((url, start, start + length))
        return honest(self, url, start, length, **more)

    monkeypatch.setattr(LocalStore, "read", spy)
    return log


def settled(reads: list[Read]) -> None:
    """Wait until what was asked for ahead has been read."""
    seen = -1
    while seen != len(reads):
        seen = len(reads)
        time.sleep(0.2)


def assert_read_once(s: Stream, reads: list[Read], *, epoch: int, step: int) -> None:
    """From a step to the end of its epoch; of the next epoch up to two blocks of each lane are on their way."""
    settled(reads)
    own = needed(s, epoch, step * BATCH // LANES, None)
    ahead = needed(s, epoch + 1, 0, 2)
    times = [sum(inside(span(s, i), r) for r in reads) for i in range(SAMPLES)]
    assert all(n <= t <= n + a for t, n, a in zip(times, own, ahead, strict=True))
    assert 0 in ahead


def needed(s: Stream, epoch: int, skip: int, count: int | None) -> list[int]:
    """How often each sample is in the lanes' blocks, from the one with a lane's sample `skip` on."""
    out = np.zeros(SAMPLES, int)
    laid = Epoch.of(s.index.block_sizes, seed=s.seed, epoch=epoch)
    for lane in range(LANES):
        runs = list(laid.lane(lane, lanes=LANES, batch=BATCH))
        ends = np.cumsum([r.last - r.first for r in runs])
        for run in runs[int(np.searchsorted(ends, skip, "right")) :][:count]:
            out[s.index.starts[run.block] + np.arange(run.first, run.last)] += 1
    return out.tolist()


def span(s: Stream, i: int) -> Read:
    begin = int(s.index.offset[i])
    return s.index.shards[s.index.shard[i]].url, begin, begin + int(s.index.size[i])


def inside(inner: Read, outer: Read) -> bool:
    return inner[0] == outer[0] and outer[1] <= inner[1] and inner[2] <= outer[2]


@pytest.mark.parametrize("readers", [2, 4])
def test_no_byte_is_fetched_twice_in_an_epoch(folder: Path, reads: list[Read], readers: int) -> None:
    s = stream(folder)
    reads.clear()
    read(s, readers=readers, start=0, steps=s.steps_per_epoch)
    assert len(s.index.block_sizes) > 2 * LANES
    assert_read_once(s, reads, epoch=0, step=0)
    assert all(end - begin <= index_file.BLOCK + max(s.index.size) for _, begin, end in reads)


@pytest.mark.parametrize("start", [1, 3, 4, 7])
def test_a_resume_fetches_only_what_is_left(folder: Path, reads: list[Read], start: int) -> None:
    """Blocks that hold a sample still to come, each once."""
    s = stream(folder)
    epoch, step = divmod(start, s.steps_per_epoch)
    steps = s.steps_per_epoch - step
    reads.clear()
    read(s, readers=1, start=start, steps=steps)
    assert_read_once(s, reads, epoch=epoch, step=step)


@pytest.mark.parametrize("readers", [2, 3, 4])
def test_a_broken_sample_is_replaced_the_same_way_by_all_readers(dented: Path, readers: int) -> None:
    s = stream(dented)
    alone = read(s, readers=1, start=0, steps=8)
    assert_equal(read(s, readers=readers, start=0, steps=8), alone)
    assert_equal(read(s, readers=readers, start=3, steps=5), alone[3:])


def test_a_broken_sample_is_reported_and_its_stand_in_is_a_neighbour(dented: Path, folder: Path) -> None:
    s = stream(dented)
    parts, whole = (read(x, readers=1, start=0, steps=5) for x in (s, stream(folder)))
    meant, given = indices(whole), indices(parts)
    missed = set(BROKEN) & set(meant)
    assert missed
    assert not set(BROKEN) & set(given)
    block = np.repeat(np.arange(len(s.index.block_sizes)), s.index.block_sizes)
    for a, b in zip(meant, given, strict=True):
        assert a == b if a not in BROKEN else block[a] == block[b]
    found = {b for p in parts for b in p.bad}
    assert {b.key for b in found} == {f"s{i:04d}" for i in missed}
    for bad in found:
        assert span(s, int(bad.key[1:]))[:2] == (bad.shard, bad.offset)
        assert bad.reason == "cannot identify image file (its .jpg)"


def test_a_stand_in_keeps_its_label_and_does_not_look_as_in_its_own_place(dented: Path, folder: Path) -> None:
    """It is cropped as the sample that it stands for would have been."""
    parts, whole = (join(tuple(read(stream(x), readers=1, start=0, steps=5))) for x in (dented, folder))
    stands = (parts.index != whole.index).nonzero().flatten().tolist()
    assert stands
    for row in stands:
        assert int(parts.label[row]) == int(parts.index[row]) % 10
        assert torch.equal(parts.params[:, row], whole.params[:, row])
        [own] = (whole.index == parts.index[row]).nonzero().flatten().tolist()
        assert not torch.equal(parts.params[:, row], parts.params[:, own])


def test_a_block_of_broken_samples_is_replaced_from_the_lanes_other_blocks(tmp_path: Path) -> None:
    write_shards(tmp_path, 24, 1, broken=range(8, 16))
    s = stream(tmp_path, lanes=1, batch=4)
    block = np.repeat(np.arange(len(s.index.block_sizes)), s.index.block_sizes)
    assert set(block[8:16]) - set(block[[*range(8), *range(16, 24)]])
    parts = read(s, readers=1, start=0, steps=6)
    assert set(indices(parts)) == {*range(8), *range(16, 24)}
    assert {b.key for p in parts for b in p.bad} == {f"s{i:04d}" for i in range(8, 16)}


def test_broken_samples_of_a_block_are_decoded_once_and_their_stand_in_is_fetched_once(
    tmp_path: Path, reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 small files that are no images, each would be decoded 10,000 times."""
    monkeypatch.setattr(index_file, "BLOCK", 2**16)
    write_tar(tmp_path / "x.tar", [m for k in range(66) for m in sample(k, *([spoiled(k)] if 2 <= k < 64 else []))])
    s, decoded, decode = stream(tmp_path, lanes=1, batch=6), Counter[bytes](), reader.decode_boxes
    monkeypatch.setattr(
        reader, "decode_boxes", lambda data, *a, **k: decoded.update([bytes(data)]) or decode(data, *a, **k)
    )
    reads.clear()
    parts = read(s, readers=1, start=0, steps=11)
    assert set(indices(parts)) <= {0, 1, 64, 65}
    assert len({b.key for p in parts for b in p.bad}) == 62
    blocks = len(s.index.block_sizes)
    assert max(decoded[spoiled(k)] for k in range(2, 64)) <= blocks <= 4
    assert len(reads) <= blocks**2


def test_a_lane_of_broken_samples_ends_the_stream_with_the_reason(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [m for k in range(9) for m in sample(k, spoiled(k))])
    [part] = islice(stream(tmp_path, lanes=2, batch=4).parts(range(2), start=0), 5)
    assert re.fullmatch(
        rf"no usable image is left in a whole lane of the data; {tmp_path}/x.tar: s\d+: "
        r"cannot identify image file \(its .jpg\)",
        str(part.error),
    )


def test_a_shard_that_is_gone_ends_the_stream_with_its_name(tmp_path: Path) -> None:
    s = stream(write_shards(tmp_path, SAMPLES, 3))
    (tmp_path / "x-001.tar").unlink()
    parts = list(islice(s.parts(range(LANES), start=0), 50))
    assert 0 < len(parts) <= s.steps_per_epoch
    assert [bool(p.error) for p in parts] == [False] * (len(parts) - 1) + [True]
    assert str(parts[-1].error) == f"{tmp_path / 'x-001.tar'}: cannot be read: No such file or directory"


def test_a_shard_that_was_cut_ends_the_stream(tmp_path: Path) -> None:
    s = stream(write_shards(tmp_path, SAMPLES, 3))
    with (tmp_path / "x-002.tar").open("r+b") as f:
        f.truncate(10_000)
    *_, last = islice(s.parts(range(LANES), start=0), 50)
    assert str(tmp_path / "x-002.tar") in str(last.error)
    assert "the file ends after" in str(last.error)


def test_what_does_not_fit_is_refused_with_the_keys_of_the_recipe(folder: Path) -> None:
    with pytest.raises(UserError, match=r"optim\.batch=72 data\.lanes=6: 65 samples do not fill one global batch"):
        _ = stream(folder, batch=72).steps_per_epoch
    with pytest.raises(UserError, match=r"optim\.batch=10 data\.lanes=6: .* the number of lanes must divide it"):
        _ = stream(folder, batch=10).steps_per_epoch


def test_groups_are_neighbours_of_one_size() -> None:
    views = Views.of([View(size=8, count=2), View(size=8), View(size=4), View(size=8)])
    assert size_groups(views) == [(3, 8), (1, 4), (1, 8)]


def test_reads_go_through_the_store_of_the_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = stream(folder)
    asked: list[str] = []
    honest = store.store
    monkeypatch.setattr(store, "store", lambda url: asked.append(url) or honest(url))  # type: ignore[func-returns-value]
    read(s, readers=1, start=0, steps=1)
    assert set(asked) <= {b.url for b in s.index.shards}
    assert asked
