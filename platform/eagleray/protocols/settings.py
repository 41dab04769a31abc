"""The `evaluate` section of a recipe: how a run evaluates its backbone during training and at its end."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluate:
    every: NonNegativeInt = 0  # epochs between kNN evaluations during training; 0: at the end only
    size: PositiveInt = 224  # pixels, centre crop
    resize: PositiveInt = 256  # pixels of the short side before the crop
    k: PositiveInt = 20
    temperature: PositiveFloat = 0.07
    limit: PositiveInt | None = None  # training images in the kNN bank and the probe; None: all
    probe_epochs: NonNegativeInt = 100  # of the linear probe; 0: no probe

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize={self.resize} leaves no room for a crop of size={self.size}")
