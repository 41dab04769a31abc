"""Train a linear classifier on frozen features with SGD, momentum 0.9, no weight decay and a cosine schedule, as in
MoCo v3, DINO, EsViT and SelfPatch.

The features are extracted once, without augmentation. The sweep trains a classifier for each learning rate, all in one
pass over the data. The best is picked on a held-out tenth of the training set, so that the test set picks nothing.

Each rank holds a shard of the features. All ranks take the same batches; each computes the gradient of the rows that it
holds, and these gradients are summed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.protocols.features import LabelledFeatures, Shard, count_classes
from eagleray.protocols.settings import BATCH, EPOCHS, RATES

CLASSIFIED = 1024  # number of rows that are classified at a time, to save memory


def linear(
    train: LabelledFeatures,
    test: LabelledFeatures,
    *,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    rates: Sequence[float] = RATES,
    scaled: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """Measure the top-1 accuracy in percent after the last epoch, and the highest test accuracy of any epoch.

    The papers' scripts print the latter. `train` and `test` are the features of this rank. With `scaled`, features are
    centred and divided by the mean of their standard deviations. Called by all ranks together."""
    split = Split.of(train, test, scaled=scaled, seed=seed)
    by_epoch = []
    for weight, bias in split.fits(epochs=epochs, batch=batch, rates=rates):
        by_epoch.append(split.test.accuracy(weight, bias))
    best_rate = int(split.validation.accuracy(weight, bias).argmax())
    curve = torch.stack(by_epoch)[:, best_rate]  # (epochs,) test accuracy of the picked rate
    numbers = {"top1": float(curve[-1]), "best": float(curve.max()), "best_epoch": int(curve.argmax()) + 1}
    return {f"linear/{name}": value for name, value in (numbers | {"lr": rates[best_rate]}).items()}


@dataclass(frozen=True)
class Rows:
    """Selected rows of a table of features that is divided among ranks. They are copied and scaled when they are used.

    `rows` are their indices in the table of all ranks."""

    features: LabelledFeatures
    shard: Shard
    rows: Tensor
    mean: Tensor | None  # (D,) mean of the features; None: they are not scaled
    scale: Tensor | None  # scalar: mean of the standard deviations of the D channels

    @property
    def total(self) -> int:
        """The number of selected rows on all ranks."""
        return len(self.rows)

    def select(self, at: Tensor) -> LabelledFeatures:
        """Return the features of the rows `rows[at]`, as far as this rank holds them."""
        mine = self.shard.own(self.rows[at])
        x = self.features.x[mine].float()
        if self.mean is not None and self.scale is not None:
            x = (x - self.mean) / self.scale
        return LabelledFeatures(x, self.features.y[mine])

    def accuracy(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the top-1 accuracy in percent (R,) of R classifiers `weight` (R, D, C). Called by all ranks
        together."""
        hits = torch.zeros(len(weight), device=weight.device)
        for at in torch.arange(self.total).split(CLASSIFIED):
            x, y = self.select(at)
            hits += ((x @ weight + bias).argmax(-1) == y).sum(1)
        return 100 * (dist.total(hits) / self.total)


@dataclass(frozen=True)
class Split:
    """Three sets of features: to train the classifiers, to pick the learning rate (`validation`), and to test."""

    train: Rows
    validation: Rows
    test: Rows
    classes: int
    generator: torch.Generator

    @classmethod
    def of(cls, train: LabelledFeatures, test: LabelledFeatures, *, scaled: bool, seed: int) -> "Split":
        """Hold out a random tenth of the training set, at least one image. Called by all ranks together.

        Raises UserError when there is no image left to train on."""
        generator = torch.Generator().manual_seed(seed)
        shard, tests = Shard.of(len(train.x)), Shard.of(len(test.x))
        if shard.total < 2:
            raise UserError(f"linear: {shard.total} training image(s); expected two or more, as one picks the rate")
        order = torch.randperm(shard.total, generator=generator)
        held_out, rest = order.tensor_split([max(len(order) // 10, 1)])
        # All channels have the same scale, so that a learning rate means the same for every backbone.
        mean, scale = moments(train.x, shard) if scaled else (None, None)
        return cls(
            Rows(train, shard, rest, mean, scale),
            Rows(train, shard, held_out, mean, scale),
            Rows(test, tests, torch.arange(tests.total), mean, scale),
            count_classes(train.y, test.y),
            generator,
        )

    def fits(self, *, epochs: int, batch: int, rates: Sequence[float]) -> Iterator[tuple[Tensor, Tensor]]:
        """Train the classifiers on `train`, and yield what `fit` yields."""
        return fit(self.train, classes=self.classes, epochs=epochs, batch=batch, rates=rates, generator=self.generator)


def moments(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) of the features of all ranks, and the mean of the standard deviations of their D channels.

    `x` are this rank's features. Several ranks sum in float64; a single rank computes in float32 if `x` is float32."""
    if dist.size() == 1 and x.dtype == torch.float32:
        return x.mean(0), x.std(0).mean()
    parts = x.split(CLASSIFIED)
    nothing = x.new_zeros(x.shape[1], dtype=torch.float64)
    mean = dist.total(sum((p.double().sum(0) for p in parts), nothing)) / shard.total
    squares = dist.total(sum(((p.double() - mean).square().sum(0) for p in parts), nothing))
    return mean.float(), (squares / (shard.total - 1)).sqrt().mean().float()


def fit(
    train: Rows, *, classes: int, epochs: int, batch: int, rates: Sequence[float], generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train R classifiers of features (N, D), one for each learning rate. The gradients of all ranks are summed.

    Yields the weights (R, D, C) and biases (R, 1, C) of the classifiers after each epoch. The next epoch changes these
    tensors in place."""
    x = train.features.x
    weight = 0.01 * torch.randn(1, x.shape[1], classes, generator=generator).repeat(len(rates), 1, 1).to(x.device)
    bias = torch.zeros(len(rates), 1, classes, device=x.device)
    batch = min(batch, train.total)
    rate = torch.tensor(rates, device=x.device).view(-1, 1, 1) * batch / 256
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]

    def gradients(at: Tensor) -> tuple[Tensor, Tensor]:
        xb, yb = train.select(at)
        error = (xb @ weight + bias).softmax(-1)  # (R, b, C) probabilities, which become d loss / d logits
        error -= F.one_hot(yb, classes)
        error /= len(at)
        return xb.T @ error, error.sum(1, keepdim=True)

    for epoch in range(epochs):
        lr = rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for step, at in enumerate(torch.randperm(train.total, generator=generator).split(batch)):
            # The first step shows whether the memory suffices, so all ranks check it and stop if one of them fails.
            grads = gradients(at) if epoch or step else dist.together(partial(gradients, at))
            for m, grad in zip(momenta, grads, strict=True):
                m.mul_(0.9).add_(dist.total(grad))
            weight -= lr * momenta[0]
            bias -= lr * momenta[1]
        yield weight, bias
