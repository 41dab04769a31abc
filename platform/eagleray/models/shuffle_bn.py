"""Batch norm as several small devices would do it, and keys that cannot be told by their neighbours: shuffling BN, He
et al. 2019, arXiv:1911.05722, section 3.3. Nothing here depends on the number of ranks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError


class GroupedBatchNorm(nn.modules.batchnorm._NormBase):
    """Each `group` consecutive images, one device's in the paper, are normalised by their own mean and variance. Not a
    `_BatchNorm` to PyTorch, so that nobody synchronises it."""

    group: int  # images; the last group of a batch may be smaller

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) to the same."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        parts = x.split(self.group)
        found = self.running_mean.new_zeros(2, len(parts), x.shape[1])  # mean and variance of each group
        out = [
            F.batch_norm(part, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, mean, var in zip(parts, *found, strict=True)
        ]
        self._follow(found)
        return torch.cat(out)

    @torch.no_grad()
    def _follow(self, found: Tensor) -> None:
        """Running statistics move once, towards the mean over the groups of all ranks; found (2, groups, C)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        sums = dist.total(F.pad(found.sum(1), (0, 1), value=found.shape[1]))  # (2, C + 1), the number of groups last
        mean, var = sums[:, :-1] / sums[:, -1:]
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var, self.momentum)
        self.num_batches_tracked.add_(1)


def group_batch_norms(module: nn.Module, group: int | None) -> None:
    """Every batch norm of the module becomes, in place, one over groups of images, with the weights and buffers that it
    has; None leaves it as it is. Raises UserError for a kind that it does not know."""
    if group is None:
        return
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d):
                raise UserError(f"method.norm_group={group}: the backbone's {type(child).__name__} cannot be grouped")
            child.__class__ = GroupedBatchNorm  # type: ignore[assignment]  # another forward, the same parameters
            child.group = group  # type: ignore[assignment]


def shuffle(
    x: Tensor, rows: tuple[int, ...], group: int | None, *, seed: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """This rank's share (B, ...) of the global batch in a random order, and what puts rows computed from it back in
    their places. Where there are no groups the order would not matter, and it stays. Raises UserError when the rows of
    some rank are not whole groups."""
    if group is None:
        return x, lambda y: y
    if any(n % group for n in rows):
        given = ", ".join(map(str, sorted(set(rows))))
        raise UserError(f"method.norm_group={group}: expected a divisor of the images of a rank, which are {given}")
    order = torch.randperm(sum(rows), generator=torch.Generator().manual_seed(seed)).to(x.device)
    mine = slice(dist.offset(rows), dist.offset(rows) + len(x))
    return dist.gather(x, rows)[order[mine]], lambda y: dist.gather(y, rows)[order.argsort()[mine]]
