"""The training loop in plain PyTorch: one optimiser step per iteration, on any device and any number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import PluginError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.queue import Memory


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one optimiser step. P is the number of trainable tensors."""

    at: Progress
    batch: Batch
    values: dict[str, Tensor]  # scalars of this rank: the method's, `grad_norm` before clipping, and `skipped`
    norms: Tensor  # (P,) norm of each gradient before clipping; 0 where there is none


class Trainer:
    """Trains a method: `step` takes one optimiser step on one batch, and `steps` one on each of several batches.

    A step whose gradient is not finite changes neither parameters nor buffers, and its `skipped` is 1. During the first
    `freeze` epochs the backbones do not change and are in evaluation mode. Without `precision`, steps use the number
    format that `auto` selects for the device."""

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        *,
        lr: Callable[[Progress], float],
        weight_decay: Callable[[Progress], float],
        clip: float | None = None,
        clip_each: bool = False,
        clip_patch: float | None = None,
        freeze: float = 0.0,
        seed: int = 0,
        wrap: Callable[[Method], nn.Module] = lambda method: method,
        precision: Precision | None = None,
    ) -> None:
        self.method, self.optimizer, self.lr, self.weight_decay = method, optimizer, lr, weight_decay
        self.clip, self.clip_each, self.clip_patch = clip, clip_each, clip_patch
        self.freeze, self.seed = freeze, seed
        self.model = wrap(method)
        self.precision = precision or Precision.of("auto", next(method.parameters()).device)
        self.params = [p for p in method.parameters() if p.requires_grad]
        self.trunks = [m for m in method.modules() if isinstance(m, Backbone)]
        self.patch = {id(p) for p in patch_parameters(method)} if clip_patch else set()
        buffers = [b for m in method.modules() if not isinstance(m, Memory) for b in m.buffers(recurse=False)]
        self.guard = BufferGuard(buffers)

    def steps(self, batches: Iterable[tuple[Progress, Batch]]) -> Iterator[Step]:
        """Return an iterator over the steps on these batches. Each step is taken when the iterator is advanced."""
        return starmap(self.step, batches)

    def step(self, at: Progress, batch: Batch) -> Step:
        """Take an optimiser step, without making the host wait for the device."""
        method, optimizer, precision, params = self.method, self.optimizer, self.precision, self.params
        method.train()
        frozen = self.trunks if at.epoch < self.freeze else []
        for trunk in self.trunks:
            trunk.held, trunk.draw = bool(frozen), at.draw
        for trunk in frozen:
            trunk.eval()
        for group in optimizer.param_groups:
            group["lr"] = (group.get("constant_lr") or self.lr(at)) * group.get("lr_scale", 1.0)
            group["weight_decay"] = self.weight_decay(at) if group["decay"] else 0.0
        before = self.guard.copies()
        # Seeded by step and rank, so that drop path is the same after a restart.
        torch.manual_seed(hash((self.seed, at.step, dist.rank())) & 0x7FFFFFFF)

        with precision.autocast():
            out = self.model(batch, at)
        check_output(method, out)
        share = batch.rows[dist.rank()] * len(batch.rows) / sum(batch.rows)  # weight of a rank, by its number of rows
        precision.scale(out["loss"] * share).backward()

        for trunk in frozen:
            trunk.model.zero_grad(set_to_none=True)
        live = [i for i, p in enumerate(params) if p.grad is not None]
        grads: list[Tensor] = [params[i].grad for i in live]  # type: ignore[misc]
        precision.unscale_(grads)
        norms = clip_(grads, self.clip, each=self.clip_each)
        if of_patch := [g for i, g in zip(live, grads, strict=True) if id(params[i]) in self.patch]:
            clip_(of_patch, self.clip_patch, each=False)
        norm = torch.linalg.vector_norm(norms)
        skipped = ~torch.isfinite(norm)
        overflow = skipped.float()
        # It stays on the device, so the host does not wait.
        optimizer.found_inf = overflow  # type: ignore[attr-defined]
        method.before_step(at)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.after_step(at)
        self.guard.restore(before, skipped)

        values = {n: v.detach() for n, v in out.items()} | {"grad_norm": norm, "skipped": overflow}
        values |= precision.values()
        precision.update(overflow)
        return Step(at, batch, values, norms if len(live) == len(params) else spread(norms, live, len(params)))


def check_output(method: Method, out: object) -> None:
    """Raises PluginError when the output of a method's forward pass is not a dictionary with a loss."""
    if not isinstance(out, dict) or "loss" not in out:
        what = f"the keys {sorted(out)}" if isinstance(out, dict) else f"a {type(out).__name__}"
        raise PluginError(f"{type(method).__name__}.forward returned {what}, expected a dict with `loss`")


def spread(norms: Tensor, live: Sequence[int], count: int) -> Tensor:
    """Return a vector (count,) with the gradient norms `norms` at the positions `live`, and 0 elsewhere."""
    each, none = dict(zip(live, norms.unbind(), strict=True)), norms.new_zeros(())
    return torch.stack([each.get(i, none) for i in range(count)])


class BufferGuard:
    """Copies buffers, such as centres and batch norm's statistics, before a step, and restores them if it is skipped.

    The buffers of each dtype are joined into one vector, so that many buffers need no more operations than few."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for b in buffers:
            by_dtype.setdefault(b.dtype, []).append(b.detach().view(-1))
        self.groups = list(by_dtype.values())

    def copies(self) -> list[Tensor]:
        """Return the values of all buffers, one vector for each dtype."""
        return [torch.cat(group) for group in self.groups]

    def restore(self, copies: list[Tensor], skipped: Tensor) -> None:
        """Set the buffers to `copies` if the scalar tensor `skipped` is true. The host does not wait for the device."""
        for group, old in zip(self.groups, copies, strict=True):
            values = torch.where(skipped, old, torch.cat(group))
            torch._foreach_copy_(group, list(values.split([len(b) for b in group])))


def patch_parameters(method: Method) -> list[nn.Parameter]:
    """Return the trained parameters of the patch projections of a method's backbones."""
    models = [m.model for m in method.modules() if isinstance(m, Backbone) and hasattr(m.model, "patch_embed")]
    return [p for model in models for p in model.patch_embed.parameters() if p.requires_grad]


@torch.no_grad()
def clip_(grads: Sequence[Tensor], limit: float | None, *, each: bool) -> Tensor:
    """Scale P gradients in place to a norm of at most `limit`, if set, and return their norms (P,) before that.

    The limit holds for the norm of all gradients together or, with `each`, for the norm of each tensor (DINO)."""
    norms, grads = dist.norms(grads), dist.local(grads)
    if limit is not None:
        norm = torch.linalg.vector_norm(norms)
        factors = (limit / ((norms if each else norm.expand_as(norms)) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, list(factors.unbind()))
    return norms
