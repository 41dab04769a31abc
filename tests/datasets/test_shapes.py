"""The drawn set: a function of (seed, index), balanced, and not to be classified by colour or by an untrained ViT."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from eagleray.datasets.shapes import CLASSES, image

TRAIN, TEST = 3000, 600  # pictures


def split(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, 3, 32, 32) in 0 to 1, and (B,) labels."""
    pictures, labels = zip(*(image(seed, i) for i in range(count)), strict=True)
    pixels = torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2) / 255
    return F.interpolate(pixels, size=(32, 32), mode="bilinear", antialias=True), torch.tensor(labels)


@pytest.fixture(scope="module")
def train() -> tuple[torch.Tensor, torch.Tensor]:
    return split(0, TRAIN)


@pytest.fixture(scope="module")
def test() -> tuple[torch.Tensor, torch.Tensor]:
    return split(1, TEST)


def test_same_key_same_picture() -> None:
    picture, label = image(3, 7)
    again, same = image(3, 7)
    assert label == same
    assert np.array_equal(picture, again)
    k = len(CLASSES)
    assert not np.array_equal(picture, image(3, 7 + k)[0])
    assert not np.array_equal(picture, image(4, 7)[0])


def test_classes_are_named_once_and_balanced() -> None:
    assert len(set(CLASSES)) == len(CLASSES)
    assert Counter(image(0, i)[1] for i in range(3 * len(CLASSES))) == dict.fromkeys(range(len(CLASSES)), 3)


@pytest.mark.parametrize("size", [32, 48, 65])
def test_size(size: int) -> None:
    picture, _ = image(0, 0, size=size)
    assert picture.size == (size, size)
    assert picture.mode == "RGB"


def test_mean_colour_says_little_about_the_class(train: tuple, test: tuple) -> None:
    means, wanted = train[0].mean((2, 3)), train[1]
    centroids = torch.stack([means[wanted == c].mean(0) for c in range(len(CLASSES))])
    guess = torch.cdist(test[0].mean((2, 3)), centroids).argmin(1)
    assert (guess == test[1]).float().mean() < 3 / len(CLASSES)


def test_untrained_backbone_is_a_poor_neighbour(train: tuple, test: tuple) -> None:
    torch.manual_seed(0)
    net = VisionTransformer(img_size=32, patch_size=8, embed_dim=192, depth=4, num_heads=3, num_classes=0).eval()
    with torch.no_grad():
        known, asked = (F.normalize(net((x - 0.5) / 0.25), dim=1) for x in (train[0], test[0]))
    near = train[1][(asked @ known.T).topk(20, 1).indices]  # (B, 20)
    guess = F.one_hot(near, len(CLASSES)).sum(1).argmax(1)
    assert (guess == test[1]).float().mean() < 0.35
