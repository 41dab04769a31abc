"""Creates optimisers by name, with the parameter groups of the papers.

If an optimiser's attribute `found_inf` is 1, as GradScaler sets it for gradients that are not finite, a step changes
nothing. The host never waits for the device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from timm.models import group_parameters
from torch import Tensor, nn

from eagleray.base.dist import norms
from eagleray.base.errors import UserError
from eagleray.engine.sharded import divide_groups, follow
from eagleray.models.backbone import Backbone

LARC_EPS = 1e-8  # added to LARC's denominator, as in Apex


def make(
    name: str,
    method: nn.Module,
    *,
    decay: str,
    momentum: float = 0.9,
    beta2: float = 0.999,
    constant: Sequence[str] = (),
    constant_lr: float = 0.0,
    layer_decay: float | None = None,
    undecayed_lr_scale: float = 1.0,
) -> torch.optim.Optimizer:
    """Create an optimiser: `adamw` and `sgd` are PyTorch's, fused; `nesterov` is `sgd` with Nesterov momentum; `lars`
    is LARS as in MoCo v3, `larc` as in SwAV, and `lamb` as in its paper.

    Raises UserError for a name in `constant` that is not a submodule of the method, for `layer_decay` when timm does
    not define the layers, and for `undecayed_lr_scale` when every parameter is decayed."""
    groups = param_groups(
        method,
        decay=decay,
        constant=constant,
        constant_lr=constant_lr,
        layer_decay=layer_decay,
        undecayed_lr_scale=undecayed_lr_scale,
    )
    whole = divide_groups(groups)
    optimizer = _create(name, groups, momentum, beta2)
    follow(optimizer, whole)
    return optimizer


@torch.no_grad()
def lay_out_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give moments from a checkpoint the strides of their parameters, on which fused steps rely."""
    for p, state in optimizer.state.items():
        for key, moment in state.items():
            if isinstance(moment, Tensor) and moment.shape == p.shape and moment.stride() != p.stride():
                state[key] = torch.empty_like(p, dtype=moment.dtype, device=moment.device).copy_(moment)


def _create(name: str, groups: list[dict[str, Any]], momentum: float, beta2: float) -> torch.optim.Optimizer:
    if name == "lars":
        return LARS(groups, momentum=momentum)
    if name == "larc":
        return LARC(groups, momentum=momentum)
    if name == "lamb":
        return LAMB(groups)
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, beta2), fused=True)
    assert name in ("sgd", "nesterov"), name
    sgd = torch.optim.SGD(groups, momentum=momentum, nesterov=name == "nesterov", fused=True)
    for p in (p for group in groups for p in group["params"]):
        sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)  # a skipped first step would leave it uninitialised
    return sgd


def param_groups(
    method: nn.Module,
    *,
    decay: str,
    constant: Sequence[str] = (),
    constant_lr: float = 0.0,
    layer_decay: float | None = None,
    undecayed_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Return groups of decayed and undecayed trainable parameters.

    `decay` selects the parameters with weight decay. `all` takes every parameter (MoCo v3). `matrices` leaves out
    biases and other vectors (DINO, which decays its class token, its position table and the lengths (K, 1) of K
    prototypes). `timm` is `matrices` without the parameters that timm's model excludes, such as the class token and
    position tables (DeiT, Swin).

    The submodules of the method named in `constant` have two groups of their own with a `constant_lr`. With
    `layer_decay`, each layer of the backbone has two groups with an `lr_scale`, a factor on the learning rate. The
    groups without weight decay have `undecayed_lr_scale` as a factor, too. Raises UserError as `make` does."""
    scaled = layer_decay is not None or undecayed_lr_scale != 1
    for part in constant:
        if part not in (parts := [n for n, _ in method.named_children()]):
            raise UserError(f"optim.constant_lr={list(constant)}: expected parts of the method: {', '.join(parts)}")
    named = [(n, p) for n, p in method.named_parameters() if p.requires_grad]
    spared = undecayed_names(method) if decay == "timm" else set()
    if decay == "all" and undecayed_lr_scale != 1:
        given = f"optim.undecayed_lr_scale={undecayed_lr_scale}"
        raise UserError(f"{given}: optim.decay=all decays every parameter; expected optim.decay=matrices or timm")
    decayed = [decay == "all" or (p.ndim > 1 and not n.endswith(".bias") and n not in spared) for n, p in named]
    stills = [n.split(".")[0] in constant for n, _ in named]
    deep = {} if layer_decay is None else layer_lr_scales(method, layer_decay)
    shares = [deep.get(n, 1.0) for n, _ in named]
    rows = list(zip(named, decayed, stills, shares, strict=True))
    return [
        {"params": [p for (_, p), *kind in rows if kind == [keep, still, share]], "decay": keep, "weight_decay": 0.0}
        | ({"constant_lr": constant_lr} if still else {})
        | ({"lr_scale": share * (1.0 if keep else undecayed_lr_scale)} if scaled else {})
        for still in ((False, True) if constant else (False,))
        for share in sorted({*shares, 1.0})
        for keep in (True, False)
    ]


def undecayed_names(method: nn.Module) -> set[str]:
    """Return the names of the parameters that the timm models of a method exclude from weight decay."""
    trunks = [(prefix, part.model) for prefix, part in method.named_modules() if isinstance(part, Backbone)]
    spared = ((prefix, model.no_weight_decay()) for prefix, model in trunks if hasattr(model, "no_weight_decay"))
    return {f"{prefix}.model.{name}" for prefix, names in spared for name in names}


def layer_lr_scales(method: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter of a backbone, by name.

    The factor is layer_decay to the power of the number of layers above the parameter's own, with the heads as the last
    layer. timm defines the layers: the stem, then blocks (BEiT: Bao et al. 2022, arXiv:2106.08254). Raises UserError
    when timm does not define them."""
    out: dict[str, float] = {}
    for prefix, part in method.named_modules():
        if isinstance(part, Backbone):
            if not hasattr(part.model, "group_matcher"):
                name = type(part.model).__name__
                raise UserError(f"optim.layer_decay={layer_decay}: timm does not define the layers of {name}")
            layers = group_parameters(part.model, part.model.group_matcher(coarse=False), reverse=True)
            top = max(layers.values()) + 1
            out |= {f"{prefix}.model.{name}": layer_decay ** (top - layer) for name, layer in layers.items()}
            # Mask tokens, of the encoder or the method, enter the backbone where patches do, so they count as the stem.
            out |= dict.fromkeys((f"{prefix.rpartition('.')[0]}.mask_token", "mask_token"), layer_decay**top)
    return out


def scale_by_trust(
    params: list[Tensor], steps: Sequence[Tensor], weight_decay: float, trust: float, *, split: bool = False
) -> list[Tensor]:
    """Return the steps of all tensors. For a matrix p, it is the step plus weight decay, with the norm trust * |p|.

    It is not scaled if its norm or |p| is 0. With `split`, tensors are this rank's rows, but norms cover all rows."""
    wide = [i for i, p in enumerate(params) if p.ndim > 1]
    if not wide:
        return list(steps)
    p = [params[i] for i in wide]
    s = torch._foreach_add([steps[i] for i in wide], p, alpha=weight_decay)
    size, length = norms(p, split=split), norms(s, split=split)
    ratio = torch.where((size > 0) & (length > 0), trust * size / length, 1.0)
    torch._foreach_mul_(s, list(ratio.unbind()))
    scaled = dict(zip(wide, s, strict=True))
    return [scaled.get(i, step) for i, step in enumerate(steps)]


def scale_by_own_norms(
    params: list[Tensor], grads: Sequence[Tensor], weight_decay: float, trust: float, *, split: bool = False
) -> list[Tensor]:
    """Return (g + wd * p) * trust * |p| / (|g| + wd * |p|) for the gradients g of all tensors p; wd is `weight_decay`.

    A gradient of 0 gives a step of 0, without weight decay, and a p of 0 gives g. `split` is as in `scale_by_trust`."""
    steps = torch._foreach_add(list(grads), params, alpha=weight_decay)
    size, length = norms(params, split=split), norms(grads, split=split)
    ratio = trust * size / (length + weight_decay * size + LARC_EPS)
    torch._foreach_mul_(steps, list(torch.where(size > 0, ratio * (length > 0), 1.0).unbind()))
    return list(steps)


class LARS(torch.optim.Optimizer):
    """SGD with momentum that scales the step g + wd * p of a matrix p by trust * |p| / |g + wd * p| (You et al. 2017).

    Here g is the gradient and wd the weight decay. Vectors are neither scaled nor decayed. MoCo v3 and DINO use this
    form; timm's LARS divides by |g| + wd * |p|."""

    scaled: ClassVar[Callable[..., list[Tensor]]] = staticmethod(scale_by_trust)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads, split = [p.grad for p in params], hasattr(self, "whole")
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            torch._fused_sgd_(
                params,
                self.scaled(params, grads, group["weight_decay"], group["trust"], split=split),
                [self.state[p]["momentum"] for p in params] if group["momentum"] else [],
                weight_decay=0.0,
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=getattr(self, "found_inf", None),
            )


class LARC(LARS):
    """SGD with momentum that scales the steps g + wd * p, also of vectors, by trust * |p| / (|g| + wd * |p|).

    Apex calls this form of You et al. 2017, arXiv:1708.03888, LARC without clipping. SwAV's authors use it."""

    scaled = staticmethod(scale_by_own_norms)


class LAMB(torch.optim.Optimizer):
    """Adam that adds wd * p, the weight decay, to the step a of a matrix p and scales the sum to the norm |p|.

    This is algorithm 2 of You et al. 2020, arXiv:1904.00962. Vectors are neither scaled nor decayed. timm's LAMB also
    clips the gradient and cannot skip a step."""

    def __init__(self, params: Iterable[Any]) -> None:
        # `fused` makes load_state_dict keep the step counts on the device.
        defaults = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-6, "fused": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        skip = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"step": torch.zeros((), device=p.device)}
                    self.state[p] |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
            means, squares, steps = ([self.state[p][k] for p in params] for k in ("mean", "square", "step"))
            torch._foreach_add_(steps, 1 if skip is None else 1 - skip)
            moves = torch._foreach_mul(params, 0.0)  # zeros, which Adam's kernel turns into the steps
            torch._fused_adam_(
                moves,
                [p.grad for p in params],
                means,
                squares,
                [],
                steps,
                lr=1.0,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=skip,
            )
            scaled = scale_by_trust(params, moves, -group["weight_decay"], 1.0, split=hasattr(self, "whole"))
            torch._foreach_mul_(scaled, group["lr"] if skip is None else group["lr"] * (1 - skip))
            torch._foreach_add_(params, scaled)
