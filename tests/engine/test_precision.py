"""The formats of a step: which one a device gets, and float16's scaled loss."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.engine import precision
from eagleray.engine.loop import Trainer
from eagleray.engine.precision import START, Precision, compute_dtype, exact_products, numerics

CPU = torch.device("cpu")


class Line(nn.Module):
    """A linear map whose loss is `factor` times its output's mean, and which has what the loop uses of a method."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.layer, self.factors = nn.Linear(4, 4), factors
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, batch: Any, at: Progress) -> dict[str, Tensor]:
        self.steps.add_(1)
        return {"loss": self.layer(torch.ones(2, 4)).float().mean() * self.factors[at.step]}

    def before_step(self, at: Progress) -> None: ...
    def after_step(self, at: Progress) -> None: ...


def train(method: Line, given: Precision, optimizer: torch.optim.Optimizer, start: int = 0) -> Iterator[Any]:
    batches = ((Progress(i, 100, 1), SimpleNamespace(rows=(2,))) for i in range(start, len(method.factors)))
    made: Any = (method, optimizer)
    trainer = Trainer(*made, lr=lambda _: 0.1, weight_decay=lambda _: 0.0, precision=given)
    yield from trainer.steps(batches)  # type: ignore[arg-type]


def sgd(method: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(method.parameters()), "decay": False}], lr=0.1, momentum=0.9, fused=True)


def test_a_cpu_takes_float32_unless_bfloat16_is_asked_for() -> None:
    assert compute_dtype("auto", CPU) == compute_dtype("fp32", CPU) == torch.float32
    assert compute_dtype("bf16", CPU) == torch.bfloat16
    with pytest.raises(UserError, match=r"^precision=fp16: a CPU trains in fp32 .* expected auto, fp32 or bf16$"):
        compute_dtype("fp16", CPU)


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_is_what_the_accelerator_computes_in(
    monkeypatch: pytest.MonkeyPatch, has: bool, expected: torch.dtype
) -> None:
    def supported(*, including_emulation: bool) -> bool:
        return has or including_emulation  # as CUDA says of a V100

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(is_bf16_supported=supported))
    gpu = torch.device("cuda", 0)
    assert compute_dtype("auto", gpu) == expected
    assert compute_dtype("fp16", gpu) == torch.float16
    if has:
        assert compute_dtype("bf16", gpu) == torch.bfloat16
    else:
        with pytest.raises(UserError, match=r"^precision=bf16: this cuda device has no bfloat16"):
            compute_dtype("bf16", gpu)


def test_a_scaled_step_is_the_same_step() -> None:
    torch.manual_seed(0)
    plain, scaled = Line([1.0, 0.5]), Line([1.0, 0.5])
    scaled.load_state_dict(plain.state_dict())
    given = Precision(torch.float16, CPU)
    seen = [float(s.values["grad_norm"]) for s in train(scaled, given, sgd(scaled))]
    want = [float(s.values["grad_norm"]) for s in train(plain, Precision(torch.float32, CPU), sgd(plain))]
    assert seen == pytest.approx(want, rel=1e-3)
    torch.testing.assert_close(scaled.layer.weight, plain.layer.weight, rtol=1e-3, atol=1e-3)


def test_small_gradients_survive_float16() -> None:
    """A gradient of 1e-8 is zero in float16 unless the loss is scaled."""
    tiny = Line([1e-7])
    [step] = train(tiny, Precision(torch.float16, CPU), sgd(tiny))
    assert float(step.values["grad_norm"]) > 1e-8
    torch.testing.assert_close(step.norms[0], torch.tensor(1e-7), rtol=1e-2, atol=0)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    line = Line([1.0, 1e6, 1.0])
    given, optimizer = Precision(torch.float16, CPU), sgd(line)
    seen = []
    for step in train(line, given, optimizer):
        moved = [p.detach().clone() for p in line.parameters()], line.steps.clone()
        seen.append((float(step.values["skipped"]), float(step.values["loss_scale"]), float(given.loss_scale), moved))
    assert [s[:3] for s in seen] == [(0, START, START), (1, START, START / 2), (0, START / 2, START / 2)]
    (weights0, steps0), (weights1, steps1), (weights2, _) = (s[3] for s in seen)
    assert all(map(torch.equal, weights0, weights1))
    assert torch.equal(steps0, steps1)
    assert not torch.equal(weights1[0], weights2[0])


def test_the_scale_grows_and_its_count_survives_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "INTERVAL", 3)
    line = Line([1.0] * 4)
    given, optimizer = Precision(torch.float16, CPU), sgd(line)
    first = train(line, given, optimizer)
    next(first), next(first)
    kept = {name: value.clone() for name, value in given.state_dict().items()}
    again = Precision(torch.float16, CPU)
    again.load_state_dict(kept)
    third, _ = train(line, again, optimizer, start=2)
    assert float(third.values["loss_scale"]) == START
    assert float(again.loss_scale) == 2 * START
    assert int(again.good_steps) == 1
    other = Precision(torch.bfloat16, CPU)
    other.load_state_dict(kept)  # a run may continue in another precision
    assert other.state_dict() == {}


def repeatable(message: str) -> None:
    """Fail in a deterministic run, as an operation does that has no fixed order."""
    with numerics(Precision(torch.float32, CPU), deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError(message)


def test_the_switches_are_set_back() -> None:
    with pytest.raises(UserError, match=r"^deterministic=true: PyTorch computes put_ in no fixed order"):
        repeatable("put_ does not have a deterministic implementation, but you set ...")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_process_that_cannot_repeat_any_more_is_told_so() -> None:
    with pytest.raises(UserError, match=r"^deterministic=true: this process has multiplied on the GPU before"):
        repeatable("Deterministic behavior was enabled ... set CUBLAS_WORKSPACE_CONFIG=:4096:8 ...")


def test_an_evaluation_within_a_run_computes_as_one_without() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("dtype", "matmul"), [(torch.bfloat16, "high"), (torch.float32, "highest")])
def test_tf32_is_for_accelerators_that_do_not_train_in_float32(dtype: torch.dtype, matmul: str) -> None:
    given = Precision(dtype, CPU)
    with numerics(given, deterministic=False):
        assert torch.get_float32_matmul_precision() == "highest"
    given.device = torch.device("cuda", 0)
    with numerics(given, deterministic=False):
        assert torch.get_float32_matmul_precision() == matmul
        assert torch.backends.cudnn.allow_tf32 == (matmul == "high")
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32
