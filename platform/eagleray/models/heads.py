"""Projection and prediction heads that several methods share."""

import itertools
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(widths: list[int], *, norm: bool, last_norm: bool = False, bias: bool = False) -> nn.Sequential:
    """Build linear layers of these widths with ReLU between them.

    `norm` puts batch norm before each ReLU and leaves the biases out, unless `bias` keeps them (SwAV, MoBY).
    `last_norm` adds a batch norm without scale and shift at the end (SimCLR, MoCo v3)."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        last = i == len(widths) - 2
        layers.append(nn.Linear(a, b, bias=bias or not norm))
        if norm and (not last or last_norm):
            layers.append(nn.BatchNorm1d(b, affine=not last))
        if not last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def drop_gradients(*modules: nn.Module) -> None:
    """Keep the parameters of modules unchanged in this step.

    Their gradients become None, because weight decay would still change a parameter whose gradient is zero."""
    for p in (p for module in modules for p in module.parameters()):
        p.grad = None


def zero_loss(module: nn.Module) -> Tensor:
    """Return a loss of zero that gives every parameter a gradient of zero, as data-parallel ranks wait for each one."""
    return 0 * torch.stack([p.sum() for p in module.parameters()]).sum()


class PrototypeHead(nn.Module):
    """DINO's head: an MLP, a bottleneck of unit length and a weight-normalised linear layer of K prototypes."""

    compiled = False  # whether the layers up to the bottleneck run through torch.compile while training

    def __init__(
        self,
        dim: int,
        prototypes: int,
        *,
        layers: int = 3,
        hidden: int = 2048,
        bottleneck: int = 256,
        norm: bool = False,
        free_scale: bool = False,
    ) -> None:
        """With `free_scale`, the length of each prototype is trained; otherwise it is 1.

        Only tests change `layers` and `norm` (batch norm in the hidden layers), to compare with the authors' head."""
        super().__init__()
        widths = [dim] + [hidden] * (layers - 1) + [bottleneck]
        mlp: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
        for a, b in itertools.pairwise(widths[1:]):
            mlp += [nn.BatchNorm1d(a)] * norm + [nn.GELU(), nn.Linear(a, b)]
        self.mlp = nn.Sequential(*mlp)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        scale: nn.Parameter = self.last.parametrizations.weight.original0  # type: ignore[union-attr, assignment, index]
        scale.data.fill_(1)
        scale.requires_grad_(free_scale)

    @property
    def projector(self) -> nn.Module:
        """The layers before the prototypes."""
        return self.mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return unit vectors z (B, bottleneck) of x (B, dim).

        The scores (B, K) are `last(z)`. They are too many for memory, so losses compute them in chunks."""
        run = compiled_projection() if self.compiled and self.training else projection
        return run(self.mlp, x)


def projection(mlp: nn.Module, x: Tensor) -> Tensor:
    """Return an MLP's output for x (B, dim), scaled to length one."""
    return F.normalize(mlp(x), dim=-1)


@cache
def compiled_projection() -> Callable[[nn.Module, Tensor], Tensor]:
    """Return `projection`, compiled for any number of rows, because the number of hidden patches changes every step."""
    return torch.compile(projection)
