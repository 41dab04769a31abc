"""Tests of EsViT: both losses, crops of any size, and a region loss that starts later."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import vit
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Trainer
from eagleray.methods.dino import DINO
from eagleray.methods.esvit import EsViT
from eagleray.methods.method import Method
from eagleray.models.heads import PrototypeHead

SIZES = (16, 16, 8, 8)
KEYS: dict[str, Any] = {"prototypes": 20, "hidden": 16, "bottleneck": 8, "free_scale": True}
LAST = Progress(30, steps_per_epoch=3, epochs=20)


def small(kind: type[Method] = EsViT, **keys: Any) -> Any:
    torch.manual_seed(0)
    return kind(vit(16, 4, 24, depth=2, heads=3), **{**KEYS, **keys})


def batch(step: int = 0, rows: int = 4, sizes: tuple[int, ...] = SIZES) -> Batch:
    g = torch.Generator().manual_seed(step)
    none = torch.empty(0)
    crops = [torch.randn(rows, 3, size, size, generator=g) for size in sizes]
    return Batch(crops, index=none, label=none, rows=(rows,))


def train(method: Method, steps: range) -> torch.optim.Optimizer:
    """Train with AdamW, three steps per epoch."""
    optimizer = optim.make("adamw", method, decay="matrices")
    batches = ((Progress(i, 3, 20), batch(i)) for i in steps)
    trainer = Trainer(method, optimizer, lr=lambda _: 0.01, weight_decay=lambda _: 0.1, clip=3.0, clip_each=True)
    for _ in trainer.steps(batches):
        pass
    return optimizer


def plain(m: EsViT, x: list[Tensor], at: Progress) -> tuple[Tensor, Tensor]:
    """Compute L_V and L_R pair by pair and image by image, from all scores."""
    tau_t, pairs = m.teacher_temp(at), [(q, v) for q in range(2) for v in range(len(x)) if v != q]
    l_v, l_r = torch.zeros(()), torch.zeros(())
    for q, v in pairs:
        s, t = m.student.backbone(x[v]), m.teacher.backbone(x[q])
        p = F.softmax((scores(m.teacher.head, t.pooled) - m.center) / tau_t, dim=1)
        l_v = l_v - (p * F.log_softmax(scores(m.student.head, s.pooled) / m.student_temp, dim=1)).sum(1).mean()
        for z_s, z_t in zip(s.patches, t.patches, strict=True):  # (N, D) of one image
            j = F.cosine_similarity(z_s.unsqueeze(1), z_t, dim=2).argmax(1)
            p = F.softmax((scores(m.teacher.region_head, z_t[j]) - m.region_center) / tau_t, dim=1)
            log_p = F.log_softmax(scores(m.student.region_head, z_s) / m.student_temp, dim=1)
            l_r = l_r - (p * log_p).sum(1).mean() / len(x[0])
    return l_v / len(pairs), l_r / len(pairs)


def scores(head: PrototypeHead, x: Tensor) -> Tensor:
    out: Tensor = head.last(head(x))
    return out


@pytest.mark.parametrize("sizes", [(16, 16), (16, 16, 8), (16, 16, 12, 8, 12), (12, 12, 16)])
def test_any_crops(sizes: tuple[int, ...]) -> None:
    m = small(view_weight=0.3, region_weight=0.9)
    train(m, range(3))  # centres, and a teacher other than the student
    given = batch(7, sizes=sizes)
    l_v, l_r = plain(m, given.views, LAST)
    out = m(given, LAST)
    torch.testing.assert_close(out["view"], l_v)
    torch.testing.assert_close(out["region"], l_r)
    torch.testing.assert_close(out["loss"], 0.3 * l_v + 0.9 * l_r)
    params = [p for p in m.student.parameters() if p.requires_grad]
    ours, want = (torch.autograd.grad(loss, params) for loss in (out["loss"], 0.3 * l_v + 0.9 * l_r))
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-6)


def test_until_regions_count_it_is_dino() -> None:
    ours, dino = small(region_from=2), small(DINO)
    first = {n: p.detach().clone() for n, p in ours.student.region_head.named_parameters()}
    optimizer = train(ours, range(6))
    train(dino, range(6))
    state = ours.state_dict()
    for name, want in dino.state_dict().items():
        found = state[name]
        if name.endswith("qkv.bias"):  # that of a key changes nothing: AdamW follows the rounding of its gradient
            found, want = (x.view(3, -1)[::2] for x in (found, want))
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    for name, p in ours.student.region_head.named_parameters():
        assert torch.equal(p, first[name])
        assert torch.equal(ours.teacher.region_head.get_parameter(name), first[name])
        assert not optimizer.state[p]
    assert not ours.region_center.any()
    out = ours(batch(5), Progress(5, 3, 20))
    assert torch.equal(out["loss"], out["view"])
    assert out["region"] == 0


def test_regions_join_and_the_optimiser_goes_on() -> None:
    m = small(region_from=2, freeze_last=0)
    optimizer = train(m, range(8))
    taken = {n: int(optimizer.state[p]["step"]) for n, p in m.named_parameters() if p.requires_grad}
    assert {count for n, count in taken.items() if "region" in n} == {2}
    assert {count for n, count in taken.items() if "region" not in n} == {8}
    assert m.region_center.any()


def test_every_parameter_has_a_gradient_before_and_after() -> None:
    """Without a gradient for every parameter, ranks would wait forever."""
    for epoch in (0, 3):
        m = small(region_from=2)
        m(batch(), Progress(3 * epoch, 3, 20))["loss"].backward()
        assert all(p.grad is not None for p in m.student.parameters() if p.requires_grad)


def test_prototypes_of_both_heads_are_frozen_at_first() -> None:
    m = small(freeze_last=1.0)
    for step, frozen in ((2, True), (3, False)):
        at = Progress(step, 3, 20)
        m(batch(), at)["loss"].backward()
        m.before_step(at)
        still = {n for n, p in m.student.named_parameters() if p.requires_grad and p.grad is None}
        last = {n for n, p in m.student.named_parameters() if "head.last." in n and p.requires_grad}
        assert still == (last if frozen else set())
        assert len(last) == 4


@pytest.mark.parametrize(("task", "still"), [("view_weight", ".head."), ("region_weight", ".region_head.")])
def test_each_task_trains_the_backbone_and_its_own_head(task: str, still: str) -> None:
    m = small(**{task: 0.0})
    m(batch(), LAST)["loss"].backward()
    moved = {n: bool(p.grad.any()) for n, p in m.named_parameters() if p.grad is not None}
    assert moved["student.backbone.model.blocks.0.attn.qkv.weight"]
    assert {yes for n, yes in moved.items() if still in n} == {False}
    heads = {".head.", ".region_head."} - {still}
    assert all(moved[n] for n in moved if any(h in n for h in heads))


@pytest.mark.parametrize("keys", [{"region_loss": "mse"}, {"matching": "sinkhorn"}, {"tokens": 3}])
def test_an_ablation_changes_regions_alone_and_every_parameter_learns(keys: dict[str, Any]) -> None:
    default, m = small(), small(**keys)
    out, was = m(batch(), LAST), default(batch(), LAST)
    assert torch.equal(out["view"], was["view"])
    assert not torch.isclose(out["region"], was["region"], rtol=1e-6)
    out["loss"].backward()
    assert all(p.grad.any() for p in m.student.region_head.parameters() if p.requires_grad)


def test_mse_is_zero_where_regions_agree() -> None:
    m = small(region_loss="mse")
    x = batch(sizes=(16,)).views[0]
    none = torch.empty(0)
    same = Batch([x, x], index=none, label=none, rows=(4,))
    assert abs(m(same, LAST)["region"]) < 1e-5
    assert m(batch(), LAST)["region"] > 1e-3


def test_tokens_are_sampled_where_there_are_more() -> None:
    m, x = small(tokens=9), batch()
    regions = m.student.project(x.views, torch.Generator().manual_seed(3))[1]
    assert [f.shape[1] for f in regions.features] == [9, 9, 4, 4]
    assert len(regions.scores.z) == 4 * (9 + 9 + 4 + 4)
    whole = m.student.backbone(x.views[0]).patches
    for token in regions.features[0][0]:
        assert torch.cdist(token.unsqueeze(0), whole[0]).min() < 1e-4


def test_a_sample_of_tokens_follows_from_the_step_as_on_any_rank() -> None:
    """The loop seeds PyTorch's own generator anew on every rank."""
    m, at = small(tokens=3, center_momentum=1.0), [LAST, LAST, Progress(31, steps_per_epoch=3, epochs=20)]
    losses = []
    for rank, step in enumerate(at):
        torch.manual_seed(rank)
        losses.append(m(batch(), step)["region"].item())
    assert losses[0] == losses[1]
    assert losses[2] != losses[1]


def test_views_of_other_images_do_not_matter() -> None:
    """Tokens are matched within an image, so the loss of two images is the mean of their own losses."""
    m, x = small(center_momentum=1.0), batch(rows=2)
    both = m(x, LAST)["region"]
    none = torch.empty(0)
    own = [
        m(Batch([v[i : i + 1] for v in x.views], index=none, label=none, rows=(1,)), LAST)["region"] for i in range(2)
    ]
    torch.testing.assert_close(both, sum(own) / 2)


def test_what_monitors_read() -> None:
    m = small(teacher_temp=Schedule(value=1e4))
    seen: list[Tensor] = []
    m.teacher.head.mlp.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    out = m(batch(), LAST)
    assert out["entropy"] > 0.999
    assert out["usage"] > 0.999
    [pooled] = seen
    torch.testing.assert_close(pooled[:4], m.export().pooled(batch().views[0]))
