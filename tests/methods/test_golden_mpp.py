"""Masked patch prediction: golden vectors computed from the formulas of ViT's paper, and properties."""

from pathlib import Path

import pytest
import torch
from helpers.commands import refused
from helpers.golden_cases import Case, cases, vit
from helpers.recipes import small_recipe
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.methods import mpp
from eagleray.methods.mpp import MPP
from eagleray.models.backbone import Backbone
from eagleray.models.patch_colours import Corruption, corrupt, mean_colours
from eagleray.views.colours import colours
from eagleray.views.photometric import normalise_

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
CPU = torch.device("cpu")
IMAGENET = [torch.tensor(values).view(3, 1, 1) for values in colours(3)]
GRID, SHARES = (4, 5), (0.5, 0.8, 0.1)


def batch(x: Tensor) -> Batch:
    return Batch([x], torch.empty(0), torch.empty(0), (len(x),))


@cases("mpp_step")
def test_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole forward pass with the corruption that the vector records, and its gradients."""
    h = case.hyper
    sizes = (h[n] for n in ("img_size", "patch_size", "embed_dim", "depth", "num_heads"))
    method = MPP(vit(*sizes, ln_eps=h["ln_eps"], pool="norm_mean"))
    outside = ("mask_token", "predictor.weight", "predictor.bias")
    names = {n: n if n in outside else f"encoder.backbone.model.{n}" for n in case.under("w.")}
    method.load_state_dict({names[n]: value for n, value in case.under("w.").items()})
    monkeypatch.setattr(mpp, "corrupt", lambda *_: Corruption(case["places"], case["mask"], case["source"]))

    colours = mean_colours(case["x"], tuple(case["mask"].shape[1:]), method.mean, method.std)  # type: ignore[arg-type]
    assert torch.equal(colours.gather(1, case["places"]), case["colours"])
    loss = method(batch(case["x"]), AT)["loss"]
    loss.backward()
    case.check(loss, "loss")
    params = dict(method.named_parameters())
    assert set(names.values()) == params.keys()
    for n, ours in names.items():
        case.check(params[ours].grad, f"g.{n}")


def test_colours_have_three_bits_of_each_channel() -> None:
    levels = torch.randint(8, (2, 3, 3, 2))
    pixels = (levels + 0.1 + 0.8 * torch.rand(levels.shape)) / 8
    x = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3)  # patches of one colour
    x += 0.05 / 8 * torch.tensor([-1.0, 1.0]).repeat(4)  # which changes no mean
    want = (levels[:, 0] * 64 + levels[:, 1] * 8 + levels[:, 2]).flatten(1)
    assert torch.equal(mean_colours(normalise_(x), (3, 2), *IMAGENET), want)


@pytest.mark.parametrize(("pixel", "colour"), [(0.0, 0), (1.0, 511)])
def test_black_and_white_are_the_first_and_the_last_colour(pixel: float, colour: int) -> None:
    x = normalise_(torch.full((1, 3, 8, 8), pixel))
    assert (mean_colours(x, (2, 2), *IMAGENET) == colour).all()


def test_half_of_the_patches_are_corrupted_of_which_four_fifths_are_masked_and_a_tenth_exchanged() -> None:
    places, mask, source = corrupt(GRID, SHARES, (3000,), 1, CPU)
    corrupted = torch.zeros(3000, 20, dtype=torch.bool).scatter(1, places, True)
    assert (corrupted.sum(1) == 10).all()
    mask, moved = mask.flatten(1), source != torch.arange(20)
    assert not (mask & ~corrupted).any()
    assert not (moved & ~corrupted).any()
    assert not (moved & mask).any()
    assert mask.sum() / 30000 == pytest.approx(0.8, abs=0.01)
    assert moved.sum() / 30000 == pytest.approx(0.1, abs=0.01)
    shift = ((source - torch.arange(20)) % 20)[moved].bincount(minlength=20)  # every other patch is as likely
    assert shift[0] == 0
    assert shift[1:].min() > 0.6 * shift[1:].float().mean()
    assert corrupted.sum(0).min() > 0.9 * 1500


def test_the_corruption_is_of_the_step_and_of_the_row_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = corrupt(GRID, SHARES, (7,), 3, CPU)
    assert not torch.equal(whole.mask, corrupt(GRID, SHARES, (7,), 4, CPU).mask)
    assert len(whole.mask.flatten(1).unique(dim=0)) == 7
    parts = []
    for rank in range(2):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(corrupt(GRID, SHARES, (4, 3), 3, CPU))
    for ours, want in zip(map(torch.cat, zip(*parts, strict=True)), whole, strict=True):
        assert torch.equal(ours, want)


def test_the_encoder_sees_nothing_of_masked_patches_and_the_loss_asks_for_corrupted_ones_alone() -> None:
    torch.manual_seed(0)
    method, x = MPP(vit(16, 4, 12, 2, 2), exchanged=0.0, masked=1.0), torch.rand(5, 3, 16, 16)
    masked = corrupt((4, 4), (0.5, 1.0, 0.0), (5,), AT.draw, CPU).mask
    pixels = masked.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1)
    seen: list[Tensor] = []
    method.encoder.backbone.register_forward_hook(lambda *args: seen.append(args[2].patches))
    loss = method(batch(x), AT)["loss"]
    other = method(batch(torch.where(pixels, 1 - x, x)), AT)["loss"]
    assert torch.equal(*seen)
    assert loss != other  # other colours are asked for
    torch.testing.assert_close(method(batch(x), AT)["loss"], loss)
    method.predictor.register_forward_hook(lambda *args: seen.append(args[1][0]))
    method(batch(x), AT)
    assert seen[-1].shape == (5, 8, 12)
    ours = {tuple(row) for row in seen[-1].flatten(0, 1).tolist()}
    assert ours == {tuple(row) for row in seen[0][masked.flatten(1)].tolist()}


def test_colours_are_learnt() -> None:
    """Images of one colour each, whose corrupted patches have the colour of the others."""
    torch.manual_seed(0)
    method = MPP(vit(16, 4, 24, 2, 2, pool="norm_mean"))
    x = normalise_(torch.rand(16, 3, 1, 1).round().expand(-1, -1, 16, 16).contiguous())
    optimizer = torch.optim.AdamW(method.parameters(), 3e-3)
    losses = []
    for step in range(60):
        loss = method(batch(x), Progress(step, 10, 6))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 6  # a guess among 512
    assert losses[-1] < 0.5


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("method.corrupted=0", "method.corrupted: input should be greater than 0"),
        ("method.corrupted=1.1", "method.corrupted: input should be less than or equal to 1"),
        ("method.corrupted=0.1", "method.corrupted=0.1: corrupts 0 of the 4 patches of a view"),
        ("method.masked=0.95", "method.masked=0.95 method.exchanged=0.3: expected a sum of at most 1"),
        ("method.exchanged=-1", "method.exchanged: input should be greater than or equal to 0"),
        (
            "views=[{size: 8}]",
            "corrupts 0 of the 1 patches of a view; expected at least one of at least two",
        ),
        ("views=[{size: 16, count: 2}]", "views: got 2, but mpp works with 1"),
        ("backbone.options.patch_drop_rate=0.5", "VisionTransformer cannot hide patches for mpp"),
        ("backbone.options.global_pool=avg", "or has a layer after its pooling; expected a plain vision transformer"),
    ],
)
def test_wrong_keys_are_one_line(
    shards: Path, key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "small.yaml").write_text(small_recipe("mpp"))
    data = f"data.train={shards / 'train'}"
    assert said in refused(capsys, "pretrain", str(path), data, f"out={tmp_path / 'out'}", key)


def test_other_backbones_and_more_channels_are_refused() -> None:
    with pytest.raises(UserError, match=r"backbone.name: ResNet cannot hide patches for mpp, or has a layer"):
        MPP(Backbone("resnet18"))
    with (
        pytest.raises(UserError, match=r"data.channels: 6 channels of 8 levels make too many colours for mpp"),
        torch.device("meta"),
    ):
        MPP(Backbone("vit_tiny_patch16_224", options={"in_chans": 6}))
