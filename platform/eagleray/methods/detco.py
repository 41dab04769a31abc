"""DetCo contrasts images, sets of their patches, and both with each other at every stage of a CNN (Xie et al. 2021,
arXiv:2102.04803, equations 1 to 5).

B images, S stages of D channels each, patches of s x s pixels, C channels of a key."""

import math
from collections.abc import Sequence

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError, explained
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.batch_norm import count_images, group_batch_norms, shuffle
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.models.jigsaw import PATCHES, jigsaw
from eagleray.models.queue import Queue
from eagleray.models.stages import convolutional, stages


class DetCo(Method):
    """MoCo v2 at every stage of a CNN, on two uncut views and on two views that are cut into nine patches each."""

    views = (4, 4)
    queues: list[Queue]
    local_queues: list[Queue]

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        weights: tuple[PositiveFloat, ...] = (0.1, 0.4, 0.7, 1.0),  # weights of the stages' losses, first to last
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 65536,
        momentum: Schedule = Schedule(value=0.999),
        norm_group: PositiveInt | None = None,  # images normalised together by batch norm (paper: a GPU's); None: all
    ) -> None:
        super().__init__()
        name = type(backbone.model).__name__
        if not convolutional(backbone.model):
            raise UserError(
                f"backbone.name: detco learns from the stages of a convolutional network, and {name} has none that it "
                "knows; expected one such as resnet50"
            )
        if (count := len(stages(backbone.model))) != len(weights):
            raise UserError(f"method.weights={list(weights)}: expected one for each of the {count} stages of {name}")
        self.weights, self.temperature, self.momentum, self.norm_group = weights, temperature, momentum, norm_group
        self.f_q = _Encoder(backbone, dim)
        group_batch_norms(self.f_q, norm_group)
        self.f_k = ema_copy(self.f_q)
        self.queues = nn.ModuleList(Queue(dim, queue) for _ in weights)  # type: ignore[assignment]
        self.local_queues = nn.ModuleList(Queue(dim, queue) for _ in weights)  # type: ignore[assignment]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x_q, x_k, *uncut = batch.views
        # Two seeds per step, so that patches of queries and keys differ in their order and their positions in cells.
        p_q, p_k = (jigsaw(p, side(p), 2 * at.draw + i, batch.rows) for i, p in enumerate(uncut))
        if self.norm_group:
            count_images(self, len(x_q))
        q_g, q_l = unit(self.f_q.encode(x_q, p_q)).unbind(1)  # (B, S, C) each: of images, of their patches
        with torch.no_grad():
            ema_update(self.f_k, self.f_q, self.momentum(at))
            k = self.keys(x_k, p_k, batch, at)
            k_g, k_l = k.unbind(1)
        losses = []
        for i, (queue_g, queue_l) in enumerate(zip(self.queues, self.local_queues, strict=True)):
            l_gg = self.contrast(q_g[:, i], k_g[:, i], queue_g)
            l_ll = self.contrast(q_l[:, i], k_l[:, i], queue_l)
            l_gl = self.contrast(q_l[:, i], k_g[:, i], queue_g)
            losses.append(self.weights[i] * (l_gg + l_ll + l_gl))
        for queues, keys in zip((self.queues, self.local_queues), dist.gather(k, batch.rows).unbind(1), strict=True):
            for queue, of_stage in zip(queues, keys.unbind(1), strict=True):
                queue.push(of_stage)
        loss = torch.stack(losses).sum()
        candidates = 1 + self.queues[0].keys.shape[1]
        return {"loss": loss, "gain": math.log(candidates) - loss / (3 * sum(self.weights))}

    def contrast(self, q: Tensor, k: Tensor, queue: Queue) -> Tensor:
        """Return equation 2: the contrastive loss of queries q (B, C) with their keys k (B, C) and, as negatives, the
        keys of a queue."""
        return infonce(logits(q, k, queue.keys, self.temperature))

    def keys(self, x: Tensor, p: Tensor, batch: Batch, at: Progress) -> Tensor:
        """Return the unit keys (B, 2, S, C) of images x (B, 3, H, W) and of their patches p (B, 9, 3, s, s). With
        `norm_group`, the momentum encoder sees the images in a shuffled order."""
        x, unshuffle = shuffle(x, batch.rows, self.norm_group, seed=at.draw)
        p, _ = shuffle(p, batch.rows, self.norm_group, seed=at.draw)
        return unshuffle(unit(self.f_k.encode(x, p)))

    def check_views(self, views: Sequence[Tensor]) -> None:
        for x, p in zip(views[:2], views[2:], strict=True):
            taken = f"patches of {side(p)} pixels, which are cut from a view of {p.shape[3]}"
            with explained(f"views: the backbone cannot take {taken}", Exception):
                self.f_q.encode(x, p.new_empty(len(p), PATCHES, p.shape[1], side(p), side(p)))

    def export(self) -> Backbone:
        return self.f_q.backbone


class _Encoder(Encoder[nn.Sequential]):
    """An encoder with two heads for each stage: one for the image, one for all patches of the image together."""

    def __init__(self, backbone: Backbone, dim: int) -> None:
        widths = [*backbone.dims("stages")[:-1], backbone.dim]
        *first, last = (mlp([d, d, dim], norm=False) for d in widths)
        super().__init__(backbone, last)
        self.stage_heads = nn.ModuleList(first)  # heads for the stages before the last
        self.local_heads = nn.ModuleList(mlp([PATCHES * d, d, dim], norm=False) for d in widths)

    def encode(self, images: Tensor, patches: Tensor) -> Tensor:
        """Return the projections (B, 2, S, C) of images (B, 3, H, W), and of their patches (B, 9, 3, s, s)."""
        f = self.backbone.pooled_stages(images)  # S x (B, D)
        f_p = [v.unflatten(0, (-1, PATCHES)).flatten(1) for v in self.backbone.pooled_stages(patches.flatten(0, 1))]
        heads = zip([*self.stage_heads, self.head, *self.local_heads], [*f, *f_p], strict=True)
        return torch.stack([head(v) for head, v in heads], 1).unflatten(1, (2, -1))


def side(view: Tensor) -> int:
    """Return the side of the patches of a square view (B, 3, S, S): 64 / 255 of S, as in the paper."""
    return view.shape[3] * 64 // 255
