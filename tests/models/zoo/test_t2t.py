"""Tests of T2T-ViT-14: performers, positions and image sizes. For golden vectors see test_golden_drloc_backbones."""

import pytest
import timm
import torch
from torch import nn

from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy
from eagleray.models.zoo.t2t import Performer, T2TViT, TokensToToken, linear_attention, sinusoids

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "token_dim": 16}


def test_linear_attention_estimates_softmax_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 20, 4).double() / 2
    w = torch.randn(200_000, 4).double()
    want = (q @ k.mT).softmax(-1) @ v
    torch.testing.assert_close(linear_attention(q, k, v, w), want, rtol=0, atol=0.02)
    assert (v.mean(1, keepdim=True) - want).abs().max() > 0.1  # which a uniform attention would not meet


def test_attention_weights_sum_to_one() -> None:
    q, k, w = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(3, 4)
    v = torch.tensor([1.0, -2.0, 3.0, 0.0]).expand(2, 7, 4)
    torch.testing.assert_close(linear_attention(q, k, v, w), v[:, :5])


def test_random_features_are_orthogonal_and_fixed() -> None:
    performer = Performer(48, 16, kernel_ratio=0.5)
    torch.testing.assert_close(performer.w @ performer.w.T, 8 * torch.eye(8))
    assert "w" in performer.state_dict()
    assert "w" not in dict(performer.named_parameters())


def test_only_performers_have_dropout() -> None:
    model = T2TViT(**SMALL, drop_path_rate=0.3)
    dropouts = {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p}
    both = [("attention1", "dropout"), ("attention1", "mlp.3"), ("attention2", "dropout"), ("attention2", "mlp.3")]
    assert dropouts == {f"patch_embed.{performer}.{name}": 0.1 for performer, name in both}
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)


def test_positions_know_distance_only() -> None:
    table = sinusoids(10, 16, torch.device("cpu"))
    near = (table[:-2] * table[2:]).sum(1)
    torch.testing.assert_close(near, near[:1].expand(8))
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0]).repeat(8).double())
    torch.testing.assert_close(table[:, 0], torch.arange(10).double().sin())


def test_parameters() -> None:
    model = timm.create_model("t2t_vit_14")
    count = sum(p.numel() for p in model.parameters())
    fixed = sum(b.numel() for b in model.buffers()) + 197 * 384  # the authors count the features and the position table
    assert (count + fixed) / 1e6 == pytest.approx(21.55, abs=0.005)


@pytest.mark.parametrize("size", [(64, 64), (96, 32)])
def test_any_multiple_of_16(size: tuple[int, int]) -> None:
    f = Backbone("t2t_vit_14", options=SMALL).eval()(torch.randn(2, 3, *size))
    assert f.grid == (size[0] // 16, size[1] // 16)
    assert f.patches.shape == (2, f.grid[0] * f.grid[1], 24)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="64 x 40 pixels"):
        TokensToToken(16, 24, 0.5)(torch.zeros(1, 3, 64, 40))


def test_patches_lie_where_the_image_says() -> None:
    torch.manual_seed(0)
    split = TokensToToken(16, 24, 0.5).eval()
    x = torch.zeros(2, 3, 64, 96)
    x[1, :, 16:32, 48:64] = torch.randn(3, 16, 16)  # row 1, column 3; overlapping splits carry it into its neighbours
    tokens = split(x)
    seen = (tokens[1] - tokens[0]).norm(dim=1).topk(9).indices
    assert set(seen.tolist()) == {row * 6 + column for row in (0, 1, 2) for column in (2, 3, 4)}


def test_every_parameter_learns_and_a_momentum_copy_never_drops() -> None:
    backbone, x = Backbone("t2t_vit_14", options=SMALL), torch.randn(4, 3, 32, 32)
    copy = ema_copy(backbone)
    assert not torch.equal(backbone(x).pooled, backbone(x).pooled)
    assert torch.equal(copy(x).pooled, copy(x).pooled)
    (backbone(x).pooled * torch.randn(24)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in backbone.parameters())
