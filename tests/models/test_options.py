"""The options of a backbone are names of arguments and values, never code, files or addresses."""

import ast
from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.engine.export import call_expression, load_call, to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    "name",
    [
        "**({} if open('pwned', 'w').write('x') else {}), exportable",
        "img_size=16, depth",
        "class",
        "",
        "pretrained",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "cache_dir",
    ],
)
def test_an_option_that_is_no_argument_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is no option; expected an argument"):
        Backbone("vit_tiny_patch16_224", options={**SMALL, name: None})
    assert not list(tmp_path.iterdir())


def test_a_description_is_not_run_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """backbone.json comes with a file of weights from anywhere; its line is printed for the user to paste."""
    value = "'); open('pwned', 'w').write('x'); ('"
    monkeypatch.chdir(tmp_path)
    call = load_call({"timm": value, "options": {"img_size": [value]}}, Path(f"{value}.safetensors"))
    line = ast.unparse(call_expression(**call))
    tree = ast.parse(line, mode="eval").body
    assert isinstance(tree, ast.Call)
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Call)] == [tree]
    assert ast.literal_eval(tree.args[0]) == value
    with pytest.raises(UserError, match="is no option"):
        load_call({"timm": "vit_tiny_patch16_224", "options": {"x=open('pwned'), y": 1}}, Path("a"))


def test_an_export_with_odd_values_is_loaded_and_compared(tmp_path: Path):
    network = Network(name="vit_tiny_patch16_224", options=SMALL | {"class_token": False, "global_pool": "avg"})
    to_timm(Backbone(network.name, options=network.options), network, tmp_path / 'it\'s "here"')
    assert (tmp_path / 'it\'s "here"' / "backbone.json").exists()
