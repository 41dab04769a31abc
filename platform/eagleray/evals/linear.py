"""Linear probe on frozen features: SGD with momentum 0.9 and no weight decay, cosine to zero, as in MoCo v3 and DINO.

The features are extracted once, without augmentation. All learning rates of the sweep train side by side in one pass; a
tenth of the training set, held out, picks one of them, so the test set picks nothing.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.evals.features import Labelled

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # for a batch of 256, scaled linearly
BATCH = 1024


def probe(train: Labelled, test: Labelled, *, epochs: int, seed: int = 0) -> dict[str, float]:
    """Top-1 accuracy in percent at the end of training, and the learning rate (for 256 images) that was picked."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(max(train.y.max(), test.y.max())) + 1
    mean, scale = train.x.mean(0), train.x.std(0).mean()  # one scale for all: rates mean the same for every backbone
    order = torch.randperm(len(train.x), generator=generator)
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]
    x, x_test = (train.x - mean) / scale, (test.x - mean) / scale
    weight, bias = fit(x[kept], train.y[kept], classes=classes, epochs=epochs, generator=generator)
    picked = int(accuracy(weight, bias, x[held], train.y[held]).argmax())
    return {"linear/top1": float(accuracy(weight, bias, x_test, test.y)[picked]), "linear/lr": RATES[picked]}


def fit(x: Tensor, y: Tensor, *, classes: int, epochs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights (R, D, C) and biases (R, 1, C) of R classifiers, one per learning rate."""
    weight = 0.01 * torch.randn(1, x.shape[1], classes, generator=generator).repeat(len(RATES), 1, 1).to(x.device)
    bias = torch.zeros(len(RATES), 1, classes, device=x.device)
    batch = min(BATCH, len(x))
    rate = torch.tensor(RATES, device=x.device).view(-1, 1, 1) * batch / 256
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
    return weight, bias


def accuracy(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Percent (R,)."""
    return 100 * ((x @ weight + bias).argmax(-1) == y).float().mean(1)
