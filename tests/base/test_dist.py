"""Several processes compute what one does, also when they hold different numbers of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.forked import start_ranks
from helpers.processes import free_port
from helpers.recipes import METHODS, small_recipe
from helpers.table import Table

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.engine.world import World
from eagleray.runs.method_checks import difference, rehearse, rehearse_on_ranks
from eagleray.runs.recipe import Recipe

BATCH = 24
SPLITS = [(12, 12), (15, 9)]
MORE = {
    "mocov3 in micro-batches": ["optim.micro_batch=4"],
    "mocov3 with an anchor": ["start={from: x, anchor: 100}"],
}
# Regions are matched with those most alike, and two that are alike but for rounding may swap.
MATCHES = {"byol_regions", "densecl", "esvit"}
OWN = {"health/input_mean", "health/input_std", "health/same_views"}  # of this rank's images alone


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Any]:
    """What one process and two computed, by the rows of each rank and by method."""
    path = tmp_path_factory.mktemp("recipes") / "small.yaml"
    recipes: dict[str, Recipe] = {}
    for name in (*METHODS, *MORE):
        path.write_text(small_recipe(name.partition(" ")[0]))
        recipes[name] = config.load(Recipe, path, ["data.train=none", *MORE.get(name, [])])
    out: dict[tuple[int, ...], Any] = {(BATCH,): {name: rehearse(r, (BATCH,)) for name, r in recipes.items()}}
    for (name, rows), rehearsal in rehearse_on_ranks(recipes, SPLITS).items():
        out.setdefault(rows, {})[name] = rehearsal
    return out


@pytest.mark.parametrize("rows", SPLITS, ids=["even", "uneven"])
def test_micro_batches_of_two_processes_are_the_batch_of_one(rows: tuple[int, ...], runs: dict[tuple[int, ...], Any]):
    one, two = runs[(BATCH,)]["mocov3"], runs[rows]["mocov3 in micro-batches"]
    assert difference(two.gradient, one.gradient) < 1e-5
    np.testing.assert_allclose(two.losses, one.losses, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", SPLITS, ids=["even", "uneven"])
@pytest.mark.parametrize("method", [*METHODS, "mocov3 with an anchor"])
def test_two_processes_equal_one(method: str, rows: tuple[int, ...], runs: dict[tuple[int, ...], Any], table: Table):
    one, two = runs[(BATCH,)][method], runs[rows][method]
    error = difference(two.gradient, one.gradient)
    table.add(method, f"two processes, {' + '.join(map(str, rows))} rows", error)
    assert error < 1e-5
    np.testing.assert_allclose(two.losses, one.losses, rtol=2e-5, atol=1e-5)
    for name in two.monitored.keys() - OWN:
        assert two.monitored[name] == pytest.approx(one.monitored[name], rel=2e-3, abs=1e-5), name
    for name, want in one.method.items():
        # A mean before batch norm moves with weights whose gradients are zero but for rounding, which AdamW enlarges.
        close = 1e-3 if method in MATCHES else 1e-4 if name.endswith("running_mean") else 2e-5
        torch.testing.assert_close(two.method[name], want, rtol=1e-4, atol=close, msg=lambda m, n=name: f"{n}: {m}")


def _gather(rank: int, port: int, out: Path) -> None:
    from eagleray.base import dist

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = (3, 1)
    x = torch.full((rows[rank], 2), float(rank + 1), requires_grad=True)
    whole = dist.gather(x, rows)
    assert not whole.requires_grad
    z = torch.full((rows[rank], 2), float(rank + 1), requires_grad=True)
    (dist.gather_with_grad(z, rows).sum(1) * torch.arange(4.0) * (rank + 1)).sum().backward()
    y = torch.tensor([rank + 1.0], requires_grad=True)
    (dist.total_with_grad(y) * (rank + 1)).sum().backward()  # losses of weight 1 and 2
    columns = [x.detach().bfloat16().view(-1, 1, 2), torch.arange(rows[rank]) + rank, torch.ones(rows[rank], 1) * rank]
    for column, together in zip(columns, dist.gather_together(columns, rows), strict=True):
        assert torch.equal(together, dist.gather(column, rows))
        assert together.dtype == column.dtype
    assert dist.from_rank_zero(lambda: torch.distributed.get_rank()) == 0

    def fail() -> None:
        raise UserError("no such bucket")

    with pytest.raises(UserError, match="no such bucket"):
        dist.from_rank_zero(fail)
    assert not dist.told("stop")
    torch.distributed.barrier()
    if rank == 0:
        dist.tell("stop")
    torch.distributed.barrier()
    assert dist.told("stop")
    gradients = []
    for reduce in ("fp32", "bf16"):
        network = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.constant_(network.weight, 1.0)
        model = World(torch.device("cpu")).wrap(network, reduce)  # type: ignore[arg-type]
        model(torch.full((1, 3), 1 / 3 + rank)).sum().backward()
        gradients.append(network.weight.grad)
    assert gradients[0][0, 0] == pytest.approx(1 / 3 + 0.5, abs=1e-6)
    assert 0 < (gradients[0] - gradients[1]).abs().max() < 0.01  # rounded to eight bits
    torch.save((whole, dist.offset(rows), dist.total(torch.ones(1)), y.grad, z.grad), out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_collectives(tmp_path: Path):
    start_ranks(_gather, (free_port(), tmp_path))
    for rank in range(2):
        whole, offset, total, grad, rows = torch.load(tmp_path / f"{rank}.pt")
        assert whole[:, 0].tolist() == [1, 1, 1, 2]
        assert offset == 3 * rank
        assert total == 2
        assert grad == 3
        assert rows[:, 0].tolist() == ([0, 3, 6], [9])[rank]  # its place in the whole, for the losses of both ranks
