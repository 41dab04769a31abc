"""The `evaluate` section of a recipe: how a run evaluates its backbone during training and at its end."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray.config import STRICT

Bank = Literal["fp32", "bf16"]  # number format of stored features

# Defaults of the linear probe: epochs, images of a batch, and learning rates for a batch of 256.
EPOCHS, BATCH = 100, 1024
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluate:
    """The settings with which kNN and the linear probe evaluate the backbone of a run."""

    # Epochs between evaluations during training, by kNN or the supervised classifier; 0: only at the end
    every: NonNegativeInt = 0
    size: PositiveInt = 224  # side of the centre crop, in pixels
    resize: PositiveInt = 256  # short side of the image before the crop, in pixels
    k: PositiveInt = 20  # number of nearest neighbours
    temperature: PositiveFloat = 0.07  # temperature of the neighbours' votes
    # Number of random training images for kNN and the linear probe; None: all, but at most 1,300,000 during training
    limit: PositiveInt | None = None
    probe_epochs: NonNegativeInt = EPOCHS  # epochs of the linear probe; 0: no probe
    # Number format of stored features; bf16 takes half the memory, and rounds the features
    bank: Bank = "fp32"

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize={self.resize} is smaller than the crop of size={self.size}")
