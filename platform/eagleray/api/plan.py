"""Plan a run before anything starts: memory, speed, what limits it, hours and money."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.runs import recipe as recipes

if TYPE_CHECKING:
    from eagleray.runs.forecast import Forecast


def plan(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
    images: int | None = None,
    cpus: int | None = None,
    input_rate: float | None = None,
    store_rate: float | None = None,
    plugins: Sequence[str | Path] = (),
    **keys: Any,
) -> "Forecast":
    """Forecast whether a run fits into memory, how fast it will be, what limits its speed and what it will cost.

    `recipe`, `overrides`, `plugins` and `keys` have the same meaning as in `pretrain`. `gpu` is a kind of GPU, such as
    `h100`, `a100-80` or `l4`. Without `gpu` the forecast is for this machine; on a CPU, Eagleray then times a short
    training step. `gpus` is the number of workers, and `price` is the price of a device per hour. `images` is the
    number of training images, of which `plan` then reads none; by default that of `data.train` or, if the recipe has no
    `data.train`, of the data set in its name. `cpus` is the number of CPU cores that each device has; without it,
    `plan` does not forecast the input of a recipe with `data.workers=auto`. `input_rate` is the number of images per
    second that one loader process decodes and crops; by default `plan` measures it on this machine. `store_rate` is the
    number of MB per second that the store delivers to the whole run.

    Raises UserError for a wrong key, an unknown GPU, or a run that does not fit into the device's memory.

    Example:

        forecast = eagleray.plan("mocov3_vits16_in1k_ep300", gpu="h100", gpus=16, input_rate=250)
        print(forecast)
    """
    lines = overrides_of(overrides, workers=gpus, **keys)
    loaded = recipes.load(str(recipe), lines, [str(p) for p in plugins])
    from eagleray.datasets.catalogue import images_of
    from eagleray.runs.local_forecast import plan_run

    if not loaded.data.train:
        images = images or images_of(str(recipe))
    found = plan_run(loaded, gpu=gpu, images=images, cpus=cpus, input_rate=input_rate, store_rate=store_rate)
    return replace(found, price=price)
