"""Shuffling batch norm: statistics over groups of images, with keys encoded in a different order from queries.

He et al. 2019, arXiv:1911.05722, section 3.3. Nothing here depends on the number of ranks. B images, C channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError


class GroupedBatchNorm(nn.modules.batchnorm._NormBase):
    """Batch norm with separate statistics for each `group` consecutive images; in the paper a group is one GPU's batch.

    A group may be spread over several ranks with equally many images. It is not a subclass of PyTorch's `_BatchNorm`,
    which would be synchronised over all ranks.
    """

    group: int  # images; the last group of a batch may be smaller
    images: int | None = None  # this rank's images, where each has several consecutive rows; None: one row each

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        group = self.group * (len(x) // (self.images or len(x)))  # rows
        if dist.size() > 1 and len(x) < group:
            return self._over_ranks(x, group)
        parts = x.split(group)
        moments = self.running_mean.new_zeros(2, len(parts), x.shape[1])  # mean and variance of each group
        out = [
            F.batch_norm(part, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
            for part, mean, var in zip(parts, *moments, strict=True)
        ]
        self._update_running(moments)
        return torch.cat(out)

    def _over_ranks(self, x: Tensor, group: int) -> Tensor:
        """Normalise x (B, C, ...) where each group consists of the rows of `group / B` neighbouring ranks."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        own, groups = dist.rank() * len(x) // group, dist.size() * len(x) // group
        count = group * x[0, 0].numel()

        def means(values: Tensor) -> Tensor:
            """Return the means (G, C) over the images and places of every group."""
            sums = values.transpose(0, 1).flatten(1).sum(1)[None]
            return dist.total_with_grad(F.pad(sums, (0, 0, own, groups - own - 1))) / count

        values = x.to(self.weight.dtype)
        mean = means(values)
        centred = values - mean[own].view(shape)
        var = means(centred.square())
        self._update_running(torch.stack([mean, var * count / (count - 1)]))
        scaled = centred * (var[own] + self.eps).rsqrt().view(shape)
        return (scaled * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _update_running(self, moments: Tensor) -> None:
        """Move the running statistics once, to the mean of `moments` (2, groups, C) over the groups of all ranks."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        sums = dist.total(
            F.pad(moments.sum(1), (0, 1), value=moments.shape[1])
        )  # (2, C + 1), the number of groups last
        mean, var = sums[:, :-1] / sums[:, -1:]
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var, self.momentum)
        self.num_batches_tracked.add_(1)


def group_batch_norms(module: nn.Module, group: int | None) -> None:
    """Turn every batch norm of a module, in place, into one over groups of images, with the same weights and buffers.

    `group` is the number of images in a group; None changes nothing. Raises UserError for a kind of batch norm other
    than PyTorch's 1d and 2d.
    """
    if group is None:
        return
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d):
                raise UserError(f"method.norm_group={group}: the backbone's {type(child).__name__} cannot be grouped")
            child.__class__ = GroupedBatchNorm  # type: ignore[assignment]  # another forward, the same parameters
            child.group = group  # type: ignore[assignment]


def count_images(module: nn.Module, images: int) -> None:
    """Tell the grouped batch norms of a module how many images this rank has in a step whose images have several rows.

    It holds until the next call, so also when activations are computed again in the backward pass.
    """
    for child in module.modules():
        if isinstance(child, GroupedBatchNorm):
            child.images = images


def check_groups(group: int, rows: tuple[int, ...]) -> None:
    """Check that every rank has whole groups, or every group whole ranks with equally many rows. Raises UserError."""
    counts = sorted(set(rows))
    if any(n % group for n in rows) and not (len(counts) == 1 and group % counts[0] == 0 == sum(rows) % group):
        given = ", ".join(map(str, counts))
        raise UserError(
            f"method.norm_group={group}: expected a divisor of the images per rank: {given}; or, where all ranks have "
            "equally many, a multiple of them that divides optim.batch"
        )


def shuffle(
    x: Tensor, rows: tuple[int, ...], group: int | None, *, seed: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's rows (B, ...) of the shuffled global batch, and a function that restores the order of rows.

    With `group` None the order does not matter and is unchanged. Raises UserError when groups do not fit the rows.
    """
    if group is None:
        return x, lambda y: y
    check_groups(group, rows)
    generator = torch.Generator(x.device).manual_seed(seed)  # a copy from the host would wait
    order = torch.randperm(sum(rows), generator=generator, device=x.device)
    own = slice(dist.offset(rows), dist.offset(rows) + len(x))
    return dist.gather(x, rows)[order[own]], lambda y: dist.gather(y, rows)[order.argsort()[own]]
