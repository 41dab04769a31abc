"""Optimisers by name and the parameter groups of the papers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def make(name: str, method: nn.Module, *, decay: str) -> torch.optim.Optimizer:
    """`adamw` with PyTorch's defaults, fused; or `lars` as in MoCo v3."""
    groups = param_groups(method, decay=decay)
    return LARS(groups) if name == "lars" else torch.optim.AdamW(groups, fused=True)


def param_groups(method: nn.Module, *, decay: str) -> list[dict[str, Any]]:
    """Decayed and undecayed trainable parameters. `all` decays everything (MoCo v3), `matrices` leaves out biases and
    other vectors (DINO, whose class token and position table are decayed, and whose prototype lengths (K, 1) too)."""
    named = [(n, p) for n, p in method.named_parameters() if p.requires_grad]
    decayed = [decay == "all" or (p.ndim > 1 and not n.endswith(".bias")) for n, p in named]
    return [
        {
            "params": [p for (_, p), d in zip(named, decayed, strict=True) if d == keep],
            "decay": keep,
            "weight_decay": 0.0,
        }
        for keep in (True, False)
    ]


class LARS(torch.optim.Optimizer):
    """SGD with momentum, each matrix's step scaled by trust * |p| / |g + wd * p|; vectors are neither scaled nor
    decayed (You et al. 2017; as in MoCo v3 and DINO: timm's divides by |g| + wd * |p|)."""

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
        """One step of every parameter with a gradient; none where `found_inf` was set to one, as GradScaler does."""
        if bool(getattr(self, "found_inf", 0)):
            return
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = self._scaled(params, group)
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, grads)
            torch._foreach_add_(params, momenta, alpha=-group["lr"])

    def _scaled(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The gradients, those of matrices decayed and brought to their trust ratio."""
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        wide = [i for i, p in enumerate(params) if p.ndim > 1]
        if wide:
            p, g = [params[i] for i in wide], [grads[i] for i in wide]
            g = list(torch._foreach_add(g, p, alpha=group["weight_decay"]))
            size, slope = torch.stack(torch._foreach_norm(p)), torch.stack(torch._foreach_norm(g))
            ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
            torch._foreach_mul_(g, list(ratio.unbind()))
            for i, scaled in zip(wide, g, strict=True):
                grads[i] = scaled
        return grads
