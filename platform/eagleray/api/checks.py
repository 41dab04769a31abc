"""Checks that authors of a method call in their own tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.api.overrides import Overrides, overrides_of
from eagleray.config import plugins as loading
from eagleray.runs import method_checks
from eagleray.runs.method_checks import MethodReport


def check_method(
    method: str | Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    plugins: Sequence[str | Path] = (),
    tolerance: float = 1e-4,
) -> MethodReport:
    """Check that a method keeps what every method promises, on small random batches and the CPU, in about a minute.

    `method` is its name, or the method section of a recipe such as `{"name": "my_method", "dim": 16}`; `plugins` are
    the files and modules that register it. `overrides` change keys of the small recipe that is used, such as
    `backbone` or `views`. The checks are these:

    * A step reads nothing from the device.
    * The loss and all gradients are finite, and a gradient reaches every trainable parameter.
    * A run that is resumed from a checkpoint is the same to the bit.
    * Micro-batches give the gradient of the batch, unless the backbone has batch norm.
    * Two processes, with equal and with unequal shares of the batch, compute what one does. `tolerance` is the largest
      difference of loss and gradient.
    * `export()` returns a backbone whose features have the width that it states.

    Raises PluginError, whose message says which of them failed and why, and UserError for a wrong recipe.

    Example:

        report = eagleray.check_method({"name": "simclr", "dim": 12, "hidden": 16})
        print(report)
    """
    loading.resolve([str(name) for name in plugins])
    tree = method_checks.small_tree({"name": method} if isinstance(method, str) else method)
    tree["plugins"] = [str(name) for name in plugins]
    for line in overrides_of(overrides):
        tree = config.merge(tree, config.override(line))
    return method_checks.check(tree, tolerance)
