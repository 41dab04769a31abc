"""Ranks on Ray: the CPUs that each has, a rank whose process dies, and one that fails."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError

from eagleray.base import dist
from eagleray.base.cpu_share import cpus
from eagleray.base.errors import UserError
from eagleray.cluster import ray_ranks as ranks
from eagleray.cluster.ray_ranks import cpu_share, ray_ranks


def test_a_rank_has_its_share_of_the_cpus_of_every_machine():
    assert cpu_share([{"CPU": 8.0}], 2) == 4
    assert cpu_share([{"CPU": 3.0}, {"CPU": 3.0}], 3) == 1
    assert cpu_share([{"CPU": 2.0}, {"CPU": 32.0}], 2) == 16
    assert cpu_share([{"GPU": 1.0}], 2) == 1


def test_the_lines_of_rank_0_stay_on_the_machine_of_the_command(monkeypatch: pytest.MonkeyPatch):
    """Any other node may go, and all ranks start again when the lines are lost nevertheless."""
    given: dict[str, Any] = {}

    class Lost:
        def __init__(self, actor_options: dict[str, Any]) -> None:
            given.update(actor_options)

        def qsize(self) -> int:
            return 1

        def get_nowait_batch(self, number: int) -> list[str]:
            raise RayActorError(None, "the node is gone")

    monkeypatch.setattr("ray.util.queue.Queue", Lost)
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0a" * 28))
    lines = ranks._queue(ray)
    assert given["num_cpus"] == 0
    assert (given["scheduling_strategy"].node_id, given["scheduling_strategy"].soft) == ("0a" * 28, False)
    with pytest.raises(ranks.Died, match=r"^the process with the lines of rank 0 died: "):
        ranks._show(lines, print)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_started_again_and_an_error_of_a_rank_ends_all(tmp_path: Path):
    def work(died: Path, note: Any) -> float:
        """On rank 1 of 2 the process dies once; then the rank raises an error, while rank 0 waits for it in vain."""
        if dist.rank() == 1 and not died.exists():
            died.touch()
            os._exit(1)
        assert cpus() == torch.get_num_threads() == 1, "each has its share of two"
        note(f"{dist.size()} ranks after a death: {died.exists()}")
        if dist.rank() == 1:
            raise UserError("x.png: does not decode")
        return float(dist.total(torch.ones(1)))

    notes: list[str] = []
    with pytest.raises(UserError, match=r"^x.png: does not decode$"):
        ray_ranks(work, tmp_path / "died", workers=2, gpus=False, note=notes.append)
    assert [line for line in notes if "the process of rank 1 died" in line]
    assert notes[-1] == "2 ranks after a death: True"
