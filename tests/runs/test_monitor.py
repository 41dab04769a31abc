"""What is seen of a run from outside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recipes import CNN_ONLY, METHODS, small_recipe

from eagleray import config
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.engine.loop import Step, Trainer
from eagleray.methods.method import Method
from eagleray.models.ema import momentum_copies
from eagleray.models.layer_names import layers_of
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.knn import knn
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.monitor import ROWS, Bank, Monitor
from eagleray.runs.recipe import Recipe, Watch

BATCH = 64
# Of which one view reaches the encoder that is exported.
ONE_VIEW = ("instdisc", "instloc", "densecl", "detco", "distill", "mae", "mpp", "pirl")


def train(recipe: Recipe, steps: int, **settings: Any) -> tuple[Method, Monitor, list[Step]]:
    """A method after some steps on noise with labels, its monitor, and the steps."""
    method = build_method(recipe)
    method.allocate(BATCH * steps)
    optimizer = build_optimizer(recipe, method)
    monitor = Monitor(method, optimizer, Watch(**settings))
    taken = []
    for step in Trainer(method, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(batches(recipe, steps)):
        monitor.watch(step)
        taken.append(step)
    return method, monitor, taken


def batches(recipe: Recipe, steps: int):
    g = torch.Generator().manual_seed(0)
    for step in range(steps):
        views = [torch.randn(BATCH, 3, v.size, v.size, generator=g) for v in recipe.views for _ in range(v.count)]
        index, label = torch.arange(BATCH) + BATCH * step, torch.randint(5, (BATCH,), generator=g)
        yield Progress(step, 100, 2), Batch(views, index, label, (BATCH,), whole_boxes(views))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return named("mocov3", tmp_path)


def named(method: str, folder: Path) -> Recipe:
    (path := folder / f"{method}.yaml").write_text(small_recipe(method))
    return config.load(Recipe, path, ["data.train=none"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_seen_whole(method: str, tmp_path: Path):
    m, monitor, taken = train(named(method, tmp_path), 2, every=2)
    values, norms = monitor.flush()
    assert len(norms) == len(taken)
    assert all(torch.isfinite(torch.tensor(v)) for v in values.values())
    seen = {n.removeprefix("health/") for n in values if n.startswith("health/")}
    assert ("same_views" in seen) == (method not in ("dinov3", "distill", "instdisc", "mae", "mpp", "pirl"))
    assert ("alignment" in seen) == (method not in ONE_VIEW)
    assert ("ema_distance" in seen) == bool(momentum_copies(m))
    layers = {n.removeprefix("grad/") for n in values if n.startswith("grad/")}
    stages = {"conv1", *(f"layer{n}" for n in (1, 2, 3, 4))}
    own = stages if method in CNN_ONLY else {"patch_embed", "blocks.00", "blocks.01"}
    assert layers == own | {"trunk", "heads"}


def test_a_monitor_changes_nothing(recipe: Recipe):
    watched, _, _ = train(recipe, 3, every=1)
    plain = build_method(recipe)
    plain.allocate(3 * BATCH)
    optimizer = build_optimizer(recipe, plain)
    list(Trainer(plain, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(batches(recipe, 3)))
    for name, value in plain.state_dict().items():
        assert torch.equal(watched.state_dict()[name], value), name


def test_the_bank_holds_what_the_encoder_made_of_the_first_view(recipe: Recipe):
    _, monitor, taken = train(recipe, 1, every=1)
    again = build_method(recipe)  # as the weights were in that step
    want = torch.nn.functional.normalize(again.export()(taken[0].batch.views[0]).pooled, dim=1)
    newest = monitor.bank.newest(BATCH)
    torch.testing.assert_close(newest.features, want.flip(0))
    assert newest.images.tolist() == taken[0].batch.index.flip(0).tolist()


def test_no_forward_is_added(recipe: Recipe):
    calls = []
    method = build_method(recipe)
    method.export().model.patch_embed.register_forward_hook(lambda _, given, out: calls.append(len(given[0])))
    optimizer = build_optimizer(recipe, method)
    monitor = Monitor(method, optimizer, Watch(every=1), labelled=True)
    for step in Trainer(method, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(batches(recipe, 2)):
        monitor.watch(step)
    assert calls == [2 * BATCH] * 2  # both views at once, two steps


def test_patches_that_pass_through_the_same_head_are_not_kept(tmp_path: Path):
    recipe = named("ibot", tmp_path)
    method = build_method(recipe)
    optimizer = build_optimizer(recipe, method)
    monitor, kept = Monitor(method, optimizer, Watch(every=1)), []
    for step in Trainer(method, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(batches(recipe, 2)):
        kept.append(sum(len(pooled) for pooled, _ in monitor._features))
        monitor.watch(step)
    assert kept[0] > kept[1] == 2 * BATCH


def test_first_in_first_out():
    bank = Bank(10, 2, torch.device("cpu"))
    for start in range(0, 24, 6):
        rows = torch.arange(start, start + 6)
        bank.push(torch.stack([rows, rows], 1).float(), rows % 3, rows)
    assert bank.filled == 10
    assert bank.newest(100).images.tolist() == list(range(23, 13, -1))
    assert bank.newest(3, skip=2).images.tolist() == [21, 20, 19]
    assert bank.newest(3).features[:, 0].tolist() == [23, 22, 21]
    other = Bank(10, 2, torch.device("cpu"))
    other.load_state_dict(bank.state_dict())
    assert torch.equal(other.newest(10).features, bank.newest(10).features)


def test_of_a_batch_larger_than_the_bank_the_last_rows_stay():
    threads, rows = torch.get_num_threads(), torch.arange(4096)
    bank = Bank(512, 64, torch.device("cpu"))
    torch.set_num_threads(2)  # each writes a part of the batch
    try:
        for _ in range(3):
            bank.push(rows[:, None].expand(-1, 64).float(), rows % 3, rows)
    finally:
        torch.set_num_threads(threads)
    newest = bank.newest(512)
    assert newest.images.tolist() == list(range(4095, 4095 - 512, -1))
    assert torch.equal(newest.features[:, 0].long(), newest.images)
    assert torch.equal(newest.labels, newest.images % 3)


def filled(recipe: Recipe, rows: int, labels: torch.Tensor, images: torch.Tensor) -> Monitor:
    method = build_method(recipe)
    monitor = Monitor(method, build_optimizer(recipe, method), Watch(bank=rows, k=20), labelled=True)
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.one_hot(labels, 24).float() + 0.4 * torch.randn(rows, 24, generator=g)
    monitor.bank.push(torch.nn.functional.normalize(x, dim=1), labels, images)
    return monitor


def test_knn_is_that_of_the_evaluation(recipe: Recipe):
    rows = 2 * ROWS
    labels = torch.randint(10, (rows,), generator=torch.Generator().manual_seed(1))
    monitor = filled(recipe, rows, labels, torch.arange(rows))
    new, old = monitor.bank.newest(rows // 4), monitor.bank.newest(rows, skip=rows // 4)
    want = knn(LabelledFeatures(old.features, old.labels), LabelledFeatures(new.features, new.labels), k=20)
    assert monitor.knn().item() == pytest.approx(want["knn/top1"], abs=0.5)
    assert 20 < want["knn/top1"] < 95


def test_an_image_is_no_neighbour_of_itself(recipe: Recipe):
    """The newest crops are of images that the bank has already, under labels that nothing else tells."""
    rows, g = 2 * ROWS, torch.Generator().manual_seed(1)
    labels = torch.randint(10, (rows,), generator=g)
    monitor = filled(recipe, rows, labels, torch.arange(rows))
    bank = monitor.bank
    bank.features.copy_(torch.nn.functional.normalize(torch.randn(rows, 24, generator=g), dim=1))
    half = rows // 2
    for part in (bank.features, bank.labels, bank.images):
        part[half:] = part[:half].clone()
    assert monitor.knn().item() < 25  # by chance 10
    bank.images.copy_(torch.arange(rows))
    assert monitor.knn().item() > 60


def test_layers_are_named_in_order():
    names = [
        *("encoder.backbone.model.patch_embed.proj.weight", "encoder.backbone.model.blocks.10.mlp.fc1.weight"),
        *("encoder.backbone.model.blocks.2.norm1.bias", "encoder.backbone.model.norm.weight", "encoder.head.0.weight"),
        *("predictor.0.weight", "encoder.backbone.model.cls_token"),
    ]
    order, of = layers_of(names)
    assert order == ["patch_embed", "blocks.02", "blocks.10", "heads", "trunk"]
    assert [order[i] for i in of] == ["patch_embed", "blocks.10", "blocks.02", "trunk", "heads", "heads", "trunk"]
    swin = [f"student.backbone.model.layers.{i}.blocks.{j}.attn.qkv.weight" for i in range(2) for j in range(2)]
    assert layers_of(swin)[0] == [f"layers.0{i}.blocks.0{j}" for i in range(2) for j in range(2)]
    resnet = ["f_q.backbone.model.layer2.1.conv1.weight", "f_q.backbone.model.conv1.weight"]
    assert layers_of(resnet)[0] == ["conv1", "layer2"]


def test_norms_by_layer_are_those_of_the_gradient(recipe: Recipe):
    _, monitor, taken = train(recipe, 3, every=50)
    _, norms = monitor.flush()
    want = [float(step.values["grad_norm"]) for step in taken]
    assert [sum(x**2 for x in row) ** 0.5 for row in norms] == pytest.approx(want, rel=1e-5)


def test_update_is_what_the_optimiser_did(recipe: Recipe):
    method = build_method(recipe)
    optimizer = build_optimizer(recipe, method)
    monitor = Monitor(method, optimizer, Watch(every=1))
    trunk = [p for n, p in method.base_encoder.backbone.named_parameters() if p.requires_grad and p.ndim > 1]
    before = torch.cat([p.detach().flatten() for p in trunk])
    for step in Trainer(method, optimizer, lr=lambda _: 1e-2, weight_decay=lambda _: 0.0).steps(batches(recipe, 1)):
        monitor.watch(step)
    after = torch.cat([p.detach().flatten() for p in trunk])
    values, _ = monitor.flush()
    assert values["health/update"] == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-4)
    assert values["health/growth"] == pytest.approx(float(after.norm() / before.norm()), rel=1e-4)


def test_what_overflows_stays_out_of_the_bank(recipe: Recipe):
    method = build_method(recipe)
    optimizer = build_optimizer(recipe, method)
    monitor = Monitor(method, optimizer, Watch(every=1))

    def spoilt():
        for at, batch in batches(recipe, 2):
            yield at, replace(batch, views=[v * (float("nan") if at.step == 0 else 1) for v in batch.views])

    for step in Trainer(method, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(spoilt()):
        monitor.watch(step)
    assert torch.isfinite(monitor.bank.features).all()


def test_labels_may_be_any_integers(recipe: Recipe):
    labels = torch.randint(10, (2 * ROWS,), generator=torch.Generator().manual_seed(1))
    monitor = filled(recipe, 2 * ROWS, labels, torch.arange(2 * ROWS))
    want = monitor.knn()
    monitor.bank.labels.mul_(10**17)
    assert torch.equal(monitor.knn(), want)
