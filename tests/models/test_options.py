"""The options of a backbone are names of arguments and values, never code, files or addresses."""

import ast
import json
from pathlib import Path

import pytest

from eagleray.base.errors import UserError
from eagleray.engine.export import snippet, to_timm
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


@pytest.mark.parametrize(("description", "source"), [("timm", "local-dir:{}"), ("backbone", "{}/backbone.safetensors")])
def test_the_line_that_loads_an_export_is_one_call(description: str, source: str, tmp_path: Path):
    """The line is printed for the user to paste; what describes the model comes from anywhere and stays in its file."""
    folder = tmp_path / "'); open('pwned', 'w').write('x'); ('"
    folder.mkdir()
    (folder / "backbone.json").write_text(json.dumps({description: "'); open('pwned', 'w').write('x'); ('"}))
    tree = ast.parse(snippet(folder), mode="eval").body
    assert isinstance(tree, ast.Call)
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Call)] == [tree]
    assert ast.literal_eval(tree.args[0]) == source.format(folder)


def test_an_export_with_odd_values_is_loaded_and_compared(tmp_path: Path):
    network = Network(name="vit_tiny_patch16_224", options=SMALL | {"class_token": False, "global_pool": "avg"})
    to_timm(Backbone(network.name, options=network.options), network, tmp_path / 'it\'s "here"')
    assert (tmp_path / 'it\'s "here"' / "backbone.json").exists()
