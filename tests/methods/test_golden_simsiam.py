"""SimSiam against the authors' code, github.com/facebookresearch/simsiam, and lightly's loss."""

import torch
from helpers.golden_cases import Case, cases, vit
from torch import nn

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods.simsiam import D, SimSiam


def test_cosines():
    p = torch.eye(4)
    torch.testing.assert_close(D(3 * p, 0.2 * p), torch.tensor(-1.0))
    torch.testing.assert_close(D(p, p.roll(1, 0)), torch.tensor(0.0))


def test_each_view_predicts_the_other_held_still():
    torch.manual_seed(0)
    method = SimSiam(vit(8, 4, 12, 1, 2), dim=6, hidden=4)
    x1, x2 = torch.randn(2, 5, 3, 8, 8)
    batch = Batch([x1, x2], torch.empty(0), torch.empty(0), (5,))
    loss = method(batch, Progress(0, 10, 2))["loss"]
    z1, z2 = (method.encoder([x]) for x in (x1, x2))  # batch norm must not mix the views
    p1, p2 = method.predictor(z1), method.predictor(z2)
    still1, still2 = z1.detach(), z2.detach()
    cosine = nn.CosineSimilarity()
    want = -(cosine(p1, still2).mean() + cosine(p2, still1).mean()) / 2
    torch.testing.assert_close(loss, want)
    params = dict(method.named_parameters())
    for name, ours, expected in zip(
        params,
        torch.autograd.grad(loss, list(params.values())),
        torch.autograd.grad(want, list(params.values())),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, msg=lambda m, n=name: f"{n}: {m}")
    assert method.export() is method.encoder.backbone


@cases("simsiam_loss")
def test_loss(case: Case):
    p1, p2, z1, z2 = (case[n].requires_grad_() for n in ("p1", "p2", "z1", "z2"))
    loss = D(p1, z2) / 2 + D(p2, z1) / 2
    loss.backward()
    case.check(loss, "loss")
    case.check(p1.grad, "grad_p1")
    case.check(p2.grad, "grad_p2")
    assert z1.grad is None
    assert z2.grad is None


@cases("simsiam_heads")
def test_heads(case: Case):
    h = case.hyper
    method = SimSiam(vit(4, 4, h["feature_dim"], 1, 1), dim=h["dim"], hidden=h["pred_dim"])
    heads = nn.ModuleDict({"encoder": nn.ModuleDict({"fc": method.encoder.head}), "predictor": method.predictor})
    weights = case.under("w.")
    # The bias that the authors freeze before the last batch norm, which takes it away, is not there in ours.
    still = f"encoder.fc.{len(method.encoder.head) - 2}.bias"
    assert heads.state_dict().keys() == weights.keys() - {still}
    fresh = {n: v for n, v in heads.state_dict().items() if not n.endswith((".weight", ".bias"))}
    heads.load_state_dict({n: v for n, v in weights.items() if n != still} | fresh)

    z1, z2 = (method.encoder.head(case[n]) for n in ("x1", "x2"))
    p1, p2 = method.predictor(z1), method.predictor(z2)
    for name, ours in {"z1": z1, "z2": z2, "p1": p1, "p2": p2, "loss": D(p1, z2) / 2 + D(p2, z1) / 2}.items():
        case.check(ours, name)
    last = method.encoder.head[-1]
    assert isinstance(last, nn.BatchNorm1d)
    last.running_mean += weights[still] * (1 - (1 - last.momentum) ** 2)  # what two forwards keep of it
    for name, value in heads.state_dict().items():
        case.check(value, f"w.{name}")
