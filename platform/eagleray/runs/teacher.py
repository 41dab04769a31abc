"""Give the frozen teacher of a method, such as `distill`, the weights that `method.teacher.weights` names."""

from eagleray.methods.method import Method
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.models.pixels import OURS, Pixels, conversion
from eagleray.models.weights import Report
from eagleray.runs import start
from eagleray.runs.recipe import TEACHER, Recipe


def teach(recipe: Recipe, method: Method) -> None:
    """Give the teacher of a method its weights, and the colours that they were trained with. Does nothing for a method
    without one. Raises UserError when the weights do not fit."""
    if recipe.teacher is None:
        return
    source = recipe.teacher.weights
    assert source is not None
    teacher = method.get_submodule("teacher")
    assert isinstance(teacher, Backbone)
    _, theirs = fill(teacher, source)
    method.get_buffer("colours").copy_(conversion(theirs).view(2, 3, 1, 1))


def fill(teacher: Backbone, source: str) -> tuple[Report, Pixels]:
    """Copy the weights of a source, as `start.from` names them, into a teacher. Return the mean and deviation of the
    pixels that it then expects. Raises UserError."""
    given = start.weights_of(source, TEACHER)
    return weights.fill(teacher, given.unconverted(), whole=True), given.pixels or OURS
