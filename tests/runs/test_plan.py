"""Which numbers of workers a recipe may have."""

from dataclasses import replace

import pytest
import torch

from eagleray.base.errors import UserError
from eagleray.config import bundled
from eagleray.data.loader_processes import processes
from eagleray.engine.world import World
from eagleray.runs import recipe as recipes
from eagleray.runs.checks import check_shares


@pytest.mark.parametrize(("workers", "readers"), [(64, 12), (128, 8)])
def test_every_shipped_recipe_runs_on_many_gpus(workers: int, readers: int) -> None:
    for name in bundled.names():
        r = recipes.load(name)
        many = replace(r, workers=workers, data=replace(r.data, workers=readers))
        check_shares(many, r.method.args.get("norm_group"))
        assert recipes.digest(many) == recipes.digest(r)


def test_groups_of_batch_norm_and_ranks_must_fit_each_other() -> None:
    r = recipes.load("moco_resnet50_in1k_ep200")
    with pytest.raises(UserError, match=r"method\.norm_group=32: expected a divisor .*: 5, 6; or, where all ranks"):
        check_shares(replace(r, workers=48, data=replace(r.data, lanes=256)), 32)


def test_auto_leaves_two_cpus_of_a_rank_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [processes("auto", cpus) for cpus in (0.5, 2, 3.9, 16)] == [1, 1, 1, 14]
    assert processes(5, 16) == 5
    alone = World(torch.device("cpu")).cpus
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert World(torch.device("cpu")).cpus == alone / 2
    assert World(torch.device("cpu"), 8.0).cpus == 8
    auto, four = (recipes.load("dino_vits16_in1k_ep100", [f"data.workers={n}"]) for n in ("auto", 4))
    assert auto.data.workers == "auto"
    assert recipes.digest(auto) == recipes.digest(four)
