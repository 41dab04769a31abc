"""DINO against the authors' code, github.com/facebookresearch/dino."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.engine import loop, optim
from eagleray.methods.dino import DINO
from eagleray.models.ema import ema_update
from eagleray.models.heads import PrototypeHead
from eagleray.models.variants import resample

EPOCH = 7  # steps in one; what moves between epochs is asked for inside them


@cases("dino_loss")
def test_loss(case: Case) -> None:
    h = case.hyper
    teacher_temp = Schedule(
        value=h["teacher_temp"],
        warmup_from=h["warmup_teacher_temp"],
        warmup=h["warmup_teacher_temp_epochs"],
        inclusive=True,
        per_epoch=True,
    )
    for step in range(EPOCH):
        temps = [teacher_temp(Progress(e * EPOCH + step, EPOCH, h["nepochs"])) for e in range(h["nepochs"])]
        case.check(torch.tensor(temps, dtype=torch.float64), "teacher_temp_schedule")

    method = dino(
        prototypes=h["out_dim"],
        student_temp=h["student_temp"],
        teacher_temp=teacher_temp,
        center_momentum=h["center_momentum"],
    )
    method.center.copy_(case["center_initial"].squeeze(0))
    for call, epoch in enumerate(case["epochs"].tolist()):
        student = Fixed(case[f"call{call}_student"])
        teacher = Fixed(case[f"call{call}_teacher"])
        method.student, method.teacher = student, teacher
        loss = method(batch(h["ncrops"], h["batch"]), Progress(epoch * EPOCH + EPOCH - 1, EPOCH, h["nepochs"]))["loss"]
        loss.backward()
        case.check(loss, f"call{call}_loss")
        case.check(student.scores.grad, f"call{call}_grad_student")
        assert teacher.scores.grad is None
        case.check(method.center.unsqueeze(0), f"call{call}_center_after")


class Fixed(nn.Module):
    """An encoder that returns fixed scores (V * B, K)."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)
        self.head = nn.Module()
        self.head.last = nn.Linear(*scores.shape[1:] * 2, bias=False)
        nn.init.eye_(self.head.last.weight)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        return self.scores[: sum(len(view) for view in views)]


def dino(**settings: Any) -> DINO:
    return DINO(vit(8, 8, 4, depth=1, heads=1), hidden=4, bottleneck=4, **settings)


def batch(views: int, rows: int) -> Batch:
    none = torch.empty(0)
    return Batch([torch.empty(rows, 3, 8, 8)] * views, index=none, label=none, rows=(rows,))


@cases("dino_head")
def test_head(case: Case) -> None:
    h, x = case.hyper, case["x"].requires_grad_()
    head = PrototypeHead(
        h["in_dim"],
        h["out_dim"],
        layers=h["nlayers"],
        hidden=h["hidden_dim"],
        bottleneck=h["bottleneck_dim"],
        norm=h["use_bn"],
        free_scale=not h["norm_last_layer"],
    )
    head.load_state_dict({ours(name): value for name, value in case.under("param/").items()})
    y = head.last(head(x))
    (y * case["cotangent"]).sum().backward()
    case.check(y, "y")
    case.check(x.grad, "grad_x")

    params, grads = dict(head.named_parameters()), case.under("grad/")
    for name in grads:
        case.check(params[ours(name)].grad, f"grad/{name}")
    assert {n for n, p in params.items() if p.grad is not None} == {ours(n) for n in grads}
    for name in case.under("after/"):
        case.check(head.state_dict()[ours(name)], f"after/{name}")
    if "y_eval_after" in case.arrays:
        case.check(head.last(head.eval()(case["x"])), "y_eval_after")


def ours(name: str) -> str:
    """Return our name for a parameter of the authors, who use the old weight norm and a bare single layer."""
    name = re.sub(r"^mlp\.(?=[a-z])", "mlp.0.", name)
    last = "last.parametrizations.weight.original"
    return name.replace("last_layer.weight_g", last + "0").replace("last_layer.weight_v", last + "1")


@cases("dino_clip_gradients")
def test_clip(case: Case) -> None:
    limit, order = case.hyper["clip"] or None, case.text["order_of_norms"]
    norms = torch.cat([loop.clip_([case[f"before/{name}"]], None, each=True) for name in order])
    case.check(norms, "norms")
    grads = {name: case[f"before/{name}"] for name in order}
    case.check(loop.clip_(list(grads.values()), limit, each=True), "norms")
    for name, grad in grads.items():
        case.check(grad, f"after/{name}")


@cases("dino_clip_gradients")
def test_freeze_last(case: Case) -> None:
    method, params = with_parameters(case)
    for setting, expected in case.text["cancel_gradients_last_layer"].items():
        epoch, freeze = map(int, re.findall(r"=(\d+)", setting))
        method.freeze_last = freeze
        for step in range(EPOCH):
            for name, p in params.items():
                p.grad = case.under("before/").get(name)
            method.before_step(Progress(epoch * EPOCH + step, EPOCH, epoch + 1))
            kept = {name: "None" if p.grad is None else "kept" for name, p in params.items()}
            assert kept == expected, f"{case.name}: {setting}, step {step} of {EPOCH}"


@cases("dino_clip_gradients")
def test_param_groups(case: Case) -> None:
    method, params = with_parameters(case)
    decayed, plain = (
        {name for name, p in params.items() if any(p is q for q in group["params"])}
        for group in optim.param_groups(method.student, decay="matrices")
    )
    assert decayed == set(case.text["param_groups"]["regularised"])
    assert plain == set(case.text["param_groups"]["not_regularised"])


def with_parameters(case: Case) -> tuple[DINO, dict[str, nn.Parameter]]:
    """Return DINO with the case's parameters in its student, and these parameters by the case's names."""
    groups, shapes = case.text["param_groups"], {n: g.shape for n, g in case.under("before/").items()}
    names = groups["regularised"] + groups["not_regularised"]
    prototypes, bottleneck = shapes["last_layer.weight_v"]
    student = nn.Module()
    student.head = PrototypeHead(
        1, prototypes, layers=1, bottleneck=bottleneck, free_scale="last_layer.weight_g" in names
    )
    del student.head.mlp
    params = {name: p for name in names for key, p in student.head.named_parameters() if key == ours(name)}
    for name in names:
        if name not in params:
            # A parameter without a gradient comes without a shape: it can only be taken for what its group says.
            shape = shapes.get(name, (2, 2) if name in groups["regularised"] else (2,))
            *path, leaf = name.split(".")
            owner = student
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            params[name] = nn.Parameter(torch.zeros(shape))
            owner.register_parameter(leaf, params[name])
    method = dino(prototypes=prototypes)
    method.student = student
    return method, params


@cases("dino_schedules")
def test_schedules(case: Case) -> None:
    for name, h in case.hyper.items():
        schedule = Schedule(
            value=h["base_value"],
            warmup_from=h["start_warmup_value"],
            warmup=h["warmup_epochs"],
            end=h["final_value"],
            inclusive=True,
        )
        steps = h["epochs"] * h["niter_per_ep"]
        full = [schedule(Progress(step, h["niter_per_ep"], h["epochs"])) for step in range(steps)]
        ours = torch.tensor(full, dtype=torch.float64)
        assert len(ours) == h["length"]
        case.check(ours, f"{name}_full")
        case.check(ours[case[f"{name}_steps"]], f"{name}_values")


@cases("dino_ema_update")
def test_ema_update(case: Case) -> None:
    h = case.hyper
    schedule = Schedule(value=h["base"], end=h["final"])
    momentum = [schedule(Progress(step, h["iters"], h["epochs"])) for step in range(h["epochs"] * h["iters"])]
    case.check(torch.tensor(momentum, dtype=torch.float64), "momentum")
    teacher = nn.ParameterList([case["k0"]])
    for step in range(case.count("k_after_step{}")):
        student = nn.ParameterList([case[f"q_after_step{step}"]])
        ema_update(teacher, student, momentum[step])
        case.check(teacher[0], f"k_after_step{step}")


@cases("dino_lars")
def test_lars(case: Case) -> None:
    h = case.hyper
    params = [nn.Parameter(case[f"p{i}_0"]) for i in range(case.count("p{}_0"))]
    optimizer = optim.LARS(params, lr=h["lr"], weight_decay=h["weight_decay"], momentum=h["momentum"], trust=h["eta"])
    for step in range(case.count("g0_{}")):
        for i, p in enumerate(params):
            p.grad = case[f"g{i}_{step}"]
        optimizer.step()
        for i, p in enumerate(params):
            case.check(p, f"p{i}_{step + 1}")


@cases("dino_vit_posembed")
def test_resample(case: Case) -> None:
    patch, table = case.hyper["patch"], case["pos_embed"]
    side = round((table.shape[1] - 1) ** 0.5)
    for height, width in case.hyper["pos_sizes"]:
        ours = resample(table, (side, side), (height // patch, width // patch))
        case.check(ours, f"out_{height}x{width}")


@cases("dino_vit_posembed")
def test_vit(case: Case) -> None:
    h, arrays = case.hyper["vit"], case.under("vit/")
    backbone = vit(h["img"], h["patch"], h["dim"], h["depth"], h["heads"], ln_eps=h["ln_eps"], position="dino")
    backbone.model.load_state_dict(case.under("vit/param/"))
    backbone.eval()
    inputs = {name.removeprefix("x"): x for name, x in arrays.items() if re.match(r"x\d", name)}
    for size, x in inputs.items():
        out = backbone(x)
        case.check(out.pooled, f"vit/cls{size}")
        n = out.grid[0] * out.grid[1]
        assert out.patches.shape[1] == n
        if f"lastattn{size}" in arrays:
            case.check(backbone.attention(x), f"vit/lastattn{size}")
        blocks = {int(name): y for name, y in case.under("vit/interm_").items() if y.shape[1] == 1 + n}
        if blocks:
            last = backbone.model.forward_intermediates(
                x, indices=-min(blocks), norm=True, return_prefix_tokens=True, intermediates_only=True, output_fmt="NLC"
            )
            for block, expected in blocks.items():
                patches, prefix = last[block]
                case.equal(torch.cat([prefix, patches], 1), expected, f"vit/interm_{block}")
