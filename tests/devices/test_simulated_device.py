"""The simulated device refuses what an accelerator refuses, and notes every wait."""

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.simulated_device import DEVICE, OnDevice, simulated
from torch import Tensor, nn
from torch.nn import functional as F

from eagleray.base import devices


@pytest.fixture
def waits() -> Iterator[list[str]]:
    with simulated() as waits:
        yield waits


def test_the_device_is_there_only_within_its_block() -> None:
    assert not torch.accelerator.is_available()
    with simulated():
        assert torch.accelerator.is_available()
        assert devices.current() == DEVICE
        assert devices.name(DEVICE) == "simulated device"
    assert devices.current() == torch.device("cpu")


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a sum with a tensor of the CPU": lambda x: x + torch.ones(3),
    "a CPU tensor written into one of the device": lambda x: x.index_put_((rows(),), torch.ones(3)),
    "a concatenation of both": lambda x: torch.cat([x, torch.ones(3)]),
    "a generator of the CPU": lambda x: torch.rand(3, device=DEVICE, generator=torch.Generator()),
    "a generator of the device on the CPU": lambda x: torch.rand(3, generator=torch.Generator(DEVICE)),
    "pinning": lambda x: x.pin_memory(),
}


def rows() -> Tensor:
    return torch.arange(3, device=DEVICE)


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_what_an_accelerator_refuses(work: Callable[[Tensor], object], waits: list[str]) -> None:
    with pytest.raises(RuntimeError):
        work(torch.ones(3, device=DEVICE))


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "blocking copy to the device": lambda x: torch.ones(3).to(DEVICE),
    "tensor of a list": lambda x: torch.tensor([1, 2], device=DEVICE),
    "index on the CPU": lambda x: x[torch.tensor([0, 2])],
    "index by a list": lambda x: x[[0, 2]],
    "mask": lambda x: x[x > 0],
    "copy to memory that is not pinned": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "synchronize": lambda x: devices.synchronize(DEVICE),
    "event": lambda x: torch.Event(DEVICE).synchronize(),
}
FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + torch.tensor(1.0)).softmax(0),
    "copy to the device": lambda x: torch.ones(3).pin_memory().to(DEVICE, non_blocking=True),
    "copy to pinned memory": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "made there": lambda x: torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)),
    "masked fill": lambda x: x.masked_fill(x > 0, 0.0),
    "streams": lambda x: in_a_stream(x),
}


def in_a_stream(x: Tensor) -> Tensor:
    side = torch.Stream(DEVICE)
    with side:
        y = x * 2
        done = side.record_event()
    torch.accelerator.current_stream(DEVICE).wait_event(done)
    y.record_stream(torch.accelerator.current_stream(DEVICE))  # type: ignore[arg-type]
    return y


@pytest.mark.parametrize("work", WAITING.values(), ids=WAITING)
def test_a_wait_is_noted_once(work: Callable[[Tensor], object], waits: list[str]) -> None:
    x = torch.ones(3, device=DEVICE)
    work(x)
    assert len(waits) == 1


@pytest.mark.parametrize("work", FREE.values(), ids=FREE)
def test_what_waits_for_nothing(work: Callable[[Tensor], object], waits: list[str]) -> None:
    x = torch.ones(3, device=DEVICE)
    work(x)
    assert waits == []


def test_values_gradients_and_updates_are_those_of_the_cpu(waits: list[str]) -> None:
    def weights(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        images = torch.randn(16, 4).to(device)
        for _ in range(3):
            net(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(net.state_dict().values())

    on_device = weights(DEVICE)
    assert all(isinstance(w, OnDevice) for w in on_device)
    for a, b in zip(on_device, weights(torch.device("cpu")), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("mask", [False, True])
def test_attention_and_its_gradients_are_those_of_the_cpu(mask: bool, waits: list[str]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 5, 8) for _ in range(3)] + [torch.randn(3, 5, 5)] * mask

    def attended(device: torch.device) -> list[Tensor]:
        inputs = [x.to(device).requires_grad_() for x in given]
        out = F.scaled_dot_product_attention(*inputs)
        return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))]

    for a, b in zip(attended(DEVICE), attended(torch.device("cpu")), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_products_and_keeps_sums(dtype: torch.dtype, waits: list[str]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(DEVICE)
    images = torch.randn(2, 3, 4, 4, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype):
        scores = net(images)
        assert scores.dtype == (scores @ scores.T).dtype == dtype
        assert scores.softmax(1).dtype == torch.float32
        with torch.autocast(DEVICE.type, enabled=False):
            assert net(images).dtype == torch.float32
    scores.float().sum().backward()
    assert net[0].weight.grad is not None
    assert net[0].weight.grad.dtype == torch.float32


def test_memory_is_counted_by_storage(waits: list[str]) -> None:
    before = torch.accelerator.memory_allocated(DEVICE)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    x = torch.zeros(1000, device=DEVICE)
    view = x.view(10, 100)
    assert torch.accelerator.memory_allocated(DEVICE) - before == 4000
    del x
    assert torch.accelerator.memory_allocated(DEVICE) - before == 4000
    del view
    assert torch.accelerator.memory_allocated(DEVICE) == before
    assert torch.accelerator.max_memory_allocated(DEVICE) - before == 4000
