"""The training loop: plain PyTorch, one optimiser step per iteration, nothing about where it runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from eagleray import dist
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.schedule import Progress

Step = tuple[Progress, dict[str, Tensor]]


def fit(
    method: Method,
    batches: Iterable[tuple[Progress, Batch]],
    optimizer: torch.optim.Optimizer,
    *,
    lr: Callable[[Progress], float],
    weight_decay: Callable[[Progress], float],
    clip: float | None = None,
    clip_each: bool = False,
    seed: int = 0,
    wrap: Callable[[Method], nn.Module] = lambda method: method,
) -> Iterator[Step]:
    """Train on `batches`, yielding after each optimiser step; the caller logs, saves and evaluates.

    Yields scalars of this rank: the method's own, `grad_norm` before clipping, and `skipped`, which is 1 where the
    gradient was not finite and the step changed nothing.
    """
    model = wrap(method)
    device = next(method.parameters()).device
    params = [p for p in method.parameters() if p.requires_grad]
    for at, batch in batches:
        method.train()
        for group in optimizer.param_groups:
            group["lr"] = lr(at)
            group["weight_decay"] = weight_decay(at) if group["decay"] else 0.0
        before = [b.clone() for b in method.buffers()]
        torch.manual_seed(hash((seed, at.step, dist.rank())) & 0x7FFFFFFF)  # drop path, the same after a restart

        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(batch, at)
        share = batch.rows[dist.rank()] * len(batch.rows) / sum(batch.rows)  # 1 unless ranks hold different numbers
        (out["loss"] * share).backward()

        norm = clip_([p.grad for p in params if p.grad is not None], clip, each=clip_each)
        skipped = ~torch.isfinite(norm)
        optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]  # on the device: nobody waits for it
        method.before_step(at)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        method.after_step(at)
        for buffer, old in zip(method.buffers(), before, strict=True):  # centres, queues, batch norm
            buffer.copy_(torch.where(skipped, old, buffer))

        yield at, {n: v.detach() for n, v in out.items()} | {"grad_norm": norm, "skipped": skipped.float()}


@torch.no_grad()
def clip_(grads: Sequence[Tensor], limit: float | None, *, each: bool) -> Tensor:
    """Scale gradients down, in place, to a norm of `limit`: that of each tensor on its own (DINO), or of all together.
    Returns the norm of all before."""
    norms = torch.stack(torch._foreach_norm(list(grads)))
    norm = torch.linalg.vector_norm(norms)
    if limit is not None:
        factors = (limit / ((norms if each else norm.expand_as(norms)) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(grads), list(factors.unbind()))
    return norm
