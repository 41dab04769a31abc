"""Two ranks on simulated devices compute what one computes, and a collective takes tensors of the device alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as td
from helpers.forked import start_ranks
from helpers.processes import free_port
from helpers.recipes import METHODS
from helpers.runs import weights
from helpers.simulated_device import DEVICE, simulated
from helpers.simulated_ranks import simulated_group
from helpers.simulated_runs import quiet_waits, run_on_device, small_run

from eagleray.base import dist
from eagleray.engine.world import World
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe

STEPS = ("max_steps=7", "precision=fp32", "optim.name=sgd", "evaluate.probe_epochs=0")


def _pretrain(rank: int, port: int, recipe: Recipe, out: Path) -> None:
    torch.set_num_threads(1)
    with simulated_group(rank, 2, port), pytest.MonkeyPatch.context() as monkeypatch:
        summary, waits_of = run_on_device(recipe, monkeypatch)
        assert summary is not None
        (out / f"{rank}.json").write_text(json.dumps([score(summary), quiet_waits(waits_of)]))


def score(summary: dict[str, Any]) -> float:
    [name] = {"knn/top1", "classifier/top1"} & summary.keys()
    return float(summary[name])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_pretrain_as_one_and_never_wait_in_a_step(
    method: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_run(method, shards, tmp_path / "two", *STEPS)
    start_ranks(_pretrain, (free_port(), recipe, tmp_path))
    scores = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert scores[0][1] == scores[1][1] == {}
    recipe = small_run(method, shards, tmp_path / "one", *STEPS)
    summary, _ = run_on_device(recipe, monkeypatch)
    assert summary is not None
    assert scores[0][0] == scores[1][0] == pytest.approx(score(summary), abs=3)  # a picture or two of 80
    start = dict(build_method(recipe).named_parameters())
    found, want = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert found.keys() == want.keys()
    away, moved = (
        torch.cat([(x[name] - y[name]).detach().flatten() for name in start]).norm()
        for x, y in ((found, want), (want, start))
    )
    assert away < 0.01 * moved, f"{away:.3g} of {moved:.3g}"


def _collectives(rank: int, port: int, out: Path) -> None:
    rows = (3, 1)
    with simulated_group(rank, 2, port), simulated() as waits:
        world = World(DEVICE)
        mine = torch.full((rows[rank], 2), float(rank + 1), device=DEVICE)
        whole, total = dist.gather(mine, rows), dist.total(mine.sum())
        before = len(waits)
        agreed = world.agree(1.0, rank)
        assert len(waits) == before  # numbers of the host travel without the device
        said = []
        for x, group in ((torch.ones(2), None), (mine, world._control)):
            for work in (td.all_reduce, lambda x, group: td.broadcast(x, 0, group=group)):
                with pytest.raises(RuntimeError) as error:
                    work(x, group=group)
                said.append(str(error.value))
        with pytest.raises(RuntimeError, match="one device"):
            td.all_gather_into_tensor(torch.empty(2, device=DEVICE), torch.ones(1))
        torch.save((whole.cpu(), total.cpu(), agreed, dist.gather_objects(rank), said), out / f"{rank}.pt")


def test_collectives_take_tensors_of_the_device_alone(tmp_path: Path) -> None:
    start_ranks(_collectives, (free_port(), tmp_path))
    for rank in range(2):
        whole, total, agreed, objects, said = torch.load(tmp_path / f"{rank}.pt")
        assert whole[:, 0].tolist() == [1, 1, 1, 2]
        assert total == 10
        assert agreed == [2, 1]
        assert objects == [0, 1]
        assert all("backend type" in line for line in said[:2]), said
        assert all("expected tensors of the CPU" in line for line in said[2:]), said
