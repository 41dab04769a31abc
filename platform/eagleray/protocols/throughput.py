"""Measure the cost of a backbone: the columns of EsViT's tables 1, 4 and 8 (Li et al. 2022, arXiv:2106.09785), and the
memory and time of a step as in table 9, without the heads and losses of a method."""

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from eagleray.base import devices
from eagleray.base.errors import explained
from eagleray.engine.precision import autocast, format_name
from eagleray.models.backbone import Backbone
from eagleray.models.token_linear import plain
from eagleray.protocols.catalogue import Throughput
from eagleray.protocols.eval_mode import check_images
from eagleray.protocols.outcome import Outcome

MIB = 2**20


def throughput(backbone: Backbone, settings: Throughput, note: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure parameters, multiply-adds, speed and memory on images of `size` pixels, in batches of 128, or of 4 on a
    CPU, and in the precision in which runs train. The backbone is not changed.

    throughput/params_m       million parameters, without a classifier
    throughput/gmacs          1e9 multiply-adds of one image's forward pass, which papers call GFLOPs
    throughput/images_per_s   forward pass without gradients, median of the rounds after a warm-up round
    throughput/forward_mib    peak memory of such a forward pass, weights included, in MiB
    throughput/step_s         forward and backward pass of one batch, in seconds, median
    throughput/step_mib       peak memory of this step in MiB, gradients included, without an optimiser's state

    Raises UserError when the backbone cannot take this size, or when the batch does not fit into memory."""
    device = next(backbone.parameters()).device
    size, rounds = settings.size, settings.rounds
    batch = settings.batch or (128 if devices.is_accelerator(device) else 4)
    note(f"throughput: {rounds} rounds of {batch} images of {size} pixels on {device.type}")
    net = copy.deepcopy(backbone).requires_grad_(True)  # a copy: training steps change batch norm's statistics
    images = torch.randn(batch, backbone.channels, size, size, device=device)
    check_images(net, size)
    full = f"throughput: {batch} images of {size} pixels do not fit on this {device.type}"
    with explained(full, torch.OutOfMemoryError, why=False):
        numbers = {
            "params_m": sum(p.numel() for p in net.parameters()) / 1e6,
            "gmacs": multiplications(net.eval(), images[:1]) / 1e9,
            "images_per_s": batch / seconds(lambda: forward(net, images), rounds, device),
            "forward_mib": peak(lambda: forward(net, images), net, device) / MIB,
            "step_s": seconds(lambda: step(net.train(), images), rounds, device),
            "step_mib": peak(lambda: step(net, images), net, device) / MIB,
        }
    details: dict[str, Any] = {"size": size, "batch": batch, "rounds": rounds, "device": devices.name(device)}
    details |= {"precision": format_name(device), "threads": torch.get_num_threads()}
    return Outcome({f"throughput/{key}": value for key, value in numbers.items()}, details)


def forward(net: nn.Module, images: Tensor) -> None:
    """Run images (B, 3, H, W) through a network without gradients."""
    with torch.inference_mode(), autocast(images.device):
        net(images)


def step(net: Backbone, images: Tensor) -> None:
    """Run a forward and a backward pass on images (B, 3, H, W)."""
    net.zero_grad()
    with autocast(images.device):
        pooled = net.pooled(images)
    pooled.float().square().mean().backward()


def multiplications(net: nn.Module, images: Tensor) -> float:
    """Count the multiply-adds of a forward pass on images (B, 3, H, W)."""
    # Attention runs as matrix products, because not all fused kernels are counted. `plain` does the same for linear
    # layers, which on some CPUs are convolutions with added rows of zeros.
    counter = FlopCounterMode(display=False)
    with plain(net), torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        net(images)
    return counter.get_total_flops() / 2


def seconds(work: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Return the median time in seconds of `work` over several rounds, after a round to warm up."""
    times = []
    for _ in range(rounds + 1):
        devices.synchronize(device)
        began = time.perf_counter()
        work()
        devices.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def peak(work: Callable[[], None], net: nn.Module, device: torch.device) -> int:
    """Return the peak memory in bytes of the network's tensors and of what `work` allocates. Other tensors on the
    device do not count."""
    net.zero_grad()
    own = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    if devices.is_accelerator(device):
        devices.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        work()
        devices.synchronize(device)
        return own + torch.accelerator.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    # The allocator's count is read, as a process keeps freed memory. What was allocated before `work` is subtracted.
    allocations = sorted(
        (e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"
    )
    return own + int(max(total for _, total, _ in allocations) - (allocations[0][1] - allocations[0][2]))
