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
    """Check that a method follows the rules below. The checks take about a minute on the CPU.

    `method` is the name of a method, or the method section of a recipe such as `{"name": "my_method", "dim": 16}`.
    `plugins` lists the files and modules that register the method. `overrides` changes keys of the small recipe that
    the checks use, such as `backbone` or `views`. `tolerance` is the largest relative difference between losses or
    gradients that the checks allow. The rules are:

    * No training step makes the host wait for the device.
    * The loss and all gradients are finite, and every trainable parameter receives a gradient.
    * A run that resumes from a checkpoint is bit-identical to a run without an interruption.
    * Micro-batches give the same gradient as the whole batch. Backbones with batch norm are exempt.
    * Two processes compute the same loss and gradient as one, whether their shares of the batch are equal or not.
    * The features of the backbone from `export()` have the width that the backbone reports.

    Raises PluginError, with the failed check and the reason, or UserError if the recipe is wrong.

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
