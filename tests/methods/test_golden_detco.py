"""DetCo against equations 1 to 5 of its paper, arXiv:2102.04803, whose authors have released no code of pretraining."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods import detco
from eagleray.methods.detco import DetCo
from eagleray.models.backbone import Backbone
from eagleray.models.jigsaw import jigsaw
from eagleray.models.queue import Queue

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
STILL = Schedule(value=1.0)


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


def resnet(*channels: int, **options: Any) -> Backbone:
    small = {"channels": channels or (4, 8, 8, 16), "stem_width": 4, "zero_init_last": False}
    return Backbone("resnet10t", options=small | options)


def views(n: int = 4, size: int = 32, uncut: int = 48) -> list[Tensor]:
    return [torch.randn(n, 3, s, s) for s in (size, size, uncut, uncut)]


def heads(encoder: Any) -> dict[str, list[nn.Sequential]]:
    """The heads of images (g) and of patches (l), by stage."""
    return {"g": [*encoder.stage_heads, encoder.head], "l": [*encoder.local_heads]}


@cases("detco_loss")
def test_step(case: Case) -> None:
    """The backbones are replaced by the pooled maps recorded in the golden vector."""
    h, b = case.hyper, len(case["q_f0"])
    settings: dict[str, Any] = {"weights": tuple(h["weights"]), "temperature": h["temperature"], "queue": h["queue"]}
    widths = [case[f"q_f{i}"].shape[1] for i in range(4)]
    method = DetCo(resnet(*widths), dim=case["queue_g0"].shape[1], momentum=STILL, **settings).double()
    # Gradients of the pooled maps of queries and of the parameters of their heads.
    trained: dict[str, Tensor] = {n: case[n].double().requires_grad_() for n in case.arrays if n[:3] in ("q_f", "q_p")}

    def of(name: str) -> Tensor:
        return trained.get(name, case[name].double())

    for who, encoder in (("q", method.f_q), ("k", method.f_k)):
        encoder.backbone.pooled_stages = lambda x, who=who: [
            of(f"{who}_f{i}") if len(x) == b else of(f"{who}_p{i}").flatten(0, 1) for i in range(4)
        ]
        for kind, of_stages in heads(encoder).items():
            for i, head in enumerate(of_stages):
                for n, layer in enumerate((head[0], head[2]), 1):
                    for letter, p in (("w", layer.weight), ("b", layer.bias)):
                        p.data.copy_(case[f"{who}_{kind}{i}_{letter}{n}"])
                        trained[f"{who}_{kind}{i}_{letter}{n}"] = p
    queues = {"g": method.queues, "l": method.local_queues}
    for kind, i in ((kind, i) for kind in "gl" for i in range(4)):
        queues[kind][i].keys.copy_(case[f"queue_{kind}{i}"].T)

    loss = method(batch_of(*(v.double() for v in views(b))), AT)["loss"]
    loss.backward()
    case.check(loss, "loss")
    grads = [name.removeprefix("grad_") for name in case.arrays if name.startswith("grad_")]
    assert set(grads) == {name for name in trained if name.startswith("q_")}
    for name in grads:
        case.check(trained[name].grad, f"grad_{name}")
    for kind, i in ((kind, i) for kind in "gl" for i in range(4)):
        case.check(queues[kind][i].keys.T, f"queue_{kind}{i}_after")


@cases("detco_loss")
def test_losses_of_a_stage(case: Case) -> None:
    method, (b, _, _) = DetCo(resnet(), dim=8, queue=16), case["q_p0"].shape
    method.temperature = case.hyper["temperature"]

    def projected(who: str, kind: str, i: int) -> Tensor:
        x = case[f"{who}_f{i}"] if kind == "g" else case[f"{who}_p{i}"].reshape(b, -1)
        for n in (1, 2):
            x = F.linear(x.relu() if n == 2 else x, case[f"{who}_{kind}{i}_w{n}"], case[f"{who}_{kind}{i}_b{n}"])
        return F.normalize(x, dim=1)

    for i in range(4):
        for q, k in ("gg", "ll", "lg"):
            queue = Queue(*case[f"queue_{k}{i}"].T.shape)
            queue.keys.copy_(case[f"queue_{k}{i}"].T)
            loss = method.contrast(projected("q", q, i), projected("k", k, i), queue)
            case.check(loss, f"loss_{''.join(sorted(q + k))}{i}")


@pytest.mark.parametrize("name", ["resnet50", "resnet18", "convnext_atto", "resnetv2_50", "nfnet_f0", "cspresnet50"])
def test_networks_of_convolutions_are_taken(name: str) -> None:
    with torch.device("meta"):
        method = DetCo(Backbone(name), queue=16)
        method.check_views(views(2, 64, 255))
    assert [p.numel() for p in method.f_q.head.parameters()][-1] == 128
    assert method.export().state_dict().keys() == Backbone(name).state_dict().keys()


ONE_LINE = r"^backbone\.name: detco learns from [^\n]+, and {} has none that it knows; expected one such as resnet50$"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vit_tiny_patch16_224", "VisionTransformer"),
        ("swin_tiny_patch4_window7_224", "SwinTransformer"),
        ("pvt_v2_b0", "PyramidVisionTransformerV2"),
        ("efficientnet_b0", "EfficientNet"),
        ("mixer_s32_224", "MlpMixer"),
    ],
)
def test_other_backbones_are_refused_in_a_line(name: str, kind: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=ONE_LINE.format(kind)):
        DetCo(Backbone(name))


def test_a_weight_for_each_stage() -> None:
    with pytest.raises(
        UserError, match=r"^method\.weights=\[0\.5, 1\.0\]: expected one for each of the 4 stages of ResNet$"
    ):
        DetCo(resnet(), weights=(0.5, 1.0))


def test_views_of_which_no_patch_can_be_cut() -> None:
    method = DetCo(resnet(), queue=16)
    with pytest.raises(
        UserError, match=r"^views: the backbone cannot take patches of 0 pixels, .* a view of 3: [^\n]+$"
    ):
        method.check_views(views(2, 32, 3))


def test_patches_are_64_of_255_pixels() -> None:
    assert [detco.side(torch.empty(1, 3, s, s)) for s in (255, 48, 224, 96)] == [64, 12, 56, 24]
    assert all(detco.side(torch.empty(1, 3, s, s)) <= s // 3 for s in range(3, 300))


def test_every_stage_learns_and_keys_do_not() -> None:
    torch.manual_seed(0)
    method = DetCo(resnet(), dim=8, queue=20)
    method(batch_of(*views()), AT)["loss"].backward()
    reached = {n for n, p in method.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {n.partition(".")[0] for n in reached} == {"f_q"}
    assert reached == {n for n, p in method.named_parameters() if p.requires_grad}


def test_a_stage_is_as_heavy_as_its_weight() -> None:
    """The first stage's head has gradients that follow its weight, and a stage none from those before it."""
    torch.manual_seed(0)
    x, grads = batch_of(*views()), []
    for weight in (1.0, 3.0):
        torch.manual_seed(1)
        method = DetCo(resnet(), dim=8, queue=20, weights=(weight, 1.0, 1.0, 1.0))
        method(x, AT)["loss"].backward()
        encoder = method.f_q
        grads.append((encoder.stage_heads[0][0].weight.grad, encoder.local_heads[3][0].weight.grad))
        assert encoder.backbone.model.layer4[0].conv1.weight.grad is not None
    torch.testing.assert_close(grads[1][0], 3 * grads[0][0])
    torch.testing.assert_close(grads[1][1], grads[0][1])


def test_keys_are_of_the_momentum_encoder_after_it_moved() -> None:
    method = DetCo(resnet(), dim=8, queue=20, momentum=Schedule(value=0.0))  # keys are encoded as queries are
    for p in method.f_k.parameters():
        p.mul_(1.5)
    x, _, p, _ = given = views()
    method(batch_of(x, x, *given[2:]), AT)
    want = F.normalize(method.f_q.encode(x, torch.randn(4, 9, 3, 12, 12)), dim=-1)[:, 0]
    for i, queue in enumerate(method.queues):
        torch.testing.assert_close(queue.keys[:, :4], want[:, i].T)
    assert all(int(queue.next) == 4 for queue in (*method.queues, *method.local_queues))


def test_patches_of_queries_and_of_keys_are_cut_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Tensor] = []
    monkeypatch.setattr(detco, "jigsaw", lambda *args: cut.append(jigsaw(*args)) or cut[-1])
    method, x = DetCo(resnet(), dim=8, queue=20), views()
    x[3] = x[2]
    for step in (3, 3, 4):
        method(batch_of(*x), Progress(step, 10, 2))
    assert torch.equal(cut[0], cut[2])  # the same step
    assert torch.equal(cut[1], cut[3])
    assert len({tuple(c.flatten()[:8].tolist()) for c in cut}) == 4
