"""Two parts of a step, each alone and beside the plain way to compute the same.

prototypes   EsViT's loss between tokens over all prototypes with its gradients, beside one that keeps every score
windows      a Swin block's attention within windows with its gradients, beside one that keeps every score

*_ms         median time of the forward and the backward pass; on a GPU compiled too
ratio        plain / ours
*_error      largest difference of ours from the plain way, as a share of the largest number
*_mib        memory at the peak beside the inputs, on a GPU
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import devices
from eagleray.engine.compiling import missing_compiler
from eagleray.engine.precision import autocast
from eagleray.losses.prototypes import Match, cross_entropy
from eagleray.models.zoo.swin import WindowAttention

# Of a step of EsViT with 64 images: rows of tokens of ten crops, of two, prototypes and channels.
ROWS, TEACHER, PROTOTYPES, DIM = 17_152, 6_272, 65_536, 256
WINDOWS, TOKENS, WIDTH, HEADS = 8_192, 49, 96, 3  # Swin-T's first stage has these for 128 images of 224 pixels
TAU_T, TAU_S = 0.07, 0.1


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--share", type=float, default=1.0, help="of the rows, prototypes and windows")
    args = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"device": common.device().type}
    for part in args.parts:
        result |= PARTS[part](args.share, args.rounds)
    common.show(result, as_json=args.json)


def prototypes(share: float, rounds: int) -> dict[str, Any]:
    device, n, m, k = common.device(), *(max(int(share * x), 32) for x in (ROWS, TEACHER, PROTOTYPES))
    s, t = (F.normalize(torch.randn(rows, DIM, device=device), dim=1) for rows in (n, m))
    w = F.normalize(torch.randn(k, DIM, device=device), dim=1)
    s.requires_grad_()
    w.requires_grad_()
    rows = torch.randint(m, (n, 2), device=device)
    rows[: n // 4, 0] = -1  # a large crop has one partner
    pairs = Match(rows, torch.full((n,), 1 / n, device=device))
    center = torch.zeros(k, device=device)

    def ours() -> Tensor:
        return cross_entropy(t, s, w.detach(), w, center, pairs, tau_t=TAU_T, tau_s=TAU_S)

    def plain() -> Tensor:
        p = ((t @ w.detach().T).float() / TAU_T).softmax(1)
        log = ((s @ w.T).float() / TAU_S).log_softmax(1)
        each = [torch.where(at >= 0, -(p[at.clamp(min=0)] * log).sum(1), 0) for at in rows.unbind(1)]
        return (torch.stack(each).sum(0) * pairs.weight).sum()

    return compared({"prototypes": ours, "prototypes_plain": plain}, [s, w], rounds) | {"rows": n, "prototypes": k}


def windows(share: float, rounds: int) -> dict[str, Any]:
    device, number = common.device(), max(int(share * WINDOWS), 64) // 64 * 64
    attention = WindowAttention(WIDTH, HEADS, window_size=(7, 7)).to(device)
    x = torch.randn(number, TOKENS, WIDTH, device=device, requires_grad=True)
    mask = torch.zeros(64, TOKENS, TOKENS, device=device).masked_fill(
        torch.rand(64, TOKENS, TOKENS, device=device) < 0.1, -100.0
    )

    def ours() -> Tensor:
        out: Tensor = attention(x, mask)
        return out.float().square().mean()

    def plain() -> Tensor:
        bias = attention._get_rel_pos_bias() + mask.unsqueeze(1)  # (64, H, N, N)
        q, k, v = attention.qkv(x).view(number, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)  # (W, H, N, d)
        scores = (attention.scale * q @ k.mT).view(-1, *bias.shape) + bias
        out = scores.softmax(-1).view(number, HEADS, TOKENS, TOKENS).to(v.dtype) @ v
        projected: Tensor = attention.proj(out.transpose(1, 2).reshape(x.shape))
        return projected.float().square().mean()

    result = compared({"windows": ours, "windows_plain": plain}, [x, *attention.parameters()], rounds)
    return result | {"windows": number}


def gradients(loss: Callable[[], Tensor], of: Sequence[Tensor]) -> list[Tensor]:
    """Return a loss in the precision of a run, and its gradients."""
    with autocast(of[0].device):
        value = loss()
    return [value.detach(), *torch.autograd.grad(value, of)]


def compared(losses: dict[str, Callable[[], Tensor]], of: Sequence[Tensor], rounds: int) -> dict[str, Any]:
    """Return times and memory of our loss, the first, and of the plain one, and how far their results are apart."""
    device, (name, plain) = common.device(), losses
    ours, theirs = gradients(losses[name], of), gradients(losses[plain], of)
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True)]
    del ours, theirs
    found: dict[str, Any] = {f"{name}_loss_error": errors[0], f"{name}_gradient_error": max(errors[1:])}
    runs = {key: partial(gradients, loss, of) for key, loss in losses.items()}
    found |= timed(runs, rounds)
    found["ratio"] = found[f"{plain}_ms"] / found[f"{name}_ms"]
    if devices.is_accelerator(device):
        found |= {f"{key}_mib": peak(run) / 2**20 for key, run in runs.items()}
        if missing_compiler(device) is None:
            found |= compiled(losses, of, rounds)
    return found


def compiled(losses: dict[str, Callable[[], Tensor]], of: Sequence[Tensor], rounds: int) -> dict[str, Any]:
    """Return the times of compiled losses, or the error where one cannot be compiled."""
    runs = {f"{key}_compiled": partial(gradients, torch.compile(loss), of) for key, loss in losses.items()}
    try:
        return timed(runs, rounds)
    except Exception as e:  # the other numbers are there
        return {"compiled_error": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}


def timed(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of each, which take turns."""

    def waited(run: Callable[[], Any]) -> Callable[[object], None]:
        def once(_: object) -> None:
            run()
            common.wait(common.device())

        return once

    times = common.alternate({name: waited(run) for name, run in candidates.items()}, range(rounds + 1))
    return {f"{name}_ms": 1000 * s.wall for name, s in times.items()}


def peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that a call takes beside what is there."""
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    run()
    common.wait(common.device())
    return int(torch.accelerator.max_memory_allocated() - before)


PARTS: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "prototypes": prototypes,
    "windows": windows,
}

if __name__ == "__main__":
    common.run(main)
