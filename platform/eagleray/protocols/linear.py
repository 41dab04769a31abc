"""Train a linear classifier on frozen features with SGD, momentum 0.9, no weight decay and a cosine schedule, as in
MoCo v3, DINO, EsViT and SelfPatch.

The features are extracted once, without augmentation. Classifiers with all learning rates of the sweep train side by
side in one pass. A held-out tenth of the training set picks one of them, so the test set picks nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.outcome import Outcome

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # learning rates for a batch of 256; they scale linearly with the batch
BATCH = 1024


def linear(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    epochs: PositiveInt = 100,
    batch: PositiveInt = BATCH,
    rates: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = RATES,
    scaled: bool = True,
    seed: NonNegativeInt = 0,
) -> Outcome:
    """Measure the top-1 accuracy in percent after the last epoch, and the highest test accuracy of any epoch.

    The scripts of the papers print the latter. `rates` are the learning rates of the sweep, for a batch of 256.
    `scaled` centres the features and divides them by a single scale."""
    split = Split.of(train, test, scaled=scaled, seed=seed)
    by_epoch = []
    for weight, bias in split.fits(epochs=epochs, batch=batch, rates=rates):
        by_epoch.append(accuracy(weight, bias, *split.test))
    best_rate = int(accuracy(weight, bias, *split.validation).argmax())
    curve = torch.stack(by_epoch)[:, best_rate]  # (epochs,)
    numbers = {"top1": float(curve[-1]), "best": float(curve.max()), "best_epoch": int(curve.argmax()) + 1}
    numbers["lr"] = rates[best_rate]
    settings = {"epochs": epochs, "batch": min(batch, len(split.train.x)), "rates": list(rates), "scaled": scaled}
    settings["seed"] = seed
    return Outcome({f"linear/{name}": value for name, value in numbers.items()}, settings)


@dataclass(frozen=True)
class Split:
    """The features that train the classifiers, those that pick the learning rate, and those of the test set."""

    train: LabelledFeatures
    validation: LabelledFeatures
    test: LabelledFeatures
    classes: int
    generator: torch.Generator

    @classmethod
    def of(cls, train: LabelledFeatures, test: LabelledFeatures, *, scaled: bool, seed: int) -> "Split":
        """Hold out a random tenth of the training set."""
        generator = torch.Generator().manual_seed(seed)
        classes = int(max(train.y.max(), test.y.max())) + 1
        order = torch.randperm(len(train.x), generator=generator)
        held_out, rest = order[: len(order) // 10], order[len(order) // 10 :]
        x, x_test = train.x, test.x
        if scaled:  # one scale for all channels, so that a rate means the same for every backbone
            mean, scale = train.x.mean(0), train.x.std(0).mean()
            x, x_test = (train.x - mean) / scale, (test.x - mean) / scale
        validation = LabelledFeatures(x[held_out], train.y[held_out])
        return cls(
            LabelledFeatures(x[rest], train.y[rest]), validation, LabelledFeatures(x_test, test.y), classes, generator
        )

    def fits(self, *, epochs: int, batch: int, rates: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        """Train the classifiers; see `fit`."""
        return fit(*self.train, classes=self.classes, epochs=epochs, batch=batch, rates=rates, generator=self.generator)


def fit(
    x: Tensor,
    y: Tensor,
    *,
    classes: int,
    epochs: int,
    batch: int,
    rates: Sequence[float],
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train R classifiers of features x (N, D) with classes y (N,), one for each learning rate.

    Yields their weights (R, D, C) and biases (R, 1, C) after each epoch. The next epoch changes these tensors in place.
    """
    weight = 0.01 * torch.randn(1, x.shape[1], classes, generator=generator).repeat(len(rates), 1, 1).to(x.device)
    bias = torch.zeros(len(rates), 1, classes, device=x.device)
    batch = min(batch, len(x))
    rate = torch.tensor(rates, device=x.device).view(-1, 1, 1) * batch / 256
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for epoch in range(epochs):
        lr = rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            xb = x[rows]
            error = (xb @ weight + bias).softmax(-1)  # (R, b, C), becomes d loss / d logits
            error -= F.one_hot(y[rows], classes)
            error /= len(rows)
            for m, grad in zip(momenta, (xb.T @ error, error.sum(1, keepdim=True)), strict=True):
                m.mul_(0.9).add_(grad)
            weight -= lr * momenta[0]
            bias -= lr * momenta[1]
        yield weight, bias


def accuracy(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the top-1 accuracy (R,) of each of R classifiers in percent."""
    return 100 * ((x @ weight + bias).argmax(-1) == y).float().mean(1)
