"""Drawn parameters: a pure function of (seed, epoch, sample, view), in torchvision's distributions."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2

from eagleray.config.view import View
from eagleray.views import sampling
from eagleray.views.sampling import COLUMNS, Views, crops, photometrics, uniforms

torch.set_num_threads(1)

N = 20_000  # views of one sample, which are drawn at once
M = 10_000  # drawn by torchvision
EQUAL = 0.025  # the two-sample statistic is above it by chance once in 1,000 times; seeds are fixed
SIZES = [(1, 1), (1, 7), (9, 2), (20, 20_000), (20_000, 20), (33, 47), (375, 500)]  # height, width
RANGES = [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.05, 0.32), (3 / 4, 4 / 3)), ((0.3, 1.0), (1.5, 4.0)), ((1, 1), (1, 1))]


def ks(a: NDArray, b: NDArray) -> float:
    """The largest distance between two samples' distribution functions."""
    grid = np.concatenate([a, b])
    below = (np.searchsorted(np.sort(s), grid, "right") / len(s) for s in (a, b))
    return float(abs(np.subtract(*below)).max())


def many(count: int = N, **view: Any) -> tuple[Views, NDArray]:
    views = Views.of([View(count=count, **view)])
    return views, uniforms(count, seed=1, epoch=2, sample=3)


def drawn(**view: Any) -> dict[str, NDArray]:
    """Photometric parameters by name."""
    views, u = many(**view)
    return dict(zip(COLUMNS, photometrics(views, u).T, strict=True))


def theirs(transform: v2.Transform, *keys: str, image: torch.Tensor | None = None, count: int = M) -> NDArray:
    """What torchvision draws (count, keys)."""
    torch.manual_seed(0)
    image = torch.zeros(3, 1, 1, dtype=torch.uint8) if image is None else image
    rows = (transform.make_params([image]) for _ in range(count))
    return np.array([[row[k] for k in keys] for row in rows], np.float64)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("scale", "ratio"), RANGES)
def test_crops_lie_in_the_image(height: int, width: int, scale: Any, ratio: Any) -> None:
    views, u = many(2000, scale=scale, ratio=ratio)
    top, left, h, w = crops(views, u, height, width).T
    assert h.min() >= 1
    assert w.min() >= 1
    assert top.min() >= 0
    assert left.min() >= 0
    assert (top + h).max() <= height
    assert (left + w).max() <= width


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (40, 200), (6, 9)])
def test_crops_are_distributed_as_torchvisions(height: int, width: int) -> None:
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    views, u = many(scale=scale, ratio=ratio)
    ours = crops(views, u, height, width).astype(np.float64)
    image = torch.empty(3, height, width, dtype=torch.uint8)
    other = theirs(v2.RandomResizedCrop(8, scale=scale, ratio=ratio), "top", "left", "height", "width", image=image)
    for pair in zip(features(ours), features(other), strict=True):
        assert ks(*pair) < EQUAL


def features(boxes: NDArray) -> list[NDArray]:
    top, left, h, w = boxes.T
    return [top, left, h, w, h * w, w / h, top + h, left + w, left * h, top * w]


def test_the_statistic_tells_like_from_unlike() -> None:
    """An aspect ratio or an area that is uniform from one that is log-uniform, a place from one a pixel off."""
    a, b = many()[1][:, :2].T
    assert ks(3 / 4 + (4 / 3 - 3 / 4) * a, 3 / 4 * (16 / 9) ** b) > 2 * EQUAL
    assert ks(0.08 + 0.92 * a, 0.08 ** (1 - b)) > 2 * EQUAL
    assert ks((a * 9).astype(int), (b * 8).astype(int)) > 2 * EQUAL
    assert ks(a, b) < EQUAL


@pytest.mark.parametrize(("height", "width"), [(1, 1), (20, 20_000), (20_000, 20), (7, 200), (200, 7)])
def test_a_crop_that_never_fits_is_torchvisions_central_one(height: int, width: int) -> None:
    views, u = many(50, scale=(1.0, 1.0), ratio=(1.2, 1.9))
    image = torch.empty(3, height, width, dtype=torch.uint8)
    transform = v2.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.2, 1.9))
    other = theirs(transform, "top", "left", "height", "width", image=image, count=1)
    assert (crops(views, u, height, width) == other).all()


def test_jitter_is_distributed_as_torchvisions() -> None:
    strength = (0.4, 1.3, 0.2, 0.1)  # a contrast factor is never below 0
    ours = drawn(strength=strength)
    names = ("brightness", "contrast", "saturation", "hue")
    jitter = v2.ColorJitter(*strength)
    other = theirs(jitter, *(f"{n}_factor" for n in names))
    for name, column in zip(names, other.T, strict=True):
        assert ks(ours[name], column) < EQUAL
        assert ks(ours[name] * 1.05, column) > EQUAL
    assert ours["contrast"].min() >= 0


def test_jitter_takes_every_order_equally_often() -> None:
    ours = drawn()
    orders = np.stack([ours[n] for n in ("first", "second", "third", "fourth")], 1)
    assert (np.sort(orders, 1) == np.arange(4)).all()
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert abs(counts - N / 24).max() < 4 * (N / 24) ** 0.5


def test_jitter_has_the_order_of_torchvisions_functions() -> None:
    """0 to 3 are brightness, contrast, saturation and hue, as in `fn_idx`."""
    params = v2.ColorJitter(0.4, 0.4, 0.2, 0.1).make_params([torch.zeros(3, 1, 1)])
    first = COLUMNS.index("brightness")
    assert [f"{c}_factor" for c in COLUMNS[first : first + 4]] == list(params)[1:]


def test_blur_is_distributed_as_torchvisions() -> None:
    ours = drawn(blur=1.0, sigma=(0.1, 2.0))["sigma"]
    other = theirs(v2.GaussianBlur(13, sigma=(0.1, 2.0)), "sigma", count=5000)[:, 0, 0]
    assert ks(ours, other) < 0.03
    assert ks(np.exp(np.log(0.1) + np.log(20) * (ours - 0.1) / 1.9), other) > 0.1


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("flip", v2.RandomHorizontalFlip),
        ("gray", v2.RandomGrayscale),
        ("solarize", lambda p: v2.RandomSolarize(128, p=p)),
        ("jitter", lambda p: v2.RandomApply([v2.RandomInvert(p=1)], p=p)),
        ("sigma", lambda p: v2.RandomApply([v2.RandomInvert(p=1)], p=p)),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.2, 0.8, 1.0])
def test_operations_happen_as_often_as_torchvisions(name: str, transform: Any, p: float) -> None:
    ours = (drawn(**{"blur" if name == "sigma" else name: p})[name] > 0).mean()
    torch.manual_seed(0)
    image, other = torch.tensor([[[200, 0]], [[0, 0]], [[90, 0]]], dtype=torch.uint8), transform(p=p)
    often = np.mean([not torch.equal(other(image), image) for _ in range(2000)])
    assert abs(ours - p) <= 4 * (p * (1 - p) / N) ** 0.5
    assert abs(ours - often) <= 4 * (p * (1 - p) / 2000) ** 0.5


def test_every_parameter_is_drawn_on_its_own() -> None:
    """None of them tells anything about another, nor about the crop."""
    views, u = many(blur=0.5, solarize=0.5, gray=0.5, jitter=0.5, erasing=0.5)
    columns = [*sampling.extra_uniforms(views, seed=1, epoch=2, sample=3).T]
    columns += [*photometrics(views, u).T[: COLUMNS.index("recrop_top")], *crops(views, u, 375, 500)[:, 2:].T]
    columns += [u[:, sampling.PLACE_X], u[:, sampling.PLACE_Y]]
    r = np.corrcoef(columns)
    own = [sampling.EXTRA_WIDTH + COLUMNS.index(c) for c in ("first", "second", "third", "fourth")]
    r[np.ix_(own, own)] = 0  # of one permutation
    r[-3, -4] = r[-4, -3] = 0  # height and width of one box
    np.fill_diagonal(r, 0)
    assert abs(r).max() < 5 / N**0.5


def test_neighbouring_samples_and_epochs_have_nothing_in_common() -> None:
    u = np.stack([uniforms(1, seed=0, epoch=e, sample=s)[0] for e in range(4) for s in range(1500)])
    grid = (np.arange(len(u)) + 0.5) / len(u)
    for column in u.T:
        assert ks(column, grid) < 0.04
    for step in (1, 1500):  # the next sample, the next epoch
        r = [np.corrcoef(column[:-step], column[step:])[0, 1] for column in u.T]
        assert np.abs(r).max() < 5 / (len(u) - step) ** 0.5


def test_draws_are_a_pure_function_of_seed_epoch_and_sample() -> None:
    keys = [(s, e, i) for s in (0, 1, 2**40) for e in (0, 1, 300) for i in (0, 1, 2**31)]
    draws = {k: uniforms(2, seed=k[0], epoch=k[1], sample=k[2]) for k in keys}
    for (seed, epoch, sample), u in draws.items():
        assert np.array_equal(uniforms(2, seed=seed, epoch=epoch, sample=sample), u)
    assert len({u.tobytes() for u in draws.values()}) == len(keys)
    assert all(u.min() >= 0 and u.max() < 1 for u in draws.values())


def test_a_view_more_leaves_the_others_as_they_were() -> None:
    few, more = Views.of([View(count=2)]), Views.of([View(count=2), View(size=96, count=6, scale=(0.05, 0.3))])
    a, b = (uniforms(len(v.views), seed=5, epoch=1, sample=9) for v in (few, more))
    assert np.array_equal(crops(few, a, 60, 80), crops(more, b, 60, 80)[:2])
    assert np.array_equal(photometrics(few, a), photometrics(more, b)[:2])
    assert len(np.unique(crops(more, b, 600, 800), axis=0)) == 8


def test_every_view_has_its_own_settings() -> None:
    """Rows of the arrays belong to the views in the order of the recipe."""
    views = Views.of([View(count=2, scale=(0.9, 1.0), flip=0, blur=1.0), View(scale=(0.05, 0.1), flip=1, sigma=(3, 4))])
    u = uniforms(3, seed=0, epoch=0, sample=0)
    _, _, h, w = crops(views, u, 300, 300).T
    assert ((h * w / 90_000 > 0.5) == [True, True, False]).all()
    params = dict(zip(COLUMNS, photometrics(views, u).T, strict=True))
    assert params["flip"].tolist() == [0, 0, 1]
    assert ((params["sigma"] > 0) == [True, True, False]).all()


def boxes(chance: float, size: int = 32, count: int = M) -> NDArray:
    """What is erased (n, 5)."""
    views, u = many(count, size=size, erasing=chance)
    more = sampling.extra_uniforms(views, seed=1, epoch=2, sample=3)
    return photometrics(views, u, more)[:, COLUMNS.index("erase_top") :]


def test_boxes_are_drawn_as_timms() -> None:
    """Compared are those of a side that both draw: heights, widths, and where they are."""
    size, count = 32, 3000
    random.seed(0)
    theirs = RandomErasing(1.0, mode="pixel", device="cpu")
    marked = (theirs(torch.zeros(3, size, size))[0] != 0 for _ in range(count))
    edges = np.array(
        [(y.min(), x.min(), y.max() + 1, x.max() + 1) for y, x in (m.nonzero(as_tuple=True) for m in marked)]
    )
    top, left, h, w, _ = boxes(1.0, size).T
    for ours, other in zip((top, left, top + h, left + w), edges.T, strict=True):
        assert ks(ours, other) < 0.04
    assert ks(h * w, np.prod(edges[:, 2:] - edges[:, :2], axis=1)) < 0.04


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_boxes_lie_in_the_image_and_are_as_often_as_they_should(p: float) -> None:
    for size in (4, 32):
        top, left, h, w, seed = boxes(p, size).T
        assert abs((h > 0).mean() - p) <= 4 * (p * (1 - p) / M) ** 0.5 + (size == 4) * 0.01
        assert ((h > 0) == (w > 0)).all()
        assert min(top.min(), left.min()) >= 0
        assert max((top + h).max(), (left + w).max()) <= size
        assert ((seed == np.floor(seed)) & (seed < 2**24)).all()


def test_what_is_drawn_does_not_move_when_views_are_erased() -> None:
    views, u = many(50)
    erased, v = many(50, erasing=1.0)
    assert (u == v).all()
    end = COLUMNS.index("erase_top")
    more = sampling.extra_uniforms(erased, seed=1, epoch=2, sample=3)
    assert (photometrics(views, u)[:, :end] == photometrics(erased, v, more)[:, :end]).all()
    assert sampling.extra_uniforms(views, seed=1, epoch=2, sample=3).size == 0
