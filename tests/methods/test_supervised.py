"""Tests of supervised training and DRLoc: learning, mixing of images, and messages for wrong labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.recipes import SMALL
from helpers.runs import assert_same, weights
from torch import Tensor

from eagleray import config
from eagleray.api.pretrain import pretrain
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.cli.demo import pictures
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.data.index import open_index
from eagleray.datasets.shards import Sample, write_shards
from eagleray.engine import optim
from eagleray.engine.loop import Trainer
from eagleray.losses.relative_location import Localiser, drloc_loss, exhaustive_pairs, pool_grid, random_pairs
from eagleray.methods.drloc import DRLoc
from eagleray.methods.supervised import Supervised
from eagleray.models.backbone import Backbone
from eagleray.protocols.classifier import accuracies, classifier
from eagleray.runs.checks import check_method, make_plan
from eagleray.runs.recipe import Recipe
from eagleray.runs.sources import resolve_paths
from eagleray.views.mixing import Mixing

CLASSES = 20  # of the drawn pictures
AUGMENTED = "{size: 16, scale: [0.3, 1.0], jitter: 0.0, randaugment: rand-m9-mstd0.5-inc1, erasing: 0.25}"
METHODS = {
    "supervised": f"classes: {CLASSES}, ema: 0.9",
    "drloc": f"classes: {CLASSES}, pairs: 8, weight: {{value: 0.5}}, ema: 0.9",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    def written(method: str, *more: str) -> Path:
        text = SMALL.replace(
            "{name: mocov3, dim: 16, hidden: 32}", f"{{name: {method}, {', '.join((METHODS[method], *more))}}}"
        )
        begin, end = text.index("views: "), text.index("data: ")
        (path := tmp_path / f"{method}.yaml").write_text(f"{text[:begin]}views: [{AUGMENTED}]\n{text[end:]}")
        return path

    return written


def keys(shards: Path, out: Path, *more: str) -> list[str]:
    return [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}", *more]


@pytest.mark.slow
def test_stopping_and_continuing_equals_no_stop(recipe: Any, shards: Path, tmp_path: Path):
    """The run uses everything random, averaged weights and a learning rate for each layer."""
    path = str(recipe("drloc"))
    more = ["optim.batch=24", "data.lanes=8", "optim.epochs=2", "evaluate.every=1", "optim.layer_decay=0.8"]
    pretrain(path, keys(shards, tmp_path / "once", "max_steps=16", *more))
    for steps in (5, 16):  # within an epoch, and over its end
        pretrain(path, keys(shards, tmp_path / "twice", f"max_steps={steps}", *more))
    assert_same(weights(tmp_path / "once"), weights(tmp_path / "twice"))
    a, b = (read_lines(tmp_path / out / "metrics.jsonl") for out in ("once", "twice"))
    assert [r["loss"] for r in a] == [r["loss"] for r in b]
    assert "classifier/top1" in a[12]
    summary = json.loads((tmp_path / "once" / "summary.json").read_text())
    assert {"classifier/top1", "classifier/top5", "classifier/mean_per_class"} <= summary.keys()
    assert not any("untrained" in name for name in summary)
    assert (tmp_path / "once" / "export" / "backbone.safetensors").exists()


BACKBONES = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "embed_dim": 12, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
    ),
    "resnet": ("resnet50", {"layers": [1, 1, 1, 1], "base_width": 16}),
    "cvt": ("cvt_13", {"dims": [16, 24, 32], "depths": [1, 1, 1], "heads": [1, 1, 1], "head_dim": 16}),
    "t2t": ("t2t_vit_14", {"embed_dim": 24, "depth": 2, "num_heads": 3, "token_dim": 16}),
}


def images(count: int = 48, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return images of noise in four classes, by the quarter that holds a bright square."""
    g = torch.Generator().manual_seed(0)
    x, y = 0.3 * torch.randn(count, 3, size, size, generator=g), torch.arange(count) % 4
    half = size // 2
    for i, label in enumerate(y.tolist()):
        x[i, :, (label // 2) * half :, (label % 2) * half :][:, :half, :half] += 2
    return x, y


def batch(x: Tensor, y: Tensor) -> Batch:
    return Batch([x], torch.arange(len(x)), y, (len(x),))


def network(name: str) -> Backbone:
    torch.manual_seed(0)
    model, options = BACKBONES[name]
    return Backbone(model, options=options)


def learnt(method: Any, x: Tensor, y: Tensor, steps: int = 40) -> list[dict[str, float]]:
    optimizer = optim.make("adamw", method, decay="matrices")
    at = ((Progress(i, 10, steps // 10), batch(x.clone(), y)) for i in range(steps))
    taken = Trainer(method, optimizer, lr=lambda _: 3e-3, weight_decay=lambda _: 0.0).steps(at)
    return [{n: float(v) for n, v in s.values.items()} for s in taken]


@pytest.mark.parametrize("backbone", ["vit", "swin", "cvt"])
def test_supervised_learns(backbone: str):
    x, y = images()
    method = Supervised(network(backbone), classes=4, mixup=0.0, cutmix=0.0)
    seen = learnt(method, x, y)
    assert seen[-1]["loss"] < seen[0]["loss"] - 0.5
    assert seen[-1]["accuracy"] > 0.9
    with torch.no_grad():
        assert (method.eval().classify(x).argmax(1) == y).float().mean() > 0.9


def test_supervised_learns_from_mixed_images_and_labels():
    x, y = images(8, size=16)
    method = Supervised(network("vit"), classes=4, smoothing=0.1, mixup=0.8, cutmix=1.0)
    torch.manual_seed(3)
    loss = method(batch(x.clone(), y), Progress(0, 1, 1))["loss"]
    torch.manual_seed(3)
    mixed_x, mixed_y = Mixing(4, smoothing=0.1, mixup=0.8, cutmix=1.0)(x.clone(), y)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(method.classify(mixed_x), mixed_y))


def test_drloc_is_what_its_keys_say():
    x, y = images(4, size=64)
    given: Any = {"pairing": "exhaustive", "targets": "paper", "grid": 4, "pool": "2x2"}
    method = DRLoc(network("vit"), classes=4, mixup=0.0, cutmix=0.0, weight=Schedule(value=0.5), **given)
    out = method(batch(x, y), Progress(0, 1, 1))
    [g] = method.encoder.backbone.grids(x)[1]
    pairs = exhaustive_pairs(16, 1, (4,), 0, g.device)
    want = drloc_loss(method.localisers[0], pool_grid(g, 4, "2x2"), pairs, mode="l1", targets="paper")
    torch.testing.assert_close(out["drloc"], want)
    torch.testing.assert_close(out["loss"], out["classes"] + 0.5 * want)


@pytest.mark.slow
def test_drloc_learns_where_tokens_lie():
    """The error is lower than that of always predicting the middle offset."""
    x, y = images(24, size=16)
    method = DRLoc(network("vit"), classes=4, mixup=0.0, cutmix=0.0, weight=Schedule(value=1.0))
    offset = (torch.arange(4).unsqueeze(1) - torch.arange(4)).abs().float()
    guess = float((offset - offset.median()).abs().mean())
    seen = learnt(method, x, y, steps=110)
    assert np.mean([s["drloc"] for s in seen[-5:]]) < 0.75 * guess
    assert seen[-1]["accuracy"] > 0.9


@pytest.mark.parametrize("mode", ["l1_signed", "ce", "ce_signed", "reg", "reg_signed"])
def test_every_loss_tells_the_right_offset_from_a_wrong_one(mode: Any):
    """Uses a grid that is not square, and a localiser that reads positions stored in the tokens."""
    h, w, k = 3, 5, 5
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    grid = torch.stack([rows, columns]).float().expand(2, -1, -1, -1)

    class Reads(Localiser):
        def forward(self, pairs: Tensor) -> Tensor:
            d = pairs[:, :2] - pairs[:, 2:]  # (n, 2)
            d = (
                d.abs()
                if not mode.endswith("signed")
                else d + torch.tensor([h - 1, w - 1])
                if kind == "l1"
                else d + k - 1
            )
            if kind == "l1":
                return self.wrong + d
            classes = 2 * k - 1 if mode.endswith("signed") else k
            return -5 * (torch.arange(classes).view(1, -1, 1) - d.unsqueeze(1) - self.wrong).abs()

    kind, localiser = mode.partition("_")[0], Reads(2)
    found = []
    for localiser.wrong in (0.0, 1.0, 2.0):
        found.append(float(drloc_loss(localiser, grid, random_pairs(h * w, 64, 1, (2,), 0, grid.device), mode=mode)))
    assert found == sorted(found)
    assert found[0] < 0.1 < found[1]


def test_pairs_are_any_two_tokens_and_the_same_after_a_restart():
    first, second = random_pairs(6, 4000, 1, (3,), 7, torch.device("cpu"))
    assert first.shape == (3, 4000)
    share = torch.bincount((first * 6 + second).flatten(), minlength=36) / 12000
    assert (share - 1 / 36).abs().max() < 0.01  # a token is its own partner as often as any
    again = random_pairs(6, 4000, 1, (3,), 7, torch.device("cpu"))
    other = random_pairs(6, 4000, 1, (3,), 8, torch.device("cpu"))
    assert torch.equal(first, again[0])
    assert not torch.equal(first, other[0])


def test_exhaustive_pairs_take_every_token_once():
    first, second = exhaustive_pairs(9, 2, (4,), 0, torch.device("cpu"))
    assert first.shape == second.shape == (8, 9)
    assert (first == torch.arange(9)).all()
    assert (second.sort(1).values == torch.arange(9)).all()
    assert len({tuple(row) for row in second.tolist()}) == 8


def test_grids_are_pooled_until_they_are_coarse_enough():
    sizes = {(7, 7): (7, 7), (13, 13): (13, 13), (14, 14): (7, 7), (28, 30): (7, 8), (14, 13): (14, 13)}
    for given, expected in sizes.items():
        for pool in ("3x3", "2x2"):
            out = pool_grid(torch.ones(1, 2, *given), 7, pool)
            assert tuple(out.shape[2:]) == ((7, 7) if (given, pool) == ((28, 30), "2x2") else expected)
            assert (out == 1).all()  # padding does not count


@pytest.mark.parametrize("backbone", BACKBONES)
def test_grids_of_every_stage(backbone: str):
    """The last grid equals the patches of `forward` for ViTs and for pyramids without a final norm."""
    network_, x = network(backbone).eval(), torch.randn(2, 3, 64, 64)
    if backbone == "vit":
        x = x[..., :32, :48]  # not square
    pooled, grids = network_.grids(x, "stages")
    out = network_(x)
    torch.testing.assert_close(pooled, out.pooled)
    assert [g.shape[1] for g in grids] == network_.dims("stages")
    assert tuple(grids[-1].shape[2:]) == out.grid
    last = grids[-1].flatten(2).mT
    if backbone == "swin":
        last = network_.model.norm(last)
    torch.testing.assert_close(last, out.patches)
    [one] = network_.grids(x)[1]
    assert torch.equal(one, grids[-1])


@pytest.mark.parametrize(
    ("backbone", "depths"), [("vit", [1, 1]), ("swin", [1, 2]), ("resnet", [1] * 4), ("cvt", [1] * 3)]
)
def test_grids_of_every_block(backbone: str, depths: list[int]):
    """The last block of a stage gives what the stage gives; the blocks before it lie on grids of the same size."""
    network_, x = network(backbone).eval(), torch.randn(2, 3, 32, 32)
    (_, stages), (_, grids) = network_.grids(x, "stages"), network_.grids(x, "blocks")
    assert [g.shape[1] for g in grids] == network_.dims("blocks")
    assert [g.shape for g in grids] == [s.shape for s, n in zip(stages, depths, strict=True) for _ in range(n)]
    for end, stage in zip(np.cumsum(depths), stages, strict=True):
        assert torch.equal(grids[end - 1], stage)


def test_blocks_without_a_grid_are_one_line():
    """The blocks of PVT return tokens in a row, the grid of which they are not told to return."""
    with torch.device("meta"):
        method, x = DRLoc(Backbone("pvt_small"), classes=4, stages="blocks"), torch.zeros(1, 3, 64, 64)
        with pytest.raises(UserError, match=r"^backbone\.name: the blocks of PVT return tokens without the grid"):
            method.check_views([x])


def test_drloc_of_blocks_adds_the_losses_of_their_own_localisers():
    """Equation 7: each block has an MLP, a grid that is not pooled, and offsets over its own k."""
    x, y = images(4)
    given: Any = {"targets": "paper", "weight": Schedule(value=0.5), "stages": "blocks", "grid": 2}
    method = DRLoc(network("swin"), classes=4, mixup=0.0, cutmix=0.0, **given)
    out = method(batch(x, y), Progress(5, 10, 1, seed=3))
    apart = []
    for f, g in zip(method.localisers, method.encoder.backbone.grids(x, "blocks")[1], strict=True):
        k = g.shape[2]
        a, b = random_pairs(k * k, 64, 1, (4,), Progress(5, 10, 1, seed=3).draw, g.device)
        d = torch.stack([(a // k - b // k).abs(), (a % k - b % k).abs()], 2) / k
        e1, e2 = (torch.stack([t[:, i].T for t, i in zip(g.flatten(2), at, strict=True)]) for at in (a, b))
        apart.append((f(torch.cat([e1, e2], 2)) - d).abs().mean())
    assert [tuple(g.shape[2:]) for g in method.encoder.backbone.grids(x, "blocks")[1]] == [(8, 8), (4, 4), (4, 4)]
    torch.testing.assert_close(out["drloc"], torch.stack(apart).sum())


def test_pairs_follow_the_seed_of_the_recipe():
    """With the seed 0 they follow from the step alone, as in the golden vectors."""
    drawn = [Progress(7, 10, 1, seed=seed).draw for seed in range(4)]
    assert drawn[0] == 7
    assert len({*drawn, Progress(8, 10, 1, seed=1).draw}) == 5
    x, y = images(4, size=16)
    method = DRLoc(network("vit"), classes=4, mixup=0.0, cutmix=0.0, weight=Schedule(value=0.5))
    losses = [method(batch(x, y), Progress(7, 10, 1, seed=seed))["drloc"].item() for seed in (0, 1, 1)]
    assert losses[0] != losses[1] == losses[2]


def test_a_plan_hands_its_seed_to_the_method(recipe: Any, shards: Path, tmp_path: Path):
    plan = make_plan(resolve_paths(config.load(Recipe, recipe("drloc"), [*keys(shards, tmp_path / "out"), "seed=3"])))
    assert plan.at(7).draw == Progress(7, 10, 2, seed=3).draw


@pytest.mark.parametrize(
    ("name", "classifier", "localiser"),
    [("t2t_vit_14", 21.55 - 0.08, 0.66), ("cvt_13", 19.94, 0.66), ("swin_tiny_patch4_window7_224", 28.29, 1.05)],
)
def test_there_are_as_many_parameters_as_in_the_authors_code(name: str, classifier: float, localiser: float):
    """Counts in millions, for 1000 classes; T2T-ViT's positions and random features are not parameters here."""
    with torch.device("meta"):
        plain, more = Supervised(Backbone(name), classes=1000), DRLoc(Backbone(name), classes=1000)
    count = [sum(p.numel() for p in method.parameters()) / 1e6 for method in (plain, more)]
    assert count[0] == pytest.approx(classifier, abs=0.006)
    assert count[1] - count[0] == pytest.approx(localiser, abs=0.005)


@pytest.mark.parametrize("keys", [{"stages": "blocks"}, {"mode": "ce_signed", "grid": 4}, {"pairing": "exhaustive"}])
def test_variants_train(keys: dict[str, Any]):
    x, y = images(8, size=16)
    method = DRLoc(network("vit"), classes=4, weight=Schedule(value=0.5), **keys)
    seen = learnt(method, x, y, steps=10)
    assert all(np.isfinite(s["loss"]) for s in seen)
    assert len(method.localisers) == (2 if "stages" in keys else 1)
    assert "accuracy" not in seen[0]  # of mixed images there is none


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("method.mode=ce, method.grid=3", r"method.grid=3: 4 x 4 tokens of a view of 16 pixels .* method.grid=4"),
        ("method.mode=ce, method.stages=all", "method.stages=all: grids differ in their number of offsets"),
        ("views=[{size: 16, randaugment: rand-m9.5-mstd0.5}]", "expected timm's name of a RandAugment policy"),
        ("views=[{size: 16}, {size: 8}]", r"views: sizes of \[8, 16\] pixels; .* one size is expected"),
    ],
)
def test_what_does_not_fit_is_one_line(keys: str, said: str, recipe: Any):
    tree = [k.strip() for k in keys.split(", method")]
    overrides = [tree[0], *(f"method{k}" for k in tree[1:])]
    fine = "backbone={options: {img_size: 16, patch_size: 4, embed_dim: 24, depth: 2, num_heads: 3}}"
    with pytest.raises(UserError, match=said) as e:
        check_method(config.load(Recipe, recipe("drloc"), ["data.train=none", fine, *overrides]))
    assert "\n" not in str(e.value)


def test_tokens_of_other_channels_than_the_vector_are_one_line():
    """EfficientNet has a convolution after its last stage."""
    method = DRLoc(Backbone("efficientnet_b0"), classes=4)
    with pytest.raises(UserError, match=r"tokens have \[320\] channels, and drloc expects \[1280\]"):
        method.check_views([torch.zeros(1, 3, 64, 64)])


def mixed(x: Tensor, y: Tensor, seed: int = 0, **keys: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return Mixing(4, **{"smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, **keys})(x.clone(), y)


@pytest.mark.parametrize("count", [1, 8, 9])
def test_images_and_labels_are_mixed_alike(count: int):
    """The pixels of constant images show the shares of the mixed images; an odd last image is not mixed."""
    y = torch.arange(count) % 4
    x = torch.nn.functional.one_hot(y, 4).float().view(count, 4, 1, 1).expand(-1, -1, 16, 16)
    for seed in range(10):
        out, targets = mixed(x, y, seed)
        torch.testing.assert_close(targets.sum(1), torch.ones(count))
        torch.testing.assert_close(out.mean((2, 3)) * 0.9 + 0.1 / 4, targets)
        if count % 2:
            assert torch.equal(out[-1], x[-1])


def test_mixing_depends_on_the_seed_of_the_step_alone():
    x, y = images(8, size=16)
    np.random.seed(5)
    one = mixed(x, y)
    np.random.seed(6)
    before = np.random.get_state()[1].copy()
    two, three = mixed(x, y), mixed(x, y, seed=1)
    assert (np.random.get_state()[1] == before).all()
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[1], three[1])


def test_without_mixing_labels_are_smoothed():
    x, y = images(5, size=16)
    out, targets = mixed(x, y, mixup=0.0, cutmix=0.0)
    assert torch.equal(out, x)
    z = torch.randn(5, 4)
    loss = torch.nn.functional.cross_entropy
    torch.testing.assert_close(loss(z, targets), loss(z, y, label_smoothing=0.1))


def test_the_average_of_weights_follows_batch_norm_too():
    method = Supervised(network("cvt"), classes=4, ema=0.5)
    names = [n for n, _ in method.average.named_buffers()]
    assert names
    before = {n: v.clone() for n, v in method.average.state_dict().items()}
    learnt(method, *images(8), steps=1)
    for name, value in method.encoder.state_dict().items():
        now = method.average.state_dict()[name]
        expected = (before[name] + value) / 2 if now.is_floating_point() else value
        torch.testing.assert_close(now, expected, msg=name)
    assert method.export() is method.average.backbone
    x = torch.randn(2, 3, 32, 32)
    method.eval()
    torch.testing.assert_close(method.classify(x), method.average.head(method.average.backbone(x).pooled))


class Oracle(torch.nn.Module):
    """A classifier that knows most classes by the position of the image in the test set."""

    def __init__(self, labels: Any) -> None:
        super().__init__()
        self.labels, self.at = torch.as_tensor(labels), 0

    def classify(self, x: Tensor) -> Tensor:
        assert not self.training
        y = self.labels[self.at : self.at + len(x)]
        self.at += len(x)
        wrong = torch.arange(len(y)) % 4  # right, second, third, sixth
        place = torch.tensor([0, 1, 2, 5])[wrong]
        z = torch.zeros(len(y), CLASSES)
        for i in range(6):
            z[torch.arange(len(y)), (y + i - place) % CLASSES] = 10.0 - i
        return z


def test_the_classifier_is_scored_on_the_test_set(shards: Path):
    index = open_index(str(shards / "test"))
    net = Oracle(index.label)
    scores = classifier(net, index, size=16, resize=16, device=torch.device("cpu"))
    assert scores["classifier/top1"] == 25
    assert scores["classifier/top5"] == 75
    assert net.training


def test_the_mean_per_class_counts_classes_alike():
    scores = accuracies(np.array([0, 0, 0, 2]), np.array([0, 0, 0, 5]))
    assert scores == {"classifier/top1": 75, "classifier/top5": 75, "classifier/mean_per_class": 50}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards without labels, with some labels, and with one label that is too high."""
    folder = tmp_path_factory.mktemp("odd")
    for name, label in {
        "none": lambda i: None,
        "some": lambda i: i % 20 if i else None,
        "high": lambda i: 20 - i % 21,
    }.items():
        rows = (Sample(s.key, s.extension, s.data, label(i)) for i, s in enumerate(pictures(0, 64)))
        write_shards(rows, str(folder / name))
    return folder


@pytest.mark.parametrize(
    ("train", "test", "classes", "said"),
    [
        ("none", None, 20, "data.train: has no labels, which the method needs"),
        ("some", None, 20, r"data.train: no label at 000000\S* in \S+\.tar, and so on at 1 of 64 images"),
        (
            "high",
            None,
            20,
            r"data.train: label 20 at 000000\S* in .*; there are 21 labels, 0 to 20, and method.classes=20",
        ),
        ("train", "high", 20, r"data.test: label 20 at 000000\S* in "),
        ("train", None, 10, r"data.train: label 10 at .* at 160 of 320 images; there are 20 labels, 0 to 19, and"),
        ("train", None, 1000, r"method.classes=1000: there are 20 labels, 0 to 19, in data.train; expected .*=20"),
    ],
)
def test_labels_that_do_not_fit_are_one_line(
    train: str, test: str | None, classes: int, said: str, odd: Path, shards: Path, recipe: Any, tmp_path: Path
):
    place = lambda name: (shards if name == "train" else odd) / name  # noqa: E731
    given = [f"data.train={place(train)}", f"out={tmp_path / 'out'}", f"method.classes={classes}"]
    given += [f"data.test={place(test)}"] if test else []
    with pytest.raises(UserError, match=said) as e:
        make_plan(resolve_paths(config.load(Recipe, recipe("supervised"), given)))
    assert "\n" not in str(e.value)
