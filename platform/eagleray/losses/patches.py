"""SelfPatch's loss: a patch of the student predicts the teacher's output for the patches around it (Yun et al. 2022,
arXiv:2206.07990).

B images, V views, N patches, D channels of the backbone, d channels of a bottleneck, C outputs of the head, K
prototypes. A part is V' consecutive views of one size, which pass through the backbone together."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from eagleray.losses.prototypes import Match, Scores
from eagleray.models.backbone import Encoder, Features, Head
from eagleray.models.class_attention import AggregationBackbone
from eagleray.models.heads import PrototypeHead


class PatchEncoder(Encoder[Head]):
    """An encoder with one head for the image and one for its patches."""

    backbone: AggregationBackbone

    def __init__(self, backbone: AggregationBackbone, head: Head, patch_head: PrototypeHead) -> None:
        super().__init__(backbone, head)
        self.patch_head = patch_head

    def features(self, views: Sequence[Tensor]) -> list[Features]:
        """Run the backbone on V views (B, 3, S, S) and return the features of each part, view-major.

        Consecutive views of one size form a part. The first two views, the large crops, share no part with others."""
        parts = groupby(enumerate(views), key=lambda view: (view[0] < 2, view[1].shape))
        return self.backbone.sizes([torch.cat([x for _, x in part]) for _, part in parts])

    def images(self, features: Sequence[Features]) -> Tensor:
        """Return the head's output (V * B, C) for the pooled vectors."""
        out: Tensor = self.head(torch.cat([f.pooled for f in features]))
        return out

    def patches(self, features: Sequence[Features]) -> list[Tensor]:
        """Return the patch head's output (V' * B, N, d) for the patches of each part."""
        return [self.patch_head(self.backbone.aggregation.norm(f.patches)) for f in features]

    def targets(self, features: Sequence[Features], k: int, *, wrap: bool) -> list[Tensor]:
        """Return the patch head's output (V' * B, N, d) of each part, for an aggregate of each patch's k most similar
        neighbours."""
        aggregate = self.backbone.aggregation.aggregate_neighbours
        return [self.patch_head(aggregate(f.patches, f.grid, k, wrap=wrap)) for f in features]


def patch_scores(parts: Sequence[Tensor], head: PrototypeHead) -> Scores:
    """Return the scores of the patches of all parts, one row per patch; each part is (V' * B, N, d)."""
    return Scores(torch.cat([x.flatten(0, 1) for x in parts]), head.last.weight)


def match_patches(parts: Sequence[Tensor]) -> Match:
    """Match each patch with the patch at the same position of the same crop.

    Each of the `parts` is (V' * B, N, d). The weights make the loss a mean over patches, then over crops."""
    crops, dtype = sum(len(x) for x in parts), torch.float32
    weight = torch.cat([x.new_full((len(x) * x.shape[1],), 1 / (crops * x.shape[1]), dtype=dtype) for x in parts])
    return Match(torch.arange(len(weight), device=weight.device).unsqueeze(1), weight)
