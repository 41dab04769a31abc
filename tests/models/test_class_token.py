"""The last block for the class token alone computes what the whole block computes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from eagleray.models import backbone as module
from eagleray.models.backbone import Backbone
from eagleray.models.checkpointing import checkpoint_blocks
from eagleray.models.tokens import class_token_pooled

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised queries": {"options": TINY | {"qk_norm": True, "scale_attn_norm": True, "qkv_bias": False}},
    "layer scale": {"options": TINY | {"init_values": 0.1, "reg_tokens": 2}},
    "drop path": {"drop_path": 0.5},
    "positions": {"position": "dino"},
}


def network(**keys: Any) -> Backbone:
    torch.manual_seed(0)
    return Backbone("vit_tiny_patch16_224", **{"options": TINY} | keys).double().train()


def pooled(net: Backbone, sizes: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the pooled vectors of images of several sizes, and the gradients of all weights."""
    net.zero_grad()
    torch.manual_seed(1)  # of drop path
    out = net.pooled_sizes(sizes)
    sum((i * x.sin()).sum() for i, x in enumerate(out, 1)).backward()  # type: ignore[union-attr]
    return out, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sizes", [(32,), (32, 16)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_whole_block(
    case: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(**CASES[case])
    given, rows = [torch.randn(5, 3, size, size).double() for size in sizes], []
    net.model.blocks[-1].mlp.register_forward_hook(lambda _, args, __: rows.append(args[0].numel() // 12))
    got, got_grads = pooled(net, given)
    assert rows == [5 * len(sizes)]
    monkeypatch.setattr(module, "class_token_pooled", lambda _: False)
    want, want_grads = pooled(net, given)
    assert rows[1] > 5 * rows[0] / len(sizes)
    torch.testing.assert_close(got, want)
    assert got_grads.keys() == want_grads.keys()
    torch.testing.assert_close(got_grads, want_grads)


def test_evaluations_take_whole_outputs() -> None:
    net, images = network().eval(), torch.randn(2, 3, 32, 32).double()
    net.model.blocks[-1].mlp.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
    rows: list[int] = []
    assert torch.equal(net.pooled(images), net(images).pooled)
    assert rows == [17, 17]


def test_the_last_block_is_whole_where_more_is_read_or_seen() -> None:
    assert class_token_pooled(network().model)
    for keys in ({"pool": "mean"}, {"norm": "batch"}, {"options": TINY | {"proj_drop_rate": 0.1}}):
        assert not class_token_pooled(network(**keys).model)
    assert not class_token_pooled(Backbone("resnet18").model)
    hooked = network()
    hooked.model.blocks[-1].register_forward_hook(lambda *_: None)
    assert not class_token_pooled(hooked.model)


def test_checkpoints_of_the_other_blocks_change_nothing() -> None:
    plain, images = network(drop_path=0.5), [torch.randn(5, 3, 32, 32).double()]
    ours = copy.deepcopy(plain)
    checkpoint_blocks(ours.model)
    assert class_token_pooled(ours.model)
    assert "forward" in vars(ours.model.blocks[-1])
    (got, got_grads), (want, want_grads) = pooled(ours, images), pooled(plain, images)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(got_grads[name], grad) for name, grad in want_grads.items())
    ours.model.blocks[-1].forward = lambda x: x  # which is no checkpoint
    assert not class_token_pooled(ours.model)
