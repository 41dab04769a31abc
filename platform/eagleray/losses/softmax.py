"""Softmaxes of scores z W^T on an accelerator, without writing the scores to its memory.

Memory, not arithmetic, limits a softmax over K prototypes: maximum, exponent, sum and division would each read and
write all scores. Here a tile of scores is computed where it is needed, once for the sum of its row and once for its
probabilities (the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867). That costs one more product, but
writes only the probabilities, two bytes each. Where Triton is missing, PyTorch's own softmax reads scores from memory.

R rows, K prototypes, d channels."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagleray.base.compilers import missing_compiler
from eagleray.losses.products import product, sum_dtype

_LIBRARY = torch.library.Library("eagleray", "FRAGMENT")
_LIBRARY.define("attend_prototypes(Tensor z, Tensor w, Tensor? c) -> (Tensor, Tensor)")


def softmax(z: Tensor, w: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(z w^T - c) (R, K) in the dtype of z (R, d) and w (K, d), and its logsumexp (R,) in float32 at
    least; c is (K,). No gradient passes.

    It is registered as one operator of PyTorch, so that `flops` counts a step traced on any device as on a GPU."""
    out: tuple[Tensor, Tensor] = torch.ops.eagleray.attend_prototypes(z, w, c)
    return out


def _softmax(z: Tensor, w: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    if z.dtype != sum_dtype(z) and _has_kernels(z.device):
        from eagleray.losses.softmax_kernels import softmax as by_tiles  # imported here, as Triton may be missing

        return by_tiles(z, w, c)
    x = product(z, w.T)
    log_p = (x if c is None else x.sub_(c)).log_softmax(1)
    lse = x[:, 0] - log_p[:, 0]
    del x
    return log_p.exp_().to(z.dtype), lse


def _shapes(z: Tensor, w: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    return z.new_empty(len(z), len(w)), z.new_empty(len(z), dtype=sum_dtype(z))


_LIBRARY.impl("attend_prototypes", _softmax, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_prototypes", _shapes, "Meta")


def flops(z: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of `softmax` for z and w of these shapes. It computes the scores twice."""
    return 4 * z[0] * w[0] * w[1]


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Return whether a device runs the kernels: a GPU of AMD, or of NVIDIA since Ampere, with Triton and a compiler."""
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return fits and missing_compiler(device) is None
