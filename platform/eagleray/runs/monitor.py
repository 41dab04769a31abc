"""What a run can say about itself without an extra forward: a kNN curve from the training crops, gradients by layer,
how features are spread. Chen, Xie and He 2021, arXiv:2104.02057, section 4 and appendix A; here for every method."""

import re
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.engine.loop import Step
from eagleray.methods.method import Method
from eagleray.models.backbone import Encoder
from eagleray.models.ema import online_of
from eagleray.protocols.knn import vote
from eagleray.runs.feature_metrics import alignment, distance, effective_rank, input_moments, size, spread, uniformity
from eagleray.runs.metrics import MONITOR_KNN

ROWS = 512  # features that are looked at: more would cost more than they say
BLOCK = re.compile(
    r"backbone\.model\.((?:blocks|stages|layers)[\d.]*(?:blocks)?[.\d]*\d|layer\d|patch_embed|stem|conv1)\b"
)


class Monitor:
    """Looks at every step from outside, at what the exported encoder made of the training crops and at the gradients,
    and every `every` steps at how things are. L layers, D channels. Between two looks it never waits for the device."""

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        *,
        step: int = 0,
        every: int = 50,
        bank: int = ROWS,
        labelled: bool = False,
        k: int = 200,
        temperature: float = 0.07,
    ) -> None:
        """`step` have been taken. The bank keeps that many features; without labels there is no kNN."""
        self.method, self.step, self.every = method, step, every
        self.labelled, self.k, self.temperature = labelled, k, temperature
        named = [(n, p) for n, p in method.named_parameters() if p.requires_grad]
        device = next(method.parameters()).device
        self.layers, of = layers([n for n, _ in named])
        self.layer_of = torch.tensor(of, device=device)  # (P,)
        self.trunk = [p for n, p in named if "backbone.model." in n and p.ndim > 1]
        self.copies = [(m, online_of(m)) for m in method.modules() if hasattr(m, "follows")]
        encoder = exported(method)
        self.bank = Bank(max(bank, ROWS), encoder.backbone.dim, device)
        head: Any = encoder.head  # of prototype heads the vectors that meet the prototypes are what is projected
        getattr(head, "mlp", head).register_forward_hook(self._see)
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._measure)
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._norms: list[Tensor] = []
        self._look: dict[str, Tensor] = {}
        self._before: list[Tensor] = []
        self._update = torch.zeros((), device=device)
        self._size = size(self.trunk).detach()

    def state_dict(self) -> dict[str, Any]:
        return self.bank.state_dict() | {"size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bank.load_state_dict(state)
        self._size.copy_(state["size"])

    def watch(self, taken: Step) -> None:
        """After an optimiser step, on every rank."""
        self.step = taken.at.step + 1
        b, rows = len(taken.batch.index), taken.batch.rows
        # What is not finite is another's business; here it would stay in the bank.
        pooled, projected = (torch.cat(xs)[: 2 * b].float().nan_to_num(0, 0, 0) for xs in zip(*self._seen, strict=True))
        self._seen.clear()
        self._norms.append(taken.norms)
        newest = dist.gather(F.normalize(pooled[:b], dim=1), rows)
        self.bank.push(newest, dist.gather(taken.batch.label, rows), dist.gather(taken.batch.index, rows))
        if self.step % self.every == 0:
            z = [dist.gather(v, rows)[:ROWS] for v in F.normalize(projected, dim=1).split(b)]
            self._look = {f"health/{name}": value for name, value in self.look(taken, z).items()}
            if self.labelled and self.bank.filled >= min(2 * ROWS, len(self.bank.labels)):
                top1 = self.knn()
                self._look[MONITOR_KNN] = top1
                self._look[MONITOR_KNN + "_error"] = (top1 * (100 - top1) / self.queries).sqrt()

    @torch.no_grad()
    def look(self, taken: Step, z: list[Tensor]) -> dict[str, Tensor]:
        """One look. z: unit projections (B, C) of the first view, and of the second where there is one."""
        views, f = taken.batch.views, self.bank.newest(ROWS).features
        mean, std = input_moments(views[0])
        found = {
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
            found["alignment"] = alignment(z[0], z[1])
        if len(views) > 1 and views[0].shape == views[1].shape:
            found["same_views"] = (views[0] == views[1]).float().mean()
        for copied, online in self.copies:
            # The online network may have more, such as heads that the copy lacks; what is copied comes first.
            found["ema_distance"] = distance(list(copied.parameters()), list(online.parameters()))
        return found

    @property
    def queries(self) -> int:
        return min(2 * ROWS, self.bank.filled // 4)

    @torch.no_grad()
    def knn(self) -> Tensor:
        """Top-1 in percent of the newest crops among those before them."""
        new = self.bank.newest(self.queries)
        old = self.bank.newest(self.bank.filled, skip=len(new.labels))
        # A crop's own image, where the bank reaches back into the last epoch, is no neighbour.
        silent = (new.images.unsqueeze(1) == old.images) | (old.labels < 0)
        cosine = (new.features @ old.features.T).masked_fill(silent, -1.0)
        labels, classes = (
            old.labels.clamp(min=0),
            int(torch.maximum(old.labels.max(), new.labels.max()).clamp(min=0)) + 1,
        )
        votes = vote(cosine, labels, classes=classes, k=self.k, temperature=self.temperature)
        return 100 * (votes.argmax(1) == new.labels).sum() / (new.labels >= 0).sum().clamp(min=1)

    def flush(self) -> tuple[dict[str, float], list[list[float]]]:
        """The newest look, if there was one since the last flush, with the largest gradient norm of each layer; and the
        norms at every step since (steps, L). Waits for the device."""
        if not self._norms:
            return {}, []
        squares = torch.stack(self._norms).float().square()  # (steps, P)
        norms = squares.new_zeros(len(squares), len(self.layers)).index_add(1, self.layer_of, squares).sqrt().cpu()
        values = dict(zip((f"grad/{n}" for n in self.layers), norms.amax(0).tolist(), strict=True))
        if self._look:
            values |= dict(zip(self._look, torch.stack([*self._look.values()]).tolist(), strict=True))
        self._norms, self._look = [], {}
        return values, norms.tolist()

    def _see(self, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if self.method.training:
            self._seen.append((args[0].detach(), out.detach()))

    def _remember(self, *_: Any) -> None:
        """Before a step that is looked at: where the trunk's matrices are."""
        if (self.step + 1) % self.every == 0:
            self._before = [p.detach().clone() for p in self.trunk]

    def _measure(self, *_: Any) -> None:
        if self._before:
            self._update = distance(self._before, [p.detach() for p in self.trunk])
            self._before = []


class Rows(NamedTuple):
    """Some of them, the newest first."""

    features: Tensor  # (n, D), float32
    labels: Tensor  # (n,)
    images: Tensor  # (n,) positions in the dataset


class Bank:
    """The newest unit features of training crops, first in, first out; the oldest are overwritten."""

    def __init__(self, length: int, dim: int, device: torch.device) -> None:
        half = torch.bfloat16 if device.type == "cuda" else torch.float32  # a CPU is slow with half of it
        self.features = torch.zeros(length, dim, dtype=half, device=device)
        self.labels = torch.zeros(length, dtype=torch.long, device=device)
        self.images = torch.full((length,), -1, dtype=torch.long, device=device)
        self.written = 0  # rows, ever

    @property
    def filled(self) -> int:
        return min(self.written, len(self.features))

    def push(self, features: Tensor, labels: Tensor, images: Tensor) -> None:
        """Rows (B, D), (B,) and (B,)."""
        at = (self.written + torch.arange(len(labels), device=labels.device)) % len(self.features)
        for kept, new in ((self.features, features), (self.labels, labels), (self.images, images)):
            kept[at] = new.to(kept.dtype)
        self.written += len(labels)

    def newest(self, n: int, skip: int = 0) -> "Rows":
        """The n newest rows but for the `skip` newest of all; fewer where there are fewer."""
        back = torch.arange(skip, min(n + skip, self.filled), device=self.labels.device)
        at = (self.written - 1 - back) % len(self.features)
        return Rows(self.features[at].float(), self.labels[at], self.images[at])

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rows of a checkpoint, if they are of this size."""
        if state["features"].shape == self.features.shape:
            for name in ("features", "labels", "images"):
                getattr(self, name).copy_(state[name])
            self.written = state["written"]


def exported(method: Method) -> Encoder[Any]:
    """The encoder whose backbone evaluations read, or the one that it is an average of, if it sees no training image
    itself."""
    backbone = method.monitored_backbone()
    return next(m for m in method.modules() if isinstance(m, Encoder) and m.backbone is backbone)


def layers(names: list[str]) -> tuple[list[str], list[int]]:
    """The layers that parameters belong to, in order, and the number of each parameter's: the patch projection, each
    block, the rest of the trunk, and the heads."""
    found = []
    for name in names:
        match = BLOCK.search(name)
        rest = "trunk" if "backbone.model." in name else "heads"
        found.append(re.sub(r"\b(\d)\b", r"0\1", match[1]) if match else rest)
    order = sorted(set(found), key=lambda n: (n in ("trunk", "heads"), n not in ("patch_embed", "stem", "conv1"), n))
    return order, [order.index(n) for n in found]
