"""Attention maps, principal components, nearest images and matched views."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.golden_cases import vit
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.data.index import Index, open_index
from eagleray.datasets.shards import Sample, encode, write_shards
from eagleray.models.backbone import Backbone, Features
from eagleray.protocols.catalogue import Attention, Components, Neighbours, Pairs
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import attention as module
from eagleray.protocols.visual import draw, explore
from eagleray.protocols.visual.attention import attention, entropy, fewest_patches, maps
from eagleray.protocols.visual.explore import (
    components,
    oriented,
    pairs,
    principal,
    second_views,
    to_image,
)
from eagleray.protocols.visual.neighbours import nearest, neighbours
from eagleray.views import photometric

SWIN = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "img_size": 32, "patch_size": 2, "window_size": 4}
SWINS = ["swin_tiny_patch4_window7_224", "esvit_swin_tiny_w7"]


def samples(count: int) -> Iterator[Sample]:
    for i in range(count):
        draw = np.random.default_rng(i // 2)  # every second image is the one before it
        image = Image.fromarray(draw.integers(256, size=(6, 8, 3), dtype=np.uint8)).resize((64, 48))
        yield Sample(f"{i:03d}", "png", encode(image), label=i // 2)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("look")
    write_shards(samples(8), str(folder))
    return open_index(str(folder))


def small() -> Backbone:
    torch.manual_seed(0)
    return vit(32, 8, 12, 2, 3)


@torch.no_grad()
def test_rows_of_a_vit_sum_to_one():
    found = maps(small().eval(), torch.randn(2, 3, 32, 48))
    assert (found.patches.shape, found.grid) == ((2, 3, 24, 24), (4, 6))
    assert found.token is not None
    torch.testing.assert_close(found.patches.sum(-1), torch.ones(2, 3, 24))
    torch.testing.assert_close(found.token.sum(-1), torch.ones(2, 3))


@torch.no_grad()
@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize("size", [32, 40, 64])
def test_windows_of_a_swin_lie_where_their_patches_do(name: str, size: int):
    """Grids of 8, 10 and 16 patches in windows of 4, the last shifted by 2; of 10, the windows are padded."""
    torch.manual_seed(0)
    backbone = Backbone(name, options=SWIN).eval()
    block = backbone.model.layers[-1].blocks[-1]
    assert block.shift_size == (2, 2)
    with torch.no_grad():
        block.attn.qkv.weight.mul_(20)
    x = torch.randn(2, 3, size, size)
    inside, outside = [], []
    hooks = [block.norm1.register_forward_hook(lambda _, __, out: inside.append(out))]
    hooks += [block.drop_path1.register_forward_hook(lambda _, __, out: outside.append(out))]
    found = maps(backbone, x)
    [hook.remove() for hook in hooks]
    h, w = found.grid
    assert found.token is None
    torch.testing.assert_close(found.patches.sum(-1), torch.ones(2, 3, h * w))
    assert ((found.patches > 0).sum(-1) <= 16).all()
    value = block.attn.qkv(inside[0]).view(2, h * w, 3, 3, -1)[:, :, 2].transpose(1, 2)  # (B, heads, N, d)
    again = block.attn.proj((found.patches @ value).transpose(1, 2).flatten(2)).view(2, h, w, -1)
    whole = slice(None) if h % 4 == 0 else slice(2, None)  # where no padding had a share
    torch.testing.assert_close(again[:, whole, whole], outside[0][:, whole, whole], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_reading_a_swin_leaves_it_as_it_was():
    torch.manual_seed(0)
    backbone, x = Backbone(SWINS[0], options=SWIN).eval(), torch.randn(1, 3, 40, 40)
    attn, before = backbone.model.layers[-1].blocks[-1].attn, backbone(x).patches
    fused = attn.fused_attn
    maps(backbone, x)
    assert torch.equal(backbone(x).patches, before)
    assert backbone.model.layers[-1].blocks[-1].attn is attn
    assert attn.fused_attn == fused
    assert not attn.softmax._forward_hooks


def test_other_models_are_named():
    with pytest.raises(UserError, match="ResNet has no attention that can be read"):
        maps(Backbone("resnet18"), torch.zeros(1, 3, 32, 32))


def test_the_kept_patches_are_the_fewest_that_hold_the_mass():
    rows = torch.randn(40, 9, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    for mass in (0.1, 0.6, 0.95, 1.0):
        kept = fewest_patches(rows, mass)
        held = (rows * kept).sum(-1)
        assert (held >= mass - 1e-6).all()
        for row, mask in zip(rows, kept, strict=True):
            if mask.sum() > 1:  # the likest ones, one less, are too few
                assert row.sort(descending=True).values[: mask.sum() - 1].sum() < mass
            assert row[mask].min() >= row[~mask].max() if (~mask).any() else True
    assert fewest_patches(torch.full((10,), 0.1), 0.6).sum() in (6, 7)


def test_entropy_in_bits():
    rows = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    torch.testing.assert_close(entropy(rows), torch.tensor([2.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_pictures_of_attention(index: Index, tmp_path: Path, name: str, capsys):
    backbone = small() if name == "vit" else Backbone(SWINS[0], options=SWIN)
    found = attention(backbone, index, Attention(size=32, limit=5), Workspace(tmp_path))
    grid = 4 if name == "vit" else 8
    each = [found.numbers[f"attention/entropy_head{h}"] for h in range(3)]
    assert found.numbers["attention/entropy"] == pytest.approx(np.mean(each), rel=1e-5)
    assert 0 < max(each) <= math.log2(16) + 1e-5  # patches of the image, or of a window
    assert 0 < found.numbers["attention/patches_kept"] <= 62.6
    assert found.settings == {"size": 32, "images": 5, "mass": 0.6, "grid": f"{grid} x {grid}"}
    assert [p.name for p in found.pictures] == [f"attention-{n}.png" for n in ("heads", "kept", "queries", "entropy")]
    assert all(Image.open(p).width > 400 for p in found.pictures)
    assert "5 images, entropy" in capsys.readouterr().out


def test_the_patch_under_a_point():
    assert module.patch_at((0.5, 0.5), (4, 6)) == 2 * 6 + 3
    assert module.patch_at((0, 0.99), (4, 6)) == 3 * 6
    assert module.patch_at((1, 1), (4, 6)) == 3 * 6 + 5, "a point on the border"


def test_heads_and_points_are_the_user_s(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sheets: dict[str, list[draw.Tile]] = {}

    def sheet(rows: dict[str, list[draw.Tile]], path: Path, title: str) -> Path:
        sheets[path.stem] = rows["image 0"]
        return path

    monkeypatch.setattr(draw, "sheet", sheet)
    attention(small(), index, Attention(size=32, limit=2, heads=2, points=(0.3, 0.6, 1.0, 0.0)), Workspace(tmp_path))
    assert [len(tiles) for tiles in sheets.values()] == [3, 3, 3]
    assert [tile.points for tile in sheets["attention-queries"][1:]] == [[(0.3, 0.6)], [(1.0, 0.0)]]
    bits = [float(tile.title.split()[2]) for tile in sheets["attention-heads"][1:]]
    assert bits == sorted(bits, reverse=True)
    with pytest.raises(UserError, match=r"points=\[0.3\]: expected x and y of each point"):
        attention(small(), index, Attention(size=32, points=(0.3,)), Workspace(tmp_path))


def test_heads_of_a_vit_at_a_point(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The map of a head is that of the class token, or that of the patch at the point that is asked for."""
    seen: dict[str, list[torch.Tensor]] = {"token": [], "point": []}
    sheets: dict[str, list[draw.Tile]] = {}
    whole = draw.heat_overlay

    for which, query in (("token", ()), ("point", (0.1, 0.9))):
        monkeypatch.setattr(draw, "heat_overlay", lambda x, m, w=which: seen[w].append(m) or whole(x, m))
        monkeypatch.setattr(draw, "sheet", lambda rows, path, _: sheets.update({path.stem: rows["image 0"]}) or path)
        attention(
            small(), index, Attention(size=32, limit=1, heads=3, query=query, points=(0.1, 0.9)), Workspace(tmp_path)
        )
        assert [tile.points for tile in sheets["attention-heads"]] == [[query] if query else ()] * 4
    at_token, at_point = (torch.stack(seen[which][:3]) for which in seen)
    mean_at_point = seen["point"][3]  # of the picture of queries, which shows the mean over heads
    torch.testing.assert_close(at_point.mean(0), mean_at_point)
    assert not torch.allclose(at_token.mean(0), mean_at_point)
    for wrong in ((0.3,), (0.3, 0.1, 0.2, 0.2)):
        with pytest.raises(UserError, match=r"query=.*: expected x and y of"):
            attention(small(), index, Attention(size=32, query=wrong), Workspace(tmp_path))


def test_components_of_a_field_of_rank_three():
    """Up to signs, of which the axes' largest weights have the plus."""
    draw = torch.Generator().manual_seed(0)
    scores, _ = torch.linalg.qr(
        torch.randn(60, 4, generator=draw, dtype=torch.float64).index_fill(1, torch.tensor(0), 1)
    )
    scores = scores[:, 1:] * torch.tensor([5.0, 3.0, 1.0])  # without a mean, and at right angles
    axes, _ = torch.linalg.qr(torch.randn(20, 3, generator=draw, dtype=torch.float64))
    found, held = principal((scores @ axes.T + 7).float(), 3)
    assert held == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(found.abs(), scores.abs().float(), rtol=1e-3, atol=1e-4)
    for i in range(3):
        assert abs(torch.corrcoef(torch.stack([found[:, i], scores[:, i].float()]))[0, 1]) > 0.9999


def test_fewer_channels_than_components():
    found, held = principal(torch.tensor([[0.0], [2.0]]), 3)
    assert found.tolist() == [[-1, 0, 0], [1, 0, 0]]
    assert held == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_the_foreground_is_in_the_middle(sign: int):
    first = torch.full((2, 6, 6), -1.0)
    first[:, 2:4, 2:5] = 5
    assert torch.equal(oriented(sign * (first - first.mean())), first - first.mean())


def test_points_of_a_crop_in_its_image():
    points, box = np.array([[0.0, 0.0], [32, 32], [8, 16]]), np.array([4, 10, 8, 16])
    assert to_image(points, box, False, 32).tolist() == [[10, 4], [26, 12], [14, 8]]
    assert to_image(points, box, True, 32).tolist() == [[26, 4], [10, 12], [22, 8]]


def test_doubles_are_each_others_nearest():
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    double = torch.cat([x, 3 * x])
    found = nearest(double, torch.arange(20), 4)
    assert torch.equal(found.rows[:, 0], torch.arange(20).roll(10))
    torch.testing.assert_close(found.cosine[:, 0], torch.ones(20))
    assert (found.rows != torch.arange(20)[:, None]).all()
    assert (found.cosine.diff(dim=1) <= 0).all()
    assert nearest(x, torch.tensor([3]), 40).rows.shape == (1, 9)


def test_a_sheet_of_neighbours(index: Index, tmp_path: Path):
    found = neighbours(small(), index, Neighbours(size=32, queries=8, k=1), Workspace(tmp_path))
    assert found.numbers["neighbours/same_class"] == 100  # as images come in twos
    assert found.numbers["neighbours/cosine"] == pytest.approx(1, abs=1e-5)
    assert Image.open(found.pictures[0]).height > 400
    more = neighbours(small(), index, Neighbours(size=32, queries=3, k=40), Workspace(tmp_path))
    assert more.settings == {"size": 32, "images": 8, "queries": 3, "k": 7}


def test_images_without_labels_are_of_no_class(tmp_path: Path):
    """Every image twice, of which only the first two pairs have labels."""
    given = [s if i < 4 else replace(s, label=None) for i, s in enumerate(samples(8))]
    for name, part in {"with": given[:4], "without": given[4:]}.items():
        write_shards(iter(part), str(tmp_path / name))
    index = open_index([str(tmp_path / "with"), str(tmp_path / "without")])
    assert index.labelled
    found = neighbours(small(), index, Neighbours(size=32, queries=8, k=7), Workspace(tmp_path))
    share = 100 * 4 / 12  # each of four has three others with a label, of which one is its twin
    assert found.numbers["neighbours/same_class"] == pytest.approx(share)


def test_a_picture_of_components(index: Index, tmp_path: Path):
    found = components(small(), index, Components(size=32, images=3), Workspace(tmp_path))
    assert 0 < found.numbers["components/variance"] <= 100
    assert 0 < found.numbers["components/foreground"] < 100
    assert found.settings == {"size": 32, "images": 3, "grid": "4 x 4"}
    assert found.pictures[0].exists()


def test_second_views_are_smaller_crops_and_the_same_each_time():
    crops = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views, boxes, flips = second_views(crops, 32)
    area = boxes[:, 2] * boxes[:, 3] / 32**2
    assert ((area > 0.36) & (area < 0.64)).all()
    assert 0 < flips.sum() < 16
    again, _, _ = second_views(crops, 32)
    assert torch.equal(views, again)


class Places(Backbone):
    """Patches that know which part of a colour wheel they show, wherever it is in the view."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.dim = torch.nn.Parameter(torch.zeros(1)), 2

    def forward(self, images: torch.Tensor) -> Features:
        grid = (images.shape[2] // 8, images.shape[3] // 8)
        x = torch.nn.functional.avg_pool2d(images, 8).flatten(2).mT
        return Features(x.mean(1), x / x.norm(dim=-1, keepdim=True), grid)


def test_matched_views_know_the_truth(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A view that is the image itself, or its mirror image."""

    def same(crops, size, mirrored=False):
        x = photometric.normalise_(crops.float() / 255)
        box = np.tile([0, 0, size, size], (len(crops), 1))
        flips = torch.full((len(crops),), mirrored)
        return (x.flip(3) if mirrored else x), box, flips

    for mirrored in (False, True):
        monkeypatch.setattr(explore, "second_views", lambda c, s, m=mirrored: same(c, s, m))
        found = pairs(Places(), index, Pairs(size=32, images=3), Workspace(tmp_path))
        assert found.numbers == {"pairs/right": 100, "pairs/error": pytest.approx(0, abs=1e-6)}
    assert Image.open(found.pictures[0]).height > 500


def test_a_smaller_view_is_found_again(index: Index, tmp_path: Path):
    found = pairs(small(), index, Pairs(size=32, images=3), Workspace(tmp_path))
    assert 0 <= found.numbers["pairs/right"] <= 100
    assert found.settings["images"] == 3


def test_images_of_which_none_decodes(tmp_path: Path):
    data = encode(Image.new("RGB", (32, 32)))
    write_shards([Sample("a", "png", data[:40])], str(tmp_path))
    index = open_index(str(tmp_path))
    for protocol, settings in ((attention, Attention), (components, Components), (pairs, Pairs)):
        with pytest.raises(UserError, match="no image in this shard decodes"):
            protocol(small(), index, settings(size=32), Workspace(tmp_path))
    with pytest.raises(UserError, match="0 images in these shards decode"):
        neighbours(small(), index, Neighbours(size=32), Workspace(tmp_path))


def test_a_pair_of_one_s_own_is_marked(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file and a sample by its key. Each is grey but for a patch in a colour of its own, which its global feature
    is, so that this patch is marked in both."""
    seen: list[draw.Pair] = []
    whole = draw.pairs
    monkeypatch.setattr(draw, "pairs", lambda p, path, title, **how: whole(seen.extend(p) or p, path, title, **how))

    class Brightest(Places):
        def forward(self, images: torch.Tensor) -> Features:
            patches = super().forward(images).patches * 0 + torch.nn.functional.avg_pool2d(images, 8).flatten(2).mT
            best = patches.sum(-1).argmax(1)
            return Features(patches[torch.arange(len(patches)), best], patches, (4, 4))

    pixels = np.full((32, 32, 3), 99, np.uint8)
    pixels[16:24, 8:16] = 255, 200, 90
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    found = pairs(
        Brightest(), index, Pairs(size=32, one=str(tmp_path / "mine.png"), other="003"), Workspace(tmp_path / "out")
    )
    assert [p.name for p in found.pictures] == ["pairs.png", "pairs-own.png"]
    marks = seen[-1].marks
    assert marks is not None
    assert marks[0, :2].tolist() == [12, 20], "the region of the file that is nearest to its own feature"
    assert seen[-1].title == "mine.png and 003"
    assert all(p.marks is not None and p.marks.shape == (2, 4) for p in seen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"one": "000"}, "--one 000: expected two images; --other names the second"),
        ({"one": "000", "other": "nobody"}, "--other nobody: neither an image file nor the key of a sample"),
        ({"one": "000", "other": __file__}, "--other .*test_explore.py: "),
    ],
)
def test_a_wrong_pair_is_named(index: Index, tmp_path: Path, given: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        pairs(small(), index, Pairs(size=32, **given), Workspace(tmp_path))
