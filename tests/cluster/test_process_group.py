"""Where ranks meet, which interface they use, and how long they wait."""

import os
import pickle
from typing import Any

import pytest
import torch.distributed as td

from eagleray.cluster import process_group


class Workers:
    """A group of one worker, which is this process."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def execute(self, work: Any, *arguments: Any) -> None:
        self.done.append(work.__name__)
        work(*arguments)

    def execute_single(self, rank: int, work: Any) -> Any:
        assert rank == 0
        return work()


def test_workers_bind_gloo_and_learn_where_their_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(process_group, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("ray.train.torch.config._set_torch_distributed_env_vars", lambda: os.environ.update(RANK="0"))
    workers = Workers()
    settings = pickle.loads(pickle.dumps(process_group.Ranks()))  # Ray sends them to its controller
    backend = settings.backend_cls()
    backend.on_start(workers, settings)
    assert os.environ["GLOO_SOCKET_IFNAME"] == process_group.interface("127.0.0.1")
    store = td.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set("a", "b")
    assert os.environ["RANK"] == "0"
    assert not td.is_initialized(), "the group is formed by the processes that train"
    backend.on_shutdown(workers, settings)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    process_group.bind()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_address_that_is_not_here_names_no_interface():
    assert process_group.interface("192.0.2.1") is None


@pytest.mark.parametrize(("minutes", "seconds"), [(10, 1800), (60, 3900)])
def test_ranks_wait_longer_than_a_store_may_be_away(minutes: float, seconds: int):
    assert process_group.limit(minutes) == seconds


def test_hangs_of_nccl_fail_the_group_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    from ray.train.v2._internal import constants

    names = [
        constants.ENABLE_NCCL_HANG_DETECTOR_ENV_VAR,
        constants.NCCL_RAS_ACTION_ENV_VAR,
        constants.NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR,
    ]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[1], constants.NCCL_RAS_ACTION_OBSERVE)
    process_group.watch_hangs(10)
    assert [os.environ[name] for name in names] == ["1", constants.NCCL_RAS_ACTION_OBSERVE, "660"]
