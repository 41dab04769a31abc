"""The parts of Detectron2's and mmdetection's detectors: regions on the centres of cells, and L1 losses of boxes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork

from eagleray.dense.detection import heads
from eagleray.dense.detection.detectron_parts import L1Proposals, Parts, giou_loss, l1_losses, own, region_pool
from eagleray.dense.detection.pyramid import FeaturePyramid
from eagleray.models.backbone import Backbone

BOTH: tuple[Parts, Parts] = ("detectron2", "torchvision")
NAMES, STRIDES = ["0", "1", "2", "3"], [4, 8, 16, 32]
HALF = 0.5 / 9  # by how much L1 is above the smooth loss, whose threshold is 1/9, for a number above the threshold


def ramps(height: int, width: int) -> dict[str, Tensor]:
    """Maps (1, 3, h, w) of an image: the cells' centres x and y in pixels, and the stride."""
    maps = {}
    for name, s in zip(NAMES, STRIDES, strict=True):
        y, x = torch.meshgrid(torch.arange(height // s), torch.arange(width // s), indexing="ij")
        maps[name] = torch.stack([(x + 0.5) * s, (y + 0.5) * s, torch.full_like(x, s).float()])[None]
    return maps


def boxes_inside(generator: torch.Generator) -> Tensor:
    """Boxes of an image of 1024 pixels, of all sizes, with a distance to its border."""
    sides = 10 * 80 ** torch.rand(50, 2, generator=generator)
    first = 64 + torch.rand(50, 2, generator=generator) * (1024 - 128 - sides)
    return torch.cat([first, first + sides], 1)


def centres(boxes: Tensor, side: int) -> Tensor:
    """The centres x, y (R, 2, side, side) of the parts of the boxes (R, 4)."""
    at = (torch.arange(side) + 0.5) / side
    x, y = (boxes[:, i, None] + (boxes[:, i + 2] - boxes[:, i])[:, None] * at for i in (0, 1))
    return torch.stack([x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], 1)


@pytest.mark.parametrize("side", [7, 14])
def test_regions_lie_where_their_boxes_are(side: int):
    """A map that says where it is: a region of it says where the region is. torchvision's are half a cell off."""
    boxes, maps = boxes_inside(torch.Generator().manual_seed(0)), ramps(1024, 1024)
    both = {name: x.expand(2, -1, -1, -1) for name, x in maps.items()}
    cut, theirs = (
        region_pool(NAMES, STRIDES, side, whose)(both, [boxes[:20], boxes[20:]], [(1024, 1024)] * 2) for whose in BOTH
    )
    strides = cut[:, 2:, 0, 0].round()
    assert set(strides.flatten().tolist()) == {4, 8, 16, 32}
    assert strides.equal(theirs[:, 2:, 0, 0].round()), "the same maps"
    torch.testing.assert_close(cut[:, :2], centres(boxes, side), atol=1e-2, rtol=0)
    torch.testing.assert_close(theirs[:, :2] - strides[..., None, None] / 2, cut[:, :2], atol=1e-2, rtol=0)


def test_no_regions_are_no_error():
    pool = region_pool(NAMES, STRIDES, 7, "detectron2")
    assert pool(ramps(64, 64), [torch.zeros(0, 4)], [(64, 64)]).shape == (0, 3, 7, 7)


def test_l1_is_the_smooth_loss_and_half_of_its_threshold():
    generator = torch.Generator().manual_seed(0)
    scores, offsets = torch.randn(20, 4, generator=generator), torch.randn(20, 16, generator=generator)
    labels = torch.randint(4, (20,), generator=generator)
    goals = 5 + torch.randn(20, 4, generator=generator)  # far away from all offsets
    given: Any = scores, offsets, list(labels.split(10)), list(goals.split(10))
    ours, theirs = l1_losses(*given), fastrcnn_loss(*given)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1] - theirs[1], HALF * 4 * (labels > 0).sum() / 20)


def test_the_loss_of_proposals_is_l1_too():
    keys = 0.7, 0.3, 256, 0.5, {}, {}, 0.7
    ours, theirs = (kind(None, None, *keys) for kind in (L1Proposals, RegionProposalNetwork))
    generator = torch.Generator().manual_seed(0)
    scores, offsets, goals = (torch.randn(600, n, generator=generator) for n in (1, 4, 4))
    labels = torch.randint(-1, 2, (600,), generator=generator).float()
    given: Any = scores, offsets, list(labels.split(300)), list((5 + goals).split(300))
    torch.manual_seed(0)
    score, box = ours.compute_loss(*given)
    torch.manual_seed(0)
    their_score, their_box = theirs.compute_loss(*given)
    torch.testing.assert_close(score, their_score)
    kept = [min(int((y == 1).sum()), 128) for y in labels.split(300)]
    drawn = [min(256, n + int((y == 0).sum())) for n, y in zip(kept, labels.split(300), strict=True)]
    torch.testing.assert_close(box - their_box, torch.tensor(HALF * 4 * sum(kept) / sum(drawn)))


def test_the_default_heads_are_torchvisions_to_the_bit():
    torch.manual_seed(0)
    pyramid = FeaturePyramid(Backbone("test_resnet"), channels=16)
    net = heads.mask_rcnn(pyramid, 3, cascade=False, sizes=(64,), longest=96, anchor=4, regions=16)
    assert type(net.rpn) is RegionProposalNetwork
    masks = torch.zeros(1, 64, 96, dtype=torch.uint8)
    masks[:, 8:40, 8:40] = 1
    target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]), "masks": masks}
    maps = pyramid(torch.rand(2, 3, 64, 96))
    given: Any = maps, [torch.tensor([[6.0, 9, 38, 44], [50, 2, 90, 30]])] * 2, [(64, 96)] * 2, [target] * 2
    torch.manual_seed(1)
    _, ours = net.roi_heads(*given)
    torch.manual_seed(1)
    _, theirs = RoIHeads.forward(net.roi_heads, *given)
    assert list(ours) == list(theirs)
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_giou_of_decoded_boxes_is_that_of_its_paper():
    """Three regions, of which the second is background; the goals of the others are 10 pixels beside them."""
    regions = [torch.tensor([[0.0, 0, 10, 10], [0, 0, 4, 4]]), torch.tensor([[0.0, 0, 20, 10]])]
    coder, labels = BoxCoder((10.0, 10.0, 5.0, 5.0)), torch.tensor([2, 0, 1])
    goals = coder.encode_single(torch.tensor([[10.0, 0, 20, 10], [0, 0, 4, 4], [10, 0, 30, 10]]), torch.cat(regions))
    offsets = torch.zeros(3, 3, 4)
    offsets[0, 1] = offsets[1] = 5  # of other classes, and of no object
    loss = giou_loss(coder, offsets.flatten(1), labels, goals, regions)
    # Boxes that touch: an IoU of 0, and nothing of their hull outside. Boxes that share a half: 100 of 300.
    torch.testing.assert_close(loss, torch.tensor(10 * ((1 - 0) + (1 - 1 / 3)) / 3))
    offsets[[0, 2], [2, 1]] = goals[[0, 2]]
    assert giou_loss(coder, offsets.flatten(1), labels, goals, regions).abs() < 1e-5


def test_a_region_moves_by_the_offsets_of_its_own_class():
    offsets = torch.arange(24.0).view(2, 12)
    scores = torch.tensor([[9.0, 1, 2], [9, 4, 3]])
    assert own(offsets, scores).equal(torch.stack([offsets[0, 8:], offsets[1, 4:8]]))
    assert own(offsets, scores, torch.tensor([1, 0])).equal(offsets[:, 4:8]), "the label of an object comes first"
