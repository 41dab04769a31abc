"""Forecast a run on a named accelerator or, at its measured speed, on this machine, and refuse runs without enough
memory."""

import io
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from eagleray.base import devices
from eagleray.base.allocator import keep_freed_memory
from eagleray.base.devices import one_thread
from eagleray.base.errors import UserError
from eagleray.config.channels import Channel, planes
from eagleray.data.costs import BadImage
from eagleray.data.decode_crops import decode_boxes
from eagleray.data.packed import Packer, packs
from eagleray.data.reader import pixel_buffer
from eagleray.engine.precision import Precision
from eagleray.models.token_linear import on_device
from eagleray.runs import accelerators, fit, layout
from eagleray.runs.accelerators import Rates
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.checks import check_method, check_shares, make_plan
from eagleray.runs.forecast import GIB, Devices, Forecast, TrainingSet, devices_of, forecast, refusal
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe, check_lanes, identity
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import resolve_paths
from eagleray.runs.step_log import read_forecast
from eagleray.runs.step_trace import StepTrace, made_up, steps, trace_images
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.sampling import Views

SMALL = 0.01  # share of a CPU's memory below which a run's weights and images certainly fit
STATE = 4  # size of weights, gradients and two moments as a multiple of the weights
FILES = 16  # number of images that are decoded to measure the speed of loading
IMAGES = 4  # images per measured step
LEAST = 1.0  # least seconds for which steps are timed: after a warm-up step, at least two, of which the fastest counts
SECONDS = 0.4  # seconds for which decoding is measured
IMAGE_BYTES = 115_000  # mean bytes of an image file in ImageNet-1k: 147 GB for 1.28 M images


def plan_run(
    recipe: Recipe,
    *,
    gpu: str | None,
    images: int | None,
    cpus: int | None,
    input_rate: float | None,
    store_rate: float | None,
) -> Forecast:
    """Return the forecast of a recipe. The other arguments are those of `eagleray.plan`. Raises UserError when the
    recipe or an argument is wrong, and for a run that does not fit."""
    accelerator = accelerators.find(gpu) if gpu else None
    check_lanes(recipe)
    check_shares(recipe, check_method(recipe).norm_group)
    known, files = _data(recipe, images)
    rate = input_rate or loader_rate(recipe, files, gpu=bool(accelerator))
    more = files and not (recipe.data.decode == "scaled" or input_rate or recipe.data.channels)
    scaled_rate = loader_rate(recipe, files, gpu=bool(accelerator), scaled=True) if more else None
    store = store_rate and 1e6 * store_rate
    data = replace(known, core_rate=rate, scaled_rate=scaled_rate, store_rate=store, cpus=cpus)
    target = devices_of(gpu or "", accelerator, recipe.ranks[1]) if accelerator else _here(recipe)
    result = forecast(recipe, target, data)
    if not result.fits:
        raise refusal(result)
    return result


def _here(recipe: Recipe) -> Devices:
    """Return the devices of this machine. The speed of a CPU or an unknown accelerator is measured.
    Raises UserError when the memory of the device is not known."""
    target = local_devices(recipe)
    if target is None:
        raise UserError("--gpu: expected a name, as this machine's device does not say how much memory it has")
    if target.rates:
        return target
    device = devices.CPU if target.is_cpu else devices.current()
    return replace(target, rates=calibrated(accelerators.cpu_rates(), recipe, device))


def _data(recipe: Recipe, images: int | None) -> tuple[TrainingSet, list[bytes]]:
    """Return the training set with, if it is read, some of its files. With `images`, it is not read, as it may be where
    this machine cannot. Raises UserError as `make_plan` does, when nothing tells the number of images, and when these
    do not fill a batch."""
    if recipe.data.train and not images:
        opened = make_plan(resolve_paths(recipe), note=_say)
        samples = opened.stream.samples(range(opened.stream.lanes), start=0)
        return data_of(opened), [bytes(data) for _, data in itertools.islice(samples, FILES)]
    if not images:
        raise UserError("--images: expected the number of images, as neither data.train nor the recipe's name tells it")
    if images < recipe.optim.batch:
        raise UserError(f"--images {images}: fewer than one batch of optim.batch={recipe.optim.batch}")
    return TrainingSet(images, IMAGE_BYTES), []


def _say(line: str) -> None:
    from eagleray.base.console import say  # imports rich, which a machine that only times steps lacks

    say(line)


def check_named(recipe: Recipe, images: int | None, gpu: str, *, insist: bool) -> None:
    """Print the plan of a recipe on its workers with this kind of GPU, in one line. Raises UserError for an unknown
    GPU, and for a run that cannot fit unless the user `insist`s."""
    data = TrainingSet(images or fit.IMAGENET, IMAGE_BYTES)  # a guess, as this machine may have no access to the data
    result = forecast(recipe, devices_of(gpu, accelerators.find(gpu), recipe.ranks[1]), data)
    _say(result.line())
    if not result.fits and not insist:
        raise UserError(f"{refusal(result)}; --insist sends the run all the same")


def local_devices(recipe: Recipe) -> Devices | None:
    """Return the devices of this machine, or None where the workers are elsewhere or the devices do not say how much
    memory they have."""
    ranks, device = recipe.ranks[1], devices.current()
    if recipe.gpus is False or not devices.is_accelerator(device):
        if recipe.gpus or recipe.is_elsewhere:
            return None  # the workers are on other machines
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return Devices("cpu", ranks, None, memory / ranks) if memory else None
    size = devices.memory_size(device)
    if size is None:
        return None
    name = devices.name(device)
    known = accelerators.recognise(name, size / GIB)
    rates = accelerators.stated_rates(known) if known else None
    return Devices(name, ranks, rates, size, known)


def data_of(plan: Plan) -> TrainingSet:
    """Return the number of images of a run's opened data and the mean size of their files, for a forecast."""
    index, samples = plan.index, plan.stream.samples_per_epoch
    return TrainingSet(samples, float(sum(b.size or 0 for b in index.shards)) / max(len(index), 1))


def check_fit(plan: Plan, say: Callable[[str], None], *, insist: bool = False) -> None:
    """Print the forecast of a run in one line, and store it in the run's folder for its records and its report.

    Raises UserError when the run cannot fit on this machine's accelerator, unless the user `insist`s. On a CPU this is
    only a warning, and a run that is small beside the memory is not forecast, as tracing its step would take long."""
    recipe, target = plan.recipe, local_devices(plan.recipe)
    if target is None or (target.is_cpu and _small(plan, target)):
        return
    key = _key(recipe, target)
    stored = read_forecast(recipe.out)
    if stored.get("key") == key:
        say(stored["line"])
        return
    result = forecast(recipe, target, data_of(plan))
    say(result.line())
    if not result.fits and not insist:
        error = refusal(result)
        if not target.is_cpu:
            raise UserError(f"{error}; --insist begins the run all the same")
        say(f"warning: {error}")
    note = result.numbers | {"images_per_s": result.images_per_s, "line": result.line(), "key": key}
    run_store(recipe.out).put(layout.FORECAST, json.dumps(note, indent=1))


def _small(plan: Plan, target: Devices) -> bool:
    """Return whether a run's weights, moments and images are far below the memory of a CPU."""
    views = sum(plan.recipe.planes * v.size**2 * v.count for v in plan.recipe.views) * plan.recipe.optim.batch
    with torch.device("meta"):
        weights = sum(p.numel() for p in build_method(plan.recipe).parameters())
    return 4 * (views + STATE * weights) < SMALL * target.memory * target.ranks


def _key(recipe: Recipe, target: Devices) -> dict[str, Any]:
    """Return the values on which a forecast depends, by name."""
    o = recipe.optim
    said = json.loads(json.dumps([identity(recipe), recipe.max_steps, recipe.monitor.bank], default=str))
    return {"recipe": said, "device": target.name, "ranks": target.ranks, "precision": recipe.precision,
            "micro_batch": o.micro_batch, "checkpointing": o.checkpointing, "parallel": recipe.parallel}  # fmt: skip


def calibrated(
    rates: Rates,
    recipe: Recipe,
    device: torch.device,
    images: int = IMAGES,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Return rates with which two short steps of the recipe take as long as they do on this machine's device.

    One step has `images` images and the other a quarter of them, but each at least as many as the method normalises
    together. Both have the recipe's micro-batches, and recompute no activations. The two durations give the time that
    each operation adds to its work, and the speed of the work. Raises UserError as `build_method` does."""
    if device.type == "cpu":
        keep_freed_memory()  # training keeps freed memory, too
    parts = None if recipe.optim.micro_batch == "auto" else recipe.optim.micro_batch
    plain = replace(recipe, optim=replace(recipe.optim, micro_batch=parts, checkpointing=False))
    group = build_method(plain).norm_group or 2
    few, many = max(images // 4, group), max(images, group)
    long = _measured(plain, many, device, clock)
    short = long if few == many else _measured(plain, few, device, clock)
    return rates.fitted(*short, *long)


def _measured(recipe: Recipe, images: int, device: torch.device, clock: Callable[[], float]) -> tuple[StepTrace, float]:
    """Return the trace of a step of `images` images, and the seconds that the step takes on the device."""
    precision = Precision.of(recipe.precision, device)
    method = build_method(recipe)
    method.allocate(images)
    on_device(method, device)
    optimizer = build_optimizer(recipe, method)
    batch, times = made_up(recipe, images, device=device), []
    began = clock()
    for _ in steps(recipe, method, optimizer, itertools.repeat(batch), precision):
        devices.synchronize(device)
        times.append(clock() - began)
        if len(times) > 2 and sum(times[1:]) > LEAST:
            break
        began = clock()
    gpu = devices.is_accelerator(device)
    return trace_images(recipe, images, ranks=1, dataset=images, dtype=precision.dtype, gpu=gpu), min(times[1:])


def loader_rate(recipe: Recipe, files: Sequence[bytes] = (), *, gpu: bool = True, scaled: bool = False) -> float:
    """Return how many images per second one loader process prepares from image files for training on a GPU or, without
    `gpu`, on this process's device. `scaled`: with data.decode=scaled. Raises UserError where crops=device fails."""
    views = Views.of(recipe.views)
    packed = packs(recipe.data.crops, views.views, torch.device("cuda") if gpu else devices.current())
    scaled |= recipe.data.decode == "scaled"
    return decoding_rate(views, files, scaled=scaled, channels=recipe.data.channels, packed=packed)


def decoding_rate(
    views: Views,
    files: Sequence[bytes] = (),
    *,
    scaled: bool = False,
    channels: Sequence[Channel] = (),
    packed: bool = False,
) -> float:
    """Return how many images per second a CPU core decodes and then crops or, if `packed`, packs for a device to crop.

    `files` are image files with these `channels`. Those that do not decode are left out, as training reads others in
    their place. Without files, one of ImageNet's usual size is generated. `scaled`: as with data.decode=scaled."""
    files, channels = (files, channels) if files else ([photograph()], ())
    out = [torch.empty(planes(channels), v.size, v.size, dtype=torch.uint8) for v in views.views]
    packer, images = Packer(views, planes(channels)), 0
    with one_thread():
        began = time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            u = sampling.uniforms(len(views.views), seed=0, epoch=0, sample=images)
            try:
                image, boxes = decode_boxes(files[images % len(files)], views, u, scaled=scaled, channels=channels)
            except BadImage:
                others = [file for file in files if file != files[images % len(files)]]
                return decoding_rate(views, others, scaled=scaled, channels=channels, packed=packed)
            if packed:
                packer.begin(views, 1)
                packer.add(image, boxes)
                packer.end(pixel_buffer)
            else:
                crop(image, boxes, views.views, out)
            images += 1
        return images / (time.perf_counter() - began)


def photograph(width: int = 500, height: int = 375) -> bytes:
    """Return a JPEG file of a made-up picture with about as many bytes as ImageNet's have."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (math.ceil(height / 4), math.ceil(width / 4), 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
    return file.getvalue()
