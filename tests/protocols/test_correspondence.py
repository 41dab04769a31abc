"""Correspondences between an image and its mirror image, on vectors, on small shards and from the command."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.golden_cases import Case, cases
from PIL import Image
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.data.index import Index, open_index
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.evaluation import evaluate
from eagleray.evaluation.target import Target
from eagleray.models.backbone import Backbone, Features
from eagleray.models.network import Network
from eagleray.protocols import correspondence as module
from eagleray.protocols.catalogue import Correspondence
from eagleray.protocols.correspondence import correspondence, matches, pairs_of, scores, views
from eagleray.protocols.settings import Evaluate
from eagleray.views.photometric import per_channel

GRIDS = [(7, 7), (4, 4), (3, 8), (8, 3), (1, 5), (5, 1)]


@cases("esvit_correspondence")
def test_golden(case: Case) -> None:
    h = case.hyper
    size, grid = (h["image"],) * 2, (h["grid"],) * 2
    assert h["image"] == h["cell"] * h["grid"]
    for i, expected in enumerate(case["results"]):
        one, other = case[f"feat1_{i}"], case[f"feat2_{i}"]
        case.equal(scores(one, other, grid, size, h["top"]), expected[:2], f"accuracy and error of pair {i}")
        case.equal(matches(one, other, h["top"] + 1).cosine[-1], expected[2], f"the last cosine of pair {i}")


def mirrored(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Patches (..., N, D) as those of the mirror image."""
    return x.unflatten(-2, grid).flip(-2).flatten(-3, -2)


@pytest.mark.parametrize("grid", GRIDS)
def test_patches_that_are_mirrored_are_found(grid: tuple[int, int]):
    own = torch.eye(math.prod(grid))
    assert scores(own, mirrored(own, grid), grid, (64, 96)).tolist() == [1, 0]


@pytest.mark.parametrize("grid", GRIDS)
def test_a_backbone_that_knows_the_place_and_not_the_content_is_wrong_but_in_the_middle(grid: tuple[int, int]):
    h, w = grid
    own, size = torch.eye(h * w), (64, 96)
    x = np.arange(pairs_of(h * w)) % w  # all cosines are 1: the first ones count
    accuracy, error = scores(own, own, grid, size).tolist()
    assert accuracy == pytest.approx((2 * x == w - 1).mean())
    assert error == pytest.approx(np.abs(w - 1 - 2 * x).mean() * size[1] / w)


def test_the_error_is_the_way_between_the_centres_of_cells():
    grid, size = (2, 3), (20, 60)  # cells of 10 by 20 pixels
    patch = torch.eye(6)[:1]  # the one at the top left, in all places of one image
    for place, way in {2: 0.0, 1: 20.0, 0: 40.0, 5: 10.0, 4: math.hypot(10, 20)}.items():
        other = torch.eye(6)[1:].repeat(2, 1)[:6]
        other[place] = patch
        found = scores(patch.expand(6, -1), other, grid, size, 1)
        assert found.tolist() == pytest.approx([float(way == 0), way])


def test_random_patches_are_found_by_chance():
    grid, images, draw = (3, 4), 3000, torch.Generator().manual_seed(0)
    one, other = torch.randn(2, images, 12, 16, generator=draw)
    accuracy = float(scores(one, other, grid, (96, 128))[:, 0].mean())
    assert abs(accuracy - 1 / 12) < 4 * math.sqrt(1 / 12 * 11 / 12 / (10 * images))


def test_the_pairs_most_alike_are_kept_likest_first():
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(5, 12, 8, generator=draw), torch.randn(5, 9, 8, generator=draw)
    found = matches(one, other, 4)
    cosine = torch.cosine_similarity(one.unsqueeze(2), other.unsqueeze(1), dim=-1)  # (5, 12, 9)
    torch.testing.assert_close(found.cosine, cosine.amax(2).sort(1, descending=True).values[:, :4])
    image = torch.arange(5).unsqueeze(1)
    torch.testing.assert_close(cosine[image, found.one, found.other], found.cosine)
    assert all(len(set(row)) == 4 for row in found.one.tolist())
    longer = matches(one * torch.rand(12, 1, generator=draw).add(0.1), 3 * other, 4)  # lengths do not matter
    assert torch.equal(longer.one, found.one)
    assert torch.equal(longer.other, found.other)
    alone = matches(one[2], other[2], 4)
    assert torch.equal(alone.one, found.one[2])
    assert matches(one, other, 20).one.shape == (5, 12)  # no more pairs than patches


def test_the_second_view_is_mirrored_and_grey_always_and_jittered_mostly():
    draw = torch.Generator().manual_seed(0)
    crops = torch.randint(80, 150, (400, 3, 4, 4), dtype=torch.uint8, generator=draw)
    mean, std = (per_channel(v, torch.device("cpu")) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    one, other = (x * std + mean for x in views(crops, range(400)))
    torch.testing.assert_close(one, crops / 255)
    torch.testing.assert_close(other, other[:, :1].expand(-1, 3, -1, -1))
    grey = torch.tensor([0.2989, 0.587, 0.114]) @ (crops / 255).flip(3).flatten(2)  # (400, 16)
    other = other[:, 0].flatten(1)
    plain = (other - grey).abs().amax(1) < 1e-4
    assert 0.12 < plain.float().mean() < 0.28
    assert torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(other, grey, strict=True)]).min() > 0.6


class Ranks(Backbone):
    """Patches of 8 pixels that know what share of the image's patches is darker, which no jitter of greys changes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight, self.seen, self.channels = nn.Parameter(torch.zeros(1)), 0, 3

    def forward(self, images: Tensor) -> Features:
        self.seen += len(images)
        assert not self.training
        level = torch.nn.functional.avg_pool2d(images.mean(1), 8)  # (B, h, w)
        rank = level.flatten(1).argsort(1).argsort(1)
        return Features(rank.float(), torch.eye(rank.shape[1])[rank], (level.shape[1], level.shape[2]))


def mosaics(count: int) -> Iterator[Sample]:
    """Pictures of 4 x 4 squares of 8 pixels, each of a grey of its own, without labels. The last does not decode."""
    for i in range(count):
        greys = 60 + 5 * np.random.default_rng(i).permutation(16).reshape(4, 4).astype(np.uint8)
        data = encode(Image.fromarray(np.kron(greys, np.ones((8, 8), np.uint8))))
        yield Sample(f"{i:03d}", "png", data if i < count - 1 else data[: len(data) // 2])


@pytest.fixture(scope="module")
def mosaic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mosaics")
    write_shards(mosaics(24), str(folder))
    return folder


@pytest.fixture(scope="module")
def index(mosaic: Path) -> Index:
    return open_index(str(mosaic))


def test_content_is_found_in_every_image_that_decodes(index: Index):
    backbone = Ranks()
    found = correspondence(backbone, index, Correspondence(size=32, resize=32)).numbers
    assert found == {"correspondence/accuracy": 1, "correspondence/error": 0, "correspondence/images": 23}
    assert backbone.training


def test_the_same_numbers_in_batches_of_any_size_and_each_time(index: Index, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    backbone = Backbone("vit_tiny_patch16_224", options=options)
    whole = correspondence(backbone, index, Correspondence(size=32, resize=32)).numbers
    torch.manual_seed(1)
    assert correspondence(backbone, index, Correspondence(size=32, resize=32)).numbers == whole
    monkeypatch.setattr(module, "BATCH", 5)
    assert correspondence(backbone, index, Correspondence(size=32, resize=32)).numbers == pytest.approx(whole, rel=1e-6)
    assert 0 < whole["correspondence/accuracy"] < 1


def test_a_limit_of_images(index: Index):
    backbone = Ranks()
    found = correspondence(backbone, index, Correspondence(size=32, resize=32, limit=7)).numbers
    assert found["correspondence/images"] in (6, 7)
    assert backbone.seen == 2 * found["correspondence/images"]


def test_ranks_share_the_images(index: Index, monkeypatch: pytest.MonkeyPatch):
    parts: list[np.ndarray] = []
    monkeypatch.setattr(dist, "size", lambda: 2)
    monkeypatch.setattr(dist, "gather_objects", lambda x: [*parts, x] if dist.rank() else parts.append(x) or parts)
    for rank, images in enumerate((12, 23)):  # of 12 and 12, one of which does not decode
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        found = correspondence(Ranks(), index, Correspondence(size=32, resize=32)).numbers
        assert found == {"correspondence/accuracy": 1, "correspondence/error": 0, "correspondence/images": images}


def test_a_sample_is_jittered_in_its_own_way_whatever_is_beside_it():
    crops = torch.randint(256, (3, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(views(crops, [5, 9, 2])[1][1:], views(crops[1:], [9, 2])[1])
    assert not torch.allclose(views(crops, [5, 9, 2])[1], views(crops, [6, 7, 8])[1])


def test_images_of_which_none_decodes(tmp_path: Path):
    write_shards(list(mosaics(1)), str(tmp_path))
    with pytest.raises(UserError, match="no image in this shard decodes"):
        correspondence(Ranks(), open_index(str(tmp_path)), Correspondence(size=32, resize=32))


def test_the_command_needs_no_labels(
    mosaic: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    one = Target("ranks", Ranks().eval(), Network(), Evaluate(size=32, resize=32))
    monkeypatch.setattr(evaluate, "load_target", lambda *_: one)
    labelled, unlabelled = str(shards / "test"), str(mosaic)
    perfect = {"correspondence/accuracy": 1, "correspondence/error": 0, "correspondence/images": 23}

    def found(train: str, test: str | None, *names: str) -> evaluate.Report:
        return evaluate.evaluate(evaluate.Request("ranks", names, train, test, out=str(tmp_path)))

    assert found(unlabelled, None, "correspondence").results[0].numbers == perfect
    assert found(labelled, unlabelled, "correspondence").results[0].numbers == perfect  # the images to test on
    both = found(unlabelled, None, "knn", "correspondence")
    assert both.results[0].numbers == perfect
    assert both.refused == [f"knn: --train {unlabelled}: these shards have no labels, and this protocol needs them"]
    assert capsys.readouterr().err == f"error: {both.refused[0]}\n"
