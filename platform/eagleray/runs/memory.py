"""Turn the exhaustion of a device's memory into one line that names the keys which help."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.data.loader import rows
from eagleray.methods.method import Method
from eagleray.runs.divided import divisible
from eagleray.runs.recipe import Recipe

log = logging.getLogger(__name__)


@contextmanager
def explain_exhaustion(recipe: Recipe, method: Method, ranks: int, *, evaluating: bool = False) -> Iterator[None]:
    """A context in which exhausted memory of the method's device raises a UserError that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        log.debug("out of memory", exc_info=e)
        device = next(method.parameters()).device
        if evaluating:
            line = f"during an evaluation, with images of {recipe.evaluate.size} pixels; a smaller evaluate.limit"
            line += " or evaluate.size needs less memory"
        else:
            images = max(rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks))
            line = f"in a training step with {images} images on each rank; less memory is needed with "
            line += ", ".join(advice(recipe, method, images, ranks))
        raise UserError(f"{device}: its memory{_size(device)} is exhausted {line}") from e


def advice(recipe: Recipe, method: Method, images: int, ranks: int = 1) -> list[str]:
    """Return the changes to a recipe that lower the memory of a step with so many images on each of the ranks, those
    that cost least time first."""
    out, size = [], min(method.export().micro_batch or images, images)
    if not recipe.optim.checkpointing:
        out.append("optim.checkpointing=true")
    if size > 1 and not method.export().batch_norm:
        out.append(f"optim.micro_batch={max(size // 4, 1)}")
    if ranks > 1 and divisible(recipe):
        out.append("parallel=fsdp")
    out.append("more workers")
    if len(recipe.views) > 2 or recipe.views[-1].count > 1:
        out.append("fewer views")
    return [*out, "a smaller views.size"]


def _size(device: torch.device) -> str:
    """Return the size of a device's memory as a text in brackets; empty where the device does not say it."""
    size = devices.memory_size(device)
    return f" ({size / 2**30:.1f} GiB)" if size else ""
