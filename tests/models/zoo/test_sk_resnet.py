"""Tests of ResNets with selective kernels: the paper's sizes, and outputs computed once more with numpy in float64."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from numpy.lib.stride_tricks import sliding_window_view

from eagleray.engine.export import to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.models.zoo.sk_resnet import SelectiveKernel, ShortcutPool

SMALL = {"layers": [1, 2, 1, 1]}
Array = np.ndarray


@pytest.mark.parametrize(
    ("depth", "width", "millions"),
    [(50, 1, 35), (50, 2, 140), (101, 1, 65), (101, 2, 257), (152, 1, 89), (152, 2, 354), (152, 3, 795)],
)
def test_parameters_are_those_of_the_paper(depth: int, width: int, millions: int):
    """Table 1 of SimCLR v2, without a classifier. It has 354 for 353.4, and 233 for a plain ResNet's 232.3."""
    with torch.device("meta"):
        b = Backbone(f"resnet{depth}_sk", options={"width": width})
    assert sum(p.numel() for p in b.parameters()) / 1e6 == pytest.approx(millions, abs=0.7)
    assert b.dim == 2048 * width


@pytest.mark.parametrize(("width", "squeezed"), [(1, [32] * 4), (3, [32, 32, 48, 96])])
def test_mixing_weights_come_from_a_sixteenth_of_the_channels_or_32(width: int, squeezed: list[int]):
    with torch.device("meta"):
        model = timm.create_model("resnet50_sk", width=width)
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    assert [stage[0].conv2.attention.fc_reduce.out_channels for stage in stages] == squeezed


@pytest.mark.parametrize("size", [(64, 64), (72, 104)])  # even on all grids; 18 x 26, 9 x 13, 5 x 7 and 3 x 4
def test_outputs_are_those_of_numpy(size: tuple[int, int]):
    model = Backbone("resnet50_sk", options=SMALL).model.double().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, t in model.state_dict().items():  # also of the norms that begin at zero, and of what they have seen
            if "bn" in name or "downsample.2" in name or name[:7] in ("conv1.1", "conv1.4"):
                t.copy_(torch.rand(t.shape, generator=draw) + 0.5)
        x = torch.randn(2, 3, *size, generator=draw, dtype=torch.float64)
        got = model.forward_features(x).numpy()
    want = network(x.numpy(), {k: v.numpy() for k, v in model.state_dict().items()})
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())


def network(x: Array, w: dict[str, Array]) -> Array:
    """The last tokens (B, 2048, h, w) of images (B, 3, H, W), with SMALL blocks and padding as TensorFlow's."""
    for i, stride in ((0, 2), (3, 1)):
        x = relu(norm(conv(x, w[f"conv1.{i}.weight"], stride), w, f"conv1.{i + 1}"))
    x = relu(norm(conv(x, w["conv1.6.weight"]), w, "bn1"))
    x = windows(same(x, 3, 2), 3, 2).max((4, 5))
    for stage, blocks in enumerate(SMALL["layers"]):
        for block in range(blocks):
            x = bottleneck(x, w, f"layer{stage + 1}.{block}", 2 if stage and not block else 1)
    return x


def bottleneck(x: Array, w: dict[str, Array], at: str, stride: int) -> Array:
    shortcut = x
    if f"{at}.downsample.1.weight" in w:
        if stride == 2:
            pooled = windows(np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1))), 2, 2).mean((4, 5))
        else:  # the mean of those pixels of a window that are there
            pooled = windows(same(x, 2, 1), 2, 1).sum((4, 5)) / windows(same(np.ones_like(x), 2, 1), 2, 1).sum((4, 5))
        shortcut = norm(conv(pooled, w[f"{at}.downsample.1.weight"]), w, f"{at}.downsample.2")
    y = relu(norm(conv(x, w[f"{at}.conv1.weight"]), w, f"{at}.bn1"))
    y = relu(norm(conv(y, w[f"{at}.conv2.conv.weight"], stride), w, f"{at}.conv2.bn"))
    streams = np.stack(np.split(y, 2, axis=1))  # (2, B, C, h, w)
    squeezed = streams.sum(0).mean((2, 3), keepdims=True)
    squeezed = relu(norm(conv(squeezed, w[f"{at}.conv2.attention.fc_reduce.weight"]), w, f"{at}.conv2.attention.bn"))
    scores = np.exp(np.stack(np.split(conv(squeezed, w[f"{at}.conv2.attention.fc_select.weight"]), 2, axis=1)))
    y = (streams * scores / scores.sum(0)).sum(0)
    return relu(norm(conv(y, w[f"{at}.conv3.weight"]), w, f"{at}.bn3") + shortcut)


def conv(x: Array, weight: Array, stride: int = 1) -> Array:
    """A convolution whose zeros at the edge depend on its kernel alone, half of them on each side."""
    k = weight.shape[-1]
    x = np.pad(x, ((0, 0), (0, 0), ((k - 1) // 2,) * 2, ((k - 1) // 2,) * 2))
    return np.tensordot(windows(x, k, stride), weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)


def windows(x: Array, k: int, stride: int) -> Array:
    """All windows (B, C, h, w, k, k) of so many pixels."""
    return sliding_window_view(x, (k, k), (2, 3))[:, :, ::stride, ::stride]


def same(x: Array, k: int, stride: int) -> Array:
    """Zeros at the edges, as few as windows need, the odd one at the end: `SAME`; below, nothing is smaller than 0."""
    needed = [max((-(-side // stride) - 1) * stride + k - side, 0) for side in x.shape[2:]]
    return np.pad(x, ((0, 0), (0, 0), *((n // 2, n - n // 2) for n in needed)))


def norm(x: Array, w: dict[str, Array], at: str) -> Array:
    mean, var, gain, shift = (
        w[f"{at}.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(var + 1e-5) * gain + shift


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def test_a_mixture_of_equal_streams_is_either_of_them():
    kernel = SelectiveKernel(torch.nn.Conv2d(4, 6, 3, stride=2, padding=1))
    with torch.no_grad():
        kernel.conv.weight[6:] = kernel.conv.weight[:6]
    x = torch.randn(3, 4, 8, 8)
    either = kernel.act(kernel.bn(kernel.conv(x)))[:, :6]
    torch.testing.assert_close(kernel(x), either)


def test_a_shortcut_is_pooled_from_the_top_left():
    x = torch.arange(9.0).view(1, 1, 3, 3)
    assert ShortcutPool(1)(x).view(3, 3).tolist() == [[2, 3, 3.5], [5, 6, 6.5], [6.5, 7.5, 8]]
    assert ShortcutPool(2)(x).view(2, 2).tolist() == [[2, 1.75], [3.25, 2]]


def test_weights_begin_as_in_the_authors_code():
    """A deviation of one over the root of the inputs of each output, and blocks that begin as their shortcuts."""
    model = Backbone("resnet50_sk", options=SMALL).model
    for layer in (model.conv1[3], model.layer3[0].conv2.conv, model.layer4[0].conv2.attention.fc_select):
        assert layer.weight.std().item() == pytest.approx(layer.weight[0].numel() ** -0.5, rel=0.05)
    block, x = model.layer2[1], torch.rand(2, 512, 4, 4)
    torch.testing.assert_close(block(x), x)


def test_every_parameter_learns_and_layouts_agree():
    b, x = Backbone("resnet50_sk", options=SMALL), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        for m in b.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.weight.fill_(1)
    (b(x).pooled * torch.randn(2048)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in b.parameters())
    want = b.eval()(x).patches
    b.to(memory_format=torch.channels_last)
    torch.testing.assert_close(b(x).patches, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_channels_of_images_and_drop_path_are_options():
    b = Backbone("resnet50_sk", drop_path=0.9, options={**SMALL, "in_chans": 5})
    assert b(torch.randn(2, 5, 64, 64)).grid == (2, 2)
    assert b.dims("stages") == [256, 512, 1024, 2048]


def test_an_export_has_the_width(tmp_path: Path):
    options = {**SMALL, "layers": [1, 1, 1, 1], "width": 2}
    b = Backbone("resnet50_sk", options=options)
    assert to_timm(b, Network(name="resnet50_sk", options=options), tmp_path).exists()
