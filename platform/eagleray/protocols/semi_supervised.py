"""Fine-tune a whole backbone and a linear classifier on a few labels, as SimCLR does: Chen et al. 2020,
arXiv:2002.05709, appendix B.5.

The optimiser is SGD with Nesterov momentum 0.9, without warm-up or weight decay. The only augmentations are random
crops and flips. B is the number of images, C of classes and D of features."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import SemiSupervised
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
from eagleray.protocols.eval_mode import check_images, in_eval_mode
from eagleray.protocols.fine_tuning import Trainee, fine_tune, set_drop_path
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ProbeSets
from eagleray.protocols.protocol import Workspace


@in_eval_mode
def semi_supervised(backbone: Backbone, sets: ProbeSets, settings: SemiSupervised, workspace: Workspace) -> Outcome:
    """Measure top-1 and top-5 accuracy in percent of a copy of the backbone that is trained on a few labels.

    A call with the same arguments continues a stopped training from its checkpoint in the workspace. Called by all
    ranks together, which share the images. Raises UserError when a setting or the data are wrong, or the backbone does
    not fit them."""
    size, resize, epochs, batch = settings.size, settings.resize, settings.epochs, settings.batch
    lr, seed, note = settings.lr, settings.seed, workspace.note
    sets, device = choose(sets, settings.labels, seed), next(backbone.parameters()).device
    check_images(backbone, size)
    batches = AugmentedBatches.of(
        sets.train, sets.train_samples, size=size, batch=batch, epochs=epochs, seed=seed, device=device, note=note
    )
    details: dict[str, Any] = {"epochs": epochs, "batch": batch, "lr": lr, "labels": settings.labels, "seed": seed}
    details |= {"size": size, "resize": resize, "crops": "random"}
    details |= {"train_images": len(sets.train_samples), "test_images": len(sets.test_samples)}
    name = f"semi_supervised-{digest(details, sets.digest, weights_digest(backbone, workspace.backbone))[:8]}"
    net = Classifier(backbone, class_numbers(sets.train, sets.train_samples, device), seed).to(device)
    fine_tune(
        "semi_supervised",
        net,
        batches,
        algorithm="nesterov",
        steps=batches.steps,
        batch=batch,
        lr=lambda at: lr * batch / 256 * 0.5 * (1 + math.cos(math.pi * at.step / batches.steps)),
        weight_decay=0.0,
        seed=seed,
        folder=f"{workspace.checkpoints}/{name}",
        scratch=workspace.out / name,
        note=note,
    )
    test = centre_crops(
        net.backbone, net.classes, sets.test, sets.test_samples, size=size, resize=resize, kind="pooled"
    )
    details["test_images"] = count_images(test.y)
    [[top1, top5]] = top_accuracies(net.scores, test, 1).tolist()
    found = without_trivial({"top1": top1, "top5": top5}, len(net.classes), note)
    return Outcome({f"semi_supervised/{number}": value for number, value in found.items()}, details)


class Classifier(Trainee):
    """A copy of a backbone with a linear classifier; both are trained."""

    def __init__(self, backbone: Backbone, classes: Tensor, seed: int) -> None:
        """`classes` (C,) are all labels, in ascending order."""
        super().__init__()
        self.backbone, self.classes = copy.deepcopy(backbone).requires_grad_(True), classes
        set_drop_path(self.backbone.model, 0.0)  # SimCLR fine-tunes without regularisation, so without drop path
        self.head = nn.Linear(backbone.dim, len(classes))
        nn.init.normal_(self.head.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def scores(self, x: Tensor) -> Tensor:
        """Return the class scores (B, 1, C) of features x (B, D), in float32; 1 is the number of classifiers."""
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float()).unsqueeze(1)  # type: ignore[no-any-return]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the mean cross-entropy of the images of a batch."""
        [images] = batch.views
        z = self.scores(self.backbone.pooled(images))[:, 0]
        return {"loss": F.cross_entropy(z, torch.searchsorted(self.classes, batch.label))}
