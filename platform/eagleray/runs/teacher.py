"""Give the frozen teacher of a method, such as `distill`, the weights that `method.teacher.weights` names."""

import timm
import torch
from torch import Tensor

from eagleray.methods.method import Method
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.models.network import TIMM
from eagleray.models.weights import Report
from eagleray.runs import start
from eagleray.runs.recipe import TEACHER, Recipe
from eagleray.views.colours import MEAN, STD


def teach(recipe: Recipe, method: Method) -> None:
    """Give the teacher of a method its weights, and the colours that they were trained with. Does nothing for a method
    without one. Raises UserError when the weights do not fit."""
    if recipe.teacher is None:
        return
    source = recipe.teacher.weights
    assert source is not None
    teacher = method.get_submodule("teacher")
    assert isinstance(teacher, Backbone)
    fill(teacher, source)
    method.get_buffer("colours").copy_(colours(source))


def fill(teacher: Backbone, source: str) -> Report:
    """Copy the weights of a source, as `start.from` names them, into a teacher. Raises UserError."""
    return weights.fill(teacher, start.weights_of(source, TEACHER), whole=True)


def colours(source: str) -> Tensor:
    """Return the factors and summands (2, 3, 1, 1) that turn colours as our views have them into those that the weights
    of a source were trained with. Only timm says which these are; for others they stay the same."""
    config = timm.get_pretrained_cfg(source.removeprefix(TIMM)) if source.startswith(TIMM) else None
    known = (config.mean, config.std) if config else (MEAN, STD)
    (mean, std), (their_mean, their_std) = (map(torch.tensor, pair) for pair in ((MEAN, STD), known))
    return torch.stack([std / their_std, (mean - their_mean) / their_std]).view(2, 3, 1, 1)
