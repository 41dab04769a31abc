"""Each patch of a student against what the teacher makes of the patches around it: SelfPatch, Yun et al. 2022,
arXiv:2206.07990."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.losses.prototypes import Match, cross_entropy, mean_scores
from eagleray.models.backbone import Encoder, Features, Head
from eagleray.models.class_attention import Aggregated
from eagleray.models.heads import PrototypeHead


class PatchEncoder(Encoder[Head]):
    """A head for the image and one for its patches. B images, V views, N patches, D channels, d of a bottleneck."""

    backbone: Aggregated

    def __init__(self, backbone: Aggregated, head: Head, patch_head: PrototypeHead) -> None:
        super().__init__(backbone, head)
        self.patch_head = patch_head

    def features(self, views: Sequence[Tensor]) -> list[Features]:
        """V x (B, 3, S, S) to features of view-major images, in parts: neighbouring views of one size share a forward,
        but the first two, the large crops, only with each other."""
        parts = groupby(enumerate(views), key=lambda view: (view[0] < 2, view[1].shape))
        return [self.backbone(torch.cat([x for _, x in part])) for _, part in parts]

    def images(self, features: Sequence[Features]) -> Tensor:
        """What the head makes of the pooled vectors: (V * B, C)."""
        out: Tensor = self.head(torch.cat([f.pooled for f in features]))
        return out

    def patches(self, features: Sequence[Features]) -> list[Tensor]:
        """What the patch head makes of the patches as they are, of each part (V' * B, N, d)."""
        return [self.patch_head(self.backbone.aggregation.norm(f.patches)) for f in features]

    def targets(self, features: Sequence[Features], k: int, *, wrap: bool) -> list[Tensor]:
        """The same of the k likest neighbours of each patch, aggregated."""
        around = self.backbone.aggregation.around
        return [self.patch_head(around(f.patches, f.grid, k, wrap=wrap)) for f in features]


def patch_loss(
    t: Sequence[Tensor],
    s: Sequence[Tensor],
    w_t: Tensor,
    w_s: Tensor,
    center: Tensor,
    *,
    tau_t: float,
    tau_s: float,
) -> Tensor:
    """H(p_t, p_s) at the same place of the same crop, for parts (V' * B, N, d) of as many places; the mean over places,
    then over crops."""
    images = sum(len(x) for x in s)
    weight = torch.cat([x.new_full((len(x) * x.shape[1],), 1 / (images * x.shape[1]), dtype=w_s.dtype) for x in s])
    place = torch.arange(len(weight), device=weight.device).unsqueeze(1)
    return cross_entropy(rows(t), rows(s), w_t, w_s, center, Match(place, weight), tau_t=tau_t, tau_s=tau_s)


def mean_patch_scores(t: Sequence[Tensor], w: Tensor, images: Sequence[int]) -> Tensor:
    """The mean score (K,) of a patch over the images of all ranks, of which there are so many on each: larger crops,
    which have more patches, weigh more."""
    return mean_scores(rows(t), w, len(rows(t)) // images[dist.rank()] * sum(images))


def rows(parts: Sequence[Tensor]) -> Tensor:
    """(V' * B, N, d) of each part to (n, d)."""
    return torch.cat([x.flatten(0, 1) for x in parts])
