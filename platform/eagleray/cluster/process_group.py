"""Form the process group of a run's workers: gloo on the address of each node, and limits for ranks that hang."""

import os
from typing import Any

import psutil
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.util import get_node_ip_address

PATIENCE = 1800.0  # seconds that a rank waits for the others in a collective operation, at least
LEAVE = 5  # seconds that ranks have to leave the group
SLACK = 300.0  # seconds beyond the time for which a store may be away, in which a rank waits rightly


class NodeAddress(_TorchBackend):
    """Ray's backend, with gloo bound to the interface of the node's address. By itself gloo takes the address of the
    host name, which on Debian and Ubuntu is 127.0.1.1: on several nodes the ranks would not find each other."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Bind gloo in every worker, then form the group."""
        worker_group.execute(bind)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Leave the group, without waiting long for a rank that hangs: Ray kills it afterwards. Ray reads the limit
        from the environment of this process, its controller, and does not pass it on from the command."""
        os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", str(LEAVE))
        super().on_shutdown(worker_group, backend_config)


class ProcessGroup(TorchConfig):
    """The settings of the process group. A backend without a name is NCCL on GPUs and gloo on CPUs."""

    @property
    def backend_cls(self) -> type[NodeAddress]:
        return NodeAddress


def process_group(patience: float) -> ProcessGroup:
    """Return the settings for a run whose store may be away for `patience` minutes."""
    return ProcessGroup(timeout_s=int(max(PATIENCE, 60 * patience + SLACK)))


def watch_hangs(patience: float) -> None:
    """Switch Ray's detector of hangs in NCCL on, with the environment variables that Ray reads: a rank whose
    operations stand still for longer than a store may be away fails the group, which starts again."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
    os.environ.setdefault("RAY_TRAIN_NCCL_RAS_ACTION", "fail")
    os.environ.setdefault("RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S", str(60 * patience + 60))


def bind() -> None:
    """Name the interface for gloo, unless the environment names one."""
    if name := interface(get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface(address: str) -> str | None:
    """Return the name of this machine's network interface that has an IP address, or None."""
    return next((n for n, known in psutil.net_if_addrs().items() if address in (a.address for a in known)), None)
