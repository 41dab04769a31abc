"""Places of patches in the image, and the share of matches that lie at the same place."""

import torch

from eagleray.losses.places import centres, right_share
from eagleray.losses.prototypes import Match


def test_patches_of_a_flipped_crop_lie_from_right_to_left() -> None:
    places, diagonal = centres(torch.tensor([[0.8, 0.0, 0.4, 1.0]]), (2, 2))
    assert torch.allclose(places, torch.tensor([[[0.7, 0.25], [0.5, 0.25], [0.7, 0.75], [0.5, 0.75]]]))
    assert torch.allclose(diagonal, torch.tensor([0.2**2 + 0.5**2]).sqrt())


def test_the_share_of_right_matches_counts_what_lies_in_both_views() -> None:
    """The second view is the right half of the first one, mirrored, and has half of the first one's tokens."""
    whole, mirrored, crop = [0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.5, 1.0], [0.2, 0.5, 0.4, 0.7]
    boxes = torch.tensor([[whole], [mirrored], [crop]])
    tokens = [torch.zeros(1, 4, 3)] * 3
    first = [[-1, 4], [-1, 4], [-1, 6], [-1, 6]]  # of tokens 1 and 3 alone: the others lie elsewhere
    second = [[1, -1], [1, -1], [3, -1], [2, -1]]  # the last one is wrong
    pairs = Match(torch.tensor(first + second + [[0, 0]] * 4), torch.ones(12))
    assert right_share(pairs, boxes, tokens, tokens[:2]) == torch.tensor(5 / 6)
    nowhere = pairs._replace(teacher=torch.full((12, 2), -1))
    assert right_share(nowhere, boxes, tokens, tokens[:2]) == 0


def test_places_are_compared_without_the_rounding_of_products() -> None:
    """Products of places are rounded to TF32 on an accelerator; so far from the origin float32 rounds them as much."""
    boxes = torch.tensor([[1000.0, 1000.0, 1001.0, 1001.0]]).expand(2, 1, 4)
    tokens = [torch.zeros(1, 36, 3)] * 2
    same = torch.arange(36)
    pairs = Match(torch.stack([same.repeat(2), same.repeat(2) + 36], 1), torch.ones(72))
    assert right_share(pairs, boxes, tokens, tokens) == 1
