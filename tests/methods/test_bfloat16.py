"""Every method trains in bfloat16, emulated on the CPU, as it does in float32: 50 steps of tiny networks.

Two runs part soon, as small differences grow. What is compared is where they arrive.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.recipes import METHODS, small_recipe
from helpers.table import Table
from torch import Tensor

from eagleray import config
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.engine.loop import Trainer
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.knn import knn
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.recipe import Recipe

CPU = torch.device("cpu")
STEPS, BATCH, IMAGES, CLASSES, SIDE = 50, 24, 240, 10, 16
LATE = 20  # steps at the end; at the start batch norm enlarges roundings, as untrained features differ little
FAST = ("mocov3", "dino", "swav")  # of every kind of loss one: keys, prototypes, Sinkhorn


def pictures(n: int) -> tuple[Tensor, Tensor]:
    """Draw images (n, 3, SIDE, SIDE) of classes that differ in a coarse pattern, and their labels."""
    g = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(CLASSES, 3, 4, 4, generator=g), size=SIDE, mode="bilinear")
    label = torch.arange(n) % CLASSES
    return patterns[label] + 1.5 * torch.randn(n, 3, SIDE, SIDE, generator=g), label


def batches(recipe: Recipe) -> Iterator[tuple[Progress, Batch]]:
    images, label = pictures(IMAGES)
    sizes = [v.size for v in recipe.views for _ in range(v.count)]
    for step in range(STEPS):
        g = torch.Generator().manual_seed(1 + step)
        index = torch.randperm(IMAGES, generator=g)[:BATCH]
        x = [F.interpolate(images[index], size=size, mode="area") for size in sizes]
        views = [v + 0.4 * torch.randn(v.shape, generator=g) for v in x]
        yield Progress(step, 10, STEPS // 10), Batch(views, index, label[index], (BATCH,), whole_boxes(views))


def train(recipe: Recipe, dtype: torch.dtype) -> tuple[Method, Tensor]:
    """Train from the recipe's weights and return the method and its losses (STEPS,)."""
    method = build_method(recipe)
    method.allocate(IMAGES)
    steps = Trainer(
        method,
        build_optimizer(recipe, method),
        lr=lambda _: 1e-3,
        weight_decay=lambda _: 0.04,
        precision=Precision(dtype, CPU),
    ).steps(batches(recipe))
    return method, torch.stack([step.values["loss"].float() for step in steps])


@torch.no_grad()
def accuracy(method: Method) -> float:
    """Return the percentage of unseen images that their neighbours among the images of the training classify right."""
    images, label = pictures(IMAGES + 800)
    x = method.export().eval().pooled(images).float()
    train, test = (LabelledFeatures(x[at], label[at]) for at in (slice(IMAGES), slice(IMAGES, None)))
    return float(knn(train, test, k=10)["knn/top1"])


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_trains_as_in_float32(name: str, tmp_path: Path, table: Table) -> None:
    (path := tmp_path / "recipe.yaml").write_text(small_recipe(name))
    recipe = config.load(Recipe, path, ["data.train=none"])
    (one, losses), (other, rounded) = train(recipe, torch.float32), train(recipe, torch.bfloat16)
    away = float((rounded - losses)[-LATE:].mean().abs() / losses.abs().mean())
    top1, rounded_top1 = accuracy(one), accuracy(other)
    table.add(name, "bfloat16's loss, relative difference", away)
    table.add(name, "its kNN top-1 %, difference", rounded_top1 - top1)
    assert not torch.equal(rounded, losses)
    assert away < 0.1
    assert rounded_top1 > top1 - 10  # 50 steps may also end better by chance
