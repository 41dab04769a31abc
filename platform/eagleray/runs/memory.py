"""Fit the steps of a run into a device's memory, and say which keys help where it is exhausted.

The largest micro-batch is found by trials before training. Two trial steps with small micro-batches show the memory
that a step takes beside the backbone's activations, and two trials of the backbone alone how much each image adds. The
trial steps alone do not show this, as with small micro-batches heads and loss may take more than the backbone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eagleray.base import devices, dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.data.loader import Loader, rows
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

log = logging.getLogger(__name__)
SIZES = (4, 12)  # images per micro-batch in two trial steps, whose peaks give the memory for each image
SHARE = 0.9  # share of the free memory that a step may take; the rest is for fragmentation and libraries
MOMENTS = {"adamw": 2, "lamb": 2, "lars": 1, "larc": 1}  # moments per weight that step 1 allocates; sgd's exist before


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
    """Return the changes to a recipe that lower the memory of a step with `images` images on each of the ranks. Those
    that cost the least time come first."""
    from eagleray.runs.step_trace import divisible

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
    """Return the size of a device's memory as a text in brackets, or an empty text if it is not known."""
    size = devices.memory_size(device)
    return f" ({size / 2**30:.1f} GiB)" if size else ""


def choose_micro_batch(
    recipe: Recipe,
    method: Method,
    precision: Precision,
    at: Progress,
    rows: tuple[int, ...],
    model: nn.Module | None = None,
    allocated: int = 0,
    loader: Loader | None = None,
) -> int | None:
    """Return the number of images to pass through the backbone at once, the same on all ranks; None: all of them.

    `rows` is the number of images of each rank, and `model` the module that a step calls if it is not the method.
    `allocated` is the bytes that the optimiser's moments take already, such as after reading a checkpoint. `loader`
    prepares the batches, which take memory before they are trained on. Weights, buffers and the state of random number
    generators are unchanged afterwards. Called by all ranks together."""
    device = next(method.parameters()).device
    if why := unmeasured(method, device):
        log.info("optim.micro_batch=auto: no micro-batches, because %s", why)
        return None
    batch = blank_batch(recipe, rows, device)
    steps = [step_peak(method, batch, at, precision, size, model or method) for size in SIZES]
    alone = [backbone_peak(method, batch, precision, size) for size in SIZES]
    trained = sum(p.nbytes for p in method.parameters() if p.requires_grad)
    moments = max(trained * MOMENTS.get(recipe.optim.name, 0) - allocated, 0)  # the first step allocates them
    later = moments + trained * (len(rows) > 1)  # DDP's buckets hold a copy of the gradients
    later += bytes_ahead(loader) if loader else 0
    images = min(dist.gather_objects(room(steps, alone, SHARE * usable_memory(device) - later)))
    groups = forwards(recipe, max(rows))
    most = max(n for n, _ in groups)
    size = next((n for n in range(most, 1, -1) if held(groups, n) <= images), 1)
    log.info("optim.micro_batch=auto: %s", "the whole batch fits" if size == most else f"{size} images at once")
    return None if size == most else size


def unmeasured(method: Method, device: torch.device) -> str:
    """Return why no micro-batch can be chosen, or an empty text if one can."""
    if any(backbone.batch_norm for backbone in backbones(method)):
        return "the batch norm of the backbone needs the whole batch"
    if device.type == "cpu":
        return "a CPU's memory is not measured"
    return "" if devices.memory_size(device) else f"PyTorch does not tell how much memory a {device.type} device has"


def bytes_ahead(loader: Loader) -> int:
    """Return the bytes of the batches that a device prepares during a step: a ready one, and one that is being cropped
    and augmented, measured on the heaviest possible batch. A device without streams prepares none."""
    if not devices.has_streams(loader.device):
        return 0
    reset_peak(loader.device)
    before = peak_memory(loader.device)
    batch, _ = loader.assemble((loader.heaviest(),))
    return peak_memory(loader.device) - before + sum(view.nbytes for view in batch.views)


def room(steps: Sequence[float], alone: Sequence[float], limit: float) -> float:
    """Return for how many images a step within `limit` bytes can hold the activations at once.

    `steps` are the peak bytes of steps in micro-batches of SIZES, `alone` those of the backbone on SIZES images."""
    each = max((peaks[1] - peaks[0]) / (SIZES[1] - SIZES[0]) for peaks in (steps, alone))
    return SIZES[1] + (limit - steps[1]) / max(each, 1.0)


def forwards(recipe: Recipe, images: int) -> list[tuple[int, float]]:
    """Return, for each size of the recipe's views, how many crops of `images` images pass through the backbone together
    and the area of a crop as a share of that of the largest crop."""
    sizes = [v.size for v in Views.of(recipe.views).views]
    return [(images * sizes.count(size), (size / max(sizes)) ** 2) for size in sorted(set(sizes))]


def held(groups: Sequence[tuple[int, float]], size: int) -> float:
    """Return for how many images of the largest size a step holds activations at once, in micro-batches of `size`.

    `groups` are those that `forwards` returns. A forward pass of more than `size` images is split, and one part at a
    time is recomputed. The activations of all smaller forward passes are held at once."""
    whole = sum(n * area for n, area in groups if n <= size)
    return whole + max((size * area for n, area in groups if n > size), default=0.0)


def set_micro_batch(method: Method, size: int | None) -> None:
    """Let every backbone of a method take `size` images at once, or with None the whole batch."""
    for backbone in backbones(method):
        backbone.micro_batch = size


def backbones(method: Method) -> list[Backbone]:
    """Return the backbones of a method, such as those of student and teacher."""
    return [m for m in method.modules() if isinstance(m, Backbone)]


def blank_batch(recipe: Recipe, rows: tuple[int, ...], device: torch.device) -> Batch:
    """Return a batch of blank images with the sizes of the recipe's views, as many as this rank has in a step."""
    images = rows[dist.rank()]
    views = [torch.zeros(images, recipe.planes, v.size, v.size, device=device) for v in Views.of(recipe.views).views]
    index = torch.arange(images, device=device)
    return Batch(views, index, torch.zeros_like(index), rows, whole_boxes(views))


def step_peak(method: Method, batch: Batch, at: Progress, precision: Precision, size: int, model: nn.Module) -> int:
    """Return the peak memory in bytes of the loss and its gradients, with micro-batches of `size` images."""

    def loss() -> Tensor:
        set_micro_batch(method, size)
        return model(batch, at)["loss"]  # type: ignore[no-any-return]

    return trial_peak(method, loss, precision)


def backbone_peak(method: Method, batch: Batch, precision: Precision, size: int) -> int:
    """Return the peak memory in bytes of the trained backbone's forward and backward pass, for `size` images of the
    batch's largest views."""
    trained = next(b for b in backbones(method) if any(p.requires_grad for p in b.parameters()))
    largest = max(batch.views, key=lambda view: view.shape[-1])
    images = largest[:1].expand(size, -1, -1, -1).contiguous()

    def loss() -> Tensor:
        set_micro_batch(method, None)
        return trained.pooled(images).float().sum()

    return trial_peak(method, loss, precision)


def trial_peak(method: Method, loss: Callable[[], Tensor], precision: Precision) -> int:
    """Return the peak memory in bytes of a loss and its gradients, and leave the method unchanged."""
    device = next(method.parameters()).device
    with untouched(method):
        reset_peak(device)
        with precision.autocast():
            value = loss()
        precision.scale(value).backward()
        return peak_memory(device)


@contextmanager
def untouched(method: Method) -> Iterator[None]:
    """A context after which weights, buffers, gradients, micro-batches and random numbers are as before.

    Nothing is compiled in it, as the sizes of trials do not occur again, and uncompiled code takes no less memory."""
    device = next(method.parameters()).device
    own: list[Tensor] = [*method.parameters(), *method.buffers()]
    before = [t.detach().cpu().clone() for t in own]
    kept = [(b, b.micro_batch) for b in backbones(method)]
    compiled = [m for m in method.modules() if getattr(m, "compiled", False)]
    for part in compiled:
        part.compiled = False  # type: ignore[assignment]
    devices = [] if device.type == "cpu" else [device.index or 0]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield
    finally:
        method.zero_grad(set_to_none=True)
        with torch.no_grad():
            for t, old in zip(own, before, strict=True):
                t.copy_(old)
        for backbone, size in kept:
            backbone.micro_batch = size
        for part in compiled:
            part.compiled = True  # type: ignore[assignment]


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak of a device's memory."""
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes of tensors on a device since `reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def usable_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process has reserved or could still reserve."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free + torch.accelerator.memory_reserved(device))
