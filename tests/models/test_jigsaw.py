"""Patches of a jigsaw puzzle."""

import pytest
import torch
from torch import Tensor

from eagleray.base import dist
from eagleray.models.jigsaw import jigsaw


def pictures(n: int, height: int, width: int) -> Tensor:
    """Images (n, 3, H, W) whose pixels say of which image they are, and where."""
    image, y, x = torch.meshgrid(*(torch.arange(float(k)) for k in (n, height, width)), indexing="ij")
    return torch.stack([image, y, x], 1)


@pytest.mark.parametrize(
    ("height", "width", "size"), [(255, 255, 64), (48, 48, 12), (31, 44, 10), (9, 9, 3), (3, 3, 1)]
)
def test_each_patch_is_a_square_of_a_cell_of_its_own(height: int, width: int, size: int):
    patches = jigsaw(pictures(5, height, width), size, 1, (5,))
    assert patches.shape == (5, 9, 3, size, size)
    image, y, x = patches.unbind(2)  # (B, 9, size, size)
    assert torch.equal(image, torch.arange(5.0).view(-1, 1, 1, 1).expand_as(image))
    pixels = torch.arange(float(size))
    assert torch.equal(y - y[..., :1, :1], pixels.view(-1, 1).expand_as(y))
    assert torch.equal(x - x[..., :1, :1], pixels.expand_as(x))
    rows, columns = y // (height // 3), x // (width // 3)
    cells = (3 * rows + columns).flatten(2)  # every pixel lies in the cell of its patch
    assert torch.equal(cells, cells[..., :1].expand_as(cells))
    assert torch.equal(cells[..., 0].sort(1).values, torch.arange(9.0).expand(5, -1))


def test_orders_and_places_are_uniform():
    patches = jigsaw(pictures(6000, 15, 15), 3, 2, (6000,))
    y, x = patches[:, :, 1, 0, 0], patches[:, :, 2, 0, 0]
    cell = 3 * (y // 5) + x // 5
    for at in (0, 4, 8):
        assert (torch.bincount(cell[:, at].long(), minlength=9) / 6000 - 1 / 9).abs().max() < 0.015
    for place in (y % 5, x % 5):
        assert torch.equal(place.unique(), torch.arange(3.0))
        assert (torch.bincount(place.flatten().long()) / place.numel() - 1 / 3).abs().max() < 0.01


def test_a_draw_follows_from_the_seed():
    x = torch.randn(4, 3, 48, 48)
    state = torch.get_rng_state()
    assert torch.equal(jigsaw(x, 12, 7, (4,)), jigsaw(x, 12, 7, (4,)))
    assert not torch.equal(jigsaw(x, 12, 7, (4,)), jigsaw(x, 12, 8, (4,)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(*jigsaw(x[:1].expand(2, -1, -1, -1), 12, 7, (2,)))  # each image has a draw of its own


@pytest.mark.parametrize("rows", [(4, 4), (6, 2)])
def test_ranks_cut_as_one_does(rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(8, 3, 48, 48)
    want = jigsaw(x, 12, 7, (8,))
    parts = []
    for rank, part in enumerate(x.split(rows)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(jigsaw(part, 12, 7, rows))
    assert torch.equal(torch.cat(parts), want)
