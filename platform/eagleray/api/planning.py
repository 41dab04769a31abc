"""Forecast a run on an accelerator or on this machine, with what is measured here."""

from dataclasses import replace
from itertools import islice

from eagleray.base import devices
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.datasets.catalogue import images_of
from eagleray.runs import accelerators, calibrate, fit, local_forecast
from eagleray.runs import recipe as recipes
from eagleray.runs.build import check_method
from eagleray.runs.forecast import Data, Forecast, Target, forecast, refusal, target_of
from eagleray.runs.plan import check_parallel, make_plan, resolve_paths
from eagleray.runs.recipe import Recipe
from eagleray.views.sampling import Views

FILES = 16  # images that are decoded to measure the input


def planned(
    recipe: Recipe,
    name: str,
    *,
    gpu: str | None,
    images: int | None,
    input_rate: float | None,
    store_rate: float | None,
) -> tuple[Data, Forecast]:
    """Return the data and the forecast of a recipe with this name; the other arguments are those of `plan`. Raises
    UserError."""
    accelerator = accelerators.find(gpu) if gpu else None
    check_parallel(recipe, check_method(recipe))
    ranks = max(recipes.span(recipe.workers)[1], 1)
    known, files = _data(recipe, name, images)
    views, scaled = Views.of(recipe.views), recipe.data.decode == "scaled"
    channels = recipe.data.channels
    rate = input_rate or calibrate.input_rate(views, files, scaled=scaled, channels=channels if files else ())
    scaled_rate = (
        calibrate.input_rate(views, files, scaled=True) if files and not (scaled or input_rate or channels) else None
    )
    data = replace(known, core_rate=rate, scaled_rate=scaled_rate, store_rate=store_rate and 1e6 * store_rate)
    target = target_of(gpu or "", accelerator, ranks) if accelerator else _here(recipe)
    result = forecast(recipe, target, data)
    if not result.fits:
        raise refusal(recipe, result, target, data)
    return data, result


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
