"""Linear layers that convolve: the same numbers as matrix products, and nothing else of a network changes."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from eagleray.models import token_linear
from eagleray.models.backbone import Backbone
from eagleray.models.token_linear import IMAGES, PIXELS, ROWS, TokenLinear, divided, on_device
from eagleray.protocols.throughput import multiplications

CPU = torch.device("cpu")


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_linear, "convolutions_are_faster", lambda: True)


@pytest.mark.parametrize(
    "shape", [(64, 17, 24), (1088, 24), (4, 16, 16, 24), (521, 24), (4, 197, 24), (3, 24), (2, 5, 24), (24,)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_those_of_a_linear_layer(
    shape: tuple[int, ...], bias: bool, training: bool, faster: None
):
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    other = copy.deepcopy(plain)
    on_device(other, CPU).train(training)
    assert type(other) is TokenLinear
    x, y = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 40)
    found = []
    for layer in (plain, other):
        out = layer(x)
        found.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], y)])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert a.is_contiguous() == b.is_contiguous()
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("channels", [(64, 192), (192, 768), (768, 192), (48, 30)])
def test_a_row_is_the_same_beside_any_others_in_evaluation(channels: tuple[int, int], faster: None):
    layer = on_device(nn.Linear(*channels), CPU).eval()
    x = torch.randn(2600, channels[0])
    whole = layer(x)
    for first, rows in ((0, 1), (7, 65), (300, 256), (20, 257), (1500, 1040), (11, 521), (96, 2080)):
        assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows]), (first, rows)


@torch.inference_mode()
def test_features_do_not_depend_on_the_batch(faster: None):
    backbone = on_device(Backbone("test_vit", options={"img_size": 32}), CPU).eval()
    images = torch.randn(40, 3, 32, 32)
    whole = backbone.pooled(images)
    assert torch.equal(torch.cat([backbone.pooled(part) for part in images.split([1, 3, 36])]), whole)


def test_multiply_adds_are_those_of_matrix_products(faster: None):
    network = nn.Sequential(nn.Linear(24, 8), nn.GELU()).eval()
    other = on_device(copy.deepcopy(network), CPU)
    x = torch.randn(5, 24)
    assert multiplications(other, x) == multiplications(network, x) == 5 * 24 * 8
    assert type(other[0]) is TokenLinear


def test_tokens_that_are_not_in_order_in_memory(faster: None):
    """A ViT's tokens without the class token, or a map of channels first."""
    layer = nn.Linear(24, 8)
    other = copy.deepcopy(layer)
    on_device(other, CPU)
    for x in (torch.randn(64, 18, 24)[:, 1:], torch.randn(16, 24, 8, 8).permute(0, 2, 3, 1)):
        torch.testing.assert_close(other(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "left"), [(ROWS, 0), (2080, 0), (6304, 0), (12608, 0), (6500, 0), (50432, 0), (521, 9), (4 * 197, 4)]
)
def test_rows_are_divided_into_images_that_are_small_enough(rows: int, left: int):
    images = divided(rows)
    assert images >= IMAGES
    assert rows // images <= PIXELS
    assert rows % images == left


def test_only_plain_linear_layers_of_a_cpu_change(faster: None):
    class Other(nn.Linear):
        pass

    network = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.LayerNorm(4))
    names = list(network.state_dict())
    assert type(on_device(copy.deepcopy(network), torch.device("meta"))[0]) is nn.Linear
    on_device(network, CPU)
    assert [type(part) for part in network] == [TokenLinear, Other, nn.LayerNorm]
    assert list(network.state_dict()) == names


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_which_cpus_convolve(
    vendor: str, capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(token_linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert token_linear.convolutions_are_faster.__wrapped__() is expected
    monkeypatch.setattr(token_linear, "CPUINFO", tmp_path / "none")
    assert token_linear.convolutions_are_faster.__wrapped__() is False
