"""Several processes compute what one does, also when they hold different numbers of rows."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from eagleray import config, optim, run
from eagleray.cluster.world import World
from eagleray.data.batch import Batch
from eagleray.recipe import Recipe
from eagleray.train import fit

BATCH, STEPS = 24, 3


def global_batch(step: int, views: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = [16, 16, *[8] * (views - 2)]
    return [torch.randn(BATCH, 3, s, s, generator=generator) for s in sizes]


def train(rank: int, rows: tuple[int, ...], port: int, recipe: Path, out: Path) -> None:
    """One rank's run; rank 0 saves weights, buffers and the mean losses."""
    torch.set_num_threads(1)
    if len(rows) > 1:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(rows))
    world = World(torch.device("cpu"))
    r = config.load(Recipe, recipe, ["data.train=none", "backbone.drop_path=0"])
    method = run.build(r)
    world.synchronise(method)
    # Not Adam: it turns the rounding of gradients that are zero in truth, such as a key bias's, into whole steps.
    optimizer = torch.optim.SGD(optim.param_groups(method, decay="all"), momentum=0.9, fused=True)
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    def batches():
        for step in range(STEPS):
            views = [v[mine] for v in global_batch(step, sum(v.count for v in r.views))]
            yield run.Progress(step, 10, 2), Batch(views, torch.empty(0), torch.arange(1), torch.zeros(1), rows)

    first: dict[str, torch.Tensor] = {}

    def before_step(at: run.Progress) -> None:
        if not first:
            first.update({n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None})

    method.before_step = before_step  # of these two methods' own there is none without frozen layers
    losses = []
    for taken in fit(method, batches(), optimizer, lr=lambda _: 0.1, weight_decay=lambda _: 0.1, wrap=world.wrap):
        share = rows[rank] / sum(rows)
        losses.append(world.agree(float(taken.values["loss"]) * share)[0])
    if rank == 0:
        torch.save({"state": method.state_dict(), "losses": losses, "gradient": first}, out)
    if len(rows) > 1:
        torch.distributed.destroy_process_group()


def spread(rows: tuple[int, ...], recipe: Path, folder: Path) -> dict:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = folder / f"{'-'.join(map(str, rows))}.pt"
    if len(rows) == 1:
        train(0, rows, port, recipe, out)
    else:
        mp.spawn(train, (rows, port, recipe, out), nprocs=len(rows))
    return torch.load(out)


@pytest.mark.parametrize("rows", [(12, 12), (15, 9)], ids=["even", "uneven"])
@pytest.mark.parametrize("method", ["small", "small_dino"])
def test_two_processes_equal_one(method: str, rows: tuple[int, ...], request: pytest.FixtureRequest, tmp_path: Path):
    recipe = request.getfixturevalue(method)
    one, two = spread((BATCH,), recipe, tmp_path), spread(rows, recipe, tmp_path)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-5)
    assert two["gradient"].keys() == one["gradient"].keys()
    whole, difference = (
        torch.cat([x.flatten().double() for x in parts]).norm()
        for parts in (one["gradient"].values(), [two["gradient"][n] - g for n, g in one["gradient"].items()])
    )
    assert difference < 1e-5 * whole
    for name, want in one["state"].items():
        torch.testing.assert_close(two["state"][name], want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _gather(rank: int, port: int, out: Path) -> None:
    from eagleray import dist

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = (3, 1)
    x = torch.full((rows[rank], 2), float(rank + 1), requires_grad=True)
    whole = dist.gather(x, rows)
    assert not whole.requires_grad
    y = torch.tensor([rank + 1.0], requires_grad=True)
    (dist.total_with_grad(y) * (rank + 1)).sum().backward()  # losses of weight 1 and 2
    torch.save((whole, dist.offset(rows), dist.total(torch.ones(1)), y.grad), out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_collectives(tmp_path: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_gather, (port, tmp_path), nprocs=2)
    for rank in range(2):
        whole, offset, total, grad = torch.load(tmp_path / f"{rank}.pt")
        assert whole[:, 0].tolist() == [1, 1, 1, 2]
        assert offset == 3 * rank
        assert total == 2
        assert grad == 3
