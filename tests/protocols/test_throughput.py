"""What a backbone costs."""

import pytest
import torch
from torch import nn

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import Throughput
from eagleray.protocols.throughput import multiplications, peak, throughput

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


def small() -> Backbone:
    return Backbone("vit_tiny_patch16_224", options=SMALL)


def test_multiplications_of_a_linear_layer_are_those_of_the_formula():
    assert multiplications(nn.Linear(7, 5), torch.randn(3, 7)) == 3 * 7 * 5


def test_multiplications_of_a_vit_are_those_of_the_formula():
    """Of N tokens of D channels: 12 N D^2 + 2 N^2 D for each block, and the patch projection."""
    n, d = 1 + (32 // 8) ** 2, 24
    blocks = 2 * (12 * n * d**2 + 2 * n**2 * d)
    assert multiplications(small(), torch.randn(1, 3, 32, 32)) == blocks + (n - 1) * d * 3 * 64


def test_memory_is_what_tensors_take():
    """1000 x 1000 floats go in and come out of each of three layers without parameters; two are alive at once."""
    x = torch.randn(1000, 1000)
    net = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())

    def work() -> None:
        with torch.inference_mode():
            net(x)

    kept: list[torch.Tensor] = []
    for _ in range(2):  # what the first leaves behind is not the second's
        assert peak(work, net, x.device) == pytest.approx(2 * x.nbytes, rel=0.15)
        assert peak(lambda: kept.append(x + 1), net, x.device) == pytest.approx(x.nbytes, rel=0.15)
    net.append(nn.Linear(1000, 1000))
    weights = sum(p.nbytes for p in net.parameters())
    assert peak(work, net, x.device) == pytest.approx(2 * x.nbytes + weights, rel=0.15)


def test_every_number_is_there_and_the_backbone_stays_as_it_was():
    backbone = small().requires_grad_(False).eval()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    found = throughput(backbone, Throughput(size=32, batch=2, rounds=1))
    names = ("params_m", "gmacs", "images_per_s", "forward_mib", "step_s", "step_mib")
    assert list(found.numbers) == [f"throughput/{n}" for n in names]
    assert all(v > 0 for v in found.numbers.values())
    assert found.numbers["throughput/params_m"] == sum(p.numel() for p in backbone.parameters()) / 1e6
    assert found.numbers["throughput/step_mib"] > found.numbers["throughput/forward_mib"]
    assert found.settings["size"] == 32
    assert found.settings["batch"] == 2
    assert not backbone.training
    assert not any(p.requires_grad or p.grad is not None for p in backbone.parameters())
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items())


def test_larger_images_cost_more():
    few, many = (throughput(small(), Throughput(size=s, batch=2, rounds=1)).numbers for s in (16, 64))
    for name in ("gmacs", "forward_mib", "step_mib"):
        assert many[f"throughput/{name}"] > few[f"throughput/{name}"]


def test_a_size_that_does_not_fit_is_said():
    with pytest.raises(UserError, match="cannot take images of --size 30"):
        throughput(small(), Throughput(size=30, batch=2, rounds=1))
