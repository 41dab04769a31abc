"""Tests of pretrained weights: names, resized tables, and refused architectures."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import save
from helpers.networks import KINDS, VIT, network
from helpers.recipes import small_recipe
from safetensors.torch import save_file
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.pixels import OURS
from eagleray.models.readings import TABLE
from eagleray.models.weights import fill
from eagleray.runs import recipe, sources
from eagleray.runs.build import build_backbone, build_method
from eagleray.runs.restore import pretrained, restore
from eagleray.runs.start import build_started


def stored(folder: Path, state: Any, name: str = "weights.pth") -> str:
    path = folder / name
    save_file(state, path) if name.endswith(".safetensors") else torch.save(state, path)
    return str(path)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, b.state_dict()[k]) for k, x in a.state_dict().items())


def refused(source: str, backbone: Backbone) -> str:
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    with pytest.raises(UserError) as e:
        fill(backbone, pretrained(source))
    assert "\n" not in str(e.value)
    assert str(e.value).startswith(f"backbone.weights={source}: ")
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items()), "half a checkpoint was taken"
    return str(e.value)


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + k: v for k, v in state.items()}


@pytest.mark.parametrize("name", KINDS)
def test_every_tensor_of_a_state_dict_is_taken(name: str, tmp_path: Path):
    theirs, ours = network(name, seed=1), network(name)
    report = fill(ours, pretrained(stored(tmp_path, theirs.model.state_dict(), "w.safetensors")))
    assert same(theirs, ours)
    assert report.share == 1
    assert not [*report.resized, *report.missing, *report.left]
    assert sorted(report.matched) == sorted(ours.model.state_dict())


WRAPPED = {
    "plain": lambda s: s,
    "distributed": lambda s: under("module.", s),
    "compiled": lambda s: {"state_dict": under("_orig_mod.", s)},
    "deit": lambda s: {"model": s, "args": argparse.Namespace(lr=1.0), "epoch": 3},
    "swin ssl": lambda s: {"model": under("encoder.", s) | under("encoder_k.", {k: -v for k, v in s.items()})},
    "dino": lambda s: {
        "student": under("module.backbone.", {k: -v for k, v in s.items()}),
        "teacher": under("backbone.", s) | {"head.mlp.0.weight": torch.ones(3)},
        "args": argparse.Namespace(arch="vit_small"),
    },
    "moco v3": lambda s: {
        "arch": "vit_small",
        "state_dict": under("module.base_encoder.", s)
        | under("module.momentum_encoder.", {k: -v for k, v in s.items()})
        | {"module.predictor.0.weight": torch.ones(2), "module.base_encoder.head.0.weight": torch.ones(2)},
    },
    "moco v2": lambda s: {"state_dict": under("module.encoder_q.", s)},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_of_public_checkpoints_are_understood(kind: str, tmp_path: Path):
    theirs, ours = network(seed=1), network()
    report = fill(ours, pretrained(stored(tmp_path, WRAPPED[kind](theirs.model.state_dict()))))
    assert same(theirs, ours)
    assert report.share == 1
    head = {"dino": ["head.mlp.0.weight"], "moco v3": ["predictor.0.weight", "base_encoder.head.0.weight"]}
    assert [k for k in report.left if "head" in k or "predictor" in k] == sorted(head.get(kind, []), reverse=True)


def test_names_of_the_authors_become_timms(tmp_path: Path):
    theirs, ours = network("swin_tiny_patch4_window7_224", seed=1), network("swin_tiny_patch4_window7_224")
    state = {k.replace("layers.1.downsample", "layers.0.downsample"): v for k, v in theirs.model.state_dict().items()}
    state |= {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16), "head.weight": torch.ones(5, 24)}
    report = fill(ours, pretrained(stored(tmp_path, {"model": state})))
    assert same(theirs, ours)
    assert len(report.left) == 2
    theirs, ours = network("t2t_vit_14", seed=1), network("t2t_vit_14")
    state = {k.replace("patch_embed", "tokens_to_token"): v for k, v in theirs.model.state_dict().items()}
    report = fill(
        ours, pretrained(stored(tmp_path, {"state_dict_ema": 0, "state_dict": state | {"pos_embed": torch.ones(1)}}))
    )
    assert same(theirs, ours)
    assert report.left == ["pos_embed"]


@pytest.mark.parametrize(("averaged", "raw"), [("state_dict_ema", "state_dict"), ("model_ema", "model")])
def test_an_average_comes_before_the_weights(averaged: str, raw: str, tmp_path: Path):
    theirs, other, ours = network(seed=1), network(seed=2), network()
    fill(ours, pretrained(stored(tmp_path, {raw: other.model.state_dict(), averaged: theirs.model.state_dict()})))
    assert same(theirs, ours)


def test_an_average_without_tensors_is_passed_over(tmp_path: Path):
    theirs, ours = network(seed=1), network()
    fill(ours, pretrained(stored(tmp_path, {"state_dict_ema": {}, "state_dict": theirs.model.state_dict()})))
    assert same(theirs, ours)


def test_a_position_table_is_resized_for_another_grid(tmp_path: Path):
    theirs, ours = network(seed=1), network(options={"img_size": 32})
    with torch.no_grad():
        theirs.model.pos_embed.fill_(0.5)
        theirs.model.pos_embed[:, 0] = -3.0  # of the class token, which is nowhere in the grid
    report = fill(ours, pretrained(stored(tmp_path, theirs.model.state_dict())))
    assert report.resized == ["pos_embed 1x17x24 of 1x5x24"]
    assert report.share == 1
    torch.testing.assert_close(ours.model.pos_embed[:, 1:], torch.full((1, 16, 24), 0.5))
    torch.testing.assert_close(ours.model.pos_embed[:, 0], torch.full((1, 24), -3.0))


def test_tables_of_relative_positions_are_resized_for_another_window(tmp_path: Path):
    name = "swin_tiny_patch4_window7_224"
    theirs, ours = network(name, seed=1), network(name, options={"window_size": 8})
    for k, v in theirs.model.state_dict().items():
        if k.endswith(TABLE):
            v.copy_(torch.arange(v.shape[1]).expand_as(v) + 1.0)
    report = fill(ours, pretrained(stored(tmp_path, theirs.model.state_dict())))
    assert report.resized == [
        "layers.0.blocks.0.attn.relative_position_bias_table 225x2 of 49x2",
        "layers.1.blocks.0.attn.relative_position_bias_table 225x4 of 49x4",
    ]
    table = ours.model.layers[0].blocks[0].attn.relative_position_bias_table
    torch.testing.assert_close(table, torch.tensor([1.0, 2.0]).expand(225, 2))


def test_the_report_names_every_key(tmp_path: Path):
    state = network(seed=1, options={"img_size": 32}).model.state_dict()
    del state["norm.bias"]
    report = fill(network(), pretrained(stored(tmp_path, state | {"head.weight": torch.ones(3)})))
    lines = list(report.lines())
    assert "1 resized, 1 missing, 1 left over; 99.9% of the backbone's parameters" in lines[0]
    assert "resized    pos_embed 1x5x24 of 1x17x24" in lines
    assert "missing    norm.bias" in lines
    assert "left over  head.weight" in lines
    keys = [line[11:].partition(" ")[0] for line in lines[1:]]
    assert sorted(keys) == sorted([*network().model.state_dict(), "head.weight"])


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(kind: torch.dtype, tmp_path: Path):
    state, key = network(seed=1).model.state_dict(), "blocks.0.mlp.fc1.weight"
    source = stored(tmp_path, state | {key: state[key].to(kind)}, "w.safetensors")
    assert f"{key} is quantised ({kind}); expected 16 bits or more" in refused(source, network())


def test_another_architecture_is_refused(tmp_path: Path):
    deeper, wider = network(options={"depth": 3}), network(options={"embed_dim": 48})
    source = stored(tmp_path, network(seed=1).model.state_dict())
    line = refused(source, deeper)
    assert "of the backbone's parameters, expected 95% or more; missing: blocks.2.norm1.weight; " in line
    line = refused(source, wider)
    assert "has 0.0% of" in line
    assert "cls_token 1x1x48, is 1x1x24; " in line
    assert "expected 95% or more" in refused(source, network("resnet50"))
    assert "expected 95% or more" in refused(source, network("swin_tiny_patch4_window7_224"))


def test_the_same_shapes_of_another_architecture_are_refused(tmp_path: Path):
    batch = network(norm="batch")
    line = "norm2.norm is batch norm in the file, and the model has none"
    assert line in refused(stored(tmp_path, batch.model.state_dict()), network())
    line = "norm2.norm is batch norm in the model, and the file has none"
    assert line in refused(stored(tmp_path, network().model.state_dict()), batch)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path):
    why = "no such run, checkpoint or file; a timm model is named timm:NAME"
    assert why in refused(str(tmp_path / "none"), network())
    (tmp_path / "text.pth").write_text("no weights")
    assert "text.pth: " in refused(str(tmp_path / "text.pth"), network())
    (tmp_path / "text.safetensors").write_text("no weights")
    assert "cannot be read (SafetensorError)" in refused(str(tmp_path / "text.safetensors"), network())
    assert "expected tensors by name, found a list" in refused(stored(tmp_path, [1, 2]), network())
    assert "holds no tensors by name" in refused(stored(tmp_path, {"epoch": 3}), network())
    assert "holds more than tensors" in refused(stored(tmp_path, {"model": network()}), network())


class Touch:
    """An object whose pickle would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_runs_no_code(tmp_path: Path):
    source = stored(tmp_path, {"model": Touch(tmp_path / "touched")})
    assert "store its state dict alone" in refused(source, network())
    assert not (tmp_path / "touched").exists()


def run_of(folder: Path, method: str, *overrides: str) -> recipe.Recipe:
    """Write a checkpoint like that of a run, with weights that no seed gives."""
    (folder / "small.yaml").write_text(small_recipe(method))
    r = recipe.load(str(folder / "small.yaml"), overrides)
    trained = build_method(r)
    trained.allocate(40)
    torch.manual_seed(5)
    for p in trained.parameters():
        nn.init.normal_(p)
    state = {"recipe": config.dump(r), "method": trained.state_dict(), "images": 40}
    save(folder / "checkpoints", 3, state)
    return r


@pytest.mark.parametrize("method", ["mocov3", "dino"])
def test_a_run_gives_what_its_method_exports(method: str, tmp_path: Path):
    r = run_of(tmp_path, method)
    exported = restore(str(tmp_path))[1].export()
    for source in (tmp_path, tmp_path / "checkpoints" / "step-000000003.pt"):
        ours = build_backbone(r)
        report = fill(ours, pretrained(str(source)))
        assert report.share == 1
        assert not report.left
        assert same(exported, ours)
    assert not same(exported, build_method(r).export())


def test_a_run_with_other_attention_heads_is_refused(tmp_path: Path):
    r = run_of(tmp_path, "mocov3", "backbone.options.num_heads=2")
    assert r.backbone.options["num_heads"] == 2
    with pytest.raises(UserError, match=r"blocks\.0\.attn has 2 attention heads in the weights, but 3 in the model"):
        fill(network(), pretrained(str(tmp_path)))


def test_a_method_is_built_on_the_weights_and_its_copies_follow(tmp_path: Path):
    theirs = network(seed=1)
    (tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    r = recipe.load(str(tmp_path / "small.yaml"))
    given = pretrained(stored(tmp_path, theirs.model.state_dict()))
    fresh, method = build_method(r), build_method(r, lambda backbone: fill(backbone, given))
    assert same(theirs, method.export())
    assert same(theirs, method.momentum_encoder.backbone)
    assert same(fresh.predictor, method.predictor), "what is not loaded starts as ever"


@pytest.fixture
def tiny_pretrained(tmp_path: Path) -> nn.Module:
    """Register a model whose pretrained weights timm reads from a file."""
    torch.manual_seed(1)
    theirs = VisionTransformer(**VIT, num_classes=7)
    file = stored(tmp_path, theirs.state_dict(), "timm.safetensors")
    here = {"file": file, "classifier": "head", "num_classes": 7, "mean": OURS.mean, "std": OURS.std}
    half = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.5)}
    default_cfgs = generate_default_cfgs({"vit_of_tests.here": here, "vit_of_tests.half": here | half})

    def vit_of_tests(pretrained: bool = False, **options: Any) -> nn.Module:
        return build_model_with_cfg(VisionTransformer, "vit_of_tests", pretrained, **VIT | options)

    vit_of_tests.__module__ = __name__
    globals()["default_cfgs"] = default_cfgs
    register_model(vit_of_tests)
    return theirs


@pytest.mark.filterwarnings("ignore:Overwriting")
def test_timms_weights(tiny_pretrained: nn.Module):
    assert sources.absolute("vit_of_tests.here") == "timm:vit_of_tests.here"
    ours = network()
    report = fill(ours, pretrained("timm:vit_of_tests.here"))
    assert report.left == ["head.weight", "head.bias"]
    assert report.share == 1
    assert all(torch.equal(v, tiny_pretrained.state_dict()[k]) for k, v in ours.model.state_dict().items())
    line = refused("timm:vit_of_tests.here", network(options={"num_heads": 2}))
    assert "blocks.0.attn has 3 attention heads in the weights, but 2 in the model" in line


@pytest.mark.filterwarnings("ignore:Overwriting")
def test_timms_weights_take_our_colours(tiny_pretrained: nn.Module, tmp_path: Path):
    """As a start, as `backbone.weights`, and in every copy of a method."""
    images = torch.rand(4, 3, 16, 16)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in OURS)
    theirs = (images - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.25, 0.5]).view(3, 1, 1)
    text = small_recipe("mocov3") + "start: {from: timm:vit_of_tests.half}\n"
    (tmp_path / "small.yaml").write_text(text)
    r = recipe.load(str(tmp_path / "small.yaml"))
    given = pretrained("timm:vit_of_tests.half")
    begun = build_started(r, 8)
    with torch.no_grad():
        want = tiny_pretrained.eval().forward_head(tiny_pretrained.forward_features(theirs), pre_logits=True)
        for method in build_method(r, lambda backbone: fill(backbone, given)), begun.method:
            for backbone in method.export(), method.momentum_encoder.backbone:
                features = backbone.eval().pooled((images - mean) / std)
                torch.testing.assert_close(features, want, rtol=0, atol=1e-5)
    assert "warning" not in "\n".join(begun.notes[0].lines)


def test_a_name_without_weights_is_refused():
    assert "timm has no weights of this name; did you mean" in refused("timm:vit_base_patch16_224.none", network())
    assert "timm has no weights of this name" in refused(sources.absolute("cvt_13"), network())


def test_sources_mean_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert sources.absolute("s3://bucket/runs/a") == "s3://bucket/runs/a"
    assert sources.absolute("runs/a") == str(tmp_path / "runs" / "a")
    assert sources.absolute(f"file://{tmp_path}/a.pth") == str(tmp_path / "a.pth")
    (tmp_path / "resnet50").mkdir()
    assert sources.absolute("resnet50") == str(tmp_path / "resnet50")
    assert sources.absolute("resnet18") == "timm:resnet18"


def test_a_run_whose_checkpoints_lack_something_is_refused(tmp_path: Path):
    save(tmp_path / "checkpoints", 3, {"step": 3, "recipe": small_recipe("mocov3"), "method": {}})
    with pytest.raises(
        UserError, match="not a checkpoint written by eagleray: expected the keys images, method, recipe"
    ):
        restore(str(tmp_path))
