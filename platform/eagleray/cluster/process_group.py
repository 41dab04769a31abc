"""Tell the workers of a run what a process group of their ranks needs: the rendezvous address and their ranks.

The training processes of the workers form the group, see `rank_process`. Only functions that run in workers import
PyTorch: Ray Train's controller on the head imports this module too, and would need more memory for every run."""

import os
from typing import Any

import psutil
from ray.train.backend import Backend, BackendConfig
from ray.util import get_node_ip_address

PATIENCE = 1800.0  # least timeout in seconds of a collective operation
SLACK = 300.0  # least seconds by which the timeout exceeds the longest accepted outage of object storage
_opened: list[Any] = []  # keeps the key-value store open until this process ends


class Meeting(Backend):
    """A backend of Ray Train that prepares the workers, but forms no process group in them. It binds gloo to the
    network interface of the node's address. By default gloo uses the address of the host name, which is 127.0.1.1 on
    Debian and Ubuntu, and ranks of other nodes could not reach it."""

    share_cuda_visible_devices = True  # all ranks of a node see its GPUs, as with Ray's backend for PyTorch

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Set the environment variables of every worker for the rendezvous address and for the worker's rank."""
        worker_group.execute(bind)
        address = worker_group.execute_single(0, listen)
        worker_group.execute(meet_at, *address)
        worker_group.execute(number)


class Ranks(BackendConfig):
    """The configuration by which Ray Train uses Meeting. A worker uses no GPU itself; its training process does."""

    @property
    def backend_cls(self) -> type[Meeting]:
        return Meeting


def limit(patience: float) -> float:
    """Return the timeout in seconds of collective operations, if object storage may fail for `patience` minutes."""
    return max(PATIENCE, 60 * patience + SLACK)


def listen() -> tuple[str, int]:
    """Open a key-value store in this process, on a free port of the node's address. Returns its host and port."""
    import torch.distributed as td

    host = get_node_ip_address()
    _opened.append(td.TCPStore(host, 0, is_master=True, wait_for_workers=False))
    return host, _opened[-1].port


def number() -> None:
    """Set this worker's environment variables for its rank, and the others that Ray Train sets for PyTorch."""
    from ray.train.torch.config import _set_torch_distributed_env_vars

    _set_torch_distributed_env_vars()


def meet_at(host: str, port: int) -> None:
    """Set the environment variables for the address of the key-value store through which the ranks meet."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def watch_hangs(patience: float) -> None:
    """Turn on Ray's detector of hangs in NCCL, by environment variables that Ray reads. Ray restarts all workers when a
    rank's operations make no progress for longer than object storage may fail (`patience` minutes)."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", "1")
    os.environ.setdefault("RAY_TRAIN_NCCL_RAS_ACTION", "fail")
    os.environ.setdefault("RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S", str(60 * patience + 60))


def bind() -> None:
    """Tell gloo to use the network interface of this node's address, unless the environment names one."""
    if name := interface(get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface(address: str) -> str | None:
    """Return the name of this machine's network interface with the IP address `address`, or None."""
    return next((n for n, known in psutil.net_if_addrs().items() if address in (a.address for a in known)), None)
