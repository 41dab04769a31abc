"""Define the result that an evaluation protocol returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The result of a protocol: its scores by name, such as knn/top1 in percent, its settings, and the paths of the
    pictures and tables that it has written."""

    numbers: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()
    tables: tuple[Path, ...] = ()
