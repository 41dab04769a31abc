"""Measure the load of this machine: CPU, memory, disk, network and GPUs, in the names and units of MLflow."""

import contextlib
import shutil
import subprocess
from pathlib import Path

MEGA = 1e6
GPU = ("utilization.gpu", "memory.used", "memory.total", "power.draw")


class Machine:
    """Measures the load of this machine each time it is asked. Shares and rates are averages since the last time.
    Numbers that the system does not provide are left out."""

    def __init__(self, folder: Path) -> None:
        """`folder` lies on the disk whose usage is reported."""
        self.folder, self.smi = folder, shutil.which("nvidia-smi")
        self.ticks, self.bytes = cpu_ticks(), network_bytes()

    def look(self) -> dict[str, float]:
        """Return the numbers by name. None of them reveals an address or a process of this machine."""
        found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            found |= self._cpu() | memory() | self._network()
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(self.folder)
            found["disk_usage_percentage"] = 100 * disk.used / disk.total
            found["disk_available_megabytes"] = disk.free / MEGA
        return {f"system/{k}": round(v, 2) for k, v in (found | self._gpus()).items()}

    def _cpu(self) -> dict[str, float]:
        """Return the share of CPU time in use since the last call, in percent."""
        before, self.ticks = self.ticks, cpu_ticks()
        busy, all = (now - old for now, old in zip(self.ticks, before, strict=True))
        return {"cpu_utilization_percentage": 100 * busy / all} if all else {}

    def _network(self) -> dict[str, float]:
        """Return the megabytes received and sent since the last call."""
        before, self.bytes = self.bytes, network_bytes()
        names = ("network_receive_megabytes", "network_transmit_megabytes")
        return {k: (now - old) / MEGA for k, now, old in zip(names, self.bytes, before, strict=True)}

    def _gpus(self) -> dict[str, float]:
        """Return the load of each GPU from nvidia-smi, as NVIDIA's Python library is not installed everywhere."""
        if not self.smi:
            return {}
        command = [self.smi, f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
        try:
            rows = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            self.smi = None
            return {}
        return {f"gpu_{i}_{k}": v for i, row in enumerate(rows) for k, v in gpu(row).items()}


def gpu(row: str) -> dict[str, float]:
    """Return the numbers in a line of nvidia-smi. A GPU that is partitioned or very old does not report all of them."""
    said = {}
    for name, text in zip(GPU, row.split(","), strict=False):
        with contextlib.suppress(ValueError):
            said[name] = float(text)
    found = {"utilization_percentage": said.get("utilization.gpu"), "power_usage_watts": said.get("power.draw")}
    used, all = said.get("memory.used"), said.get("memory.total")
    if used is not None and all:
        found |= {"memory_usage_megabytes": used * 2**20 / MEGA, "memory_usage_percentage": 100 * used / all}
    return {k: v for k, v in found.items() if v is not None}


def cpu_ticks() -> tuple[int, int]:
    """Return the busy and the total clock ticks of all cores since the machine started; zeros where there is no
    /proc."""
    try:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and idle while a disk is waited for


def memory() -> dict[str, float]:
    """Return how much memory is in use."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    used = (kib["MemTotal"] - kib["MemAvailable"]) * 1024
    return {
        "system_memory_usage_megabytes": used / MEGA,
        "system_memory_usage_percentage": 100 * used / 1024 / kib["MemTotal"],
    }


def network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by all network interfaces except loopback."""
    try:
        rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    except OSError:
        return 0, 0
    counts = [numbers.split() for name, numbers in rows if name.strip() != "lo"]
    return sum(int(c[0]) for c in counts), sum(int(c[8]) for c in counts)
