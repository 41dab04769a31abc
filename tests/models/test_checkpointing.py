"""Activation checkpointing changes nothing but the memory of a step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.networks import KINDS
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import group_batch_norms, sync_batch_norms
from eagleray.models.checkpointing import checkpoint_blocks
from eagleray.models.stages import blocks

DEVICE = torch.device("cpu")
VIT = KINDS["vit_tiny_patch16_224"] | {"depth": 4}
PYRAMID = {"dims": (8, 8, 16, 16), "heads": (1, 2, 2, 2), "depths": (1, 1, 2, 1)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"drop_path": 0.5, "options": VIT}),
    "vit with batch norm": ("vit_tiny_patch16_224", {"drop_path": 0.5, "norm": "batch", "options": VIT}),
    "swin": ("swin_tiny_patch4_window7_224", {"drop_path": 0.5}),
    "resnet": ("resnet50", {}),
    "convnext": ("convnext_atto", {"drop_path": 0.5, "options": {"dims": (8, 8, 16, 16), "depths": (1, 1, 2, 1)}}),
    "t2t": ("t2t_vit_14", {"drop_path": 0.5, "options": KINDS["t2t_vit_14"] | {"depth": 3}}),
    "cvt": ("cvt_13", {"drop_path": 0.5, "options": KINDS["cvt_13"] | {"depths": (1, 1, 3)}}),
    "cvt of EsViT": ("cvt_tiny_esvit", {"drop_path": 0.5, "options": PYRAMID}),
    "pvt": ("pvt_small", {"drop_path": 0.5, "options": PYRAMID}),
    "vil": ("vil_tiny", {"drop_path": 0.5, "options": PYRAMID}),
}
NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda module: None,
    "synchronised": lambda module: sync_batch_norms(module, DEVICE),
    "in groups": lambda module: group_batch_norms(module, 4),
}


def build(case: str) -> Backbone:
    torch.manual_seed(0)
    name, keys = CASES[case]
    return Backbone(name, **{"options": KINDS.get(name, {}), **keys})


def images(case: str) -> list[Tensor]:
    torch.manual_seed(1)
    size = 16 if case.startswith("vit") else 32
    return [torch.randn(8, 3, size, size) for _ in range(2)]


def trained(backbone: Backbone, views: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of two views, and the buffers after them."""
    torch.manual_seed(2)  # of drop path
    sum(backbone(x).patches.square().mean() + backbone.pooled(x).sum() for x in views).backward()  # type: ignore[union-attr]
    torch.rand(1)  # the generator goes on from where it would be
    return {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}, dict(backbone.named_buffers())


def kept(backbone: Backbone, x: Tensor) -> int:
    """Return the bytes that a forward pass keeps for the backward pass."""
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    weights = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = backbone.pooled(x)
    assert out.requires_grad
    return sum(n for pointer, n in held.items() if pointer not in weights)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers_are_equal_to_the_bit(case: str, norms: str):
    plain = build(case)
    if norms != "plain" and not any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in plain.modules()):
        pytest.skip("without batch norm")
    if norms == "in groups" and any(type(m).__name__ == "BatchNormAct2d" for m in plain.modules()):
        pytest.skip("cannot be grouped")
    NORMS[norms](plain)
    ours = copy.deepcopy(plain)
    checkpoint_blocks(ours.model)
    want, got = trained(plain, views := images(case)), trained(ours, views)
    assert want[0]
    for expected, found in zip(want, got, strict=True):
        assert expected.keys() == found.keys()
        assert not [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


@pytest.mark.parametrize("case", CASES)
def test_a_step_keeps_less(case: str, monkeypatch: pytest.MonkeyPatch):
    if case in ("resnet", "t2t"):  # whose stems keep much
        name, _ = CASES[case]
        deep = {"layers": (9, 1, 1, 1), "stem_width": 4} if case == "resnet" else {"depth": 20}
        monkeypatch.setitem(CASES, case, (name, {"options": KINDS[name] | deep}))
    plain = build(case)
    ours = copy.deepcopy(plain)
    checkpoint_blocks(ours.model)
    x = images(case)[0]
    assert kept(ours, x) < 0.7 * kept(plain, x)


def test_a_copy_has_its_own_blocks():
    ours = build("vit")
    checkpoint_blocks(ours.model)
    other = copy.deepcopy(ours)
    for p in ours.parameters():
        nn.init.constant_(p, torch.nan)
    assert other(images("vit")[0]).pooled.isfinite().all()
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in build("vit").named_parameters()]


def test_nothing_is_computed_again_without_a_gradient():
    ours, calls = build("vit"), []
    checkpoint_blocks(ours.model)
    for block in blocks(ours.model):
        block.mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        ours(images("vit")[0])
    ours.eval()(images("vit")[0]).pooled.sum().backward()
    assert len(calls) == 8
    ours.train()(images("vit")[0]).pooled.sum().backward()
    assert len(calls) > 14  # the last block's is not needed again


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match="neither stages nor blocks"):
        checkpoint_blocks(nn.Linear(2, 2))
