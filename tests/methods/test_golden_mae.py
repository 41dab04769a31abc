"""MAE: what the encoder sees and what the loss counts, and the authors' code, github.com/facebookresearch/mae."""

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
from eagleray.methods import mae
from eagleray.methods.mae import MAE, mae_loss, patchify, shuffle
from eagleray.models.backbone import Backbone
from eagleray.models.variants import sincos

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
CPU = torch.device("cpu")


def ours(name: str) -> str:
    """Our name of a parameter of theirs."""
    if name == "mask_token":
        return "decoder.mask_token"
    name, of_decoder = name.removeprefix("decoder_"), name.startswith("decoder_")
    return f"decoder.{name}" if of_decoder else f"encoder.backbone.model.{name}"


@cases("mae_step")
def test_step(case: Case, monkeypatch: pytest.MonkeyPatch):
    """A whole forward pass with the order of the patches that theirs had, and its gradients."""
    h = case.hyper
    sizes = (h[n] for n in ("img_size", "patch_size", "embed_dim", "depth", "num_heads"))
    method = MAE(
        vit(*sizes, ln_eps=1e-6, position="sincos"),
        mask_ratio=h["mask_ratio"],
        decoder_dim=h["decoder_embed_dim"],
        decoder_depth=h["decoder_depth"],
        decoder_heads=h["decoder_num_heads"],
    )
    method.load_state_dict({ours(name): value for name, value in case.under("w.").items()})
    monkeypatch.setattr(mae, "shuffle", lambda *_: case["noise"].argsort(1))
    loss = method(Batch([case["x"]], torch.empty(0), torch.empty(0), (len(case["x"]),)), AT)["loss"]
    loss.backward()
    case.check(loss, "loss")
    params = dict(method.named_parameters())
    gradients = {ours(name): name for name in case.under("g.")}
    assert gradients.keys() == {name for name, p in params.items() if p.requires_grad}
    for name, theirs in gradients.items():
        case.check(params[name].grad, f"g.{theirs}")


@cases("mae_loss")
def test_loss(case: Case):
    pixels = case["pred"].requires_grad_()
    p = case.hyper["patch_size"]
    loss = mae_loss(pixels, patchify(case["x"], (p, p)), case["mask"].bool())
    loss.backward()
    case.check(loss, "loss")
    case.check(pixels.grad, "grad_pred")


@cases("mae_pos_embed")
def test_positions_are_theirs_with_the_halves_of_the_channels_swapped(case: Case):
    side, dim = case.hyper["grid_size"], case.hyper["embed_dim"]
    table = sincos((side, side), dim, prefix=1)
    assert not table.requires_grad
    case.check(table[0].roll(dim // 2, 1), "pos_embed")


def test_a_patch_holds_its_pixels_row_by_row():
    x = torch.randn(2, 3, 8, 12)
    patches = patchify(x, (4, 3))
    assert patches.shape == (2, 8, 36)
    for n in range(8):
        top, left = n // 4 * 4, n % 4 * 3
        want = x[:, :, top : top + 4, left : left + 3].permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(patches[:, n], want)


def made(**keys: float) -> MAE:
    torch.manual_seed(0)
    return MAE(vit(16, 4, 12, 2, 2), **{"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2} | keys)


def test_the_encoder_sees_nothing_of_masked_patches_and_the_loss_nothing_of_visible_ones():
    method, x = made(), torch.randn(5, 3, 16, 16)
    order = shuffle(16, (5,), AT.step, CPU)
    assert method.visible == 4
    hidden = torch.zeros(5, 16, dtype=torch.bool).scatter(1, order[:, 4:], True)
    grid = hidden.view(5, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    seen = [method.encoder.backbone.visible(image, order[:, :4]) for image in (x, torch.where(grid, 9.0, x))]
    torch.testing.assert_close(*seen)

    pixels, target = torch.randn(2, 5, 16, 48)
    other = torch.where(hidden.unsqueeze(2), pixels, 7.0)
    torch.testing.assert_close(mae_loss(pixels, target, hidden), mae_loss(other, target, hidden))
    std, mean = torch.std_mean(target, 2, keepdim=True)
    assert mae_loss((target - mean) / std, target, hidden) < 1e-6
    torch.testing.assert_close(mae_loss(pixels, target, hidden), mae_loss(pixels, 3 * target + 2, hidden))


def test_with_all_patches_the_encoder_is_the_backbone():
    backbone, x = made().encoder.backbone, torch.randn(3, 3, 16, 16)
    order = torch.stack([torch.randperm(16) for _ in range(3)])
    pooled, tokens = backbone.visible(x, order)
    whole = backbone(x)
    torch.testing.assert_close(pooled, whole.pooled, rtol=1e-4, atol=1e-5)
    want = whole.patches.gather(1, order.unsqueeze(2).expand(-1, -1, 12))
    torch.testing.assert_close(tokens[:, 1:], want, rtol=1e-4, atol=1e-5)


def test_orders_are_of_the_step_and_of_the_row_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch):
    whole = shuffle(16, (7,), 3, CPU)
    assert torch.equal(whole.sort(1).values, torch.arange(16).expand(7, -1))
    assert not torch.equal(whole, shuffle(16, (7,), 4, CPU))
    assert len(whole.unique(dim=0)) == 7
    parts = []
    for rank in range(2):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(shuffle(16, (4, 3), 3, CPU))
    assert torch.equal(torch.cat(parts), whole)


def test_a_model_without_a_class_token_trains():
    torch.manual_seed(0)
    method = MAE(vit(16, 4, 12, 1, 2, pool="norm_mean"), decoder_dim=8, decoder_depth=1, decoder_heads=2)
    loss = method(Batch([torch.randn(3, 3, 16, 16)], torch.empty(0), torch.empty(0), (3,)), AT)["loss"]
    loss.backward()
    assert all(p.grad is not None for p in method.parameters() if p.requires_grad)


def test_weights_are_initialised_as_the_authors_do():
    """Uniform after Glorot and Bengio, with query, key and value as one matrix, and no bias."""
    torch.manual_seed(0)
    model = Backbone("vit_tiny_patch16_224", init="mae", options={"depth": 1}).model
    decoder = MAE(vit(16, 4, 12, 1, 2), decoder_dim=64, decoder_depth=1, decoder_heads=2).decoder

    def check(weight: Tensor) -> None:
        rows, columns = weight.flatten(1).shape
        bound = (6 / (rows + columns)) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound

    for block in (model.blocks[0], decoder.blocks[0]):
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            check(layer.weight)
            assert not layer.bias.any()
    check(model.patch_embed.proj.weight)
    assert 0.01 < model.cls_token.std() < 0.03
    assert 0.01 < decoder.mask_token.std() < 0.03


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("method.mask_ratio=1", "method.mask_ratio: input should be less than 1"),
        ("method.mask_ratio=0", "method.mask_ratio: input should be greater than 0"),
        ("method.mask_ratio=0.9", "method.mask_ratio=0.9: leaves 0 of 4 patches visible; expected at least one"),
        ("method.decoder_dim=18", "method.decoder_dim=18: expected a multiple of 4 and of method.decoder_heads=2"),
        ("method.decoder_heads=3", "method.decoder_dim=16: expected a multiple of 4 and of method.decoder_heads=3"),
        ("method.decoder_depth=0", "method.decoder_depth: input should be greater than 0"),
        ("views=[{size: 32}]", "views: 32 pixels, but the decoder of mae has positions for 16 x 16"),
        ("views=[{size: 16, count: 2}]", "views: got 2, but mae works with 1"),
        ("backbone.options.global_pool=avg", "has a layer after its pooling; expected a plain vision transformer"),
        ("backbone.init=beit", "backbone.init: input should be 'timm', 'moco' or 'mae'"),
        ("optim.beta2=1", "optim.beta2: input should be less than 1"),
    ],
)
def test_wrong_keys_are_one_line(shards: Path, key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (path := tmp_path / "small.yaml").write_text(small_recipe("mae"))
    data = f"data.train={shards / 'train'}"
    assert said in refused(capsys, "pretrain", str(path), data, f"out={tmp_path / 'out'}", key)


def test_other_backbones_are_refused():
    with pytest.raises(UserError, match=r"backbone.name: ResNet cannot leave patches out for mae"):
        MAE(Backbone("resnet18"))
    with pytest.raises(UserError, match=r"backbone.init=mae: resnet18 is not one of timm's plain vision transformers"):
        Backbone("resnet18", init="mae")
