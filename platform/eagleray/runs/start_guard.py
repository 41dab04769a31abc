"""Compare a backbone's features during training with those of the weights that the run has started from.

Some training images are embedded at the start and again from time to time, more often in the first steps, in which good
features are most often lost. An anchor (Gram anchoring) keeps patches as similar to each other as at the start."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.config.types import Format
from eagleray.data.batch import Batch
from eagleray.engine.precision import autocast
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import sharing_copy
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import labelled_samples, remaining_samples, subset
from eagleray.protocols.image_batches import Reading, batches
from eagleray.protocols.knn import vote
from eagleray.runs.health import LOST_START, Finding
from eagleray.runs.metrics import START_CKA, START_FOUND, START_KNN, START_RANK
from eagleray.runs.monitor import effective_rank
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe
from eagleray.views.photometric import normalise

# Fewest and most images that are compared. They are as many as in eight batches; without labels they are LEAST.
LEAST, MOST = 1024, 2048
BATCH = 64  # images in the backbone at once
K, TEMPERATURE = 20, 0.07  # settings of kNN among these images
LOST_BELOW = 0.9  # share of the deciding score at the start below which the start is reported as lost
ERRORS = 2  # number of standard errors of a score that count as its noise


class StartGuard:
    """Compares the features of a run's backbone with those at its start. In a recipe without `start` it does nothing.

    Its state is part of the checkpoints: the features at the start, the scores of that backbone, and the step of the
    best checkpoint so far."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.settings = plan, plan.recipe.start
        # How the end is evaluated, and how the start was: a command that continues the run may change these settings.
        self.now = self.judged = asdict(plan.recipe.evaluate) | {"every": 0, "test": str(plan.recipe.data.test)}
        self.every, self.labelled = plan.recipe.monitor.every, False
        if self.settings:
            labelled = labelled_samples(plan.index)
            self.labelled = plan.index.labelled and len(labelled) > 1  # an image is classified by others
            samples = labelled if self.labelled else remaining_samples(plan.index)
            most = MOST if self.labelled else LEAST
            self.samples = subset(samples, min(max(8 * plan.recipe.optim.batch, LEAST), most))
            self.labels = torch.from_numpy(plan.index.label[self.samples]).unique(return_inverse=True)[1]
        self.read = False  # whether the images were read
        # Batches of b images of this rank: positions (b,) among its images, and uint8 pixels (b, V, C, H, W). V is 1
        # with labels, else 2, as each image then has two crops.
        self.images: list[tuple[Tensor, Tensor]] = []
        self.first: Tensor | None = None  # (n, D) features at the start, on the host
        self.scores: dict[str, float] = {}  # scores of the start: its evaluation and the first measurement
        self.best: tuple[float, int] | None = None  # the best checkpoint so far: its deciding score and its step
        self.before: tuple[float, int] | None = None  # the same without the newest checkpoint, perhaps not saved yet
        self.seen: tuple[int, dict[str, float]] = (-1, {})  # the newest measurement, and its step
        self.fresh = False  # whether the newest measurement is in no record yet
        self.told = False  # whether the finding LOST_START was reported
        self.over = False  # whether features have got so much worse that the run ends early, with its best checkpoint

    @property
    def key(self) -> str:
        """Return the key of the score that decides whether the start is lost."""
        return START_KNN if self.labelled else START_FOUND

    @property
    def returns(self) -> int | None:
        """Return the step of the best checkpoint so far, with whose weights the run will end. None without
        `start.keep_best`, or while there is no checkpoint."""
        return self.best[1] if self.settings and self.settings.keep_best and self.best else None

    def state_dict(self) -> dict[str, Any]:
        if self.settings is None:
            return {}
        fresh = list(self.seen) if self.fresh else []  # the next line of metrics.jsonl reports these
        state = {"first": self.first, "scores": self.scores, "best": list(self.best or ()), "told": self.told}
        return state | {"over": self.over, "returns": self.returns, "fresh": fresh, "judged": self.judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint. If it was made without a guard, its state is empty, and the guard is off."""
        if not state:
            self.settings = None
            return
        self.first, self.scores, self.told = state["first"], dict(state["scores"]), state["told"]
        self.over, self.judged = state["over"], state["judged"]
        if state["fresh"]:
            self.seen, self.fresh = (int(state["fresh"][0]), dict(state["fresh"][1])), True
        self.best = (float(state["best"][0]), int(state["best"][1])) if state["best"] else None

    @property
    def watches(self) -> bool:
        """Return whether the run's features are compared with those at its start."""
        return self.settings is not None

    def due(self, step: int) -> bool:
        """Return whether to measure after this step: every `monitor.every` steps and, until the backbone has been
        trained for as many, after 1, 2, 3, 4, 6, 8, 12, 16, 24, ... steps of its training."""
        if self.settings is None:
            return False
        trained = step - math.ceil(self.plan.frozen_steps)
        odd = trained // (trained & -trained or 1)  # its odd factor: 1 for powers of two, 3 half-way between them
        return (0 < trained < self.every and odd in (1, 3)) or step % self.every == 0

    def measure(
        self, step: int, export: Callable[[], Backbone], precision: Format, reading: Reading
    ) -> dict[str, float]:
        """Measure the features of the backbone that `export` returns after a step: their effective rank, CKA, and kNN
        accuracy or, without labels, the share of crops found. Another call for this step returns the same. The first
        call defines the start. Called by all ranks together. Raises UserError and Outage if images cannot be read."""
        if self.seen[0] != step:
            if not self.read:  # all ranks read at once, also one whose share has no image
                dist.together(partial(self._read, reading))
                self.read = True
            features = F.normalize(self._embed(export(), precision).nan_to_num(0, 0, 0), dim=2)  # NaN becomes 0
            fresh = self.first is None
            if fresh:
                self.first = features[:, 0].half().cpu()
            self.seen = step, dist.gather_objects(self._numbers(features.cpu()))[0]
            self.fresh = not fresh
            if fresh:
                self.scores |= self.seen[1]
        return self.seen[1]

    def flush(self) -> dict[str, float]:
        """Return the newest measurement if no earlier call has returned it, else nothing."""
        fresh, self.fresh = self.fresh, False
        return self.seen[1] if fresh else {}

    def findings(self) -> list[Finding]:
        """Return a finding when the newest measurement is, for the first time, far below that at the start."""
        if self.told or not self._below(LOST_BELOW, sure=False):
            return []
        self.told = True
        return [Finding(self.seen[0], LOST_START, self._text())]

    def lost(self) -> str:
        """Return why the run ends: the newest score is below `start.stop_below` of that at the start. Else empty."""
        if not self.settings or self.settings.stop_below is None or not self._below(self.settings.stop_below):
            return ""
        kept = f"; the checkpoint of step {self.best[1]} is the best, and is kept" if self.best else ""
        return f"step {self.seen[0]}: start.stop_below={self.settings.stop_below:g}: {self._text()}{kept}"

    def outcome(self, step: int) -> str:
        """Return a sentence on the end of a run that exports its best checkpoint, which is that of `step`."""
        assert self.best is not None
        why = "ended early, as features got worse; " if self.over else ""
        return (
            f"{why}exports its best checkpoint, of step {step}: {self._what} {self.best[0]:.1f} % of "
            f"{len(self.samples)} training images, {self.scores[self.key]:.1f} at the start"
        )

    def saved(self, *, kept: bool) -> int | None:
        """Return the step of the best checkpoint, a new one of the newest measurement included. `kept` says whether the
        checkpoint before the new one was saved."""
        self.before = self.best if kept else self.before
        self.best, (step, numbers) = self.before, self.seen
        if self.key in numbers and (self.best is None or numbers[self.key] > self.best[0]):
            self.best = numbers[self.key], step
        return self.best[1] if self.best else None

    def _below(self, share: float, *, sure: bool = True) -> bool:
        """Return whether the newest score is below `share` of that at the start, if the latter was better than a guess.
        With `sure` it must be below this limit by more than noise, else below the score at the start by as much."""
        now, before = self.seen[1][self.key], self.scores[self.key]
        p = before / 100
        noise = ERRORS * 100 * (p * (1 - p) / len(self.samples)) ** 0.5
        guess = 100 / len(self.samples)
        if self.labelled:  # accuracy of guessing each class as often as it occurs
            guess = 100 * (self.labels.bincount() / len(self.labels)).square().sum().item()
        limit = share * before - noise if sure else min(share * before, before - noise)
        return before - noise > guess and now < limit

    @property
    def _what(self) -> str:
        return "kNN" if self.labelled else "crops found"

    def _text(self) -> str:
        now, before = self.seen[1][self.key], self.scores[self.key]
        return f"{self._what} of {len(self.samples)} training images fell from {before:.1f} to {now:.1f} %"

    def _read(self, reading: Reading) -> None:
        """Decode this rank's share of the images, once."""
        from eagleray.protocols.crop_retrieval import random_crops  # only runs without labels need it

        e, mine = self.judged, np.array_split(self.samples, dist.size())[dist.rank()]
        for rows, images in batches(self.plan.index, mine, e["size"], e["resize"], BATCH, reading=reading):
            crops = [images] if self.labelled else [random_crops(images, rows, e["size"], n) for n in range(2)]
            self.images.append((torch.from_numpy(np.searchsorted(mine, rows)), torch.stack(crops, 1)))

    def _embed(self, backbone: Backbone, precision: Format) -> Tensor:
        """Return the features (n, V, D) of all images; those of an image that does not decode are zero."""
        shares = [len(part) for part in np.array_split(self.samples, dist.size())]
        shape = shares[dist.rank()], 1 if self.labelled else 2, backbone.dim
        mine = dist.together(partial(embed, backbone, self.images, shape, precision))
        return dist.gather(mine, shares)

    @torch.no_grad()
    def _numbers(self, features: Tensor) -> dict[str, float]:
        from eagleray.protocols.crop_retrieval import share_found

        assert self.first is not None
        one = features[:, 0]
        decides = top1(one, self.labels) if self.labelled else share_found(one, features[:, 1])
        return {START_RANK: float(effective_rank(one)), START_CKA: cka(one, self.first), self.key: decides}


@in_eval_mode
@torch.no_grad()
def embed(
    backbone: Backbone, images: list[tuple[Tensor, Tensor]], shape: tuple[int, int, int], precision: Format
) -> Tensor:
    """Return the pooled features of n images in V views, of this `shape` (n, V, D). `images` are batches: the rows (b,)
    of the output that a batch fills, and its uint8 pixels (b, V, C, H, W). Other rows are zero."""
    device = next(backbone.parameters()).device
    out = torch.zeros(shape, device=device)
    for rows, pixels in images:
        x = normalise(pixels.flatten(0, 1), device)
        with autocast(device, precision):
            out[rows.to(device)] = backbone.pooled(x).float().unflatten(0, pixels.shape[:2])
    return out


def cka(x: Tensor, y: Tensor) -> float:
    """Return the linear centred kernel alignment (CKA) of two sets of features (n, D) of the same images, from 0 to 1
    (Kornblith et al. 2019, arXiv:1905.00414, equation 5). It is computed in float64, as in float32 it may exceed 1 when
    the two sets are nearly equal."""
    x, y = (a - a.mean(0) for a in (x.double(), y.double()))
    both, own, other = ((a.T @ b).square().sum() for a, b in ((x, y), (x, x), (y, y)))
    return float(both / (own * other).sqrt().clamp(min=1e-12))


def top1(features: Tensor, labels: Tensor) -> float:
    """Return the kNN accuracy, top-1 in percent, of unit features (n, D), classified by their K nearest others."""
    cosine = (features @ features.T).fill_diagonal_(-1.0)
    votes = vote(cosine, labels, classes=int(labels.max()) + 1, k=min(K, len(labels) - 1), temperature=TEMPERATURE)
    return 100 * float((votes.argmax(1) == labels).float().mean())


class Anchor:
    """A frozen copy of the backbone at the start, which is part of the checkpoints; none without `start.anchor`."""

    def __init__(self, recipe: Recipe, method: Method) -> None:
        """Copy the backbone that `method` exports. The method must have taken over the weights that `start` names."""
        self.weight = recipe.start.anchor if recipe.start else 0.0
        self.backbone = sharing_copy(method.export()).requires_grad_(False).eval() if self.weight else None

    def state_dict(self) -> dict[str, Any]:
        return self.backbone.state_dict() if self.backbone else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.backbone:
            self.backbone.load_state_dict(state)

    def joined(self, method: Method) -> nn.Module:
        """Return a module that is called like the method and adds the anchor's loss; without an anchor, the method."""
        return Anchored(method, self.backbone, self.weight) if self.backbone else method


class Anchored(nn.Module):
    """A method whose loss includes the Gram loss between its patches of the first view and those of an anchor."""

    def __init__(self, method: Method, backbone: Backbone, weight: float) -> None:
        super().__init__()
        from eagleray.losses.gram import gram_loss
        from eagleray.runs.start import STUDENT, encoders

        self.method, self.weight, self.gram_loss = method, weight, gram_loss
        self.anchor = [backbone]  # a list keeps it out of this module's parameters: it neither trains nor is averaged
        self.trained = [encoders(method)[STUDENT].backbone]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the scalars of the method and `anchor`, which `loss` includes."""
        out: dict[str, Tensor] = self.method(batch, at)
        [anchor], [trained] = self.anchor, self.trained
        with torch.no_grad():
            before = anchor(batch.views[0]).patches
        anchored = self.gram_loss(trained(batch.views[0]).patches, before)
        return out | {"loss": out["loss"] + self.weight * anchored, "anchor": anchored}
