"""Batch norms over the rows of all ranks, or over groups of images.

MoCo normalises the key of an image in another group than its query: if both shared their statistics, the network could
tell from these which belong together (He et al. 2019, arXiv:1911.05722, section 3.3). Results are the same for any
number of ranks. B images, C channels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError

KERNELS = ("cuda", "xpu")  # device types with kernels for PyTorch's SyncBatchNorm: GPUs of NVIDIA, AMD and Intel


class PortableSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the rows of all ranks, on any device. Ranks may have different numbers of rows."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        if not self.training or dist.size() == 1:
            return super().forward(x)
        axes, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        n = dist.total(wide.new_full((1,), x.numel() / x.shape[1]))
        mean = dist.total_with_grad(wide.sum(axes)) / n
        centred = wide - mean.view(shape)
        var = dist.total_with_grad(centred.square().sum(axes)) / n
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum or 0.1)
                self.running_var.lerp_(var * n / (n - 1), self.momentum or 0.1)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        return (torch.addcmul(self.bias.view(shape), out, self.weight.view(shape)) if self.affine else out).to(x.dtype)


OVER_RANKS = (PortableSyncBatchNorm, nn.SyncBatchNorm)


def sync_batch_norms(module: nn.Module, device: torch.device) -> nn.Module:
    """Turn every batch norm of a module, in place, into one over all ranks, with the same weights and buffers.

    Raises UserError for a kind of batch norm other than PyTorch's 1d and 2d on a device other than those of KERNELS."""
    if device.type in KERNELS:
        return convert_sync_batchnorm(module)  # timm's, as PyTorch's would lose the activation in timm's batch norms
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d):
            raise UserError(
                f"workers: expected 1, because the backbone's {type(child).__name__} is synchronised on "
                f"{' and '.join(KERNELS)} devices only"
            )
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            child.__class__ = PortableSyncBatchNorm  # type: ignore[assignment]  # only `forward` changes
    return module


class _NormEach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x (V, B, C) normalised for each view, the means and variances (V, C), and the number of rows per view;
        statistics are over all ranks."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = wide.mean(1)  # (V, C)
        sums = torch.stack([own, (wide - own.unsqueeze(1)).square().sum(1)])
        row = torch.cat([sums.flatten(), sums.new_full((1,), wide.shape[1])])
        rows = dist.gather(row.unsqueeze(0), (1,) * dist.size())  # one row of each rank
        counts, (means, squares) = rows[:, -1:].unsqueeze(2), rows[:, :-1].view(-1, *sums.shape).unbind(1)
        n = counts.sum()
        mean = (counts * means).sum(0) / n
        var = (squares + counts * (means - mean).square()).sum(0) / n  # combined as by Chan, Golub and LeVeque 1979
        scale = torch.rsqrt(var + eps).unsqueeze(1)
        normed = (wide - mean.unsqueeze(1)) * scale
        out = normed if weight is None or bias is None else torch.addcmul(bias, normed, weight)
        ctx.save_for_backward(normed, scale, weight, n)
        ctx.mark_non_differentiable(mean, var, n)
        return out.to(x.dtype), mean, var, n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight, n = ctx.saved_tensors
        g = grads[0].to(normed.dtype)
        of_weight = of_bias = None
        if weight is not None:
            of_weight, of_bias = (g * normed).sum((0, 1)), g.sum((0, 1))
            g = g * weight
        sums = dist.total(torch.stack([g.sum(1), (g * normed).sum(1)])).unsqueeze(2) / n  # (2, V, 1, C)
        of_x = (g - sums[0] - normed * sums[1]) * scale
        return of_x.to(grads[0].dtype), of_weight, of_bias, None


def each_view(head: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """Return a head's output for each of the inputs `views` (B, C); its batch norms never mix two inputs.

    Batch norms over all ranks exchange the statistics of all inputs in one message."""
    together = len(views) > 1 and head.training and dist.size() > 1 and isinstance(head, nn.Sequential)
    if not together or not any(isinstance(layer, OVER_RANKS) for layer in head):  # type: ignore[attr-defined]
        return [head(x) for x in views]
    x = torch.cat(list(views))
    for layer in head:  # type: ignore[attr-defined]
        x = _norm_each(layer, x, len(views)) if isinstance(layer, OVER_RANKS) else layer(x)
    outs = list(x.chunk(len(views)))
    for hook in head._forward_hooks.values():  # the monitor's hooks expect one call for each view
        for view, out in zip(views, outs, strict=True):
            hook(head, (view,), out)
    return outs


def _norm_each(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, views: int) -> Tensor:
    parts = x.unflatten(0, (views, -1))  # (V, B, C)
    out, mean, var, n = _NormEach.apply(parts, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    with torch.no_grad():
        norm.num_batches_tracked.add_(views)
        for i in range(views):
            norm.running_mean.lerp_(mean[i].to(norm.running_mean.dtype), norm.momentum or 0.1)
            norm.running_var.lerp_((var[i] * n / (n - 1)).to(norm.running_var.dtype), norm.momentum or 0.1)
    return out.flatten(0, 1)  # type: ignore[no-any-return]


class GroupedBatchNorm(nn.modules.batchnorm._NormBase):
    """Batch norm with separate statistics for each `group` consecutive images. In MoCo, a group is one GPU's batch.

    A group may be spread over several ranks with equally many images. The class does not inherit from `_BatchNorm`,
    because `sync_batch_norms` would turn it into a norm over all ranks."""

    group: int  # images per group; the last group of a batch may be smaller
    images: int | None = None  # number of images on this rank, whose rows are consecutive; None: one row per image

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        group = self.group * (len(x) // (self.images or len(x)))  # rows per group
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
        """Normalise x (B, C, ...) if each group consists of all rows of `group / B` consecutive ranks."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        own, groups = dist.rank() * len(x) // group, dist.size() * len(x) // group
        count = group * x[0, 0].numel()

        def means(values: Tensor) -> Tensor:
            """Return the means (G, C) over all images and positions of each of G groups."""
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
        """Move the running statistics one step towards the mean of `moments` (2, groups, C) over all ranks' groups."""
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

    `group` is the number of images in a group; None turns grouped norms into what they were. Raises UserError for a
    kind of batch norm other than PyTorch's 1d and 2d."""
    for child in module.modules():
        if group is None and isinstance(child, GroupedBatchNorm):
            child.__class__ = child.plain  # type: ignore[assignment]
        elif group and isinstance(child, nn.modules.batchnorm._BatchNorm):
            if type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d):
                raise UserError(f"method.norm_group={group}: the backbone's {type(child).__name__} cannot be grouped")
            child.__class__, child.plain = GroupedBatchNorm, type(child)  # type: ignore[assignment]
            child.group = group  # type: ignore[assignment]


def count_images(module: nn.Module, images: int) -> None:
    """Tell the grouped batch norms of a module how many images this rank has, if each image has several rows.

    The number stays set until the next call, as the backward pass may recompute activations."""
    for child in module.modules():
        if isinstance(child, GroupedBatchNorm):
            child.images = images


def check_groups(group: int, rows: tuple[int, ...]) -> None:
    """Raises UserError unless `group` divides each rank's `rows`, or a group is all rows of several equal ranks."""
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
    """Shuffle the rows of x (B, ...) across all ranks, so that the batch norm groups of keys hold other images than
    those of queries. Return this rank's rows, and a function that undoes the shuffle.

    `rows` is the number of rows of each rank, `group` the number of images in a group. If it is None, x is returned
    unchanged, as batch norm over all rows does not depend on their order. Raises UserError for a `group` that does not
    fit `rows` (see `check_groups`)."""
    if group is None:
        return x, lambda y: y
    check_groups(group, rows)
    generator = torch.Generator(x.device).manual_seed(seed)  # draws on the device, so that no copy waits for it
    order = torch.randperm(sum(rows), generator=generator, device=x.device)
    own = slice(dist.offset(rows), dist.offset(rows) + len(x))
    return dist.gather(x, rows)[order[own]], lambda y: dist.gather(y, rows)[order.argsort()[own]]
