"""The operations of SimCLR's pairs: cutout, Sobel's filter, noise, rotation and a second crop, in any order."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn import functional as F

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.runs import recipe
from eagleray.views import photometric, photometric_cpu, sampling
from eagleray.views.colours import MEAN, STD
from eagleray.views.sampling import COLUMNS, Views

torch.set_num_threads(1)

MANY, SIZE = 96, 32
QUIET = {"jitter": 0, "gray": 0, "flip": 0}
ALL = {"recrop": 0.5, "sobel": 0.5, "noise": 0.5, "rotate": 0.5, "cutout": 0.5, "blur": 0.5}


def images(count: int = MANY) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def drawn(views: Views, count: int = MANY) -> Tensor:
    """Parameters (V, count, 38) of as many samples."""
    keys = [{"seed": 3, "epoch": 1, "sample": i} for i in range(count)]
    u = np.stack([sampling.uniforms(len(views.views), **key) for key in keys])
    more = np.stack([sampling.extra_uniforms(views, **key) for key in keys])
    return torch.from_numpy(sampling.photometrics(views, u, more)).transpose(0, 1)


def params(**view: Any) -> Tensor:
    return drawn(Views.of([View(size=SIZE, **(QUIET | view))]))[0]


def pixels(x: Tensor) -> Tensor:
    """Undo the normalisation."""
    return x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def column(p: Tensor, name: str) -> Tensor:
    return p[:, COLUMNS.index(name)]


def test_a_rotation_moves_pixels_by_quarter_turns() -> None:
    x, p = images(), params(rotate=1)
    out = (pixels(photometric.apply(x, p)) * 255).round().byte()
    assert set(column(p, "quarters").tolist()) == {1, 2, 3}
    for one, turned, quarters in zip(x, out, column(p, "quarters").int().tolist(), strict=True):
        assert np.array_equal(turned.numpy(), np.rot90(one.numpy(), quarters, (1, 2)))


@pytest.mark.parametrize("share", [0.0625, 0.25])
def test_cutout_fills_one_square_of_its_share_and_nothing_else(share: float) -> None:
    x, p = images(), params(cutout=1, cutout_area=(share, share))
    out, plain = photometric.apply(x, p), photometric.apply(x, params())
    for view, before in zip(out, plain, strict=True):
        rows, columns = (view.abs().amax(0) < 1e-6).nonzero(as_tuple=True)
        h, w = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert h == w
        assert len(rows) == h * w == round(share * SIZE**2)
        kept = view.abs().amax(0) >= 1e-6
        assert torch.equal(view[:, kept], before[:, kept])
    assert column(p, "cut_top").unique().numel() > 10


def test_noise_has_the_moments_it_states() -> None:
    gray = torch.full((MANY, 3, SIZE, SIZE), 128, dtype=torch.uint8)
    p = params(noise=1, noise_std=(0.05, 0.1))
    added = pixels(photometric.apply(gray, p)) - 128 / 255
    std = column(p, "noise_std")
    assert 0.05 <= std.min() < 0.055
    assert 0.095 < std.max() <= 0.1
    assert ((added.std((1, 2, 3)) / std - 1).abs() < 0.06).all()
    assert ((added.mean((1, 2, 3)) / std).abs() < 5 / (3 * SIZE**2) ** 0.5).all()
    assert added.flatten(1).corrcoef().fill_diagonal_(0).abs().max() < 0.1


def test_sobel_equals_scipys() -> None:
    x = images(8)
    gray = np.tensordot(photometric.LUMA, x.numpy() / 255, (0, 1))
    edges = [np.hypot(*(ndimage.sobel(g, axis, mode="mirror") for axis in (0, 1))) / 4 for g in gray]
    ours = pixels(photometric.apply(x, params(sobel=1)[:8]))
    assert np.abs(ours.numpy() - np.minimum(edges, 1)[:, None]).max() < 1e-5


def test_a_second_crop_equals_pytorchs_interpolation() -> None:
    x, p = images(), params(recrop=1, scale=(0.2, 0.8))
    ours = pixels(photometric.apply(x, p))
    first = COLUMNS.index("recrop_top")
    for one, view, (top, left, h, w) in zip(x, ours, p[:, first : first + 4].int().tolist(), strict=True):
        box = one[None, :, top : top + h, left : left + w].float() / 255
        expected = F.interpolate(box, (SIZE, SIZE), mode="bilinear", align_corners=False)[0]
        assert (view - expected).abs().max() < 1e-5
        assert 0.15 < h * w / SIZE**2 < 0.85


@pytest.mark.parametrize("order", [("cutout", "rotate"), ("rotate", "cutout"), ("noise", "sobel"), ("sobel", "noise")])
def test_only_the_listed_are_applied_one_after_the_other(order: tuple[str, str]) -> None:
    """Two steps with one operation each, at the same parameters, are the pair."""
    x, on = images(), {"jitter": 1, "flip": 1} | dict.fromkeys(ALL, 1)
    first, second, pair = (params(**on, apply=names) for names in (order[:1], order[1:], order))
    once = x.float() / 255
    for p, name in ((first, order[0]), (second, order[1])):
        photometric.apply_one_(once, name, torch.ones(MANY, dtype=torch.bool), p, p)
    assert (pixels(photometric.apply(x, pair)) - once).abs().max() < 1e-6
    other = params(**on, apply=order[::-1])
    assert (photometric.apply(x, pair) - photometric.apply(x, other)).abs().max() > 0.1


def test_a_view_does_not_depend_on_its_batch_and_the_cpu_is_a_rounding_away() -> None:
    kinds = Views.of([View(size=SIZE, **ALL), View(size=SIZE, **ALL, apply=("cutout", "noise", "flip", "rotate"))])
    p, x = drawn(kinds).flatten(0, 1), images(2 * MANY)
    whole = photometric.apply(x, p)
    alone = torch.cat([photometric.apply(x[i : i + 1], p[i : i + 1]) for i in range(2 * MANY)])
    assert (whole - alone).abs().max() < 1e-5
    done = x.clone()
    photometric_cpu.apply_(done, p)
    apart = (pixels(photometric.finish(done, p)) - pixels(whole)).abs() * 255
    assert apart.max() < 0.52


def test_other_numbers_do_not_move_when_these_operations_are_added() -> None:
    plain = drawn(Views.of([View(erasing=0.5, blur=0.5)]))
    added = drawn(Views.of([View(erasing=0.5, blur=0.5, rotate=0.5, noise=0.5)]))
    old = [c for c in COLUMNS if c not in COLUMNS[COLUMNS.index("recrop_top") : COLUMNS.index("turn0")]]
    at = [COLUMNS.index(c) for c in old]
    assert torch.equal(plain[..., at], added[..., at])


def test_probabilities_hold() -> None:
    p = drawn(Views.of([View(rotate=0.3, cutout=0.6, sobel=0.1, noise=0.5, recrop=0.8)]), 2000)[0]
    for name, share in {"quarters": 0.3, "cut_side": 0.6, "sobel": 0.1, "noise_std": 0.5, "recrop_height": 0.8}.items():
        assert abs((column(p, name) > 0).float().mean() - share) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_views_with_the_same_crop_have_it() -> None:
    views = Views.of([View(), View(same_crop=True, count=2), View()])
    boxes = sampling.crops(views, sampling.uniforms(4, seed=0, epoch=0, sample=0), 300, 400)
    assert (boxes[:3] == boxes[0]).all()
    assert (boxes[3] != boxes[0]).any()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("views.1.rotate=2", "views.1.rotate: input should be less than or equal to 1, got 2"),
        ("views.1.cutout_area=[0.5, 1.5]", "two shares of the area, above 0 and below 1, the lower first"),
        ("views.1.noise_std=[0.3, 0.1]", "two positive numbers, the lower first"),
        ("views.1.apply=[cutuot]", "unknown operation 'cutuot'; known are recrop, jitter"),
        ("views.1.apply=[flip, flip]", "each operation once"),
        ("views.1.apply=[cutout]", "apply lists cutout, whose probability is 0"),
        ("views.0.same_crop=true", "views.0.same_crop: expected a view before it"),
    ],
)
def test_wrong_keys_are_one_line(key: str, said: str) -> None:
    with pytest.raises(UserError) as e:
        recipe.load("byol_vitxs8_cifar10_ep2", [key])
    [line] = str(e.value).splitlines()
    assert said in line


def test_entries_of_a_list_are_changed_by_number() -> None:
    tree = {"views": [{"size": 1}, {"size": 2, "blur": 0.1}]}
    assert config.merge(tree, config.override("views.1.blur=0.5"))["views"] == [{"size": 1}, {"size": 2, "blur": 0.5}]
    assert config.merge(tree, {"views": {}})["views"] == {}
