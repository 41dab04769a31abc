"""Train a linear classifier on a frozen backbone's features of random crops, as MoCo v3, DINO, EsViT and SelfPatch do.

It is trained on all labels by SGD with momentum 0.9, no weight decay and a cosine schedule by epochs. Every step sends
images through the backbone, which is in evaluation mode. The test images are not cropped at random, so their features
are computed once. B is the number of images, D of features, C of classes and H of classifiers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import LinearAugmented
from eagleray.protocols.crop_training import (
    AugmentedBatches,
    centre_crops,
    choose,
    class_numbers,
    count_images,
    top_accuracies,
    without_trivial,
)
from eagleray.protocols.digests import digest, weights_digest
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import LabelledFeatures, check_kind, read_kinds, subset
from eagleray.protocols.fine_tuning import Trainee, fine_tune
from eagleray.protocols.image_batches import BATCH
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ONE_IN, ProbeSets
from eagleray.protocols.protocol import Workspace

HELD_OUT = 50_000  # largest number of held-out images on which the learning rate is picked


@in_eval_mode
def linear_augmented(backbone: Backbone, sets: ProbeSets, settings: LinearAugmented, workspace: Workspace) -> Outcome:
    """Measure top-1 and top-5 accuracy in percent after the last epoch, and after the epoch with the highest top-1
    accuracy.

    The papers' scripts print the latter, whose epoch the test set chooses. With several learning rates, a tenth of the
    training images picks one, see `Classifiers`. A call with the same arguments continues a stopped training from its
    checkpoint in the workspace. Called by all ranks together, which share the images. Raises UserError when a setting,
    the data or the backbone do not fit."""
    seed, batch, epochs, rates = settings.seed, settings.batch, settings.epochs, settings.rates
    size, resize, features, note = settings.size, settings.resize, settings.features, workspace.note
    sets, device = choose(sets, settings.labels, seed), next(backbone.parameters()).device
    check_kind(backbone, features, size)
    batches = AugmentedBatches.of(
        sets.train, sets.train_samples, size=size, batch=batch, epochs=epochs, seed=seed, device=device, note=note
    )
    details: dict[str, Any] = {"epochs": epochs, "batch": batch, "rates": list(rates), "labels": settings.labels}
    details |= {"seed": seed, "features": features, "size": size, "resize": resize, "crops": "random"}
    details |= {"train_images": len(sets.train_samples), "test_images": len(sets.test_samples)}
    classes = class_numbers(sets.train, sets.train_samples, device)
    kept_out = subset(sets.train_samples, max(len(sets.train_samples) // ONE_IN, 1))
    extract = partial(centre_crops, backbone, classes, size=size, resize=resize, kind=features)
    test = extract(sets.test, sets.test_samples)
    net = Classifiers(
        partial(crop_features, backbone, features),
        test,
        classes,
        rates,
        epochs,
        held_out=mask(kept_out, len(sets.train), device) if len(rates) > 1 else None,
        seed=seed,
    ).to(device)
    name = f"linear_augmented-{digest(details, sets.digest, weights_digest(backbone, workspace.backbone))[:8]}"
    details["test_images"] = count_images(test.y)
    fine_tune(
        "linear_augmented",
        net,
        batches,
        algorithm="sgd",
        steps=batches.steps,
        batch=batch,
        lr=lambda at: sum(rates) * batch / 256 * 0.5 * (1 + math.cos(math.pi * int(at.epoch) / epochs)),
        weight_decay=0.0,
        seed=seed,
        folder=f"{workspace.checkpoints}/{name}",
        scratch=workspace.out / name,
        note=note,
    )
    picked = net.pick(extract(sets.train, subset(kept_out, HELD_OUT))) if len(rates) > 1 else 0
    found = without_trivial(summary(net.curve[:, picked].cpu()), len(classes), note) | {"lr": rates[picked]}
    return Outcome({f"linear_augmented/{number}": value for number, value in found.items()}, details)


def summary(curve: Tensor) -> dict[str, float]:
    """Return a classifier's results by name. `curve` (epochs, 2) is its top-1 and top-5 accuracy after each epoch."""
    best = int(curve[:, 0].argmax())
    pairs = {"top1": curve[-1, 0], "top5": curve[-1, 1], "best": curve[best, 0], "best_top5": curve[best, 1]}
    return {name: float(value) for name, value in pairs.items()} | {"best_epoch": best + 1}


class Classifiers(Trainee):
    """Linear classifiers for all learning rates, trained side by side as one layer.

    With SGD, multiplying a loss by s has the same effect as multiplying the learning rate by s. So the loss of the
    layer is the sum of its classifiers' losses, each times its rate. With several rates, each rate has a second
    classifier, which does not learn from the held-out images. The rate whose second classifier is best on these images
    is picked, and its first classifier, trained on all labels, is the result. So the test set picks nothing, and every
    label is used."""

    def __init__(
        self,
        read: Callable[[Tensor], Tensor],
        test: LabelledFeatures,
        classes: Tensor,
        rates: tuple[float, ...],
        epochs: int,
        *,
        held_out: Tensor | None,
        seed: int,
    ) -> None:
        """`read` returns the features (B, D) of images. `test` are this rank's test features. `classes` (C,) are the
        labels. `held_out` (N,) is true for the images of the index that pick the rate; None: one rate."""
        super().__init__()
        self.read, self.test, self.classes, self.held_out = read, test, classes, held_out
        shares = torch.tensor(rates, dtype=torch.float64, device=classes.device) / sum(rates)
        self.shares = shares.float().repeat(1 if held_out is None else 2)  # (H,) weight of each classifier's loss
        self.head = nn.Linear(test.x.shape[1], len(self.shares) * len(classes))
        generator = torch.Generator().manual_seed(seed)
        weight = 0.01 * torch.randn(len(classes), test.x.shape[1], generator=generator)
        self.head.weight.data = weight.repeat(len(self.shares), 1)
        self.head.bias.data.zero_()
        # Top-1 and top-5 test accuracy in percent of each rate after each epoch. This is a parameter, so that
        # checkpoints store it.
        self.curve = nn.Parameter(torch.zeros(epochs, len(rates), 2), requires_grad=False)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores (B, H, C) of H classifiers for C classes, from features (B, D). Computed in float32."""
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float()).unflatten(1, (len(self.shares), -1))  # type: ignore[no-any-return]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the sum of the classifiers' mean losses over the batch, each times its share of all rates."""
        [images] = batch.views
        z = self.scores(self.read(images))
        y = torch.searchsorted(self.classes, batch.label)
        losses = F.cross_entropy(z.mT, y.unsqueeze(1).expand(z.shape[:2]), reduction="none")  # (B, H)
        if self.held_out is not None:
            all_labels, others = losses.chunk(2, 1)
            spared = self.held_out[batch.index].unsqueeze(1)
            losses = torch.cat([all_labels, others.masked_fill(spared, 0) * ONE_IN / (ONE_IN - 1)], 1)
        return {"loss": (losses.mean(0) * self.shares).sum()}

    @torch.no_grad()
    def after_step(self, at: Progress) -> None:
        """After the last step of an epoch, measure the test accuracies of the classifiers."""
        if (at.step + 1) % at.steps_per_epoch == 0:
            self.curve[int(at.epoch)] = top_accuracies(self.scores, self.test, len(self.shares))[: self.curve.shape[1]]

    def pick(self, held_out: LabelledFeatures) -> int:
        """Return the index of the rate whose second classifier is best on the held-out images."""
        accuracies = top_accuracies(self.scores, held_out, len(self.shares))
        return int(accuracies[self.curve.shape[1] :, 0].argmax())


@torch.no_grad()
def crop_features(backbone: Backbone, kind: str, images: Tensor) -> Tensor:
    """Return the features (B, D) of images (B, 3, S, S). Few images are processed at a time, to save memory."""
    return torch.cat([read_kinds(backbone, part, [kind])[kind] for part in images.split(BATCH)])


def mask(samples: NDArray[np.int64], total: int, device: torch.device) -> Tensor:
    """Return a mask (total,) that is true at the indices `samples`."""
    out = torch.zeros(total, dtype=torch.bool)
    out[torch.from_numpy(samples)] = True
    return out.to(device)
