"""The softmax of an accelerator equals the formula, by tiles and without Triton, and moves few bytes a score."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eagleray.base import devices
from eagleray.losses import products
from eagleray.losses.prototypes import Match, cross_entropy
from eagleray.losses.softmax import softmax
from eagleray.runs.step_trace import Tracer

# In a process of its own, as Triton decides when it is imported whether it compiles or interprets.
TILES = """
import torch
from eagleray.losses import softmax_kernels as tiles
from test_softmax import drawn, exact

tiles.SPAN = 256
for dtype, tolerance in ((torch.bfloat16, 1e-3), (torch.float32, 1e-5)):
    for n, k, d, shifted in ((130, 300, 80, True), (3, 7, 5, False)):
        z, w, c = drawn(n, k, d, dtype, shifted)
        (p, lse), (want, want_lse) = tiles.softmax(z, w, c), exact(z, w, c)
        assert (p.dtype, lse.dtype) == (dtype, torch.float32)
        assert (p.double() - want.to(dtype).double()).norm() < tolerance * want.norm(), (dtype, n)
        assert (lse - want_lse).abs().max() < 1e-5 * want_lse.abs().max(), (dtype, n)
        far = tiles.softmax(1e4 * z, w, None)[0].double()  # this neither overflows nor hides small scores
        assert (far.sum(1) - 1).abs().max() < 1e-2, (dtype, n)
"""


def drawn(n: int, k: int, d: int, dtype: torch.dtype, shifted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return vectors at a temperature of 0.1, prototypes and a shift."""
    g = torch.Generator().manual_seed(0)
    z, w = (F.normalize(torch.randn(rows, d, generator=g), dim=1) for rows in (n, k))
    return (10 * z).to(dtype), w.to(dtype), torch.randn(k, generator=g) if shifted else None


def exact(z: Tensor, w: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the softmax and the logsumexp of the formula, in float64."""
    x = z.double() @ w.double().T - (0 if c is None else c)
    return x.softmax(1), x.logsumexp(1)


def test_tiles_equal_the_formula() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", TILES], env=env, check=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shifted", [False, True])
def test_without_triton_it_equals_the_formula(dtype: torch.dtype, tolerance: float, shifted: bool) -> None:
    z, w, c = drawn(20, 300, 16, dtype, shifted)
    (p, lse), (want, want_lse) = softmax(z, w, c), exact(z, w, c)
    assert p.dtype == dtype
    assert (p.double() - want).norm() < tolerance * want.norm()
    torch.testing.assert_close(lse, want_lse.float())


# The least shared memory of a block, of NVIDIA's GPUs since Ampere and of AMD's.
@pytest.mark.parametrize(
    ("target", "kib"), [(("cuda", 80, 32), 99), (("cuda", 90, 32), 99), (("hip", "gfx942", 64), 64)]
)
def test_kernels_compile_for_a_gpu(
    target: tuple[Any, ...], kib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A machine without a GPU compiles them too; shared memory must suffice on every one."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eagleray.losses import softmax_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {name: getattr(kernels, name) for name in ("ROWS", "COLUMNS", "CHANNELS", "SPAN")} | {"SHIFTED": True}
    types = {"z": "*bf16", "w": "*bf16", "p": "*bf16", "n": "i32", "k": "i32", "d": "i32"}
    for kernel in (kernels.sum_exponents, kernels.write_shares):
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget(*target), options=kernels.OPTIONS)
        assert compiled.metadata.shared <= kib * 1024


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the CPU takes the way of a GPU."""
    monkeypatch.setattr(devices, "is_accelerator", lambda _: True)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_an_accelerator_is_that_of_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    z, w, c = (x.to(dtype) for x in drawn(40, 300, 16, torch.float64, True) if x is not None)
    pairs = Match(torch.arange(40).view(20, 2) - 1, torch.rand(20))

    def found() -> list[Tensor]:
        s, w_s = (0.1 * z[:20]).requires_grad_(), w.roll(1).requires_grad_()
        loss = cross_entropy(0.1 * z, s, w, w_s, 0.01 * c, pairs, tau_t=0.05, tau_s=0.1, chunk=900)
        return [loss, *torch.autograd.grad(loss, (s, w_s))]

    ours = found()
    monkeypatch.undo()
    torch.testing.assert_close(ours, found(), rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)


@pytest.mark.usefixtures("pretended")
def test_bytes_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as in the trace of a step, with what the products read and write beside the scores."""
    monkeypatch.setattr(products, "_sums_in_float32", lambda a: a.dtype == torch.bfloat16)
    n, k, d = 4096, 65536, 256
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        t, s, center = torch.empty(n, d), torch.empty(n, d, requires_grad=True), torch.empty(k)
        w_t, w_s = torch.empty(k, d), torch.empty(k, d, requires_grad=True)
        pairs = Match(torch.zeros(n, 1, dtype=torch.long), torch.empty(n))
        with Tracer() as tracer:
            cross_entropy(t, s, w_t, w_s, center, pairs, tau_t=0.04, tau_s=0.1).backward()
    moved = sum(work.bytes * times for work, times in tracer.work.items())
    assert 6 < moved / (2 * n * k) < 14
