"""Crops of several sizes in one forward have the features and the gradients of one forward for each size."""

import pytest
import torch
from torch import Tensor, nn

from eagleray.models import backbone as module
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.checkpointing import micro_batched
from eagleray.models.tokens import drop_factors, of_tokens, packable

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2}
SIZES = (32, 16)


def network(**keys: object) -> Backbone:
    torch.manual_seed(0)
    return Backbone("vit_tiny_patch16_224", options=TINY, **keys)  # type: ignore[arg-type]


def images() -> list[Tensor]:
    return [torch.randn(3, 3, SIZES[0], SIZES[0]), torch.randn(4, 3, SIZES[1], SIZES[1])]


@pytest.mark.parametrize("keys", [{}, {"position": "dino"}, {"pool": "mean"}, {"options": TINY | {"qk_norm": True}}])
def test_one_forward_is_that_of_each_size(keys: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"options": TINY} | keys
    torch.manual_seed(0)
    net = Backbone("vit_tiny_patch16_224", **keys)  # type: ignore[arg-type]
    given, grads, outs = images(), [], []
    for packs in (True, False):
        monkeypatch.setattr(module, "packable", lambda _, packs=packs: packs)
        net.zero_grad()
        features = net.sizes(given)
        assert [f.grid for f in features] == [(4, 4), (2, 2)]
        torch.testing.assert_close(net.pooled_sizes(given)[1], features[1].pooled)
        sum(f.pooled.square().sum() + f.patches.sin().sum() for f in features).backward()  # type: ignore[union-attr]
        grads.append([p.grad for p in net.parameters() if p.grad is not None])
        outs.append([x for f in features for x in f[:2]])
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)


def test_one_forward_of_a_swin_is_that_of_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = {"img_size": 64, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    net, grads, outs = Backbone("esvit_swin_tiny_w7", options=options), [], []
    given = [torch.randn(2, 3, 64, 64), torch.randn(3, 3, 44, 44)]  # the second one is padded
    for packs in (True, False):
        monkeypatch.setattr(module, "packable", lambda model, packs=packs: packs and model.packs())
        net.zero_grad()
        features = net.sizes(given)
        sum(f.pooled.square().sum() + f.patches.sin().sum() for f in features).backward()  # type: ignore[union-attr]
        grads.append([p.grad for p in net.parameters()])
        outs.append([x for f in features for x in f[:2]])
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-4)
    net.model.layers[0].blocks[1].forward = lambda x: x  # such as activation checkpointing
    assert not packable(net.model)


def test_the_blocks_run_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = network(), []
    net.model.blocks[0].mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    Encoder(net, nn.Identity())(images())
    assert seen == [(3 * 17 + 4 * 5, 12)]


def test_what_is_not_plain_runs_apart() -> None:
    assert packable(network().model)
    assert not packable(network(norm="batch").model)
    assert not packable(Backbone("resnet18").model)
    hooked = network()
    hooked.model.blocks[1].register_forward_hook(lambda *_: None)
    assert not packable(hooked.model)
    replaced = network()
    replaced.model.blocks[1].forward = lambda x: x  # such as activation checkpointing
    assert not packable(replaced.model)


def test_micro_batches_go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sizes = network(), []
    net.micro_batch = 2
    monkeypatch.setattr(module, "micro_batched", lambda f, x, size: (sizes.append(size), micro_batched(f, x, size))[1])
    net.sizes(images())
    assert sizes == [2, 2]


def test_drop_path_keeps_or_drops_whole_crops() -> None:
    torch.manual_seed(0)
    rates = [0.0, 0.0, 0.2, 0.2, 0.4, 0.4]
    drawn = drop_factors(rates, 3000, torch.zeros(1))
    factors = [f for both in of_tokens(drawn, [(2000, 3), (1000, 2)], 3) for f in both]
    assert all(f.shape == (8000, 1) for f in factors)
    for rate, f in zip(rates, factors, strict=True):
        large, small = f[:6000].view(2000, 3), f[6000:].view(1000, 2)
        assert (large == large[:, :1]).all()
        assert (small == small[:, :1]).all()
        assert f[f > 0].unique().tolist() == pytest.approx([1 / (1 - rate)])
        assert float(f.mean()) == pytest.approx(1, abs=0.06)
    assert not torch.equal(factors[2], factors[3])
    assert drop_factors([0.0] * 6, 2, torch.zeros(1)) is None
    assert of_tokens(None, [(2, 3)], 1) == [(None, None)]


def test_drop_path_changes_the_features_of_crops_while_training_alone() -> None:
    net, given = network(drop_path=0.5), images()
    still = net.eval().pooled_sizes(given)
    torch.testing.assert_close(still, network().pooled_sizes(given))
    moved = net.train().pooled_sizes(given)
    assert not torch.allclose(moved[0], still[0])


@pytest.mark.parametrize(("name", "calls"), [("vit_tiny_patch16_224", 1), ("resnet18", 2)])
def test_views_share_a_forward_where_no_batch_norm_mixes_them(name: str, calls: int) -> None:
    torch.manual_seed(0)
    net = Backbone(name, options=TINY if name.startswith("vit") else {})
    encoder = Encoder(net, nn.Sequential(nn.Linear(net.dim, 4), nn.BatchNorm1d(4)))
    views, seen = [torch.randn(3, 3, 32, 32), torch.randn(3, 3, 32, 32)], []
    apart = [encoder([x]) for x in views]
    first = net.model.get_submodule("norm" if calls == 1 else "layer4")
    first.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    torch.testing.assert_close(encoder.each(views), apart)
    assert seen == [6 // calls] * calls
    torch.testing.assert_close([f.pooled for f in net.each(views)], net.pooled_each(views))
