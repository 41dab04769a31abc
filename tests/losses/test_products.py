"""Similarities keep float32 where autocast would round them to 16 bits."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base.autocast import in_float32
from eagleray.losses.infonce import logits
from eagleray.losses.nce import exp_similarity
from eagleray.losses.products import cosine, inner, unit
from eagleray.losses.prototypes import Scores, cross_entropy, match_views
from eagleray.methods.byol import distance
from eagleray.methods.mocov3 import ctr
from eagleray.methods.simclr import nt_xent

TAU = 0.05
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def near(dtype: torch.dtype, n: int = 8, c: int = 64) -> tuple[Tensor, Tensor]:
    """Return unit vectors x, y (n, c) whose own similarities are near 1, with numbers that `dtype` holds."""
    torch.manual_seed(0)
    x = F.normalize(torch.randn(n, c), dim=1)
    y = F.normalize(x + 0.02 * torch.randn(n, c), dim=1)
    return x.to(dtype).float(), y.to(dtype).float()


@HALVES
def test_a_logit_is_the_float32_product_of_the_16_bit_vectors(dtype: torch.dtype) -> None:
    x, y = near(dtype)
    exact = (x.double() * y.double()).sum(1).float() / TAU  # of each pair, near 1 / TAU
    with torch.autocast("cpu", dtype):
        seen = {
            "inner": (inner(x, y) / TAU).diag(),
            "InfoNCE's positive": logits(x, y, y.T, TAU)[:, 0],
            "InfoNCE's negatives": logits(x, y, y.T, TAU)[:, 1:].diag(),
            "InstDisc": exp_similarity(x, y.expand(len(x), -1, -1), TAU).log().diag(),
        }
        rounded = (x @ y.T / TAU).diag()
    assert (rounded / exact - 1).abs().max() > 1e-4  # what autocast makes of the product
    for name, value in seen.items():
        assert value.dtype == torch.float32, name
        assert (value / exact - 1).abs().max() < 1e-6, name


@HALVES
@pytest.mark.parametrize("loss", [nt_xent, ctr])
def test_contrastive_losses_under_autocast_are_those_of_float32(
    loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """The numbers of the vectors are 1/128 or -1/128, and so have 16 bits; their products near 1 have more."""
    torch.manual_seed(0)
    x = torch.randn(8, 2**14).sign() / 128
    y = torch.where(torch.rand_like(x) < 0.01, -x, x)
    want = loss(x, y, 0.2, (8,))
    with torch.autocast("cpu", dtype):
        seen = loss(x.to(dtype), y.to(dtype), 0.2, (8,))
    torch.testing.assert_close(seen, want, rtol=1e-5, atol=1e-6)


@HALVES
def test_cosines_are_float32(dtype: torch.dtype) -> None:
    x, y = near(dtype)
    with torch.autocast("cpu", dtype):
        seen, mean = cosine(x.to(dtype), y.to(dtype)), distance(x.to(dtype), y.to(dtype))
    torch.testing.assert_close(seen, F.cosine_similarity(x, y))
    torch.testing.assert_close(mean, distance(x, y))


def test_in_float32_and_float64_it_is_the_plain_product() -> None:
    x, y = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    for a, b in ((x, y), (x.double(), y.double())):
        plain = a @ b.T
        assert torch.equal(inner(a, b), plain)
        ours = torch.autograd.grad(inner(a, b).square().sum(), (x, y))
        assert all(map(torch.equal, ours, torch.autograd.grad(plain.square().sum(), (x, y))))
    assert torch.equal(unit(x), F.normalize(x, dim=1))
    queue = torch.randn(7, 30)
    assert torch.equal(logits(unit(x), unit(x), queue, 1.0)[:, 1:], unit(x) @ queue)


@HALVES
def test_its_gradient_is_that_of_the_product(dtype: torch.dtype) -> None:
    x, y = (v.requires_grad_() for v in near(dtype))
    want = torch.autograd.grad(F.cross_entropy(x @ y.T, torch.arange(8)), (x, y))
    with torch.autocast("cpu", dtype):
        seen = torch.autograd.grad(F.cross_entropy(inner(x, y), torch.arange(8)), (x, y))
        [alone] = torch.autograd.grad(inner(x, y.detach()).sum(), x)
    for a, b in zip(seen, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01 * float(b.abs().max()))
    torch.testing.assert_close(alone, y.sum(0).expand_as(x).detach(), rtol=1e-5, atol=1e-5)


def test_small_gradients_of_prototypes_survive_float16() -> None:
    """The gradient of a row is far below 6e-8, the least number of float16; the scale of the loss comes later."""
    z, w = F.normalize(torch.randn(8, 16), dim=1), F.normalize(torch.randn(32, 16), dim=1)
    half = z.half().requires_grad_()
    t = Scores(z.half(), w)
    with torch.autocast("cpu", torch.float16):
        loss = 1e-6 * cross_entropy(
            t.z, half, t.w, w, torch.zeros(32), match_views(t, Scores(half, w), 4), tau_t=0.04, tau_s=0.1
        )
    (2.0**16 * loss).backward()
    assert half.grad is not None
    assert (half.grad != 0).float().mean() > 0.9


def test_a_decorated_function_leaves_autocast() -> None:
    @in_float32
    def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
        return a @ b * scale

    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        seen = product(a.bfloat16(), a, 2.0)
    assert torch.equal(seen, a.bfloat16().float() @ a * 2)
    assert math.isfinite(float(seen.sum()))
