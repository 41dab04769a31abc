"""Tests of SelfPatch, on DINO and on MoBY: neighbours, aggregation and the loss of patches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import vit
from safetensors.torch import load_file
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.engine.export import to_timm
from eagleray.engine.loop import Trainer
from eagleray.engine.optim import make
from eagleray.losses import prototypes
from eagleray.losses.patches import match_patches
from eagleray.losses.prototypes import H, Scores, update_center
from eagleray.methods.method import Method
from eagleray.methods.moby import MoBY
from eagleray.methods.selfpatch import SelfPatch
from eagleray.methods.selfpatch_moby import SelfPatchMoBY
from eagleray.models.backbone import Backbone
from eagleray.models.class_attention import Aggregation, AggregationBackbone
from eagleray.models.network import Network
from eagleray.models.patch_neighbors import most_similar_neighbours, neighbours

AT = Progress(step=15, steps_per_epoch=10, epochs=4)
GRIDS = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (5, 3), (7, 7)]
both = pytest.mark.parametrize("kind", [SelfPatch, SelfPatchMoBY])


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_neighbours_touch_and_are_mutual(grid: tuple[int, int], wrap: bool) -> None:
    (h, w), found = grid, neighbours(grid, wrap=wrap)
    for place, around in enumerate(found.tolist()):
        there = [n for n in around if n >= 0]
        assert len({*there, place}) == len(there) + 1, "each once, and not itself"
        for n in there:
            dy, dx = abs(n // w - place // w), abs(n % w - place % w)
            assert max(min(dy, h - dy), min(dx, w - dx)) == 1 if wrap else max(dy, dx) == 1
            assert place in found[n]
        near = [
            min(3, size) if wrap else sum(0 <= i + d < size for d in (-1, 0, 1))
            for i, size in ((place // w, h), (place % w, w))
        ]
        assert len(there) == near[0] * near[1] - 1


def test_the_likest_neighbour_comes_first_and_none_is_beyond_the_border() -> None:
    x = torch.randn(2, 12, 5)
    x[0, 0], x[0, 1] = torch.ones(5), torch.full((5,), 3.0)  # of one direction
    x[0, 11] = torch.ones(5) + 0.1 * torch.randn(5)  # the neighbour of place 0 on a torus alone
    place, there = most_similar_neighbours(x, (3, 4), 4, wrap=True)
    assert place[0, 0, :2].tolist() == [1, 11]
    assert there.all()
    place, there = most_similar_neighbours(x, (3, 4), 4, wrap=False)
    assert place[0, 0][there[0, 0]].tolist()[0] == 1
    assert sorted(place[0, 0][there[0, 0]].tolist()) == [1, 4, 5]
    assert there.sum(-1)[0].tolist() == [3, 4, 4, 3, 4, 4, 4, 4, 3, 4, 4, 3]
    cosine = F.cosine_similarity(x[:, 5:6], x[:, neighbours((3, 4), wrap=False)[5]], dim=-1)
    assert torch.equal(place[:, 5], neighbours((3, 4), wrap=False)[5][cosine.topk(4).indices])


def test_neighbours_are_chosen_in_full_precision() -> None:
    x = torch.ones(16) + 1e-3 * torch.randn(2, 36, 16)  # alike in half of it
    alone = most_similar_neighbours(x, (6, 6), 4, wrap=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(most_similar_neighbours(x, (6, 6), 4, wrap=True)[0], alone)


def aggregation() -> Aggregation:
    torch.manual_seed(0)
    module = Aggregation(12, 3)
    for p in module.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return module


def test_an_aggregation_knows_no_order_and_no_absent_patch() -> None:
    module, x = aggregation(), torch.randn(4, 6, 12)
    out = module(x)
    torch.testing.assert_close(module(x[:, torch.randperm(6)]), out)
    there = torch.tensor([[True, True, False, True, False, False]]).expand(4, -1)
    torch.testing.assert_close(module(x, there), module(x[:, [0, 1, 3]]))
    assert not torch.allclose(module(x, there), out)
    none = module(x, torch.zeros(4, 6, dtype=torch.bool))
    assert none.isfinite().all()
    torch.testing.assert_close(none, none[:1].expand(4, -1))


@pytest.mark.parametrize(("place", "around"), [(12, [6, 7, 8, 11, 13, 16, 17, 18]), (24, [18, 19, 23]), (0, [1, 5, 6])])
def test_a_patch_is_seen_by_its_neighbours_alone_and_not_by_itself(place: int, around: list[int]) -> None:
    module, x = aggregation(), torch.randn(1, 25, 12)
    before = module.aggregate_neighbours(x, (5, 5), 8, wrap=False)
    x[0, place] += torch.randn(12)
    moved = (module.aggregate_neighbours(x, (5, 5), 8, wrap=False) - before).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == around


def test_an_aggregated_backbone_pools_its_patches_and_leaves_them_as_they_are() -> None:
    backbone = vit(16, 8, 24, depth=2, heads=3, pool="mean").eval()
    x, ours = torch.randn(2, 3, 16, 16), AggregationBackbone(backbone, 3).eval()
    out, plain = ours(x), backbone(x)
    assert torch.equal(out.patches, plain.patches)
    torch.testing.assert_close(out.pooled, ours.aggregation(plain.patches))
    torch.testing.assert_close(out.pooled, ours.pooled(x))
    assert (out.pooled - plain.pooled).norm() > 1
    with pytest.raises(UserError, match=r"method.heads=5: expected a divisor of the backbone's 24 channels"):
        AggregationBackbone(backbone, 5)


def test_positions_of_patches_alone_are_resampled_as_the_authors_do() -> None:
    model = vit(24, 8, 24, depth=1, heads=3, pool="mean", position="dino").model
    x = torch.randn(1, 2, 2, 24)
    grid = model.pos_embed.view(1, 3, 3, 24).permute(0, 3, 1, 2)
    want = F.interpolate(grid, scale_factor=2.1 / 3, mode="bicubic").flatten(2).mT
    torch.testing.assert_close(model._pos_embed(x), x.flatten(1, 2) + want)
    own = torch.zeros(1, 3, 3, 24)
    assert torch.equal(model._pos_embed(own), model.pos_embed)


def test_what_is_exported_is_the_model_alone(tmp_path: Path) -> None:
    network = Network(name="vit_tiny_patch16_224", pool="mean", options={"depth": 1, "embed_dim": 24, "num_heads": 3})
    backbone = Backbone(network.name, pool=network.pool, options=network.options)
    file = to_timm(AggregationBackbone(backbone, 3).eval(), network, tmp_path)
    assert load_file(file).keys() == backbone.model.state_dict().keys()


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


def crops(kind: type[Method], rows: int = 3) -> Batch:
    g = torch.Generator().manual_seed(5)
    sizes = (24, 24, 16, 16) if kind is SelfPatch else (24, 24)
    return batch_of(*(torch.randn(rows, 3, size, size, generator=g) for size in sizes))


def small(kind: type[Method], *, position: str = "timm", patch: int = 8, **keys: Any) -> Method:
    torch.manual_seed(0)
    own = {"prototypes": 40} if kind is SelfPatch else {"dim": 8, "queue": 20, "patch_hidden": 16}
    sizes = {"patch_prototypes": 24, "hidden": 16, "bottleneck": 8, "heads": 3} | own
    method = kind(vit(24, patch, 24, depth=2, heads=3, pool="mean", position=position), **(sizes | keys))
    g = torch.Generator().manual_seed(1)
    copied = method.teacher if kind is SelfPatch else method.target
    for p in copied.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=g))  # another network than the one that learns
    return method


@both
@pytest.mark.parametrize("keys", [{}, {"wrap": False}, {"neighbours": 1}, {"neighbours": 8}, {"position": "none"}])
def test_everything_that_is_trained_learns(kind: type[Method], keys: dict[str, Any]) -> None:
    m = small(kind, freeze_last=0.5, **keys)
    out = m(crops(kind), AT)
    out["loss"].backward()
    m.before_step(AT)
    assert all(x.isfinite() for x in out.values())
    still = [n for n, p in m.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not still
    assert all(p.grad is None for n, p in m.named_parameters() if n.startswith(("teacher.", "target.")))


@both
@pytest.mark.parametrize("keys", [{"wrap": False}, {"neighbours": 1}, {"neighbours": 8}])
def test_neighbours_change_the_loss_of_patches_alone(kind: type[Method], keys: dict[str, Any]) -> None:
    out, was = small(kind, **keys)(crops(kind), AT), small(kind)(crops(kind), AT)
    assert not torch.isclose(out["patch"], was["patch"], rtol=1e-6)
    torch.testing.assert_close(out["loss"] - 0.1 * out["patch"], was["loss"] - 0.1 * was["patch"])


@both
def test_the_weight_of_patches(kind: type[Method]) -> None:
    out, more = small(kind)(crops(kind), AT), small(kind, patch_weight=0.7)(crops(kind), AT)
    torch.testing.assert_close(more["loss"] - out["loss"], 0.6 * out["patch"])


@both
def test_prototypes_stand_still_at_first(kind: type[Method]) -> None:
    m = small(kind, freeze_last=1.6)
    m(crops(kind), AT)["loss"].backward()
    m.before_step(AT)
    still = {n.partition(".")[2] for n, p in m.named_parameters() if p.requires_grad and p.grad is None}
    heads = ("head.", "patch_head.") if kind is SelfPatch else ("patch_head.",)
    assert {n.partition("last.")[0] for n in still} == {*heads}


@both
def test_what_evaluations_and_monitors_read_is_the_image_by_class_attention(kind: type[Method]) -> None:
    m = small(kind, momentum=Schedule(value=1.0))
    encoder = m.teacher if kind is SelfPatch else m.online
    seen: list[Tensor] = []
    hooked = getattr(encoder.head, "mlp", encoder.head)
    hooked.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    batch = crops(kind)
    m(batch, AT)
    want = torch.cat([m.export()(x).pooled for x in batch.views])
    torch.testing.assert_close(torch.cat(seen), want)
    assert m.export() is encoder.backbone
    assert isinstance(m.export(), AggregationBackbone)


@both
def test_patches_are_compared_crop_by_crop_and_place_by_place(kind: type[Method]) -> None:
    """The loss is compared with one computed by hand from the paper."""
    m, batch = small(kind, center_momentum=0.25), crops(kind)
    torch.manual_seed(2)
    m.patch_center.normal_(std=0.05)
    center, tau = m.patch_center.clone(), 0.04
    out = m(batch, AT)
    student, teacher = (m.student, m.teacher) if kind is SelfPatch else (m.online, m.target)
    terms, scores = [], []
    for x in batch.views:
        s, t = student.backbone(x), teacher.backbone(x)
        near = teacher.backbone.aggregation.aggregate_neighbours(t.patches, t.grid, 4, wrap=True)
        t_scores = teacher.patch_head.last(teacher.patch_head(near))
        s_scores = student.patch_head.last(student.patch_head(student.backbone.aggregation.norm(s.patches)))
        p = F.softmax((t_scores - center) / tau, -1)
        terms.append(-(p * F.log_softmax(s_scores / 0.1, -1)).sum(-1).mean())
        scores.append(t_scores.flatten(0, 1))
    torch.testing.assert_close(out["patch"], torch.stack(terms).mean())
    torch.testing.assert_close(m.patch_center, center.lerp(torch.cat(scores).mean(0), 0.75))


@both
def test_the_copy_follows_where_the_method_under_it_moves_it(kind: type[Method]) -> None:
    """The whole copy moves, with aggregation and heads: DINO's after the step, MoBY's before its keys."""
    m = small(kind, momentum=Schedule(value=0.75))
    student, teacher = (m.student, m.teacher) if kind is SelfPatch else (m.online, m.target)
    start = [p.clone() for p in teacher.parameters()]
    m(crops(kind), AT)
    assert all(map(torch.equal, start, teacher.parameters())) == (kind is SelfPatch)
    m.after_step(AT)
    for old, p, online in zip(start, teacher.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(p, old.lerp(online, 0.25))


def test_large_crops_alone() -> None:
    """The teacher does not see the small crops, and their patches are not compared."""
    m, batch = small(SelfPatch, crops="large"), crops(SelfPatch)
    seen: list[int] = []
    model = m.teacher.backbone.model
    model.register_forward_hook(lambda *_: seen.append(1))
    before = model.forward_features
    model.forward_features = lambda x: seen.append(x.shape[-1]) or before(x)
    out = m(batch, AT)
    assert seen == [24]
    g = torch.Generator().manual_seed(9)
    other = batch_of(*batch.views[:2], *(torch.randn(3, 3, 16, 16, generator=g) for _ in range(2)))
    m, everything = small(SelfPatch, crops="large"), small(SelfPatch)
    changed = m(other, AT)
    assert torch.equal(changed["patch"], out["patch"])
    assert not torch.equal(changed["loss"], out["loss"])  # the student sees them
    assert not torch.equal(everything(other, AT)["patch"], small(SelfPatch)(batch, AT)["patch"])


def test_views_of_other_images_do_not_matter() -> None:
    batch = crops(SelfPatch, rows=2)
    whole = small(SelfPatch)(batch, AT)
    parts = [small(SelfPatch)(batch_of(*(v[i : i + 1] for v in batch.views)), AT) for i in range(2)]
    for name in ("loss", "patch"):
        torch.testing.assert_close(whole[name], (parts[0][name] + parts[1][name]) / 2)


@pytest.mark.parametrize("patch", [4, 8, 12])
def test_patch_sizes_and_grids_that_are_not_square(patch: int) -> None:
    m = small(SelfPatch, patch=patch)
    views = [torch.randn(2, 3, *size) for size in ((24, 48), (24, 48), (12, 24) if patch == 12 else (16, 24))]
    out = m(batch_of(*views), AT)
    out["loss"].backward()
    assert out["loss"].isfinite()
    assert m.teacher.features(views)[0].grid == (24 // patch, 48 // patch)


def test_parts_of_a_batch_are_in_the_order_of_the_views() -> None:
    encoder = small(SelfPatch).teacher
    views = [torch.randn(2, 3, size, size) for size in (24, 24, 24, 16, 16)]
    parts = encoder.features(views)
    assert [len(p.pooled) for p in parts] == [4, 2, 4]  # the large crops apart
    alone = [encoder.backbone(x).pooled for x in views]
    torch.testing.assert_close(torch.cat([p.pooled for p in parts]), torch.cat(alone))


def test_a_mean_over_places_then_over_crops() -> None:
    """The loss weights crops equally, and the centre weights patches equally."""
    mean = torch.zeros(6)
    t, s = [torch.randn(4, 9, 6), torch.randn(2, 4, 6)], [torch.randn(4, 9, 6), torch.randn(2, 4, 6)]
    p_t, p_s = (Scores(torch.cat([x.flatten(0, 1) for x in parts]), torch.eye(6)) for parts in (t, s))
    loss = H(p_t, p_s, match_patches(s), mean, 0.3, 0.2)
    crop = [-(F.softmax(a / 0.3, -1) * F.log_softmax(b / 0.2, -1)).sum(-1).mean(-1) for a, b in zip(t, s, strict=True)]
    torch.testing.assert_close(loss, torch.cat(crop).mean())
    update_center(mean, p_t, (2,), 0.0)
    torch.testing.assert_close(mean, torch.cat([x.flatten(0, 1) for x in t]).mean(0))


def test_the_centre_is_over_the_images_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    t, other = [torch.randn(4, 9, 6), torch.randn(2, 4, 6)], [torch.randn(6, 9, 6), torch.randn(3, 4, 6)]
    flat = [torch.cat([x.flatten(0, 1) for x in parts]) for parts in (t, other)]
    monkeypatch.setattr(prototypes.dist, "rank", lambda: 1)
    monkeypatch.setattr(prototypes.dist, "total", lambda x: x + flat[1].sum(0))
    update_center(mean := torch.zeros(6), Scores(flat[0], torch.eye(6)), (3, 2), 0.0)
    torch.testing.assert_close(mean, torch.cat(flat).mean(0))


def test_the_loss_of_images_is_that_of_moby() -> None:
    """Without the patches' loss, the loss equals MoBY's on the same image vectors."""
    ours, batch = small(SelfPatchMoBY), crops(SelfPatchMoBY)
    plain = MoBY(vit(24, 8, 24, depth=1, heads=3), dim=8, hidden=16, queue=20)
    plain.online, plain.target, plain.predictor = ours.online, ours.target, ours.predictor
    for mine, theirs in ((ours.queue1, plain.queue1), (ours.queue2, plain.queue2)):
        theirs.load_state_dict(mine.state_dict())
    late = Progress(step=40, steps_per_epoch=10, epochs=4)  # the copy stands still
    want, out = plain(batch, late), ours(batch, late)
    torch.testing.assert_close(out["loss"] - 0.1 * out["patch"], want["loss"])
    torch.testing.assert_close(out["gain"], want["gain"])
    for mine, theirs in ((ours.queue1, plain.queue1), (ours.queue2, plain.queue2)):
        torch.testing.assert_close(mine.keys, theirs.keys)


def test_frozen_epochs_train_the_aggregation() -> None:
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    backbone = Backbone("vit_tiny_patch16_224", options=size)
    sizes: dict[str, Any] = {"prototypes": 16, "patch_prototypes": 8, "hidden": 8, "bottleneck": 4, "heads": 2}
    method = SelfPatch(backbone, momentum=Schedule(value=0.5), **sizes)
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    optimizer = make("sgd", method, decay="all")
    trainer = Trainer(method, optimizer, lr=lambda _: 0.1, weight_decay=lambda _: 0.0, freeze=3.0)
    views = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    trainer.step(AT, Batch(views, torch.arange(2), torch.zeros(2), (2,)))
    changed = {n for n, p in method.named_parameters() if not torch.equal(p, before[n])}
    assert not [n for n in changed if ".backbone.model." in n]
    for role in ("student", "teacher"):
        assert any(n.startswith(f"{role}.backbone.aggregation.") for n in changed)
