"""How workers find each other, and how long they wait."""

import os
import pickle

import pytest
import ray
from ray.train.torch.config import _TorchBackend

from eagleray.cluster import process_group


class Workers:
    """A group of one worker, which is this process."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def execute(self, work, *arguments) -> None:
        self.done.append(work.__name__)
        work(*arguments)


def test_gloo_is_bound_to_the_nodes_address_before_the_group_forms(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(_TorchBackend, "on_start", lambda *_: named.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    named: list[str | None] = []
    workers = Workers()
    settings = pickle.loads(pickle.dumps(process_group.process_group(10)))  # Ray sends them to its controller
    settings.backend_cls().on_start(workers, settings)
    assert workers.done == ["bind"]
    assert named == [process_group.interface("127.0.0.1")]
    assert named[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    process_group.bind()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_a_rank_that_hangs_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch):
    class Hanging(Workers):
        def execute_async(self, *_: object, **__: object) -> list[object]:
            return []

        def __len__(self) -> int:
            return 2

    waited: list[float] = []
    monkeypatch.setenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "")  # so that it is put back
    monkeypatch.delenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S")
    monkeypatch.setattr(ray, "get", lambda futures, timeout: waited.append(timeout))
    settings = process_group.process_group(10)
    settings.backend_cls().on_shutdown(Hanging(), settings)
    assert waited == [process_group.LEAVE]


def test_an_address_that_is_not_here_names_no_interface():
    assert process_group.interface("192.0.2.1") is None


@pytest.mark.parametrize(("minutes", "seconds"), [(10, 1800), (60, 3900)])
def test_ranks_wait_longer_than_a_store_may_be_away(minutes: float, seconds: int):
    assert process_group.process_group(minutes).timeout_s == seconds


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
