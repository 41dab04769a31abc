"""Tests of ViL: it is compared with full attention with a mask."""

import pytest
import timm
import torch
from torch import Tensor, nn

from eagleray.models.backbone import Backbone
from eagleray.models.zoo.vil import FullAttention, ViL, WindowAttention

DIM, HEADS, WINDOW = 12, 3, 3
EVERY = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def dense(attn: WindowAttention, x: Tensor, grid: tuple[int, int], near: list[tuple[int, int]]) -> Tensor:
    """Compute window attention from the scores of all tokens, for `near` windows (rows, columns) away."""
    g, s = attn.tokens, attn.window
    scores = x.new_full((attn.heads, x.shape[1], x.shape[1]), -torch.inf)
    at = [divmod(i, grid[1]) for i in range(grid[0] * grid[1])]
    table = attn.table.view(4 * s - 1, 4 * s - 1, -1)
    for i, (qi, qj) in enumerate(at):
        for j, (ki, kj) in enumerate(at):
            if (ki // s - qi // s, kj // s - qj // s) in near:
                scores[:, g + i, g + j] = table[qi - ki + 2 * s - 1, qj - kj + 2 * s - 1]
    if g:
        scores[:, :g, :g] = attn.among_global
        scores[:, :g, g:] = attn.from_global.unsqueeze(2)
        scores[:, g:, :g] = attn.to_global.unsqueeze(1)
    q, k, v = attn.qkv(x).view(*x.shape[:2], 3, attn.heads, -1).permute(2, 0, 3, 1, 4)
    p = (q @ k.mT / q.shape[-1] ** 0.5 + scores).softmax(-1)
    return attn.proj((p @ v).transpose(1, 2).flatten(2))


def attention(tokens: int) -> WindowAttention:
    attn = WindowAttention(DIM, HEADS, tokens, WINDOW)
    for p in attn.parameters():
        nn.init.normal_(p)
    return attn.double()  # scores this large leave rounding in float32


@pytest.mark.parametrize("grid", [(9, 12), (7, 5), (2, 10), (3, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_eight_windows_around(grid: tuple[int, int], tokens: int):
    attn = attention(tokens).eval()
    x = torch.randn(2, tokens + grid[0] * grid[1], DIM, dtype=torch.float64)
    torch.testing.assert_close(attn(x, grid), dense(attn, x, grid, EVERY))


def test_one_window_around_while_training():
    grid, attn = (8, 7), attention(1).train()
    x = torch.randn(1, 1 + 8 * 7, DIM, dtype=torch.float64)
    around = [at for at in EVERY if at != (0, 0)]
    expected = {at: dense(attn, x, grid, [(0, 0), at]) for at in around}
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        out = attn(x, grid)
        [at] = [at for at in around if torch.allclose(out, expected[at])]
        seen.add(at)
        torch.manual_seed(seed)
        assert torch.equal(attn(x, grid), out)
    assert seen == set(around)


@torch.no_grad()
def test_full_attention_knows_where_patches_lie():
    """With zero queries only the positions matter, so a table with one large offset points there."""
    grid, attn = (3, 4), FullAttention(DIM, 1, 0, (3, 4))
    for zero in (attn.qkv.weight[:DIM], attn.qkv.bias, attn.proj.bias):
        zero.zero_()
    attn.table.zero_().view(5, 7)[1 + 2, -2 + 3] = 100.0  # query minus key is one row down and two columns left
    nn.init.eye_(attn.proj.weight)
    x = torch.randn(1, 12, DIM)
    v = attn.qkv(x)[..., 2 * DIM :]
    query, key = 1 * 4 + 0, 0 * 4 + 2
    torch.testing.assert_close(attn(x, grid)[:, query], v[:, key])


def test_another_grid_resamples_positions():
    attn = FullAttention(DIM, HEADS, 1, (4, 4))
    assert attn.bias(9).shape == (HEADS, 10, 10)
    with torch.no_grad():
        attn.table.fill_(0.5)
    torch.testing.assert_close(attn.bias(9)[:, 1:, 1:], torch.full((HEADS, 9, 9), 0.5))
    torch.testing.assert_close(attn.bias(9)[:, 0, 1:], attn.from_global.expand(-1, 9))
    torch.testing.assert_close(attn.bias(9)[:, 1:, 0], attn.to_global.expand(-1, 9))


def test_parameters():
    with torch.device("meta"):
        model = timm.create_model("vil_tiny", num_classes=0, drop_path_rate=0.1)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 27.57
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])
    assert all(m.eps == 1e-6 for m in model.modules() if isinstance(m, nn.LayerNorm))


def test_any_crop_size():
    small = {"dims": (8, 8, 16, 16), "heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)}
    backbone = Backbone("vil_tiny", drop_path=0.1, options=small)
    for h, w in ((224, 224), (96, 96), (96, 160)):
        f = backbone(torch.randn(2, 3, h, w))
        assert f.grid == (h // 32, w // 32)
        torch.testing.assert_close(f.pooled, f.patches.mean(1))
    f.pooled.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_patches_lie_where_the_image_says():
    model = ViL(img_size=128, dims=(8, 8, 8, 8), heads=(1, 1, 1, 1), depths=(0, 0, 0, 0)).eval()
    x = torch.zeros(1, 3, 96, 128)
    x[:, :, 32:64, 96:] = 3  # row 1, column 3
    f = model.forward_features(x)
    odd = (f - f[0, 0, 0]).abs().sum(3)
    assert f.shape == (1, 3, 4, 8)
    assert odd.nonzero().tolist() == [[0, 1, 3]]


def test_the_last_stage_has_no_global_token():
    with pytest.raises(ValueError, match="the last stage is averaged"):
        ViL(tokens=(1, 1, 1, 1))
