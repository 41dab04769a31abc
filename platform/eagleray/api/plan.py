"""Plan a run before anything starts: memory, speed, what limits it, hours and money."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe

if TYPE_CHECKING:
    from eagleray.runs.forecast import Data, Forecast


@dataclass(frozen=True)
class Planned:
    """The plan of a run. Printed, it is what `eagleray plan` prints.

    Example:

        planned = eagleray.plan("mocov3_vits16_in1k_ep300", gpu="h100", gpus=16, input_rate=250)
        planned.forecast.fits, planned.forecast.images_per_s, planned.forecast.hours
    """

    recipe: Recipe
    forecast: "Forecast"
    data: "Data"
    price: float | None

    def json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return self.forecast.json(self.price)

    def __str__(self) -> str:
        from eagleray.runs.forecast import report

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
    lines = overrides_of(overrides, workers=gpus, **keys)
    loaded = recipes.load(str(recipe), lines, [str(p) for p in plugins])
    from eagleray.api.planning import planned

    data, result = planned(loaded, str(recipe), gpu=gpu, images=images, input_rate=input_rate, store_rate=store_rate)
    return Planned(loaded, result, data, price)
