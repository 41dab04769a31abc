"""Measure a run without an extra forward pass: kNN accuracy of the training crops, gradient norms by layer, spread of
features.

This follows Chen, Xie and He 2021, arXiv:2104.02057, section 4 and appendix A, for every method."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import devices, dist
from eagleray.base.dist import local, norms, sharded
from eagleray.engine.loop import Step
from eagleray.methods.method import Method
from eagleray.models.backbone import encoder_with
from eagleray.models.ema import frozen_weights, momentum_copies
from eagleray.models.heads import PrototypeHead
from eagleray.models.layer_names import in_backbone, layers_of
from eagleray.protocols.knn import vote
from eagleray.runs.metrics import MONITOR_KNN
from eagleray.runs.recipe import Watch

BANK = 2**17  # largest default size of the bank, in features: a tenth of ImageNet-1k, as in the paper
ROWS = 512  # number of features whose spread and rank are measured; more would cost more and tell no more


class Monitor:
    """Collects the features and gradient norms of every step through hooks, and measures them every `every` steps.

    L is the number of layers, P of parameters, D of channels. Between two measurements the host never waits for the
    device."""

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        settings: Watch,
        *,
        images: int = 0,
        labelled: bool = False,
    ) -> None:
        """`images` is the size of the training set. The bank of features for kNN has the size in `settings` or, by
        default, holds a tenth as many features. The kNN accuracy is measured only if the images are `labelled`."""
        self.method, self.settings, self.every = method, settings, settings.every
        self.labelled, self.step = labelled, 0
        named = [(n, p) for n, p in method.named_parameters() if p.requires_grad]
        device = next(method.parameters()).device
        self.layers, positions = layers_of([n for n, _ in named])
        self.layer_of = torch.tensor(positions, device=device)  # (P,) layer of each parameter
        self.moving = [p for n, p in named if in_backbone(n) and p.ndim > 1]
        self.copies = momentum_copies(method)
        encoder = encoder_with(method, method.monitored_backbone())
        self.bank = Bank(bank_rows(settings, images), encoder.backbone.dim, device)
        self.trunk = self.moving + [p for p in frozen_weights(encoder.backbone) if p.ndim > 1]
        head = encoder.head
        projector = head.projector if isinstance(head, PrototypeHead) else head
        projector.register_forward_hook(self._collect_features)
        optimizer.register_step_pre_hook(self._copy_trunk)
        optimizer.register_step_post_hook(self._measure_update)
        self._features: list[tuple[Tensor, Tensor]] = []  # (pooled features, projections) by forward pass of a step
        self._rows: float = math.inf  # rows to collect in a step: two views of each image; known after one step
        self._norms: list[Tensor] = []
        self._look: dict[str, Tensor] = {}
        self._before: list[Tensor] = []
        self._update = torch.zeros((), device=device)
        self._size = size(self.trunk).detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the bank, and what the next line of metrics.jsonl will report of the steps so far."""
        norms = torch.stack(self._norms) if self._norms else torch.empty(0)
        return self.bank.state_dict() | {"size": self._size, "norms": norms, "look": dict(self._look)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bank.load_state_dict(state)
        device = self._size.device
        self._size = state["size"].to(device, copy=True)
        self._norms = list(state["norms"].to(device, copy=True))
        self._look = {name: value.to(device, copy=True) for name, value in state["look"].items()}

    def forget(self) -> None:
        """Drop the features of a trial step."""
        self._features.clear()

    def watch(self, step: Step) -> None:
        """Collect the features and the gradient norms of an optimiser step. Must be called on every rank."""
        self.step = step.at.step + 1
        b, rows = len(step.batch.index), step.batch.rows
        self._rows = 2 * b
        # Values that are not finite become 0, as they would stay in the bank for long. Health reports them.
        pooled, projected = (
            torch.cat(xs)[: 2 * b].float().nan_to_num(0, 0, 0) for xs in zip(*self._features, strict=True)
        )
        self._features.clear()
        self._norms.append(step.norms)
        newest = F.normalize(pooled[:b], dim=1)
        self.bank.push(*dist.gather_together([newest, step.batch.label, step.batch.index], rows))
        if self.step % self.every == 0:
            z = [dist.gather(v, rows)[:ROWS] for v in F.normalize(projected, dim=1).split(b)]
            self._look = {f"health/{name}": value for name, value in self.look(step, z).items()}
            if self.labelled and self.bank.filled >= enough(len(self.bank.labels)):
                top1 = self.knn()
                self._look[MONITOR_KNN] = top1
                self._look[MONITOR_KNN + "_error"] = (top1 * (100 - top1) / self.queries).sqrt()

    @torch.no_grad()
    def look(self, step: Step, z: list[Tensor]) -> dict[str, Tensor]:
        """Return the health numbers of a step. z are the unit projections (B, C) of the first view and, if there is
        one, the second."""
        views, f = step.batch.views, self.bank.newest(ROWS).features
        mean, std = input_moments(views[0])
        values = {
            "backbone_std": spread(f),
            "backbone_rank": effective_rank(f),
            "projector_std": spread(z[0]),
            "projector_rank": effective_rank(z[0]),
            "uniformity": uniformity(z[0]),
            "input_mean": mean,
            "input_std": std,
            "update": self._update,
            "growth": (now := size(self.trunk)) / self._size,
        }
        self._size = now
        if len(z) > 1:
            values["alignment"] = alignment(z[0], z[1])
        if len(views) > 1 and views[0].shape == views[1].shape:
            values["same_views"] = (views[0] == views[1]).float().mean()
        for copy, online in self.copies:
            # The online network may have more parameters, such as heads, than its copy; the common ones come first.
            values["ema_distance"] = distance(list(copy.parameters()), list(online.parameters()))
        return values

    @property
    def queries(self) -> int:
        """Return how many of the newest crops kNN classifies."""
        return min(2 * ROWS, self.bank.filled // 4)

    @torch.no_grad()
    def knn(self) -> Tensor:
        """Return the kNN accuracy of the newest crops, top-1 in percent. Their neighbours are the crops before them."""
        new = self.bank.newest(self.queries)
        old = self.bank.newest(self.bank.filled, skip=len(new.labels))
        # Where the bank reaches back into the last epoch, a crop of the same image is not counted as a neighbour.
        silent = (new.images.unsqueeze(1) == old.images) | (old.labels < 0)
        cosine = (new.features @ old.features.T).masked_fill(silent, -1.0)
        classes, labels = old.labels.clamp(min=0).unique(return_inverse=True)  # labels may be any integers
        votes = vote(cosine, labels, classes=len(classes), k=self.settings.k, temperature=self.settings.temperature)
        return 100 * (classes[votes.argmax(1)] == new.labels).sum() / (new.labels >= 0).sum().clamp(min=1)

    def flush(self) -> tuple[dict[str, float], list[list[float]]]:
        """Return the numbers since the last flush, and the gradient norms of every step since then (steps, L).

        The numbers are the largest gradient norm of each layer and, if there are any, the newest health numbers. The
        host waits for the device here."""
        if not self._norms:
            return {}, []
        squares = torch.stack(self._norms).float().square()  # (steps, P)
        norms = squares.new_zeros(len(squares), len(self.layers)).index_add(1, self.layer_of, squares).sqrt().cpu()
        values = dict(zip((f"grad/{n}" for n in self.layers), norms.amax(0).tolist(), strict=True))
        if self._look:
            values |= dict(zip(self._look, torch.stack([*self._look.values()]).tolist(), strict=True))
        self._norms, self._look = [], {}
        return values, norms.tolist()

    def _collect_features(self, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Store the pooled features and projections of a step's first forward passes. Later ones are left out, such as
        those of all patches through iBOT's head."""
        if self.method.training and sum(len(x) for x, _ in self._features) < self._rows:
            self._features.append((args[0].detach(), out.detach()))

    def _copy_trunk(self, *_: Any) -> None:
        """Copy the trained weight matrices of the backbone before a step that will be measured."""
        if (self.step + 1) % self.every == 0:
            self._before = [p.detach().clone() for p in self.moving]

    def _measure_update(self, *_: Any) -> None:
        """Measure how far the step has moved the weight matrices of the backbone, relative to their norm."""
        if self._before:
            self._update = distance(self._before, [p.detach() for p in self.moving], self.trunk)
            self._before = []


def bank_rows(settings: Watch, images: int) -> int:
    """Return how many features the kNN monitor keeps of a training set of `images`."""
    return max(settings.bank or min(images // 10, BANK), ROWS)


def enough(rows: int) -> int:
    """Return how many features a bank of `rows` must hold before the kNN accuracy is measured."""
    return min(2 * ROWS, rows)


def first_knn(settings: Watch, images: int, batch: int) -> int:
    """Return the step after which the kNN accuracy is first measured."""
    return settings.every * math.ceil(enough(bank_rows(settings, images)) / (settings.every * batch))


class BankRows(NamedTuple):
    """Rows of the bank, the newest first."""

    features: Tensor  # (n, D), float32
    labels: Tensor  # (n,)
    images: Tensor  # (n,) positions in the dataset


class Bank:
    """A ring buffer with the newest unit features of training crops, their labels and their images' positions."""

    def __init__(self, length: int, dim: int, device: torch.device) -> None:
        half = torch.bfloat16 if devices.is_accelerator(device) else torch.float32  # a CPU is slow with half precision
        self.features = torch.zeros(length, dim, dtype=half, device=device)
        self.labels = torch.zeros(length, dtype=torch.long, device=device)
        self.images = torch.full((length,), -1, dtype=torch.long, device=device)
        self.written = 0  # number of rows written so far, including overwritten ones

    @property
    def filled(self) -> int:
        """Return the number of rows that hold features."""
        return min(self.written, len(self.features))

    def push(self, features: Tensor, labels: Tensor, images: Tensor) -> None:
        """Append rows: features (B, D), labels (B,) and images (B,). If there are more rows than the bank has, only the
        last are written, as the order of two writes to one place is not defined."""
        self.written += len(labels)
        kept = min(len(labels), len(self.features))
        at = (self.written - kept + torch.arange(kept, device=labels.device)) % len(self.features)
        for column, new in ((self.features, features), (self.labels, labels), (self.images, images)):
            column[at] = new[-kept:].to(column.dtype)

    def newest(self, n: int, skip: int = 0) -> "BankRows":
        """Return the n newest rows after leaving out the `skip` newest, or as many as the bank has."""
        back = torch.arange(skip, min(n + skip, self.filled), device=self.labels.device)
        at = (self.written - 1 - back) % len(self.features)
        return BankRows(self.features[at].float(), self.labels[at], self.images[at])

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the rows of a checkpoint. Rows of a bank of another size are ignored."""
        if state["features"].shape == self.features.shape:
            for name in ("features", "labels", "images"):
                getattr(self, name).copy_(state[name])
            self.written = state["written"]


def spread(z: Tensor) -> Tensor:
    """Return sqrt(C) times the standard deviation of unit rows z (B, C) over the batch, averaged over the channels.
    It is 1 where directions are random and 0 where all rows are equal (Chen and He 2021, arXiv:2011.10566, section
    4.1)."""
    return z.std(0, correction=0).mean() * z.shape[1] ** 0.5


def effective_rank(z: Tensor) -> Tensor:
    """Return RankMe (Garrido et al. 2023, arXiv:2210.02885): the exp of the entropy of the singular values of z (B,
    C), from 1 to min(B, C)."""
    p = torch.linalg.svdvals(z)
    p = p / p.sum().clamp(min=torch.finfo(p.dtype).tiny)  # the rank is 1 where all features are zero
    return torch.exp(-torch.xlogy(p, p).sum())


def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Return the mean squared distance between unit rows z1 and z2 (B, C) of the same images (Wang and Isola 2020,
    arXiv:2005.10242)."""
    return (z1 - z2).square().sum(1).mean()


def uniformity(z: Tensor) -> Tensor:
    """Return the log of the mean of exp(-2 |zi - zj|^2) over pairs of unit rows (B, C): 0 where all rows are equal,
    near -4 where they cover the sphere (Wang and Isola 2020, arXiv:2005.10242)."""
    return torch.pdist(z).square().mul(-2).exp().mean().log()


def input_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of pixels (B, C, H, W): about 0 and 1 where images are normalised."""
    std, mean = torch.std_mean(x.float())
    return mean, std


def distance(a: Sequence[Tensor], b: Sequence[Tensor], whole: Sequence[Tensor] | None = None) -> Tensor:
    """Return |a - b| / |b| or, with `whole`, |a - b| / |whole|. Each list of tensors is taken as one vector."""
    return size(torch._foreach_sub(local(a), local(b)), split=sharded(b[0])) / size(whole or b)


def size(tensors: Sequence[Tensor], *, split: bool | None = None) -> Tensor:
    """Return the norm of a list of tensors, taken as one vector. `split`: whether they hold only this rank's rows."""
    return torch.linalg.vector_norm(norms(tensors, split=split))
