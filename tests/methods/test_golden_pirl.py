"""PIRL: golden vectors computed from the paper's formulas and the loss that VISSL has for it, and properties."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import refused
from helpers.golden_cases import Case, cases, vit
from helpers.recipes import small_recipe
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.nce import estimate_Z, exp_similarity, nce
from eagleray.methods import pirl
from eagleray.methods.pirl import PIRL
from eagleray.models.backbone import Backbone
from eagleray.models.jigsaw import jigsaw
from eagleray.models.queue import draw_negatives

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
IMAGES, ROWS = 20, 4


class Given(nn.Module):
    """A backbone that returns recorded features of images and of patches."""

    def __init__(self, features: Tensor, patch_features: Tensor) -> None:
        super().__init__()
        self.features, self.patch_features = features, patch_features

    def pooled_sizes(self, images: list[Tensor]) -> list[Tensor]:
        return [self.features]

    def pooled(self, images: Tensor) -> Tensor:
        return self.patch_features


def small(**keys: Any) -> PIRL:
    torch.manual_seed(0)
    method = PIRL(vit(16, 8, 24, depth=1, heads=3), dim=8, **{"negatives": 6, "patch": 8, **keys})
    method.allocate(IMAGES)
    return method


def batch(step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(step)
    views = [torch.randn(ROWS, 3, size, size, generator=generator) for size in (16, 34)]
    return Batch(views, torch.randperm(IMAGES, generator=generator)[:ROWS], torch.empty(0), (ROWS,))


def bank_of(method: PIRL) -> Tensor:
    assert method.bank is not None
    return method.bank.rows


@cases("pirl_loss")
def test_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone is replaced by the features recorded in the golden vector, the draw by the recorded negatives."""
    h, (n, dim) = case.hyper, case["memory_before"].shape
    given = {name: case[name].requires_grad_() for name in ("features", "patch_features")}
    settings: dict[str, Any] = {"temperature": h["temperature"], "momentum": h["memory_momentum"], "negatives": h["K"]}
    backbone = vit(16, 8, given["features"].shape[1], depth=1, heads=1)
    method = PIRL(backbone, dim=dim, jigsaw_weight=h["lambda"], patch=h["patch"], **settings)
    method.allocate(n)
    bank_of(method).copy_(case["memory_before"])
    method.encoder.backbone = Given(**given)  # type: ignore[assignment]
    heads = {"f": method.encoder.head, "patch": method.patch_head, "jigsaw": method.jigsaw_head}
    for name, head in heads.items():
        head.load_state_dict({kind: case[f"{name}_{kind}"] for kind in ("weight", "bias")})
    if h["Z_given"]:
        method.Z.copy_(case["Z"])
    monkeypatch.setattr(pirl, "draw_negatives", lambda *_: case["negatives"])

    view = case["view"]
    loss = method(Batch([view, view], case["y"], torch.empty(0), (len(view),)), AT)["loss"]
    loss.backward()
    case.check(loss, "loss")
    case.check(method.Z, "Z")
    for name, tensor in given.items():
        case.check(tensor.grad, f"grad_{name}")
    for name, head in heads.items():
        case.check(head.weight.grad, f"grad_{name}_weight")
        case.check(head.bias.grad, f"grad_{name}_bias")
    method.after_step(AT)
    case.check(bank_of(method), "memory_after")


def test_lambda_weighs_the_patches_and_the_image_against_the_same_negatives() -> None:
    method, b = small(jigsaw_weight=0.2), batch()
    rows = torch.cat([b.index.unsqueeze(1), draw_negatives(IMAGES, 6, b.rows, AT.draw, torch.device("cpu"))], 1)
    f = F.normalize(method.encoder(b.views[:1]), dim=1)
    patches = jigsaw(b.views[1], 8, AT.draw, b.rows).flatten(0, 1)
    v = method.patch_head(method.encoder.backbone(patches).pooled)
    g = F.normalize(method.jigsaw_head(v.view(ROWS, 72)), dim=1)
    e_f, e_g = (exp_similarity(v, bank_of(method)[rows], 0.07) for v in (f, g))
    Z = estimate_Z(e_g, IMAGES, b.rows)
    out = method(b, AT)
    torch.testing.assert_close(out["loss"], 0.2 * nce(e_g / Z, IMAGES) + 0.8 * nce(e_f / Z, IMAGES))
    torch.testing.assert_close(method.Z, Z)


def test_the_bank_takes_the_vectors_of_the_images_after_the_step() -> None:
    method, b = small(momentum=0.25), batch()
    before = bank_of(method).clone()
    f = F.normalize(method.encoder(b.views[:1]), dim=1)
    method(b, AT)["loss"].backward()
    assert torch.equal(bank_of(method), before)
    method.after_step(AT)
    torch.testing.assert_close(bank_of(method)[b.index], F.normalize(0.25 * before[b.index] + 0.75 * f, dim=1))
    others = [i for i in range(IMAGES) if i not in b.index.tolist()]
    assert torch.equal(bank_of(method)[others], before[others])


def test_the_order_of_patches_reaches_the_head() -> None:
    method, patches = small(), torch.randn(1, 9, 3, 8, 8)
    assert not torch.allclose(method.encode_patches(patches), method.encode_patches(patches.roll(1, 1)))


def test_resnets_take_the_sizes_of_the_paper() -> None:
    torch.manual_seed(0)
    backbone = Backbone("resnet50", options={"layers": [1, 1, 1, 1], "base_width": 16})
    method = PIRL(backbone, dim=8, negatives=10)
    method.allocate(IMAGES)
    views = [torch.randn(2, 3, 64, 64), torch.randn(2, 3, 255, 255)]
    method.check_views(views)
    method(Batch(views, torch.tensor([3, 1]), torch.empty(0), (2,)), AT)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in method.jigsaw_head.parameters())


def test_patches_must_fit_into_the_cells() -> None:
    small().check_views([torch.empty(1, 3, 16, 16), torch.empty(1, 3, 24, 24)])
    with pytest.raises(UserError, match=r"^views: the second view has 23 pixels, .* 7; expected at least 24 pixels"):
        small().check_views([torch.empty(1, 3, 16, 16), torch.empty(1, 3, 23, 23)])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("method.dim=0", "method.dim: input should be greater than 0"),
        ("method.temperature=0", "method.temperature: input should be greater than 0"),
        ("method.momentum=-1", "method.momentum: input should be greater than or equal to 0"),
        ("method.negatives=0", "method.negatives: input should be greater than 0"),
        ("method.patch=x", "method.patch: input should be a valid integer"),
        ("method.jigsaw_weight=2", "method.jigsaw_weight: input should be less than or equal to 1"),
        ("method.patch=17", "views: the second view has 48 pixels, so a cell of the jigsaw has 16"),
        ("views=[{size: 16}]", "views: got 1, but pirl works with 2"),
    ],
)
def test_wrong_keys_are_one_line(
    shards: Path, key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "small.yaml").write_text(small_recipe("pirl"))
    data = f"data.train={shards / 'train'}"
    assert said in refused(capsys, "pretrain", str(path), data, f"out={tmp_path / 'out'}", key)


def test_without_allocate_it_says_so() -> None:
    method = PIRL(vit(16, 8, 24, depth=1, heads=3), dim=8, patch=8)
    with pytest.raises(AssertionError, match="allocate"):
        method(batch(), AT)
