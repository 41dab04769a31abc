"""Prepare the workers of a run for the process group of their ranks: the address where these meet, and their numbers.

The group itself is formed by the processes that train, see `rank_process`. Ray Train's controller imports this too, on
the head, where every run would pay for PyTorch: only the functions that workers call import it.
"""

import os
from typing import Any

import psutil
from ray.train.backend import Backend, BackendConfig
from ray.util import get_node_ip_address

PATIENCE = 1800.0  # seconds that a rank waits for the others in a collective operation, at least
SLACK = 300.0  # seconds beyond the time for which a store may be away, in which a rank waits rightly
_opened: list[Any] = []  # the store of this process, which ends with it


class Meeting(Backend):
    """A backend that forms no group in the workers. It binds gloo to the interface of the node's address: by itself
    gloo takes the address of the host name, which on Debian and Ubuntu is 127.0.1.1, and on several nodes the ranks
    would not find each other."""

    share_cuda_visible_devices = True  # ranks of a node see each other's GPUs, as with Ray's own backend for PyTorch

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Write into the environment of every worker where the ranks meet, and which one is its."""
        worker_group.execute(bind)
        address = worker_group.execute_single(0, listen)
        worker_group.execute(meet_at, *address)
        worker_group.execute(number)


class Ranks(BackendConfig):
    """Tells Ray Train to form no group in its workers. They use no GPU: those are for the processes that train."""

    @property
    def backend_cls(self) -> type[Meeting]:
        return Meeting


def limit(patience: float) -> float:
    """Return the seconds that a rank waits for the others, in a run whose store may be away for `patience` minutes."""
    return max(PATIENCE, 60 * patience + SLACK)


def listen() -> tuple[str, int]:
    """Open a key-value store in this process, on a free port of the node's address, and return where it is."""
    import torch.distributed as td

    host = get_node_ip_address()
    _opened.append(td.TCPStore(host, 0, is_master=True, wait_for_workers=False))
    return host, _opened[-1].port


def number() -> None:
    """Name the rank of this worker in its environment, as Ray does for PyTorch."""
    from ray.train.torch.config import _set_torch_distributed_env_vars

    _set_torch_distributed_env_vars()


def meet_at(host: str, port: int) -> None:
    """Let the ranks of this worker meet at a store."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


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
