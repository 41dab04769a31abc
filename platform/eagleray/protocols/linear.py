"""Linear probe on frozen features: SGD with momentum 0.9 and no weight decay, cosine to zero by epochs, as in MoCo v3,
DINO, EsViT and SelfPatch.

The features are extracted once, without augmentation. All learning rates of the sweep train side by side in one pass; a
tenth of the training set, held out, picks one of them, so the test set picks nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.protocols.features import Labelled
from eagleray.protocols.outcome import Outcome

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # for a batch of 256, scaled linearly
BATCH = 1024
# What the papers' scripts do otherwise; all of them take features as they are. Their rates are in the middle of ours.
DINO = {"epochs": 100, "batch": 1024, "scaled": False, "rates": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)}
VARIANTS = {
    "mocov3": {"epochs": 90, "batch": 1024, "scaled": False, "rates": (0.1, 0.3, 1.0, 3.0, 10.0)},
    "dino": DINO,
    "esvit": DINO,
    "selfpatch": DINO,
}


def linear(
    train: Labelled,
    test: Labelled,
    *,
    epochs: PositiveInt = 100,
    batch: PositiveInt = BATCH,
    rates: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = RATES,
    scaled: bool = True,
    seed: NonNegativeInt = 0,
) -> Outcome:
    """Top-1 in percent after the last epoch, as `probe`, and the best of all epochs on the test set, which is what the
    papers' scripts print. `rates` are for 256 images; `scaled` centres features and divides by one scale."""
    sets = Split.of(train, test, scaled=scaled, seed=seed)
    tested = []
    for weight, bias in sets.fits(epochs=epochs, batch=batch, rates=rates):
        tested.append(accuracy(weight, bias, *sets.test))
    picked = int(accuracy(weight, bias, *sets.held).argmax())
    curve = torch.stack(tested)[:, picked]  # (epochs,)
    numbers = {"top1": float(curve[-1]), "best": float(curve.max()), "best_epoch": int(curve.argmax()) + 1}
    numbers["lr"] = rates[picked]
    how = {"epochs": epochs, "batch": min(batch, len(sets.kept.x)), "rates": list(rates), "scaled": scaled}
    how["seed"] = seed
    return Outcome({f"linear/{name}": value for name, value in numbers.items()}, how)


def probe(train: Labelled, test: Labelled, *, epochs: int, seed: int = 0) -> dict[str, float]:
    """Top-1 accuracy in percent at the end of training, and the learning rate (for 256 images) that was picked."""
    sets = Split.of(train, test, scaled=True, seed=seed)
    *_, (weight, bias) = sets.fits(epochs=epochs, batch=BATCH, rates=RATES)
    picked = int(accuracy(weight, bias, *sets.held).argmax())
    return {"linear/top1": float(accuracy(weight, bias, *sets.test)[picked]), "linear/lr": RATES[picked]}


@dataclass(frozen=True)
class Split:
    """What a probe learns from, what picks its rate, and what it is tested on."""

    kept: Labelled
    held: Labelled
    test: Labelled
    classes: int
    generator: torch.Generator

    @classmethod
    def of(cls, train: Labelled, test: Labelled, *, scaled: bool, seed: int) -> "Split":
        generator = torch.Generator().manual_seed(seed)
        classes = int(max(train.y.max(), test.y.max())) + 1
        order = torch.randperm(len(train.x), generator=generator)
        held, kept = order[: len(order) // 10], order[len(order) // 10 :]
        x, x_test = train.x, test.x
        if scaled:  # one scale for all channels: rates mean the same for every backbone
            mean, scale = train.x.mean(0), train.x.std(0).mean()
            x, x_test = (train.x - mean) / scale, (test.x - mean) / scale
        parts = (Labelled(x[kept], train.y[kept]), Labelled(x[held], train.y[held]), Labelled(x_test, test.y))
        return cls(*parts, classes, generator)

    def fits(self, *, epochs: int, batch: int, rates: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        return fit(*self.kept, classes=self.classes, epochs=epochs, batch=batch, rates=rates, generator=self.generator)


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
    """Weights (R, D, C) and biases (R, 1, C) of R classifiers, one per learning rate, after each epoch: the same
    tensors, which the next epoch changes."""
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
    """Percent (R,)."""
    return 100 * ((x @ weight + bias).argmax(-1) == y).float().mean(1)
