"""A backbone to evaluate has all of its weights from the source that was named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from eagleray.base.errors import UserError
from eagleray.evaluation import target
from eagleray.evaluation.target import load_target
from eagleray.methods.moco import MoCo
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import GroupedBatchNorm
from eagleray.models.network import Network
from eagleray.protocols.settings import Evaluate


def test_a_parameter_that_would_be_random_is_named(tmp_path: Path):
    state = Backbone("test_vit").model.state_dict()
    for name in ("cls_token", "norm.bias"):  # far less than 5 % of the parameters
        del state[name]
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w\.pth: lacks cls_token and 1 more of \d+ parameters of test_vit"):
        load_target(str(tmp_path / "w.pth"), "test_vit")


def test_layers_that_the_architecture_lacks_are_named(tmp_path: Path):
    state = Backbone("test_vit").model.state_dict()
    torch.save(state | {"blocks.0.ls1.gamma": torch.ones(64)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w\.pth: has blocks\.0\.ls1\.gamma inside of the backbone"):
        load_target(str(tmp_path / "w.pth"), "test_vit")


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet", "resnet18"])
def test_a_classifier_beside_the_backbone_is_left_out(name: str, tmp_path: Path):
    """That of ConvNeXt is in one module with the last norm."""
    whole = timm.create_model(name, num_classes=7)
    torch.save(whole.state_dict(), tmp_path / "w.pth")
    ours = load_target(str(tmp_path / "w.pth"), name).backbone.model.state_dict()
    assert ours
    assert all(torch.equal(tensor, whole.state_dict()[key]) for key, tensor in ours.items())


def test_norms_over_groups_of_images_are_for_pretraining_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Detectors freeze or synchronise PyTorch's norms, and have other batches."""
    recipe = SimpleNamespace(backbone=Network(name="resnet10t"), evaluate=Evaluate(), data=SimpleNamespace(channels=()))
    method = MoCo(Backbone("resnet10t"), dim=8, queue=32, norm_group=2)
    assert any(type(m) is GroupedBatchNorm for m in method.export().modules())
    monkeypatch.setattr(target, "restore", lambda _: (recipe, method, tmp_path))
    modules = list(load_target(str(tmp_path)).backbone.modules())
    assert any(type(m) is nn.BatchNorm2d for m in modules)
    assert not any(isinstance(m, GroupedBatchNorm) for m in modules)
