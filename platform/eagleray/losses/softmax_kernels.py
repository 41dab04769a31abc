"""Triton kernels of `softmax`, whose tiles of scores exist only in registers. Imported only if Triton is installed."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, CHANNELS = 128, 128, 64  # a tile has ROWS x COLUMNS scores, and sums CHANNELS channels at a time
SPAN = 4096  # prototypes that one program sums over; so few that even a few rows make enough programs for a GPU
# Triton's interpreter can neither multiply in bfloat16 nor round to it.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
OPTIONS = {"num_warps": 8, "num_stages": 3}  # they use 96 KiB of shared memory on NVIDIA's GPUs, 64 on AMD's


def softmax(z: Tensor, w: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(z W^T - c) (R, K) in the dtype of z (R, d), and its logsumexp (R,) in float32."""
    (n, d), k = z.shape, len(w)
    z, w = z.contiguous(), w.contiguous()
    shift = z.new_empty(0, dtype=torch.float32) if c is None else c.float().contiguous()
    sizes: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": COLUMNS, "CHANNELS": CHANNELS, "SHIFTED": c is not None}
    rows, spans = triton.cdiv(n, ROWS), triton.cdiv(k, SPAN)
    parts = z.new_empty(n, spans, dtype=torch.float32)
    sum_exponents[rows, spans](z, w, shift, parts, n, k, d, SPAN=SPAN, **sizes, **OPTIONS)
    lse, p = parts.logsumexp(1), z.new_empty(n, k, dtype=torch.float32 if INTERPRETED.value else z.dtype)
    # Consecutive programs read the same prototypes, so that most of these reads hit the cache.
    write_shares[rows, triton.cdiv(k, COLUMNS)](z, w, shift, lse, p, n, k, d, **sizes, **OPTIONS)
    return p.to(z.dtype), lse


@triton.jit  # type: ignore[misc]
def tile(
    z: tl.tensor, w: tl.tensor, shift: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    n: tl.tensor, k: tl.tensor, d: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SHIFTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scores (ROWS, COLUMNS) of z's `rows` for the prototypes `columns`, -inf beyond the last prototype."""
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, d, CHANNELS):
        at = first + tl.arange(0, CHANNELS)
        inside = (at < d)[None, :]
        a = tl.load(z + rows[:, None] * d + at[None, :], (rows < n)[:, None] & inside, 0.0)
        b = tl.load(w + columns[:, None] * d + at[None, :], (columns < k)[:, None] & inside, 0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        scores = tl.dot(a, tl.trans(b), scores, input_precision="ieee")
    if SHIFTED:
        scores -= tl.load(shift + columns, columns < k, 0.0)[None, :]
    return tl.where((columns < k)[None, :], scores, float("-inf"))


@triton.jit  # type: ignore[misc]
def sum_exponents(
    z: tl.tensor, w: tl.tensor, shift: tl.tensor, parts: tl.tensor, n: tl.tensor, k: tl.tensor, d: tl.tensor,
    SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SHIFTED: tl.constexpr,
) -> None:  # fmt: skip
    """Write into `parts` (n, spans) the logsumexp of ROWS rows' scores over SPAN prototypes; one program per span."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    begin = tl.program_id(1) * SPAN
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(begin, min(begin + SPAN, k), COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        x = tile(z, w, shift, rows, columns, n, k, d, ROWS, COLUMNS, CHANNELS, SHIFTED)
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        top = higher
    tl.store(parts + rows * tl.num_programs(1) + tl.program_id(1), top + tl.log(total), rows < n)


@triton.jit  # type: ignore[misc]
def write_shares(
    z: tl.tensor, w: tl.tensor, shift: tl.tensor, lse: tl.tensor, p: tl.tensor,
    n: tl.tensor, k: tl.tensor, d: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SHIFTED: tl.constexpr,
) -> None:  # fmt: skip
    """Write one tile of probabilities, of ROWS rows and COLUMNS prototypes, into p (n, k)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tile(z, w, shift, rows, columns, n, k, d, ROWS, COLUMNS, CHANNELS, SHIFTED)
    share = tl.exp(x - tl.load(lse + rows, rows < n, 0.0)[:, None])
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    tl.store(p + rows[:, None] * k + columns[None, :], share.to(p.dtype.element_ty), inside)
