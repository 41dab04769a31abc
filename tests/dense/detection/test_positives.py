"""SelfPatch's true positives: neighbouring patches that show the same objects."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.annotated import coco
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Positives
from eagleray.dense.detection.data import Example
from eagleray.dense.detection.positives import class_map, positive_neighbours, positives
from eagleray.evaluation.registry import PROTOCOLS


def test_patches_of_one_class_are_positives_of_each_other():
    """A grid of 4 x 4 patches of 2 pixels, of which the two columns on the right show the class 1."""
    classes = torch.zeros(8, 8, dtype=torch.int64)
    classes[:, 4:] = 1
    true, objects = positive_neighbours(classes, 3, (4, 4))
    assert objects.view(4, 4).tolist() == [[False, False, True, True]] * 4
    assert true.sum(1).view(4, 4).tolist() == [[3, 3, 3, 3], [5, 5, 5, 5], [5, 5, 5, 5], [3, 3, 3, 3]]


def test_positives_are_neighbours_whose_shares_of_classes_have_a_cosine_of_95_percent():
    """Counted once more with loops, on a grid that is not square. A patch with a third of another class has a cosine of
    0.89 with one that has none of it, a patch with a sixth one of 0.98."""
    classes = torch.randint(3, (4, 3), generator=torch.Generator().manual_seed(0)).repeat_interleave(6, 0)
    classes = classes.repeat_interleave(6, 1)
    classes[:6, :2] = 2  # 12 of 36 pixels
    classes[6:12, 6:7] = 2  # 6 of 36
    true, _ = positive_neighbours(classes, 2, (4, 3))
    patches = [classes[6 * y : 6 * y + 6, 6 * x : 6 * x + 6] for y in range(4) for x in range(3)]
    shares = torch.stack([torch.stack([(p == c).double().mean() for c in range(3)]) for p in patches])
    for i in range(12):
        for j in range(12):
            near = i != j and abs(i // 3 - j // 3) <= 1 and abs(i % 3 - j % 3) <= 1
            alike = float(F.cosine_similarity(shares[i], shares[j], dim=0)) >= 0.95
            assert bool(true[i, j]) == (near and alike), (i, j)


def test_small_objects_lie_on_large_ones_in_the_middle_of_the_image():
    masks = torch.zeros(2, 8, 12, dtype=torch.uint8)
    masks[0, 3:5, 5:7], masks[1, :, 2:10] = 1, 1
    example = Example(torch.zeros(3, 8, 12, dtype=torch.uint8), {"masks": masks, "labels": torch.tensor([2, 1])})
    image, classes = class_map(example, 8)
    assert image.shape == (3, 8, 8)
    want = torch.ones(8, 8, dtype=torch.int64)
    want[3:5, 3:5] = 2
    assert torch.equal(classes, want)
    empty = Example(example.image, {"masks": masks[:0], "labels": torch.zeros(0, dtype=torch.int64)})
    assert not class_map(empty, 4)[1].any()


class Red(nn.Module):
    """A backbone whose patches are two numbers: how red a patch is, and how red it is not."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = nn.Parameter(torch.tensor(sign))

    def forward(self, images: Tensor) -> Any:
        red = (F.avg_pool2d(images[:, :1] - images[:, 1:2], 8) > 1).float()
        return SimpleNamespace(patches=torch.cat([red, 1 - red], 1).flatten(2).mT * self.sign, grid=(4, 4))


def test_a_backbone_that_sees_the_objects_chooses_the_positives(tmp_path: Path):
    """The square of each of two images covers whole patches and parts of others."""
    folder: Any = coco(tmp_path, 2)
    found = positives(Red(1.0), folder, Positives(size=32, chosen=1)).numbers
    assert found["positives/images"] == 2
    assert 0 < found["positives/chance"] < found["positives/precision"] <= 100
    assert 0 < found["positives/mean"] < 84 / 16  # of a grid of 4 x 4 there are 84 neighbours
    assert found["positives/chance"] == pytest.approx(100 * found["positives/mean"] * 16 / 84)
    assert found["positives/on_objects"] != found["positives/mean"]
    every = positives(Red(1.0), folder, Positives(size=32, chosen=8)).numbers
    assert every["positives/precision"] == pytest.approx(every["positives/chance"]), "all neighbours are chosen"


def test_wrong_settings_are_one_line(tmp_path: Path):
    protocol = PROTOCOLS["positives"]
    assert protocol.parse({"chosen": "6"}) == {"chosen": 6}
    with pytest.raises(UserError, match=r"^--chosen: [^\n]*less than or equal to 8"):
        protocol.parse({"chosen": "9"})
    with pytest.raises(UserError, match=r"^--coco \S+: has neither annotations/instances_val.json nor"):
        positives(Red(1.0), tmp_path, Positives())
