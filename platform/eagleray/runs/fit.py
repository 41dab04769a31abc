"""Find settings of a recipe that suit the number of images, for `eagleray init` and for errors about too few images."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.schedule import Schedule
from eagleray.config.view import View
from eagleray.runs.recipe import Recipe, flat

IMAGENET = 1_281_167  # images of ImageNet-1k, for which the lengths of the shipped recipes are meant
EPOCHS = (10, 100, 800)  # fewest epochs, epochs for as many images as ImageNet-1k, and most epochs
STEPS = 16  # fewest steps of an epoch, as an epoch should be more than a few large batches
LEAST = 16  # fewest images of a batch, as methods compare its images or take means over them
PER_GPU = 128  # most images of a batch on one GPU; ViT-S with two crops of 224 pixels then fits into 40 GB
SMALL = 160  # side of images in pixels below which a ViT gets smaller patches
DEFAULTS = config.to_plain(View())
PUBLIC = "timm:vit_small_patch16_224.dino"  # name of public weights that errors suggest where there are few images
READERS = 8  # most lanes (slices of a batch, data.lanes) of a rank: up to 8 loader processes read whole lanes


class Value(NamedTuple):
    """A key of a recipe, its new value, and the reason."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def values_for(recipe: Recipe, images: int, *, gpus: int = 1, size: int = 224) -> list[Value]:
    """Return the keys to change in a recipe for `images` images with a short side of `size` pixels. With 0 `gpus`
    the run is in one process on the CPU. Raises UserError when there are too few images."""
    keys = flat(recipe)
    batches = list(batch_for(recipe, images, ranks=max(gpus, 1)))
    changed = {v.key: v.value for v in batches}
    batch = changed.get("optim.batch", recipe.optim.batch)
    steps = images // batch
    least, usual, most = EPOCHS
    epochs = round(min(max(usual * math.sqrt(IMAGENET / images), least), most))
    values = [
        Value("workers", gpus, "one worker per GPU" if gpus else "in this process, without Ray"),
        *batches,
        Value("optim.epochs", epochs, f"{epochs * steps} steps in all"),
        *_schedules(recipe, epochs, epochs * steps),
        *_prototypes(keys, images),
        *_pixels(keys, size),
    ]
    return [v for v in values if v.key not in keys or keys[v.key] != v.value]


def batch_for(recipe: Recipe, images: int, *, ranks: int) -> Iterator[Value]:
    """Yield the size of the batch, and values that depend on it. Raises UserError when there are too few images."""
    if images < LEAST * STEPS:
        raise UserError(
            f"{images} images are too few to pretrain on; expected at least {LEAST * STEPS}, and some thousands to "
            f"learn much: use public weights as they are, such as `eagleray embed {PUBLIC} FOLDER`"
        )
    keys = flat(recipe)
    old = recipe.optim.batch
    each = _power(min(old / ranks, images / STEPS / ranks, PER_GPU))
    each = max(each, -(-LEAST // ranks))
    batch = each * ranks
    if images < batch:
        raise UserError(f"{images} images do not fill a batch of {ranks} worker(s); expected at least {batch}")
    lanes = ranks * min(each, READERS)
    yield Value("optim.batch", batch, f"{images // batch} steps per epoch; optim.checkpointing=true if memory runs out")
    yield Value("data.lanes", lanes, "divides the batch, with the same number for each worker")
    if recipe.optim.lr_images is None and batch != old:
        yield Value("optim.lr_images", old, "optim.lr.value is meant for this batch and is scaled to ours")
    queue = keys.get("method.queue")
    if queue and queue > images // 2:
        fitting = max(_power(images // 2 / batch), 1) * batch
        yield Value(
            "method.queue",
            fitting,
            f"at most half of the {images} images, so that few keys come from the query's image",
        )
    group = keys.get("method.norm_group")
    if group and each % group:
        yield Value("method.norm_group", each, "the images of one worker")


def too_small(recipe: Recipe, images: int) -> UserError:
    """Return the error for a run whose images do not fill a batch, with the values that would suit them."""
    given = f"data.train: {images} images do not fill one batch of optim.batch={recipe.optim.batch}"
    try:
        values = batch_for(recipe, images, ranks=recipe.ranks[1])
        keys = flat(recipe)
        fitting = " ".join(str(v) for v in values if keys[v.key] != v.value)
    except UserError as e:
        return UserError(f"{given}; {e}")
    return UserError(f"{given}; {fitting} would fit, or `eagleray init --images {images}` writes a recipe that fits")


def long_queue(recipe: Recipe, images: int) -> str | None:
    """Return a warning when the method's queue holds more keys than there are images, else None."""
    queue = recipe.method.args.get("queue") or 0
    if queue <= images:
        return None
    fitting = max(_power(images / 2 / recipe.optim.batch), 1) * recipe.optim.batch
    return (
        f"method.queue={queue}: longer than the {images} images of data.train, so a query is compared with older keys "
        f"of its own image; method.queue={fitting} would fit"
    )


def _schedules(recipe: Recipe, epochs: int, steps: int) -> Iterator[Value]:
    """Yield the schedules that do not suit a run of `epochs` epochs and `steps` steps, with another warm-up and other
    drops. If the run is so short that the momentum encoder would stay near its random weights, its momentum is lowered.
    Each value is a mapping that replaces the whole schedule."""
    plain = config.to_plain(recipe)
    sections = [("optim", plain["optim"]), ("method", plain["method"])]
    for key, value in ((f"{name}.{k}", v) for name, section in sections for k, v in section.items()):
        if not isinstance(value, dict) or "warmup" not in value:
            continue
        changed, why = dict(value), []
        if value["warmup"] > 0.3 * epochs or (key == "optim.lr" and value["warmup"] > epochs / 10):
            changed["warmup"] = epochs / 10
            why.append("warms up for a tenth of the run")
        if value["drops"]:
            changed["drops"] = [round(drop * epochs / recipe.optim.epochs) for drop in value["drops"]]
            why.append("drops at the same shares of the run")
        fastest = round(1 - 50 / max(steps, 100), 4)
        if key == "method.momentum" and value["value"] > fastest:
            changed["value"] = fastest
            why.append(f"follows within a fiftieth of the {steps} steps")
        if changed != value:
            own = {k: v for k, v in changed.items() if k == "value" or v != asdict(Schedule(value=0))[k]}
            yield Value(key, own, ", ".join(why))


def _prototypes(keys: Mapping[str, Any], images: int) -> Iterator[Value]:
    """Yield fewer prototypes where the method has more of them than the images can fill."""
    fitting = 1024 if images < 10_000 else 4096 if images < 200_000 else None
    if fitting and keys.get("method.prototypes", 0) > fitting:
        yield Value("method.prototypes", fitting, "more would stay empty with so few images")


def _pixels(keys: Mapping[str, Any], size: int) -> Iterator[Value]:
    """Yield the keys that make crops smaller for images below 224 pixels.

    Only ViTs and ResNets get smaller crops. The windows of other backbones need 224 pixels, so their images are
    enlarged instead."""
    name = keys["backbone.name"]
    patch = int(found[1]) if (found := re.search(r"^vit_\w+_patch(\d+)", name)) else 8
    if size >= 224 or not (found or name.startswith("resnet")):
        return
    if found and size < SMALL:
        patch = min(patch, max(_power(size / 8), 2))
    side = max(size // patch, 2) * patch
    if found:
        yield Value("backbone.options.img_size", side, f"{side // patch} x {side // patch} patches")
        yield Value("backbone.options.patch_size", patch, "pixels, for small images")
    yield Value("views", [_scaled(view, side / 224, patch) for view in keys["views"]], "crops as large as the images")
    if "method.patch" in keys:  # PIRL cuts patches of so many pixels from a view
        yield Value("method.patch", int(keys["method.patch"] * side / 224), "pixels, about the same share of a view")
    if "curriculum" in keys:
        smaller = [_smaller(phase, side / 224, patch) for phase in keys["curriculum"]]
        yield Value("curriculum", smaller, "the same, of such crops")
    yield Value("evaluate.size", side, "pixels")
    yield Value("evaluate.resize", side, "pixels")


def _scaled(view: Mapping[str, Any], by: float, patch: int) -> dict[str, Any]:
    """Return a view whose side is scaled by `by` and is a multiple of the patch. Keys at their default are left out."""
    own = {key: value for key, value in view.items() if value != DEFAULTS.get(key)}
    return {"size": _side(view["size"] * by, patch), **{k: v for k, v in own.items() if k != "size"}}


def _smaller(phase: Mapping[str, Any], by: float, patch: int) -> dict[str, Any]:
    """Return a phase of the curriculum whose sizes, if any, are scaled by `by` and are multiples of the patch."""
    sizes = {"sizes": [_side(size * by, patch) for size in phase["sizes"]]} if "sizes" in phase else {}
    return {**phase, **sizes}


def _side(pixels: float, patch: int) -> int:
    """Return the multiple of `patch` that is nearest to `pixels`, and at least `patch`."""
    return max(round(pixels / patch), 1) * patch


def _power(number: float) -> int:
    """Return the largest power of two that is not above a number, and 1 for a number below 1."""
    return 2 ** max(math.floor(math.log2(number)), 0) if number > 0 else 1
