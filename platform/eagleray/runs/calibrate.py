"""Measure on this machine, in seconds, what a plan needs: how fast a short step is, and how fast images are decoded."""

import io
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from eagleray.base import devices
from eagleray.base.allocator import keep_freed_memory
from eagleray.config.channels import Channel, planes
from eagleray.data.decode_crops import decode_crops
from eagleray.engine.precision import Precision
from eagleray.models.token_linear import on_device
from eagleray.runs.accelerators import Rates
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import StepTrace, made_up, steps, trace_images
from eagleray.views import sampling
from eagleray.views.sampling import Views

IMAGES = 4  # images of the measured step
LEAST = 1.0  # seconds in which steps are measured, two of them at least, after one to warm up; the fastest counts
SECONDS = 0.4  # images are decoded for this long
IMAGE_BYTES = 115_000  # the mean of ImageNet-1k: 147 GB for 1.28 M images


def calibrated(
    rates: Rates,
    recipe: Recipe,
    device: torch.device,
    images: int = IMAGES,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Return rates with which two short steps of the recipe take as long as they do on this machine's device.

    One has few `images`, the other a quarter of them, or both as many as the method normalises together, in the
    micro-batches of the recipe and with no activations computed twice. The two tell the time that each operation takes
    from that of its work. Raises UserError as `build_method` does.
    """
    if device.type == "cpu":
        keep_freed_memory()  # training does the same
    parts = None if recipe.optim.micro_batch == "auto" else recipe.optim.micro_batch
    plain = replace(recipe, optim=replace(recipe.optim, micro_batch=parts, checkpointing=False))
    group = build_method(plain).norm_group or 2
    few, many = max(images // 4, group), max(images, group)
    long = _measured(plain, many, device, clock)
    short = long if few == many else _measured(plain, few, device, clock)
    return rates.fitted(*short, *long)


def _measured(recipe: Recipe, images: int, device: torch.device, clock: Callable[[], float]) -> tuple[StepTrace, float]:
    """Return what a step of so many images does, and the seconds that it takes on the device."""
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
    return trace_images(recipe, images, ranks=1, dataset=images, dtype=precision.dtype), min(times[1:])


def input_rate(
    views: Views,
    files: Sequence[bytes] = (),
    seconds: float = SECONDS,
    *,
    scaled: bool = False,
    channels: Sequence[Channel] = (),
) -> float:
    """Return how many images a second one core of this machine decodes and crops into the views.

    `files` are image files, of these `channels`; without any, one of ImageNet's usual size is made. `scaled` is as in a
    Stream.
    """
    files = files or [photograph()]
    out = [torch.empty(planes(channels), v.size, v.size, dtype=torch.uint8) for v in views.views]
    threads, images = torch.get_num_threads(), 0
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            u = sampling.uniforms(len(views.views), seed=0, epoch=0, sample=images)
            decode_crops(files[images % len(files)], views, u, out, scaled=scaled, channels=channels)
            images += 1
        return images / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)


def photograph(width: int = 500, height: int = 375) -> bytes:
    """Return a JPEG file of a made-up picture with about as many bytes as ImageNet's have."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (math.ceil(height / 4), math.ceil(width / 4), 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
    return file.getvalue()
