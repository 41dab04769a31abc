"""Tests of shuffling batch norm: groups of images share statistics, for any number of ranks."""

from pathlib import Path

import pytest
import torch
from helpers.forked import start_ranks
from helpers.processes import free_port
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.densecl import DenseCL
from eagleray.methods.detco import DetCo
from eagleray.methods.instloc import InstLoc
from eagleray.methods.moco import MoCo
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import GroupedBatchNorm, count_images, group_batch_norms, shuffle, sync_batch_norms
from eagleray.models.checkpointing import checkpoint_blocks

HIDDEN = {MoCo: {"hidden": 16}, DenseCL: {"hidden": 16}, InstLoc: {"hidden": 16}}
AT = Progress(step=3, steps_per_epoch=10, epochs=2)


def norm(group: int | None, *, image: bool) -> nn.Module:
    """Build a batch norm with random weights and running statistics; None: PyTorch's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm2d(5) if image else nn.BatchNorm1d(5)).double()
    for x in (*net.parameters(), net[0].running_mean, net[0].running_var):
        nn.init.uniform_(x, 0.5, 1.5)
    group_batch_norms(net, group)
    return net


def inputs(image: bool) -> Tensor:
    return torch.randn(12, 5, *(4, 3) * image, dtype=torch.float64) * 3 + 1


@pytest.mark.parametrize("image", [False, True], ids=["vectors", "maps"])
@pytest.mark.parametrize("group", [3, 4, 12])
def test_each_group_has_a_batch_norm_of_its_own(group: int, image: bool):
    ours, x = norm(group, image=image), inputs(image).requires_grad_()
    y, weights = ours(x), torch.randn_like(x)
    theirs = [norm(None, image=image) for _ in range(12 // group)]  # each sees one group
    parts = [net(part) for net, part in zip(theirs, x.split(group), strict=True)]
    torch.testing.assert_close(y, torch.cat(parts))

    grads = torch.autograd.grad((y * weights).sum(), [x, *ours.parameters()])
    for net in theirs:
        assert [n for n, _ in net.named_parameters()] == [n for n, _ in ours.named_parameters()]
    expected = torch.autograd.grad(
        (torch.cat(parts) * weights).sum(), [x, *(p for n in theirs for p in n.parameters())]
    )
    torch.testing.assert_close(grads[0], expected[0])
    torch.testing.assert_close(grads[1], sum(expected[1::2]))
    torch.testing.assert_close(grads[2], sum(expected[2::2]))

    for name, value in ours.state_dict().items():  # statistics move once, to the mean of the groups
        mean = torch.stack([net.state_dict()[name].double() for net in theirs]).mean(0)
        torch.testing.assert_close(value.double(), mean)
    assert ours.state_dict().keys() == theirs[0].state_dict().keys()


def test_statistics_of_other_groups_do_not_matter():
    net, x = norm(4, image=True), inputs(True)
    y = net(x)
    x[:4] *= 100
    assert torch.equal(net(x)[4:], y[4:])


def test_a_group_has_all_rows_of_its_images():
    net, x = norm(2, image=True), inputs(True)
    count_images(net, 4)  # of three rows each
    torch.testing.assert_close(net(x), norm(6, image=True)(x))
    torch.testing.assert_close(net(x[:4]), norm(2, image=True)(x[:4]))  # a row each in another forward of the step


def test_evaluation_has_no_groups():
    net, x = norm(4, image=True), inputs(True)
    net(x)
    plain = norm(None, image=True)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_grouped_norms_are_not_synchronised(device: str):
    net = nn.Sequential(nn.Linear(3, 5), norm(4, image=False))
    net = sync_batch_norms(net, torch.device(device))
    assert type(net[1][0]) is GroupedBatchNorm


@pytest.mark.parametrize("method", [MoCo, DenseCL, DetCo])
def test_every_norm_of_a_backbone_is_grouped(method: type[MoCo | DenseCL | DetCo]):
    with torch.device("meta"):
        method, plain = method(resnet("resnet50"), dim=8, queue=32, norm_group=2), resnet("resnet50")
    norms = [m for m in method.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert len(norms) == 2 * 53
    assert all(type(m) is GroupedBatchNorm and m.group == 2 for m in norms)
    assert method.export().state_dict().keys() == plain.state_dict().keys()


def test_an_unknown_norm_is_an_error():
    with pytest.raises(UserError, match=r"method\.norm_group=4.*BatchNormAct2d"):
        MoCo(Backbone("efficientnet_b0"), norm_group=4)


def test_a_shuffle_is_undone():
    x = torch.arange(16.0).unsqueeze(1)
    seen = set()
    for step in range(5):
        y, undo = shuffle(x, (16,), 4, seed=step)
        assert not torch.equal(y, x)
        assert torch.equal(y.sort(0).values, x)
        assert torch.equal(undo(y * 2), x * 2)
        seen.add(tuple(y.flatten().tolist()))
    assert len(seen) == 5


def test_without_groups_nothing_is_shuffled():
    x = torch.arange(16.0).unsqueeze(1)
    y, undo = shuffle(x, (16,), None, seed=1)
    assert y is x
    assert undo(y) is x


@pytest.mark.parametrize("rows", [(10,), (6, 10)])
def test_groups_must_fit_the_rows_of_every_rank(rows: tuple[int, ...]):
    with pytest.raises(UserError, match=r"method\.norm_group=4: expected a divisor .* (6, )?10; or,"):
        shuffle(torch.zeros(rows[0], 1), rows, 4, seed=0)


def test_a_query_knows_its_neighbour_and_its_key_does_not():
    torch.manual_seed(0)
    method = MoCo(resnet("resnet10t"), dim=8, hidden=None, queue=32, norm_group=2).double()
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    other = x.clone()
    other[1] = torch.randn(3, 32, 32)

    def changed(encode) -> set[int]:
        with torch.no_grad():
            return set((encode(x) - encode(other)).norm(dim=1).gt(1e-9).nonzero().flatten().tolist())

    assert changed(lambda v: method.f_q([v])) == {0, 1}
    batch = Batch([], torch.empty(0), torch.empty(0), rows=(8,))
    found = [changed(lambda v, s=step: method.keys(v, batch, Progress(s, 10, 2))) for step in range(6)]
    assert all(len(pair) == 2 and 1 in pair for pair in found)
    assert len(set(map(frozenset, found))) > 1


@pytest.mark.parametrize("method", [MoCo, DenseCL, DetCo])
def test_keys_are_put_back_where_their_queries_are(method: type[MoCo | DenseCL | DetCo]):
    batch = Batch([*torch.randn(method.views[0], 8, 3, 32, 32).double()], torch.empty(0), torch.empty(0), rows=(8,))

    def loss(group: int | None) -> Tensor:
        torch.manual_seed(0)
        net = method(resnet("resnet10t"), dim=8, queue=32, norm_group=group, **HIDDEN.get(method, {})).double()
        return net(batch, AT)["loss"]

    torch.testing.assert_close(loss(8), loss(None))  # one group: its order does not matter
    assert not torch.isclose(loss(4), loss(None))


def test_groups_of_patches_are_the_same_where_activations_are_computed_again():
    batch = Batch([*torch.randn(4, 8, 3, 32, 32).double()], torch.empty(0), torch.empty(0), rows=(8,))

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = DetCo(resnet("resnet10t"), dim=8, queue=32, norm_group=2).double()
        if checkpointing:
            checkpoint_blocks(net.f_q.backbone.model)
        net(batch, AT)["loss"].backward()
        return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], g) for name, g in plain.items())


def resnet(name: str) -> Backbone:
    thin = {"channels": (4, 8, 8, 16), "stem_width": 4} if name == "resnet10t" else {}
    return Backbone(name, options={"zero_init_last": False, **thin})  # so that every norm matters


BATCH, GROUP = 12, 2
METHODS = {"moco": MoCo, "moco-symmetric": MoCo, "densecl": DenseCL, "instloc": InstLoc, "detco": DetCo}
SPLITS = {"even": ((6, 6), GROUP), "uneven": ((8, 4), GROUP), "group on two ranks": ((6, 6), BATCH)}


def step(name: str, rank: int, rows: tuple[int, ...], group: int) -> dict[str, Tensor]:
    """Return loss and gradient of the global batch, and all buffers after the step."""
    torch.manual_seed(0)
    keys = {
        "dim": 8,
        "queue": 40,
        "momentum": Schedule(value=0.9),
        "norm_group": group,
        **HIDDEN.get(METHODS[name], {}),
    }
    method = METHODS[name](resnet("resnet10t"), **keys | ({"symmetric": True} if "symmetric" in name else {})).double()
    sync_batch_norms(method, torch.device("cpu"))
    shape = (METHODS[name].views[0], BATCH, 3, 32, 32)
    views = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    batch = Batch([v[mine] for v in views], torch.empty(0), torch.empty(0), rows)
    for p in method.f_q.parameters():
        p.data.mul_(1.1)  # the key encoder is another network
    loss = method(batch, AT)["loss"] * rows[rank] / BATCH
    loss.backward()
    grads = {n: dist.total(p.grad) for n, p in method.named_parameters() if p.grad is not None}
    return {"loss": dist.total(loss), **grads, **dict(method.named_buffers())}


def _rank(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {(name, kind): step(name, rank, *split) for name in METHODS for kind, split in SPLITS.items()}
    torch.save(found, out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the results of two processes, by method and rows."""
    out = tmp_path_factory.mktemp("ranks")
    start_ranks(_rank, (free_port(), out))
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_equal_one(name: str, kind: str, ranks: list[dict]):
    one = step(name, 0, (BATCH,), SPLITS[kind][1])
    assert sum("running_mean" in n for n in one) > 20
    for found in ranks:
        two = found[name, kind]
        assert two.keys() == one.keys()
        for n, want in one.items():
            torch.testing.assert_close(two[n], want, msg=lambda m, n=n: f"{n}: {m}")
