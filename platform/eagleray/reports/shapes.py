"""Check the files of a run's folder that a page shows, because people or other versions may have written them."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from eagleray.base.errors import UserError
from eagleray.config.tree import explain

log = logging.getLogger(__name__)
NO_MAPPING = re.compile(r"input should be a valid dictionary( or instance of \w+)?")  # pydantic's message: no mapping
LONGEST = 300  # largest number of characters in an error about a file
T = TypeVar("T")


class Shape(BaseModel):
    """The keys of a file that are checked. Their values are not converted, and other keys are allowed."""

    model_config = ConfigDict(strict=True)


class Named(Shape):
    """The section of a recipe that selects a method."""

    name: str = ""


class Network(Shape):
    """The section of a recipe that describes the backbone."""

    name: str = ""
    options: dict[str, Any] | None = None


class Optim(Shape):
    """The section of a recipe about batches and epochs."""

    batch: int | None = None
    epochs: int | float | None = None


class Recipe(Shape):
    """The keys of recipe.yaml that reports read. Other keys are not checked, because plug-ins may define them."""

    method: Named = Named()
    backbone: Network = Network()
    data: dict[str, Any] = {}
    optim: Optim = Optim()
    evaluate: dict[str, Any] = {}
    max_steps: int | None = None


class Environment(Shape):
    """The keys of environment.json that reports read."""

    packages: dict[str, Any] | None = None
    gpus: list[str] | None = None
    command: list[str] = []


class Phase(Shape):
    """An entry of plan.json: a phase of the training with smaller views or fewer patches."""

    until: int


class Forecast(Shape):
    """The keys of plan.json that reports read."""

    line: str
    memory: dict[str, float]
    phases: list[Phase] = []
    images_per_s: float | None = None
    mfu: float | None = None


class Failure(Shape):
    """The keys of the file that says why a run has failed."""

    why: str


class Finding(Shape):
    """A line of health.jsonl: a problem that the run found."""

    kind: str
    text: str


class Skipped(Shape):
    """A line of skipped.jsonl: a step whose gradients were not finite."""

    keys: list[str]


class Bad(Shape):
    """A line of quarantine.jsonl: a sample or a shard that could not be read."""

    shard: str
    key: str
    reason: str


def check(kind: type[T], tree: Any, where: Path | str) -> T:
    """Return the content `tree` of a file as `kind`. Raises UserError, which names the file, if it has another form."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as e:
        line = NO_MAPPING.sub("expected keys with values", "; ".join(explain(e, kind)))
        raise UserError(f"{where}: {line if len(line) < LONGEST else f'{line[:LONGEST]} ...'}") from None


def complete(kind: type, lines: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Return those lines of a file that have the keys of `kind`, and warn of the others, which a page cannot show."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def fits(line: dict[str, Any]) -> bool:
        try:
            adapter.validate_python(line)
        except ValidationError:
            return False
        return True

    kept = [line for line in lines if fits(line)]
    if more := len(lines) - len(kept):
        keys = ", ".join(kind.__annotations__)
        log.warning("%s: left out %d of %d lines, which have no %s", path, more, len(lines), keys)
    return kept
