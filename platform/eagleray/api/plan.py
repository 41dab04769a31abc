"""Plan a run before anything starts: memory, speed, what limits it, hours and money."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.base import devices
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.datasets.catalogue import images_of
from eagleray.runs import accelerators, calibrate, fit, local_forecast
from eagleray.runs import recipe as recipes
from eagleray.runs.build import check_method
from eagleray.runs.forecast import Data, Forecast, Target, forecast, refusal, report, target_of
from eagleray.runs.plan import check_parallel, make_plan, resolve_paths
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

FILES = 16  # images that are decoded to measure the input


@dataclass(frozen=True)
class Planned:
    """The plan of a run. Printed, it is what `eagleray plan` prints.

    Example:

        planned = eagleray.plan("mocov3_vits16_in1k_ep300", gpu="h100", gpus=16, input_rate=250)
        planned.forecast.fits, planned.forecast.images_per_s, planned.forecast.hours
    """

    recipe: Recipe
    forecast: Forecast
    data: Data
    price: float | None

    def json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return self.forecast.json(self.price)

    def __str__(self) -> str:
        return "\n".join(report(self.recipe, self.forecast, self.data, self.price))


def plan(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    price: float | None = None,
    images: int | None = None,
    input_rate: float | None = None,
    store_rate: float | None = None,
    plugins: Sequence[str | Path] = (),
    **keys: Any,
) -> Planned:
    """Say before a run starts whether it fits, how fast it will be, what limits it and what it costs.

    `recipe`, `overrides`, `plugins` and `keys` are as in `pretrain`. `gpu` is a name of the table in docs/plan.md,
    such as `h100`; without it the plan is for this machine, and on a CPU a short step is measured. `gpus` is the number
    of workers, and `price` what a device costs in an hour. The number of images is that of `data.train`, or `images`,
    or that of the data set in the recipe's name. `input_rate` is the images per second that one loader process decodes
    and crops; without it that is measured here. `store_rate` is the MB per second that the store gives in all.

    Raises UserError for a wrong key, an unknown GPU, and a run that does not fit into the device's memory.

    Example:

        planned = eagleray.plan("mocov3_vits16_in1k_ep300", gpu="h100", gpus=16, input_rate=250)
        print(planned)
    """
    accelerator = accelerators.find(gpu) if gpu else None
    lines = overrides_of(overrides, workers=gpus, **keys)
    loaded = recipes.load(str(recipe), lines, [str(p) for p in plugins])
    check_parallel(loaded, check_method(loaded))
    ranks = max(recipes.span(loaded.workers)[1], 1)
    known, files = _data(loaded, str(recipe), images)
    views, scaled = Views.of(loaded.views), loaded.data.decode == "scaled"
    channels = loaded.data.channels
    rate = input_rate or calibrate.input_rate(views, files, scaled=scaled, channels=channels if files else ())
    scaled_rate = (
        calibrate.input_rate(views, files, scaled=True) if files and not (scaled or input_rate or channels) else None
    )
    data = replace(known, core_rate=rate, scaled_rate=scaled_rate, store_rate=store_rate and 1e6 * store_rate)
    target = target_of(gpu or "", accelerator, ranks) if accelerator else _here(loaded)
    result = forecast(loaded, target, data)
    if not result.fits:
        raise refusal(loaded, result, target, data)
    return Planned(loaded, result, data, price)


def _here(recipe: Recipe) -> Target:
    """Return this machine as a target; the speed of its CPU, and of a device that is not in the table, is measured."""
    target = local_forecast.local_target(recipe)
    if target is None:
        raise UserError("--gpu: expected a name, as this machine's device does not say how much memory it has")
    if target.rates:
        return target
    device = devices.CPU if target.is_cpu else devices.current()
    return replace(target, rates=calibrate.calibrated(accelerators.cpu_rates(), recipe, device))


def _data(recipe: Recipe, name: str, images: int | None) -> tuple[Data, list[bytes]]:
    """Return the training set, and some of its files where it is given. Raises UserError."""
    if recipe.data.train:
        opened = make_plan(resolve_paths(recipe), note=say)
        samples = opened.stream.samples(range(opened.stream.lanes), start=0)
        return local_forecast.data_of(opened), [bytes(data) for _, data in islice(samples, FILES)]
    images = images or images_of(name)
    if not images:
        raise UserError("--images: expected the number of images, as neither data.train nor the recipe's name tells it")
    if images < recipe.optim.batch:
        raise UserError(f"--images {images}: fewer than one batch of optim.batch={recipe.optim.batch}")
    return Data(images, calibrate.IMAGE_BYTES), []


def check_named(recipe: Recipe, name: str, gpu: str, *, insist: bool) -> None:
    """Print the plan of a recipe on its workers with this kind of GPU, in one line. Raises UserError for an unknown
    GPU, and for a run that cannot fit unless the user `insist`s."""
    target = target_of(gpu, accelerators.find(gpu), max(recipes.span(recipe.workers)[1], 1))
    data = Data(images_of(name) or fit.IMAGENET, calibrate.IMAGE_BYTES)  # the data may be out of reach from here
    result = forecast(recipe, target, data)
    console.print(result.line(), markup=False)
    if not result.fits and not insist:
        raise UserError(f"{refusal(recipe, result, target, data)}; --insist sends the run all the same")
