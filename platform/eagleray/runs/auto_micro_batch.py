"""Choose the largest micro-batch that a device has memory for, by two trial steps before training."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)
SIZES = (4, 12)  # images of the two trials; a step's peak grows with the micro-batch along a line
SHARE = 0.9  # of the free memory that a step may take; the rest is for fragments and libraries
MOMENTS = {"adamw": 2, "lamb": 2, "lars": 1, "sgd": 1}  # floats per weight, which the first step allocates


def choose_micro_batch(
    recipe: Recipe, method: Method, precision: Precision, at: Progress, rows: tuple[int, ...]
) -> int | None:
    """Return the images that pass through the backbone at once, the same on all ranks; None: all of them.

    `rows` has the number of images of every rank. Weights, buffers and random numbers are as before. Called by all
    ranks together.
    """
    device = next(method.parameters()).device
    norms = any(backbone.batch_norm for backbone in backbones(method))
    if device.type == "cpu" or norms:
        why = "the batch norm of the backbone needs the whole batch" if norms else "a CPU's memory is not measured"
        log.info("optim.micro_batch=auto: no micro-batches, because %s", why)
        return None
    batch = blank_batch(recipe, rows, device)
    low, high = (trial_peak(method, batch, at, precision, size) for size in SIZES)
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    later = trained * (MOMENTS[recipe.optim.name] + (len(rows) > 1))  # and DDP's buckets
    size = min(dist.gather_objects(largest(low, high, SHARE * usable_memory(device) - later)))
    most = max(rows) * most_views(recipe)
    log.info("optim.micro_batch=auto: %s", "the whole batch fits" if size >= most else f"{size} images at once")
    return None if size >= most else size


def largest(low: float, high: float, limit: float) -> int:
    """Return the largest micro-batch with a peak below `limit` bytes; `low` and `high` are the peaks of SIZES."""
    slope = max((high - low) / (SIZES[1] - SIZES[0]), 1.0)
    return max(math.floor(SIZES[0] + (limit - low) / slope), 1)


def set_micro_batch(method: Method, size: int | None) -> None:
    """Let every backbone of a method take so many images at once; None: all of them."""
    for backbone in backbones(method):
        backbone.micro_batch = size


def backbones(method: Method) -> list[Backbone]:
    """Return the backbones of a method, such as those of student and teacher."""
    return [m for m in method.modules() if isinstance(m, Backbone)]


def most_views(recipe: Recipe) -> int:
    """Return how many views of one size may share a forward pass of the backbone."""
    sizes = [v.size for v in Views.of(recipe.views).views]
    return max(sizes.count(size) for size in sizes)


def blank_batch(recipe: Recipe, rows: tuple[int, ...], device: torch.device) -> Batch:
    """Return a batch of gray images with the sizes of the recipe's views, as many as this rank has in a step."""
    images = rows[dist.rank()]
    views = [torch.zeros(images, 3, v.size, v.size, device=device) for v in Views.of(recipe.views).views]
    index = torch.arange(images, device=device)
    return Batch(views, index, torch.zeros_like(index), rows)


def trial_peak(method: Method, batch: Batch, at: Progress, precision: Precision, size: int) -> int:
    """Return the peak memory in bytes of the loss and its gradients, after which the method is as before."""
    device = batch.index.device
    with untouched(method):
        set_micro_batch(method, size)
        reset_peak(device)
        with precision.autocast():
            loss = method(batch, at)["loss"]
        precision.scale(loss).backward()
        return peak_memory(device)


@contextmanager
def untouched(method: Method) -> Iterator[None]:
    """A context after which weights, buffers, gradients, micro-batches and random numbers are as before."""
    device = next(method.parameters()).device
    own: list[Tensor] = [*method.parameters(), *method.buffers()]
    before = [t.detach().cpu().clone() for t in own]
    sizes = [b.micro_batch for b in backbones(method)]
    devices = [] if device.type == "cpu" else [device.index or 0]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield
    finally:
        method.zero_grad(set_to_none=True)
        with torch.no_grad():
            for t, old in zip(own, before, strict=True):
                t.copy_(old)
        for backbone, size in zip(backbones(method), sizes, strict=True):
            backbone.micro_batch = size


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak of a device's memory."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes of tensors on a device since `reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def usable_memory(device: torch.device) -> int:
    """Return the bytes of a device that this process holds or could get."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free + torch.accelerator.memory_reserved(device))
