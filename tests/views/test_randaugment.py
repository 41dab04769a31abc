"""RandAugment: timm's, as a pure function of a seed."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_train

from eagleray import config
from eagleray.config.view import View
from eagleray.views.operations import augment, posterize

POLICY = "rand-m9-mstd0.5-inc1"


def crop(seed: int = 0, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_crop_becomes_what_timm_makes_of_it() -> None:
    theirs = transforms_imagenet_train(32, auto_augment=POLICY, interpolation="bicubic", separate=True)[1].transforms[0]
    view, changed = View(size=32, jitter=0.0, randaugment=POLICY), 0
    for op in theirs.ops:
        op.aug_fn = posterize if op.name.startswith("Posterize") else op.aug_fn
    for seed in range(40):
        ours = crop(seed)
        augment(ours, view, seed)
        random.seed(seed)
        np.random.seed(seed)
        image = theirs(Image.fromarray(crop(seed).permute(1, 2, 0).numpy()))
        assert torch.equal(ours, torch.from_numpy(np.array(image)).permute(2, 0, 1))
        changed += not torch.equal(ours, crop(seed))
    assert changed > 20


def test_a_policy_may_leave_no_bit() -> None:
    """Where timm's posterize would ask Pillow for 0 bits, which it refuses."""
    image = Image.fromarray(crop().permute(1, 2, 0).numpy())
    assert not np.array(posterize(image, 0)).any()
    assert (np.array(posterize(image, 1)) % 128 == 0).all()
    assert np.array(posterize(image, 9)).tolist() == np.array(image).tolist()


def test_global_generators_are_left_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    augment(crop(), View(size=32, jitter=0.0, randaugment=POLICY), 5)
    after = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert after == (random.random(), np.random.rand())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"randaugment": "rand-m9"}, r"randaugment=rand-m9 needs jitter=0, got jitter=0.8"),
        ({"randaugment": "rnd-m9", "jitter": 0}, r"randaugment: expected timm's name of a RandAugment policy"),
        ({"randaugment": "rand-x9", "jitter": 0}, r"randaugment: expected timm's name of a RandAugment policy"),
        ({"erasing": 1.5}, "erasing: "),
    ],
)
def test_what_does_not_fit_is_one_line(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(config.RecipeError, match=said) as e:
        config.check(View, keys, "view")
    assert "\n" not in str(e.value)
