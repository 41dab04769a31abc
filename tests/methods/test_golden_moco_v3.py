"""MoCo v3 against the authors' code, github.com/facebookresearch/moco-v3."""

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.engine.optim import LARS
from eagleray.methods.mocov3 import MoCoV3, ctr
from eagleray.models.ema import ema_update


@cases("moco_v3_loss")
def test_loss(case: Case) -> None:
    q1, q2 = case["q1"].requires_grad_(), case["q2"].requires_grad_()
    tau, rows = case.hyper["temperature"], (len(q1),)
    one, other = ctr(q1, case["k2"], tau, rows), ctr(q2, case["k1"], tau, rows)
    (one + other).backward()
    case.check(one, "loss_q1_k2")
    case.check(other, "loss_q2_k1")
    case.check(one + other, "loss")
    case.check(q1.grad, "grad_q1")
    case.check(q2.grad, "grad_q2")


@cases("moco_v3_loss_gather")
def test_loss_gather(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    world, n, _ = case["q"].shape

    def all_gather(out: Tensor, own: Tensor) -> None:
        torch.testing.assert_close(own, F.normalize(case["k"][dist.rank()], dim=1))
        out.copy_(F.normalize(case["k"], dim=2).flatten(0, 1))

    monkeypatch.setattr(dist, "size", lambda: world)
    monkeypatch.setattr(dist.dist, "all_gather_into_tensor", all_gather)
    losses, q = [], case["q"].requires_grad_()
    for rank in range(world):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        losses.append(ctr(q[rank], case["k"][rank], case.hyper["temperature"], (n,) * world))
    case.check(torch.stack(losses), "loss")
    torch.stack(losses).sum().backward()  # a rank's loss reaches its own queries alone
    case.check(q.grad, "grad_q")


@cases("moco_v3_step")
def test_step(case: Case) -> None:
    h, still = case.hyper, set(case.hyper["online_parameters_without_gradient"])
    backbone = vit(
        *(h[n] for n in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")),
        position="sincos" if "base_encoder.pos_embed" in still else "timm",
        freeze_patch="base_encoder.patch_embed.proj.weight" in still,
    )
    momentum = Schedule(value=h["momentum"])
    method = MoCoV3(backbone, dim=h["dim"], hidden=h["mlp_dim"], temperature=h["temperature"], momentum=momentum)
    method.load_state_dict({ours(name): value for name, value in case.under("w.").items()})

    x1, x2 = case["x1"], case["x2"]
    batch = Batch([x1, x2], index=torch.empty(0), label=torch.empty(0), rows=(len(x1),))
    loss = method(batch, Progress(step=3, steps_per_epoch=10, epochs=2))["loss"]
    loss.backward()

    case.check(loss, "loss")
    params = dict(method.named_parameters())
    for name in case.under("g."):
        # Batch norm over a few nearly equal class tokens blows rounding up: even float64 meets the tolerance only so.
        case.near(params[ours(name)].grad, f"g.{name}")
    for name in case.under("after."):
        case.check(method.state_dict()[ours(name)], f"after.{name}")
    online = {name for name in params if not name.startswith("momentum_encoder.")}
    assert {n for n in online if params[n].grad is None} == {ours(n) for n in still}
    assert not any(params[n].requires_grad for n in params.keys() - online)


def ours(name: str) -> str:
    """Return our name for a parameter of the authors, whose head is inside the ViT; ours is beside it."""
    encoder, _, rest = name.partition(".")
    return name if encoder == "predictor" or rest.startswith("head.") else f"{encoder}.backbone.model.{rest}"


@cases("moco_v3_vit_forward")
def test_vit_forward(case: Case) -> None:
    h = case.hyper
    backbone = vit(
        *(h[n] for n in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")),
        ln_eps=h["ln_eps"],
        mlp_ratio=h["mlp_ratio"],
        position="sincos",
        freeze_patch=h["stop_grad_conv1"],
    )
    case.check(backbone.model.pos_embed, "w.pos_embed")
    backbone.model.load_state_dict(case.under("w."))

    out = backbone.double()(case["x"].double())
    (out.pooled * case["cotangent"]).sum().backward()
    case.check(out.pooled, "out")
    case.check(torch.cat([out.pooled.unsqueeze(1), out.patches], 1), "tokens")
    params = dict(backbone.model.named_parameters())
    case.tolerance["atol"] = 4e-6  # three of the vector's 6,912 gradients, made in float32, are off by up to 3.6e-6
    for name in case.under("g."):
        case.check(params[name].grad, f"g.{name}")
    assert params["pos_embed"].grad is None
    assert (params["patch_embed.proj.weight"].grad is None) == h["stop_grad_conv1"]
    assert (params["patch_embed.proj.bias"].grad is None) == h["stop_grad_conv1"]


@cases("moco_v3_pos_embed")
def test_pos_embed(case: Case) -> None:
    h = case.hyper
    patch = 2
    img = (h["grid_h"] * patch, h["grid_w"] * patch)
    backbone = vit(img, patch, h["dim"], depth=1, heads=1, position="sincos")
    case.check(backbone.model.pos_embed, "pos_embed")
    assert not backbone.model.pos_embed.requires_grad


@cases("moco_v3_ema")
def test_ema(case: Case) -> None:
    numbers = range(case.count("base{}"))
    online = nn.ParameterList([case[f"base{i}"] for i in numbers])
    target = nn.ParameterList([case[f"mom{i}_before"] for i in numbers])
    ema_update(target, online, case.hyper["m"])
    for i in numbers:
        case.check(target[i], f"mom{i}_after")
        assert torch.equal(online[i], case[f"base{i}"])


@cases("moco_v3_heads")
def test_heads(case: Case) -> None:
    h = case.hyper
    method = MoCoV3(vit(8, 8, h["in_dim"], depth=0, heads=1), heads=h["arch"], dim=h["out_dim"], hidden=h["hidden"])
    # In float64, which leaves no rounding but the vector's: batch norm makes much of it in the gradient.
    projector = with_weights(method.base_encoder.head, case, "projector").double()
    predictor = with_weights(method.predictor, case, "predictor").double()
    x = case["x"].double().requires_grad_()
    z = projector(x)
    p = predictor(z)
    (p * case["cotangent"]).sum().backward()
    case.check(z, "z")
    case.check(p, "p")
    case.check(x.grad, "grad_x")
    for name, net in {"projector": projector, "predictor": predictor}.items():
        for key, value in net.state_dict().items():
            case.check(value, f"{name}.{key}")


def with_weights(net: nn.Sequential, case: Case, name: str) -> nn.Sequential:
    """Load the weights of the case, whose running statistics are those after the forward pass."""
    weights = case.under(f"{name}.")
    assert net.state_dict().keys() == weights.keys()
    net.load_state_dict({n: weights[n] if n.endswith((".weight", ".bias")) else v for n, v in net.state_dict().items()})
    assert all(m.eps == case.hyper["bn_eps"] for m in net if isinstance(m, nn.BatchNorm1d))
    return net


@cases("moco_v3_lars")
def test_lars(case: Case) -> None:
    h = case.hyper
    params = [nn.Parameter(case[f"p{i}_init"]) for i in range(case.count("p{}_init"))]
    optimizer = LARS(params, weight_decay=h["weight_decay"], momentum=h["momentum"], trust=h["trust_coefficient"])
    last = len(h["lr"]) - 1
    for step, lr in enumerate(h["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        for i, p in enumerate(params):
            p.grad = case[f"p{i}_grad_step{step}"]
        optimizer.step()
        for i, p in enumerate(params):
            # Some vectors hold the last value at every step: their arrays shared the parameter's memory.
            if step == last or not torch.equal(case[f"p{i}_after_step{step}"], case[f"p{i}_after_step{last}"]):
                case.check(p, f"p{i}_after_step{step}")
    for i, p in enumerate(params):
        case.check(optimizer.state[p]["momentum"], f"p{i}_momentum_final")


@cases("moco_v3_schedule")
def test_schedule(case: Case) -> None:
    h = case.hyper
    at = [Progress(step, h["iters_per_epoch"], h["epochs"]) for step in case["step"].tolist()]
    lr = Schedule(value=h["lr"], warmup=h["warmup_epochs"], end=0.0)
    momentum = Schedule(value=h["moco_m"], end=1.0)
    case.check(torch.tensor([a.epoch for a in at], dtype=torch.float64), "epoch")
    case.check(torch.tensor([lr(a) for a in at], dtype=torch.float64), "lr")
    case.check(torch.tensor([momentum(a) for a in at], dtype=torch.float64), "momentum")
