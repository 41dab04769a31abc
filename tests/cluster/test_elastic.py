"""How many workers a run may have, and what each of them gets."""

from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.cluster.ray_train import resources
from eagleray.cluster.supervisor import cpus_per_gpu
from eagleray.runs import recipe
from eagleray.runs.checks import make_plan
from eagleray.runs.recipe import Recipe, span
from eagleray.runs.sources import resolve_paths

HEAD, CPUS, GPUS = {"memory": 1.0}, {"CPU": 8.0}, {"CPU": 32.0, "GPU": 8.0}


@pytest.fixture
def wanted(small: Path):
    def load(*keys: str) -> Recipe:
        return recipe.load(str(small), keys)

    return load


@pytest.mark.parametrize(
    ("given", "least", "most"), [("4..16", 4, 16), ("3", 3, 3), (3, 3, 3), (0, 0, 0), ("1..1", 1, 1)]
)
def test_spans(given: int | str, least: int, most: int):
    assert span(given) == (least, most)


@pytest.mark.parametrize("given", ["16..4", "0..4", "4-16", "many", -1, "4..", ""])
def test_no_spans(given: int | str):
    with pytest.raises(ValueError, match=r"such as 4\.\.16"):
        span(given)


def test_a_span_is_kept_in_the_resolved_recipe_and_a_single_number_is_one(wanted):
    assert wanted("workers=4..16").workers == "4..16"
    assert wanted("workers=5..5").workers == 5
    one, other = wanted("workers=4..16"), wanted("workers=1", "gpus=true")
    assert recipe.digest(one) == recipe.digest(other)  # where it runs is not what it learns


def test_every_number_of_workers_must_fit_the_batch(wanted, shards: Path, tmp_path: Path):

    keys = [f"data.train={shards / 'train'}", f"out={tmp_path / 'out'}"]
    make_plan(resolve_paths(wanted(*keys, "workers=1..32")))
    with pytest.raises(UserError, match=r"workers=33: .* at most optim\.batch=32"):
        make_plan(resolve_paths(wanted(*keys, "workers=1..33")))


@pytest.mark.parametrize(
    ("keys", "nodes", "gpu", "cpus"),
    [
        (["workers=2"], [CPUS], False, 4),
        (["workers=2"], [HEAD, CPUS, {"CPU": 2.0}], False, 2),  # no more than the smallest machine has
        (["workers=4"], [{"CPU": 2.0}], False, 0.5),
        (["workers=3"], [CPUS, CPUS], False, 4),  # a worker's CPUs are on one machine
        (["workers=4"], [CPUS, CPUS, CPUS], False, 4),
        (["workers=3"], [{"CPU": 1.0}, {"CPU": 1.0}], False, 0.5),
        (["workers=128", "optim.batch=128"], [{"CPU": 1.0}], False, 0.0078),
        (["workers=20000", "optim.batch=20000"], [{"CPU": 1.0}], False, 0.0001),  # never nothing, which Ray drops
        (["workers=1..3"], [{"CPU": 1.0}, {"CPU": 1.0}], False, 1),  # Ray resizes by whole CPUs
        (["workers=16"], [HEAD, GPUS, GPUS], True, 4),
        (["workers=4..16"], [CPUS, GPUS], True, 4),  # machines without GPUs have no say
        (["workers=16", "gpus=true"], [HEAD], True, 1),  # an autoscaler has yet to start them
        (["workers=2", "gpus=false"], [GPUS], False, 16),
        (["workers=2", "gpus=false"], [HEAD], False, 1),  # never nothing: Ray refuses a worker without resources
        (["workers=8", "gpus=true"], [], True, 1),
    ],
)
def test_resources_of_a_worker(wanted, keys: list[str], nodes: list[dict[str, float]], gpu: bool, cpus: float):
    assert resources(wanted(*keys), nodes) == (gpu, cpus)


@pytest.mark.parametrize(
    ("node", "least", "cpus"),
    [
        ({"CPU": 96.0, "GPU": 8.0}, 1, 12),  # it was not up yet when the worker asked for one CPU
        ({"CPU": 100.0, "GPU": 8.0}, 4, 12),
        ({"CPU": 12.0, "GPU": 8.0}, 4, 4),
        ({"GPU": 8.0}, 1, 1),
    ],
)
def test_loaders_of_a_worker_have_its_share_of_the_machine(node: dict[str, float], least: float, cpus: float):
    assert cpus_per_gpu(node, least) == cpus


def test_some_gpus_but_too_few_are_said_with_both_ways_out(wanted):
    with pytest.raises(UserError, match=r"workers=16: there are 8 GPUs.*gpus=true waits.*gpus=false"):
        resources(wanted("workers=16"), [GPUS])


@pytest.mark.parametrize("nodes", [[], [HEAD], [{"CPU": 0.0}]])
def test_a_cluster_without_machines_does_not_guess(wanted, nodes: list[dict[str, float]]):
    with pytest.raises(UserError, match=r"workers=8: the cluster has no machine.*gpus=true waits.*gpus=false"):
        resources(wanted("workers=8"), nodes)
