"""InstLoc pastes two crops of an image on other images, and contrasts the pasted boxes instead of whole images (Yang et
al. 2021, arXiv:2102.08318, section 3, with the backbone and head of R50-C4).

B images, C channels of a key, A anchors. Boxes (B, 4) are left, top, right and bottom in pixels."""

import math

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torchvision.ops import box_iou

from eagleray.base import dist
from eagleray.base.rng import step_generator
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.batch_norm import group_batch_norms, shuffle
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.models.queue import Queue
from eagleray.models.region_align import check_convolutional, pooled_regions
from eagleray.views.pasting import DRAWS, draw_boxes, paste

# Anchors as in the released code, whose images have 256 pixels: sides of 32 to 256 pixels at every 16th pixel. GRID
# anchor centres are on a side of the image, SCALES are shares of this side, RATIOS are height over width.
GRID, SCALES, RATIOS = 16, (1 / 8, 1 / 4, 1 / 2, 1.0), (0.5, 0.75, 1.0, 1.5, 2.0)


class InstLoc(Method):
    """MoCo v2 on boxes: two crops of an image are pasted on other images, and features inside their boxes are compared.

    The third view of an image is the background on which crops of other images are pasted."""

    views = (3, 3)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        hidden: PositiveInt = 2048,
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 65536,
        momentum: Schedule = Schedule(value=0.999),
        smallest: Share = 0.5,  # least side of the rectangle into which a box is fitted, as a share of the image's side
        overlap: Share = 0.5,  # IoU with the pasted box that a query's box must exceed; 1: the pasted box itself
        side: PositiveInt = 14,  # side of a box in cells of the map before the last stage
        norm_group: PositiveInt | None = None,  # images normalised together by batch norm (paper: a GPU's); None: all
    ) -> None:
        super().__init__()
        check_convolutional(backbone)
        self.temperature, self.momentum, self.norm_group = temperature, momentum, norm_group
        self.smallest, self.overlap = smallest, overlap
        self.f_q = _Encoder(backbone, mlp([backbone.dim, hidden, dim], norm=False), side)
        group_batch_norms(self.f_q, norm_group)
        self.f_k = ema_copy(self.f_q)
        self.queue = Queue(dim, queue)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x1, x2, others = batch.views
        u = self.draw(batch, at)  # (B, 2 * DRAWS + 1)
        boxes1, cuts1 = draw_boxes(u[:, :DRAWS], self.smallest, others.shape[3])
        boxes2, cuts2 = draw_boxes(u[:, DRAWS:-1], self.smallest, others.shape[3])
        # The released code pastes on two whole images drawn from the training set. Here they are the third views, also
        # whole images, of the rows after and before an image's own. The order of rows is random, so they are too.
        x1 = paste(x1, neighbours(others, batch.rows, 1), boxes1, cuts1)
        x2 = paste(x2, neighbours(others, batch.rows, -1), boxes2, cuts2)
        q = unit(self.f_q.regions(x1, near_boxes(boxes1, u[:, -1:], self.overlap, x1.shape[3])))  # (B, C)
        with torch.no_grad():
            ema_update(self.f_k, self.f_q, self.momentum(at))
            x2, unshuffle = shuffle(x2, batch.rows, self.norm_group, seed=at.draw)
            boxes2, _ = shuffle(boxes2, batch.rows, self.norm_group, seed=at.draw)  # the same order
            k = unshuffle(unit(self.f_k.regions(x2, boxes2)))  # (B, C)
        scores = logits(q, k, self.queue.keys, self.temperature)
        self.queue.push(dist.gather(k, batch.rows))
        loss = infonce(scores)
        return {"loss": loss, "gain": math.log(scores.shape[1]) - loss}

    def draw(self, batch: Batch, at: Progress) -> Tensor:
        """Draw uniform random numbers (B, 2 * DRAWS + 1): DRAWS for each of two boxes, and one to choose an anchor."""
        x = batch.views[2]
        generator = step_generator(at.draw, x.device)
        u = torch.rand(sum(batch.rows), 2 * DRAWS + 1, generator=generator, device=x.device, dtype=x.dtype)
        return dist.own(u, batch.rows)

    def export(self) -> Backbone:
        return self.f_q.backbone


class _Encoder(Encoder[nn.Sequential]):
    """An encoder whose last stage and head see only a box of each image."""

    def __init__(self, backbone: Backbone, head: nn.Sequential, side: int) -> None:
        super().__init__(backbone, head)
        self.side = side

    def regions(self, images: Tensor, boxes: Tensor) -> Tensor:
        """Project a box of each image (B, 3, S, S) to (B, C)."""
        out: Tensor = self.head(pooled_regions(self.backbone, images, boxes, self.side))
        return out


def neighbours(x: Tensor, rows: tuple[int, ...], step: int) -> Tensor:
    """Return, for every row of x (B, ...), the next row of the global batch or, with `step` -1, the previous row."""
    edges = dist.gather(x[:1] if step == 1 else x[-1:], (1,) * len(rows))  # (ranks, ...) edge rows of all ranks
    edge = edges[(dist.rank() + step) % len(rows)][None]
    return torch.cat([x[1:], edge] if step == 1 else [edge, x[:-1]])


def anchors(size: int, like: Tensor) -> Tensor:
    """Return the anchors (A, 4) of an image of `size` pixels; some reach beyond the image."""
    corner = torch.arange(GRID, device=like.device, dtype=like.dtype) / GRID
    y, x = torch.meshgrid(corner, corner, indexing="ij")
    shapes = [(scale * ratio**-0.5, scale * ratio**0.5) for scale in SCALES for ratio in RATIOS]
    each = [torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 2) for w, h in shapes]
    return size * torch.stack(each, 2).flatten(0, 2)


def near_boxes(boxes: Tensor, u: Tensor, overlap: float, size: int) -> Tensor:
    """Return for each box an anchor whose IoU with it is above `overlap`, or the box itself if there is none.

    The uniform random numbers `u` (B, 1) choose among these anchors. The released code first applies non-maximum
    suppression with random scores. It is left out, as the host would have to wait for the number of anchors left."""
    candidates = anchors(size, boxes)  # (A, 4)
    counted = (box_iou(boxes, candidates) > overlap).cumsum(1)  # (B, A)
    count = counted[:, -1:]
    number = torch.minimum((u * count).long() + 1, count)  # which of the anchors that overlap enough, from 1 on
    chosen = torch.searchsorted(counted, number).clamp(max=len(candidates) - 1)  # (B, 1)
    return torch.where(count > 0, candidates[chosen.squeeze(1)], boxes)
