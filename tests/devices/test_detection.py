"""Detectors on the simulated device."""

import torch
from helpers.simulated_device import DEVICE, simulated
from torch import nn

from eagleray.dense.detection.c4 import freeze
from eagleray.models.backbone import Backbone


@torch.no_grad()
def test_frozen_batch_norm_keeps_its_statistics_on_the_device() -> None:
    backbone = Backbone("test_resnet")
    for norm in (m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)):
        for x in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            x.data.uniform_(0.5, 2)
    before = {name: x.clone() for name, x in backbone.state_dict().items()}
    images = torch.rand(1, 3, 64, 64)
    want = backbone.eval().pooled(images)
    with simulated():
        freeze(backbone.to(DEVICE))
        after = backbone.state_dict()
        assert {x.device for x in after.values()} == {DEVICE}
        assert all(x.cpu().equal(before[name]) for name, x in after.items())
        assert before.keys() - after.keys() == {name for name in before if "num_batches" in name}
        torch.testing.assert_close(backbone.train().pooled(images.to(DEVICE)).cpu(), want, atol=1e-5, rtol=1e-4)
