"""What a protocol of evaluation gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Numbers by name, such as knn/top1 in percent, the settings that they were made with, and pictures."""

    numbers: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Path, ...] = ()
