"""A token stands in place of hidden patches before positions are added, in all ways in which a ViT runs."""

from typing import Any

import pytest
import torch
from helpers.golden_cases import vit
from torch import Tensor

from eagleray.models.backbone import Backbone
from eagleray.models.tokens import Hidden, maskable, packable

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dino": {"position": "dino"},
    "mean": {"pool": "mean"},
    "batch norm": {"norm": "batch"},
}


def network(**settings: Any) -> Backbone:
    torch.manual_seed(0)
    return vit(16, 4, 12, 2, 3, **settings)


def given() -> tuple[Tensor, Hidden]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, 16, 16, generator=g), Hidden(
        torch.rand(5, 4, 4, generator=g) < 0.4, torch.randn(1, 12, generator=g).requires_grad_()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_hidden_patches_do_not_matter_and_their_positions_do(kind: str) -> None:
    net, (x, hidden) = network(**KINDS[kind]), given()
    pixels = hidden.mask.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1)
    other = torch.where(pixels, torch.randn(x.shape), x)
    ours, same, seen = net(x, hidden), net(other, hidden), net(x)
    assert torch.equal(ours.patches, same.patches)
    assert torch.equal(ours.pooled, same.pooled)
    assert (ours.patches - seen.patches).norm() > 1e-3 * seen.patches.norm()
    at = ours.patches[hidden.mask.flatten(1)]
    assert (at[0] - at[1]).abs().max() > 1e-4
    ours.pooled.square().sum().backward()
    assert hidden.token.grad.norm() > 0


def test_registers_stay_beside_hidden_patches() -> None:
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "reg_tokens": 4}
    net, (x, hidden) = Backbone("vit_tiny_patch16_224", options=options), given()
    assert net(x, hidden).patches.shape == (5, 16, 12)
    none = Hidden(torch.zeros_like(hidden.mask), hidden.token)
    torch.testing.assert_close(net(x, none).patches, net(x).patches)


def test_packed_and_micro_batched_forwards_are_the_whole_one() -> None:
    net, (x, hidden) = network(position="dino"), given()
    small = torch.randn(5, 3, 8, 8)
    assert packable(net.model)
    whole, apart = net.sizes([x, small], hidden), [net(x, hidden), net(small)]
    net.micro_batch = 2
    parts = net.sizes([x, small], hidden)
    for a, b, c in zip(whole, apart, parts, strict=True):
        torch.testing.assert_close(a.patches, b.patches)
        torch.testing.assert_close(c.patches, b.patches)
        torch.testing.assert_close(c.pooled, b.pooled)
    grads = [
        torch.autograd.grad(out[0].pooled.sum() + out[1].pooled.square().sum(), [hidden.token, *net.parameters()])
        for out in (apart, parts)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_in_the_place_of_another_is_seen_there(kind: str) -> None:
    net, (x, hidden) = network(**KINDS[kind]), given()
    source = torch.stack([torch.randperm(16) for _ in range(5)])
    blocks = x.unflatten(3, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (B, N, 3, p, p)
    moved = torch.stack([image[order] for image, order in zip(blocks, source, strict=True)])
    other = moved.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    ours, want = net(x, hidden._replace(source=source)), net(other, hidden)
    torch.testing.assert_close(ours.patches, want.patches)
    if not net.batch_norm:
        net.micro_batch = 2
        torch.testing.assert_close(net(x, hidden._replace(source=source)).patches, want.patches)


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet50", {}), ("swin_tiny_patch4_window7_224", {}), ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5})],
)
def test_other_backbones_cannot_hide_patches(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        assert not maskable(Backbone(name, options=options).model)
    assert maskable(network().model)
