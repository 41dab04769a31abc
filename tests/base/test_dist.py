"""Several processes compute what one does, also when they hold different numbers of rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from helpers.processes import free_port
from helpers.recipes import METHODS, small_recipe
from helpers.table import Table

from eagleray import config
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import fit
from eagleray.engine.world import World
from eagleray.runs import pretrain
from eagleray.runs.build import build_method
from eagleray.runs.monitor import Monitor
from eagleray.runs.recipe import Recipe

BATCH, STEPS = 24, 4
SPLITS = [(12, 12), (15, 9)]
PARTS = "mocov3 in micro-batches"
OWN = {"health/input_mean", "health/input_std", "health/same_views"}  # of this rank's images alone


def global_batch(step: int, recipe: Recipe) -> list[torch.Tensor]:
    # Of seeds 0 to 3 one image puts a hidden unit of byol_regions within rounding of ReLU's kink, where gradients part.
    generator = torch.Generator().manual_seed(10 + step)
    sizes = [v.size for v in recipe.views for _ in range(v.count)]
    return [torch.randn(BATCH, 3, s, s, generator=generator) for s in sizes]


def train(rank: int, rows: tuple[int, ...], recipe: Recipe) -> dict[str, Any]:
    """One rank's run: weights, buffers, the mean losses, and the first step's gradient."""
    world = World(torch.device("cpu"))
    method = build_method(recipe)
    method.allocate(100)
    world.synchronise(method)
    # Not Adam: it turns the rounding of gradients that are zero in truth, such as a key bias's, into whole steps.
    optimizer = optim.make("sgd", method, decay="all")
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    def batches() -> Iterator[tuple[pretrain.Progress, Batch]]:
        for step in range(STEPS):
            views = [v[mine] for v in global_batch(step, recipe)]
            index = torch.arange(BATCH)[mine] + step
            label = (torch.arange(BATCH) * 7 % 10)[mine]
            yield pretrain.Progress(step, 10, 2), Batch(views, index, label, rows)

    first: dict[str, torch.Tensor] = {}
    own = method.before_step

    def before_step(at: pretrain.Progress) -> None:
        if not first:
            first.update({n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None})
        own(at)

    method.before_step = before_step
    monitor = Monitor(method, optimizer, every=STEPS)
    losses = []
    for taken in fit(method, batches(), optimizer, lr=lambda _: 0.02, weight_decay=lambda _: 0.1, wrap=world.wrap):
        monitor.watch(taken)
        share = rows[rank] / sum(rows)
        losses.append(world.agree(float(taken.values["loss"]) * share)[0])
    return {"state": method.state_dict(), "losses": losses, "gradient": first, "seen": monitor.flush()[0]}


def rank_of(rank: int, rows: tuple[int, ...], port: int, folder: Path) -> None:
    """All methods' runs in one process; rank 0 saves them."""
    torch.set_num_threads(1)
    if len(rows) > 1:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(rows))
    found = {}
    for method in METHODS:
        (path := folder / f"{rank}.yaml").write_text(small_recipe(method))
        found[method] = train(rank, rows, config.load(Recipe, path, ["data.train=none"]))
    (path := folder / f"{rank}.yaml").write_text(small_recipe("mocov3"))
    found[PARTS] = train(rank, rows, config.load(Recipe, path, ["data.train=none", "optim.micro_batch=4"]))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    if len(rows) > 1:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Any]:
    """What one process and two found, by the rows of each rank and by method."""
    out = {}
    for rows in [(BATCH,), *SPLITS]:
        folder = tmp_path_factory.mktemp("-".join(map(str, rows)))
        if len(rows) == 1:
            rank_of(0, rows, 0, folder)
        else:
            mp.spawn(rank_of, (rows, free_port(), folder), nprocs=len(rows))
        out[rows] = torch.load(folder / "found.pt")
    return out


@pytest.mark.parametrize("rows", SPLITS, ids=["even", "uneven"])
def test_micro_batches_of_two_processes_are_the_batch_of_one(rows: tuple[int, ...], runs: dict[tuple[int, ...], Any]):
    one, two = runs[(BATCH,)]["mocov3"], runs[rows][PARTS]
    assert difference(two["gradient"], one["gradient"]) < 1e-5
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", SPLITS, ids=["even", "uneven"])
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one(method: str, rows: tuple[int, ...], runs: dict[tuple[int, ...], Any], table: Table):
    one, two = runs[(BATCH,)][method], runs[rows][method]
    error = difference(two["gradient"], one["gradient"])
    table.add(method, f"two processes, {' + '.join(map(str, rows))} rows", error)
    assert error < 1e-5
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=2e-5, atol=1e-5)
    for name in two["seen"].keys() - OWN:
        assert two["seen"][name] == pytest.approx(one["seen"][name], rel=2e-3, abs=1e-5), name
    for name, want in one["state"].items():
        torch.testing.assert_close(two["state"][name], want, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def difference(ours: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """|ours - want| / |want| of gradients by name, each side as one vector."""
    assert ours.keys() == want.keys()
    away = torch.cat([(ours[n] - w).flatten().double() for n, w in want.items()]).norm()
    return float(away / torch.cat([w.flatten().double() for w in want.values()]).norm())


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
    torch.save((whole, dist.offset(rows), dist.total(torch.ones(1)), y.grad, z.grad), out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_collectives(tmp_path: Path):
    mp.spawn(_gather, (free_port(), tmp_path), nprocs=2)
    for rank in range(2):
        whole, offset, total, grad, rows = torch.load(tmp_path / f"{rank}.pt")
        assert whole[:, 0].tolist() == [1, 1, 1, 2]
        assert offset == 3 * rank
        assert total == 2
        assert grad == 3
        assert rows[:, 0].tolist() == ([0, 3, 6], [9])[rank]  # its place in the whole, for the losses of both ranks
