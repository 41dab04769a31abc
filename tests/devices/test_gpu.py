"""What a GPU has to give just as a CPU does: these tests run on both, the CPU's run is the GPU's twin.

The last four are about the device itself and have none.
"""

import gc
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.data.index import Index, open_index
from eagleray.data.loader import Loader
from eagleray.data.packed import on_device
from eagleray.data.reader import Stream
from eagleray.engine import loop
from eagleray.methods.method import Method
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe
from eagleray.views import photometric, sampling
from eagleray.views.crop_batch import crop_batch
from eagleray.views.sampling import Views

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_both = pytest.mark.parametrize(
    "device", [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=[pytest.mark.gpu, without_gpu])]
)
ROUNDING = 0.51 / 255 / 0.224  # of a pixel to uint8 on a CPU, over the smallest deviation of `colours.STD`
VIEWS = Views.of([View(size=48, blur=0.5, solarize=0.3), View(size=32, count=2, gray=0.5, scale=(0.1, 0.5))])
MIB = 2**20


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """96 photographs of 80 x 60 pixels."""
    folder = tmp_path_factory.mktemp("gpu")
    script = Path(__file__).parents[2] / "benchmarks" / "synthetic.py"
    sizes = ["--images", "96", "--distinct", "96", "--width", "80", "--height", "60"]
    subprocess.run([sys.executable, script, folder, *sizes], check=True)
    return open_index(str(folder), folder, note=lambda _: None)


@pytest.fixture(params=["small", "small_dino"])
def chosen(request: pytest.FixtureRequest) -> Recipe:
    return recipe.load(str(request.getfixturevalue(request.param)))


def drawn(images: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (B, 3, S, S) and parameters (B, 13) with every operation among them."""
    one = Views.of([View(size=size, blur=0.5, solarize=0.5, gray=0.3)])
    params = [sampling.photometrics(one, sampling.uniforms(1, seed=0, epoch=0, sample=i)) for i in range(images)]
    pixels = torch.randint(
        0, 256, (images, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return pixels, torch.cat([torch.from_numpy(p) for p in params])


@on_both
def test_photometric_gives_what_it_gives_one_by_one_on_a_cpu(device: torch.device) -> None:
    pixels, params = drawn(64, 40)
    together = photometric.apply(pixels.to(device), params).cpu()
    alone = torch.cat([photometric.apply(p[None], q[None]) for p, q in zip(pixels, params, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@on_both
def test_loader_gives_the_batches_of_a_single_reader_on_a_cpu(device: torch.device, index: Index) -> None:
    stream = Stream(index, VIEWS, seed=3, lanes=8, batch=16)
    expected = Loader(stream, rank=0, ranks=1, workers=0, device=CPU).batches(4)
    got = Loader(stream, rank=0, ranks=1, workers=2, device=device).batches(4)
    for (a, _), (b, bad) in itertools.islice(zip(expected, got, strict=False), 5):  # over the end of the epoch
        assert bad == []
        assert a.rows == b.rows
        assert all(v.device == device for v in (*b.views, b.index, b.label))
        assert torch.equal(a.index, b.index.cpu())
        assert torch.equal(a.label, b.label.cpu())
        torch.testing.assert_close([v.cpu() for v in b.views], a.views, atol=ROUNDING, rtol=0)


@on_both
def test_a_batch_on_its_way_is_not_written_over(device: torch.device, index: Index) -> None:
    """Batches kept while later ones are made stay what they were, though the device makes them on another stream."""
    stream = Stream(index, VIEWS, seed=3, lanes=8, batch=16)
    batches = Loader(stream, rank=0, ranks=1, workers=2, device=device).batches(0)
    kept, copies = [], []
    for batch, _ in itertools.islice(batches, 6):
        kept.append(batch.views)
        copies.append([v.clone() for v in batch.views])
    assert all(torch.equal(a, b) for a, b in zip(itertools.chain(*kept), itertools.chain(*copies), strict=True))


@on_both
def test_crops_are_those_of_a_cpu_bit_for_bit(device: torch.device, index: Index) -> None:
    stream = Stream(index, VIEWS, seed=3, lanes=8, batch=16)
    parts = zip(stream.parts(range(8), start=0), replace(stream, packed=True).parts(range(8), start=0), strict=True)
    for cropped, sent in itertools.islice(parts, 3):
        assert sent.packed is not None
        there = on_device([sent.packed], device)
        groups = (there.boxes[:1], VIEWS.views[:1]), (there.boxes[1:], VIEWS.views[1:])
        for want, (boxes, views) in zip(cropped.pixels, groups, strict=True):
            assert torch.equal(crop_batch(there.pixels, boxes, views).cpu(), want)


def made_up(r: Recipe, device: torch.device) -> Batch:
    """The same pixels on any device."""
    b, generator = r.optim.batch, torch.Generator().manual_seed(0)
    views = [torch.randn(b, 3, v.size, v.size, generator=generator).to(device) for v in Views.of(r.views).views]
    label = torch.full((b,), -1, device=device)
    return Batch(views, torch.arange(b), label, (b,))


def steps(r: Recipe, device: torch.device, count: int) -> Iterator[tuple[Method, dict[str, torch.Tensor]]]:
    """The method after each of some steps, past warm-up and frozen layers, and what the step gave."""
    method = build_method(r).to(device)
    batch = made_up(r, device)
    fit = loop.Trainer(
        method, build_optimizer(r, method), lr=lambda _: 1e-3, weight_decay=lambda _: 0.05, clip=3.0
    ).steps((Progress(step, 10, 10), batch) for step in range(20, 20 + count))
    for taken in fit:
        yield method, taken.values


@on_both
def test_losses_are_those_of_a_cpu(device: torch.device, chosen: Recipe) -> None:
    """In bfloat16 on a GPU, in float32 on a CPU. Drop path draws differently there, so it is off."""
    still = replace(chosen, backbone=replace(chosen.backbone, drop_path=0.0))
    expected = [values["loss"].item() for _, values in steps(still, CPU, 5)]
    got = [values["loss"].item() for _, values in steps(still, device, 5)]
    assert all(map(math.isfinite, got))
    assert got[0] == pytest.approx(expected[0], rel=0.01)
    assert got == pytest.approx(expected, rel=0.1)  # what one step rounds, the next ones build on


@on_both
def test_no_step_leaves_memory_behind(device: torch.device, chosen: Recipe) -> None:
    gc.collect()
    gc.freeze()  # what earlier tests have left is not looked through at each step
    try:
        taken = [allocated(device) for _ in steps(chosen, device, 8)]
    finally:
        gc.unfreeze()
    assert max(taken[3:]) <= min(taken[3:]) + MIB // 4


def allocated(device: torch.device) -> int:
    """Bytes of live tensors, but for those on the CPU that the garbage collector has frozen."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(t.nbytes for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))


@pytest.mark.gpu
@without_gpu
def test_peak_memory_is_that_of_the_weights_and_little_more(chosen: Recipe) -> None:
    """Weights, gradients and moments, activations of a tiny model, and the workspace of the matrix library."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method, _ = list(steps(chosen, CUDA, 5))[-1]
    weights = sum(p.nbytes for p in method.parameters())
    assert weights < torch.cuda.max_memory_allocated() - before < 10 * weights + 200 * MIB


@pytest.mark.gpu
@without_gpu
def test_photometric_does_not_wait_for_the_device() -> None:
    pixels, params = drawn(8, 32)
    pixels = pixels.to(CUDA)
    twice_without_waiting(lambda: photometric.apply(pixels, params))


@pytest.mark.gpu
@without_gpu
def test_crops_do_not_wait_for_the_device(index: Index) -> None:
    stream = Stream(index, VIEWS, seed=3, lanes=8, batch=16, packed=True)
    sent = next(stream.parts(range(8), start=0)).pin_memory().packed
    assert sent is not None

    def made() -> None:
        there = on_device([sent], CUDA)
        crop_batch(there.pixels, there.boxes[1:], VIEWS.views[1:])

    twice_without_waiting(made)


@pytest.mark.gpu
@without_gpu
def test_fit_does_not_wait_for_the_device(chosen: Recipe) -> None:
    taken = steps(chosen, CUDA, 2)
    twice_without_waiting(lambda: next(taken))


def twice_without_waiting(work: Callable[[], object]) -> None:
    """The first time may wait, as things are made then that stay."""
    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
