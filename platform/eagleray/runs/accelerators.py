"""The accelerators that a run can be planned for: rates from data sheets, and the network of a usual cloud machine."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from eagleray.base.errors import UserError
from eagleray.config import nearest

if TYPE_CHECKING:
    from eagleray.runs.step_trace import StepTrace, Work

# Kinds of operations. FUNCTION are functions such as GELU and softmax; MOVE are all others, which only move memory.
MATMUL, CONV, ATTENTION, NORM, FUNCTION, MOVE = "matmul", "conv", "attention", "norm", "function", "move"
PER_NODE = 8  # largest number of accelerators in a machine


class Accelerator(NamedTuple):
    """The data of one kind of accelerator. Rates are peaks, without sparsity."""

    title: str
    half: float  # TFLOP/s of matrix products in bfloat16, or in float16 where there is no bfloat16
    bfloat16: bool
    wide: float  # TFLOP/s of float32 products, in TF32 where there is TF32
    full: float  # TFLOP/s of float32 products without TF32
    memory: float  # GiB that the driver reports
    bandwidth: float  # GB/s of its memory
    link: float  # GB/s to the other accelerators of its machine, in one direction
    network: float  # GB/s of its share of the machine's network, in one direction
    source: str


NVIDIA = "nvidia.com/en-us/data-center"
ACCELERATORS = {
    "t4": Accelerator("NVIDIA T4", 65, False, 8.1, 8.1, 15.0, 320, 12, 1.5, f"{NVIDIA}/tesla-t4; AWS g4dn.12xlarge"),
    "v100": Accelerator("NVIDIA V100 SXM2 32 GB", 125, False, 15.7, 15.7, 31.7, 900, 150, 1.5,
                        f"{NVIDIA}/v100; AWS p3dn.24xlarge"),
    "a10g": Accelerator("NVIDIA A10G", 70, True, 35, 31.2, 22.5, 600, 25, 1.5,
                        "NVIDIA A10G data sheet; AWS g5.48xlarge"),
    "l4": Accelerator("NVIDIA L4", 121, True, 60, 30.3, 22.5, 300, 25, 1.5, f"{NVIDIA}/l4; AWS g6.48xlarge"),
    "l40s": Accelerator("NVIDIA L40S", 362, True, 183, 91.6, 45.0, 864, 25, 6, f"{NVIDIA}/l40s; AWS g6e.48xlarge"),
    "a100-40": Accelerator("NVIDIA A100 SXM 40 GB", 312, True, 156, 19.5, 39.6, 1555, 300, 6,
                           f"{NVIDIA}/a100; AWS p4d.24xlarge"),
    "a100-80": Accelerator("NVIDIA A100 SXM 80 GB", 312, True, 156, 19.5, 79.3, 2039, 300, 6,
                           f"{NVIDIA}/a100; AWS p4de.24xlarge"),
    "h100": Accelerator("NVIDIA H100 SXM", 989, True, 494, 67, 79.6, 3350, 450, 50, f"{NVIDIA}/h100; AWS p5.48xlarge"),
    "h200": Accelerator("NVIDIA H200 SXM", 989, True, 494, 67, 140.4, 4800, 450, 50,
                        f"{NVIDIA}/h200; AWS p5en.48xlarge"),
    "b200": Accelerator("NVIDIA B200", 2250, True, 1125, 75, 179.0, 8000, 900, 50,
                        f"{NVIDIA}/dgx-b200; AWS p6-b200.48xlarge"),
    "mi300x": Accelerator("AMD Instinct MI300X", 1307, True, 653, 163, 191.7, 5300, 448, 50,
                          "amd.com/en/products/accelerators/instinct/mi300/mi300x; Azure ND MI300X v5"),
}  # fmt: skip

# Shares of the peak rates that large operations are assumed to reach, for the reasons in docs/plan.md.
REACHED = {MATMUL: 0.65, CONV: 0.4, ATTENTION: 0.35}
REACHED_BANDWIDTH = 0.8
LAUNCH = 2e-6  # seconds that an operation takes in addition to its work, on any device
LATENCY, FAR = 20e-6, 50e-6  # seconds of an all-reduce of a few bytes: within a machine, and between machines
HOP = 25e-6  # seconds that a message takes from the CPU process of one rank to that of another
# Rates of a CPU core. Only their ratios matter, as `local_forecast.calibrated` scales them to the measured speed.
CORE = {MATMUL: 80e9, CONV: 60e9, ATTENTION: 60e9}  # FLOP/s
CORE_BANDWIDTH = {FUNCTION: 9e9, NORM: 12e9}  # B/s
CORE_COPY = 30e9  # B/s of operations of all other kinds
DISPATCH = 8e-6  # seconds in which the host dispatches an operation; a faster device waits for the host


@dataclass(frozen=True)
class Rates:
    """The speeds that a device reaches, by the kind of an operation (`step_trace.Work`)."""

    flops: dict[tuple[str, bool], float]  # FLOP/s by kind and whether it is in float32
    bytes: dict[str, float]  # B/s by kind
    launch: float  # seconds that each operation takes in addition to its work
    dispatch: float = 0.0  # seconds in which the host dispatches an operation while the device works

    def seconds(self, trace: "StepTrace") -> float:
        """Return the seconds that the device computes in a step, without loading input or communication between ranks.

        Each operation takes `launch` and the time of its FLOPs or of its memory traffic, whichever is longer (the
        roofline model, Williams et al. 2009)."""

        def one(w: "Work") -> float:
            computing = w.flops / self.flops[w.kind, w.wide] if w.flops else 0.0
            return max(computing, w.bytes / self.bytes[w.kind]) + self.launch

        return sum(times * one(w) for w, times in trace.work.items())

    def slowed(self, factor: float) -> "Rates":
        """Return the rates of a device on which everything takes `factor` times as long."""
        return Rates(
            {k: v / factor for k, v in self.flops.items()},
            {k: v / factor for k, v in self.bytes.items()},
            self.launch * factor,
            self.dispatch * factor,
        )

    def fitted(self, short: "StepTrace", short_seconds: float, long: "StepTrace", long_seconds: float) -> "Rates":
        """Return rates at which the step `short` takes `short_seconds` and the step `long` takes `long_seconds`: all
        rates are slowed by one factor, and `launch` is replaced.

        If no positive factor and `launch` achieve this, all rates are slowed so that `long` takes `long_seconds`."""
        free = replace(self, launch=0.0)
        (a, b), (c, d) = ((free.seconds(t), sum(t.work.values())) for t in (short, long))
        area = a * d - b * c
        if area:
            factor = (short_seconds * d - long_seconds * b) / area
            launch = (long_seconds * a - short_seconds * c) / area
            if factor > 0 and launch > 0:
                return replace(self.slowed(factor), launch=launch)
        return self.slowed(long_seconds / self.seconds(long))


def find(name: str) -> Accelerator:
    """Return an accelerator by its name in ACCELERATORS. Raises UserError for an unknown name."""
    if name.lower() not in ACCELERATORS:
        raise UserError(f"--gpu {name}: unknown{nearest(name.lower(), list(ACCELERATORS))}")
    return ACCELERATORS[name.lower()]


def recognise(reported: str, memory: float) -> Accelerator | None:
    """Return the accelerator with the name and the memory in GiB that a driver reports, or None for an unknown one."""
    words = set(reported.lower().replace("-", " ").split())
    return next(
        (
            one
            for name, one in ACCELERATORS.items()
            if name.partition("-")[0] in words and abs(one.memory - memory) < 0.1 * one.memory
        ),
        None,
    )


def stated_rates(device: Accelerator, *, tf32: bool = True) -> Rates:
    """Return the rates to expect of an accelerator, as shares of its peaks. `tf32` is False for a run in fp32."""
    products = device.wide if tf32 else device.full
    flops = {
        (kind, wide): share * 1e12 * (products if wide else device.half)
        for kind, share in REACHED.items()
        for wide in (False, True)
    }
    moved = REACHED_BANDWIDTH * 1e9 * device.bandwidth
    return Rates(flops, dict.fromkeys((MATMUL, CONV, ATTENTION, NORM, FUNCTION, MOVE), moved), LAUNCH, DISPATCH)


def cpu_rates() -> Rates:
    """Return the assumed rates of a CPU core, before `local_forecast.calibrated` scales them to the measured speed."""
    flops = {(kind, wide): rate for kind, rate in CORE.items() for wide in (False, True)}
    return Rates(flops, dict.fromkeys((*CORE, MOVE), CORE_COPY) | CORE_BANDWIDTH, LAUNCH)


def reduce_seconds(device: Accelerator, ranks: int, size: int) -> float:
    """Return the seconds of an all-reduce of `size` bytes in a ring over the slowest link (Patarasuk and Yuan 2009)."""
    if ranks == 1:
        return 0.0
    near = ranks <= PER_NODE
    speed = device.link if near else min(device.link, device.network * PER_NODE)
    return (LATENCY if near else FAR) + 2 * size * (ranks - 1) / ranks / (speed * 1e9)


def agree_seconds(ranks: int) -> float:
    """Return the seconds in which all ranks agree whether to take a step, by gloo's all-reduce in a ring of CPUs."""
    return 2 * (ranks - 1) * HOP
