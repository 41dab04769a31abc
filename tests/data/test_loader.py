"""Ranks and loader processes: every split of the work gives the same global batches."""

import ctypes
import dataclasses
import errno
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from helpers import forked
from helpers.pictures import sample, spoiled, write_shards, write_tar
from helpers.processes import wait_for
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from eagleray.base import files, fork_server
from eagleray.base.errors import Outage, UserError
from eagleray.config.view import View
from eagleray.data import index_file, loader_processes, reader
from eagleray.data.batch import Batch
from eagleray.data.index import open_index
from eagleray.data.loader import Loader, rows
from eagleray.data.loader_processes import of_process
from eagleray.data.quarantine import BadSample
from eagleray.data.reader import StepPart, Stream
from eagleray.storage.store import LocalStore
from eagleray.views import colours, photometric
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


def assert_same(ours: list[Step], theirs: list[Step]) -> None:
    assert len(ours) == len(theirs)
    for (a, bad), (b, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.label, b.label)
        assert bad == expected
        for x, y in zip(a.views, b.views, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (4, 0), (7, 0), (1, 3), (2, 4)])
def test_any_split_of_the_work_gives_the_same_global_batches(folder: Path, ranks: int, workers: int) -> None:
    """Bit for bit, across an epoch's end and with broken samples."""
    s = stream(folder)
    alone = read(s, ranks=1, workers=0, start=0, steps=5)
    assert any(bad for _, bad in alone)
    assert_same(read(s, ranks=ranks, workers=workers, start=0, steps=5), alone)


@pytest.mark.parametrize(("start", "workers"), [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (3, 2)])
def test_starting_at_a_step_is_the_tail_of_the_whole(folder: Path, start: int, workers: int) -> None:
    """Bit for bit, also in another number of loader processes."""
    s = stream(folder)
    whole = read(s, ranks=1, workers=0, start=0, steps=7)
    assert_same(read(s, ranks=1, workers=workers, start=start, steps=7 - start), whole[start:])


def test_a_batch_holds_what_the_stream_gives(folder: Path) -> None:
    s = stream(folder)
    [(batch, _)] = read(s, ranks=1, workers=0, start=2, steps=1)
    part = next(s.parts(range(LANES), start=2))
    assert [tuple(v.shape) for v in batch.views] == [(BATCH, 3, 16, 16)] * 2 + [(BATCH, 3, 8, 8)]
    pixels = [view for group in part.pixels for view in group]
    for view, raw, params in zip(batch.views, pixels, part.params, strict=True):
        away = (view - photometric.apply(raw, params)).abs() * torch.tensor(colours.STD).view(3, 1, 1)
        assert away.max() < 0.51 / 255  # one rounding
    assert torch.equal(batch.index, part.index)


@pytest.mark.parametrize("workers", [0, 2])
def test_colours_are_the_readers_work_where_the_device_is_a_cpu(folder: Path, workers: int) -> None:
    """On a CPU the main process normalises what its readers coloured; the crops that an accelerator gets are plain."""
    loader = Loader(stream(folder), rank=0, ranks=1, workers=workers, device=CPU)
    assert loader.stream.colours
    assert not Loader(stream(folder), rank=0, ranks=1, workers=workers, device=torch.device("meta")).stream.colours
    with mock.patch.object(photometric, "apply", side_effect=AssertionError("in the main process")):
        next(loader.batches(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_is_what_the_readers_let_the_loader_wait_and_nothing_else(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> Tensor:
        time.sleep(0.2)
        return finish(*given)

    finish = photometric.finish
    monkeypatch.setattr(photometric, "finish", slow)  # once for each size of views
    loader = Loader(stream(folder), rank=0, ranks=1, workers=workers, device=CPU)
    begin = time.perf_counter()
    list(loader.batches(0, 3))
    assert 0 < loader.waited <= time.perf_counter() - begin - 3 * 2 * 0.2


def test_a_slow_reader_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return honest(*given, **options)

    honest = reader.decode_boxes
    monkeypatch.setattr(reader, "decode_boxes", slow)
    loader = Loader(stream(folder), rank=0, ranks=1, workers=0, device=CPU)
    next(loader.batches(0))
    assert loader.waited >= 0.05 * BATCH


def test_a_loader_process_that_stands_still_is_named_and_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eagleray.data.loader.LAST", 0.5)
    before = set(multiprocessing.active_children())
    batches = Loader(stream(folder), rank=0, ranks=1, workers=2, device=CPU).batches(0)
    next(batches)
    monkeypatch.setattr(loader_processes, "NAMED", 1.0)  # only now: the start may take longer
    monkeypatch.setattr(loader_processes, "STOPPED", 2.0)
    _, stopped = set(multiprocessing.active_children()) - before
    os.kill(stopped.pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"no batch for \d+ s; .*loader process {stopped.pid} is stopped"):
        list(batches)
    assert 2 <= time.monotonic() - began < 100  # and not after the 120 s of other loaders that are slow
    assert len([r for r in caplog.records if f"loader process {stopped.pid} is stopped" in r.message]) == 1
    wait_for(lambda: not stopped.is_alive())  # whose end another thread may hear of a moment earlier


class Endless(Stream):
    """Reads for long."""

    def parts(self, *_: Any, **__: Any) -> Iterator[Any]:
        time.sleep(600)
        yield


def test_loader_processes_end_with_a_process_that_is_killed(folder: Path) -> None:
    """They are reading, and are no children of it."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    parent = fork_server.CONTEXT.Process(target=read_for_ever, args=(folder, sender))
    parent.start()
    pids = receiver.recv()
    assert all(map(psutil.pid_exists, pids))
    parent.kill()
    parent.join()
    wait_for(lambda: not any(map(alive, pids)))


def read_for_ever(folder: Path, sender: Any) -> None:
    """Send the numbers of the processes of a loader that never ends."""
    vars(forkserver._forkserver)["ensure_running"] = int  # type: ignore[attr-defined]  # it runs
    endless = Endless(open_index(str(folder), note=lambda _: None), VIEWS, 7, LANES, BATCH)
    batches = Loader(endless, rank=0, ranks=1, workers=2, device=CPU).batches(0)
    threading.Thread(target=next, args=(batches,), daemon=True).start()
    wait_for(lambda: len(multiprocessing.active_children()) == 2)
    sender.send([p.pid for p in multiprocessing.active_children()])
    time.sleep(600)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


SCRIPT = """
import os, sys
import eagleray

os.environ["EAGLERAY_SAID_LATER"] = "here"
print("begins")
views = [{"size": 8, "operations": ["environment"]}]
loader = eagleray.loader(sys.argv[1], views=views, batch=12, workers=2, plugins=["told.py"])
print(next(iter(loader)).views[0].shape)
"""
TOLD = """
import logging, os
from eagleray import register

@register.view("environment")
def environment(crop, seed):
    logging.getLogger("told").warning("reads in %s, %s", os.environ["EAGLERAY_SAID_LATER"], os.getcwd())
    return crop
"""


def test_loader_processes_have_plugins_and_environment_and_log_in_the_users_script(
    shards: Path, tmp_path: Path
) -> None:
    """They do not run the script again, though it is not guarded."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "told.py").write_text(TOLD)
    command = [sys.executable, "script.py", str(shards / "train")]
    done = forked.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert set(done.stderr.splitlines()) == {f"reads in here, {tmp_path}"}


def test_what_loader_processes_log_is_logged_here(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    s = Telling(open_index(str(folder), note=lambda _: None), VIEWS, 7, LANES, BATCH)
    list(Loader(s, rank=0, ranks=1, workers=2, device=CPU).batches(0, 2))
    wait_for(lambda: sorted(r.getMessage() for r in caplog.records) == ["reader 0", "reader 1"])


class Telling(Stream):
    """Says who reads."""

    def parts(self, *given: Any, **options: Any) -> Iterator[StepPart]:
        info = get_worker_info()
        assert info
        logging.getLogger("eagleray").warning("reader %d", info.id)
        return super().parts(*given, **options)


def test_arrays_are_not_copied_to_each_loader_process() -> None:
    weights = np.ones(2**22, np.float32)
    with loader_processes.loaded(Weighed(weights), 2) as (items, _):
        assert [tuple(item) for item in items] == [(len(weights), False)] * 2


class Weighed(IterableDataset[tuple[int, bool]]):
    """Yields the length of its weights, and whether this process owns them."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        yield int(self.weights.sum()), bool(self.weights.flags.owndata)


@pytest.mark.parametrize(("lanes", "ranks"), [(6, 4), (7, 2), (8, 3), (64, 5), (4, 9)])
def test_rows_are_what_every_rank_owns(lanes: int, ranks: int) -> None:
    batch = 3 * lanes
    counts = rows(lanes, batch, ranks=ranks)
    assert len(counts) == ranks
    assert sum(counts) == batch
    assert max(counts) - min(counts) <= (3 if ranks <= lanes else 1)


@pytest.mark.usefixtures("copied_loaders")
def test_readers_that_share_lanes_fetch_each_byte_once_and_not_far_ahead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine loader processes on two lanes cost the store what one costs; what they hold is bounded by the steps that
    they may be ahead."""
    log = tmp_path / "reads"
    honest = LocalStore.read

    def read(store: LocalStore, url: str, start: int, length: int, **options: Any) -> memoryview:
        files.append_lines(log, [{"url": url, "start": start, "end": start + length}])
        return honest(store, url, start, length, **options)

    def reads() -> Counter[tuple[Any, ...]]:
        return Counter(tuple(r.values()) for r in files.read_lines(log))

    s = dataclasses.replace(stream(folder, lanes=2, batch=4), views=Views.of([View(size=8)]))
    monkeypatch.setattr(LocalStore, "read", read)
    list(Loader(s, rank=0, ranks=1, workers=0, device=CPU).batches(0, 30))
    alone = reads()
    log.unlink()
    steps = Loader(s, rank=0, ranks=1, workers=9, device=CPU).batches(0, 30)
    next(steps)
    time.sleep(0.5)
    assert reads().total() < 0.7 * alone.total()
    list(steps)
    assert reads() == alone


@pytest.mark.slow
@pytest.mark.usefixtures("copied_loaders")
def test_readers_that_are_slower_than_the_one_that_fetches_get_all_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks of a run: who fetched them has nothing more to do, but their memory is handed over by it."""
    honest = reader.decode_boxes

    def slow(*given: Any, **options: Any) -> Any:
        info = get_worker_info()
        if info and info.id:
            time.sleep(0.1)
        return honest(*given, **options)

    s = dataclasses.replace(stream(folder, lanes=1, batch=4), views=Views.of([View(size=8)]))
    want = [batch.index for batch, _ in Loader(s, rank=0, ranks=1, workers=0, device=CPU).batches(0, 22)]
    monkeypatch.setattr(reader, "decode_boxes", slow)
    for _ in range(3):
        got = [batch.index for batch, _ in Loader(s, rank=0, ranks=1, workers=4, device=CPU).batches(0, 22)]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


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


FULL = "unable to allocate shared memory(shm) for file </torch_7_8_9>: No space left on device (28)"
SMALL = r"a loader process found no room for its views: /dev/shm has [\d.]+ MiB, .*--shm-size=8g .*data\.workers=0$"
ERRORS = [
    (RuntimeError(FULL), UserError, SMALL),
    (ValueError("a\nb"), RuntimeError, "a loader process died: b$"),
    (KeyError("x" * 999), RuntimeError, f"a loader process died: KeyError: '{'x' * 189}$"),
    (MemoryError(), RuntimeError, "a loader process died: MemoryError$"),
    (UserError("x.tar: is damaged"), UserError, r"x\.tar: is damaged$"),
    (Outage("s3://x did not answer"), Outage, "s3://x did not answer$"),
]


@pytest.mark.parametrize(("error", "kind", "line"), ERRORS)
@pytest.mark.usefixtures("copied_loaders")
def test_any_error_of_a_loader_process_is_one_line(
    error: Exception, kind: type[Exception], line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's has the traceback in its text."""

    def fail(*_: Any, **__: Any) -> Iterator[Any]:
        raise error

    monkeypatch.setattr(Stream, "parts", fail)
    said, found = "", None
    try:
        next(Loader(stream(folder), rank=0, ranks=1, workers=1, device=CPU).batches(0))
    except Exception as e:
        said, found = str(e), type(e)
    assert found is kind
    assert re.match(line, said)
    assert len(said) < 300


def test_a_bus_error_is_said_as_too_little_shared_memory() -> None:
    """Where memory cannot be reserved, a loader process dies only as it writes."""
    text = (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    )
    text += "shared memory. Please try to raise your shared memory limit."
    assert re.match(SMALL, str(of_process(RuntimeError(text))))


def test_no_room_for_semaphores_is_said_as_too_little_shared_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight readers share six lanes by queues and semaphores, which are files in /dev/shm."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(fork_server.CONTEXT, "Semaphore", full)
    assert re.match(SMALL, one_line(Loader(stream(folder), rank=0, ranks=1, workers=8, device=CPU).batches(0)))


@pytest.mark.slow
def test_a_small_folder_of_shared_memory_is_named(folder: Path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = fork_server.CONTEXT.Process(target=load_in_64_kib, args=(folder, sender))
    process.start()
    sender.close()
    try:
        said = receiver.recv()
    except EOFError:
        pytest.skip("only root may mount a folder of its own")
    process.join()
    assert re.match(SMALL.replace(r"[\d.]+", r"0\.06"), said)
    assert len(said) < 300


def load_in_64_kib(folder: Path, sender: Any) -> None:
    """Send the error of a loader where there is so little shared memory; nothing where that cannot be made."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        return
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]):
        if subprocess.run(["mount", *words]).returncode:
            return
    views = Views.of([View(size=96, count=2)])
    s = dataclasses.replace(stream(folder), views=views)
    try:
        next(Loader(s, rank=0, ranks=1, workers=1, device=CPU).batches(0))
    except UserError as e:
        sender.send(str(e))


@pytest.mark.parametrize("workers", [0, 2, 8])
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
