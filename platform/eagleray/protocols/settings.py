"""The `evaluate` section of a recipe: how a run evaluates its backbone during training and at its end."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT

Bank = Literal["fp32", "bf16"]  # the format in which features are kept

EPOCHS = 100  # of the linear probe where a recipe sets none


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluate:
    """The settings with which kNN and the linear probe evaluate the backbone of a run."""

    every: NonNegativeInt = 0  # epochs between kNN evaluations during training; 0: at the end only
    size: PositiveInt = 224  # pixels, centre crop
    resize: PositiveInt = 256  # pixels of the short side before the crop
    k: PositiveInt = 20
    temperature: PositiveFloat = 0.07
    limit: PositiveInt | None = None  # training images that kNN and the linear probe use; None: all
    probe_epochs: NonNegativeInt = EPOCHS  # of the linear probe; 0: no probe
    # The format in which features are kept: bf16 takes half the memory, and rounds them.
    bank: Bank = "fp32"

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize={self.resize} is smaller than the crop of size={self.size}")
