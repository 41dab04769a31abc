"""Turn the exhaustion of a device's memory into one line that names the keys which help."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from eagleray.base.errors import UserError
from eagleray.data.loader import rows
from eagleray.methods.method import Method
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
            images = max(rows(recipe.data.lanes, recipe.optim.batch, ranks=ranks, workers=recipe.data.workers))
            line = f"in a training step with {images} images on each rank; less memory is needed with "
            line += ", ".join(advice(recipe, method, images))
        raise UserError(f"{device}: its memory{_size(device)} is exhausted {line}") from e


def advice(recipe: Recipe, method: Method, images: int) -> list[str]:
    """Return the changes to a recipe that lower the memory of a step with so many images on each rank, those that cost
    least time first."""
    out, size = [], min(method.export().micro_batch or images, images)
    if not recipe.optim.checkpointing:
        out.append("optim.checkpointing=true")
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in method.export().modules())
    if size > 1 and not norms:
        out.append(f"optim.micro_batch={max(size // 4, 1)}")
    out.append("more workers")
    if len(recipe.views) > 2 or recipe.views[-1].count > 1:
        out.append("fewer views")
    return [*out, "a smaller views.size"]


def _size(device: torch.device) -> str:
    """Return the size of a device's memory as a text in brackets; empty where the device does not say it."""
    if device.type == "cpu":
        return ""
    try:
        _, size = torch.accelerator.get_memory_info(device)
    except RuntimeError:  # of a device that cannot tell
        return ""
    return f" ({size / 2**30:.1f} GiB)"
