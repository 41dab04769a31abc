"""Measure the load of this machine: CPU, memory, disk, network and GPUs, in the names and units of MLflow."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import psutil

from eagleray.base import child

MEGA = 1e6
GPU = ("utilization.gpu", "memory.used", "memory.total", "power.draw")


class Machine:
    """Measures the load of this machine each time it is asked. Shares and rates are averages since the last time.
    None of the numbers reveals an address or a process."""

    def __init__(self, folder: Path) -> None:
        """`folder` lies on the disk whose usage is reported."""
        self.folder, self.smi = folder, shutil.which("nvidia-smi")
        psutil.cpu_percent()  # its first answer says nothing
        self.network = network()

    def look(self) -> dict[str, float]:
        """Return the numbers by name."""
        memory, before, self.network = psutil.virtual_memory(), self.network, network()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": (memory.total - memory.available) / MEGA,
            "system_memory_usage_percentage": memory.percent,
            "network_receive_megabytes": (self.network[0] - before[0]) / MEGA,
            "network_transmit_megabytes": (self.network[1] - before[1]) / MEGA,
        }
        with contextlib.suppress(OSError):  # a disk may have gone
            disk = shutil.disk_usage(self.folder)
            found["disk_usage_percentage"] = 100 * disk.used / disk.total
            found["disk_available_megabytes"] = disk.free / MEGA
        return {f"system/{k}": round(v, 2) for k, v in (found | self._gpus()).items()}

    def _gpus(self) -> dict[str, float]:
        """Return the load of each GPU from nvidia-smi, as NVIDIA's Python library is not installed everywhere."""
        if not self.smi:
            return {}
        command = [self.smi, f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
        try:
            rows = child.run(command, text=True, timeout=20, check=True).stdout.splitlines()
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


def network() -> tuple[int, int]:
    """Return the bytes received and sent by all network interfaces except loopback."""
    counts = [c for name, c in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(c.bytes_recv for c in counts), sum(c.bytes_sent for c in counts)
