"""A checkpoint is data: what its recipe says makes no request, opens no file and ends in one line."""

import json
import socket
from pathlib import Path

import pytest
import torch

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.runs import recipe
from eagleray.runs.restore import KEYS, restore

NINE = ", ".join(["*a{0}"] * 9)
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{NINE.format(i - 1)}]\n" for i in range(1, 12))


def checkpoint_with(text: str, path: Path) -> str:
    torch.save(dict.fromkeys(KEYS, 1) | {"recipe": text, "images": 10}, path)
    return str(path)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"pretrained": True, "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"}}, "pretrained"),
        ({"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}}, "pretrained_cfg"),
        ({"checkpoint_path": "pickle.pt"}, "checkpoint_path"),
        ({"name": "hf-hub:timm/vit_tiny_patch16_224"}, "hf-hub"),
        ({"name": "local-dir:/etc"}, "local-dir"),
    ],
)
def test_the_recipe_of_a_checkpoint_makes_no_request(
    options: dict[str, object], name: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tree = config.to_plain(recipe.load(str(small)))
    tree["backbone"]["name"] = options.pop("name", tree["backbone"]["name"])
    tree["backbone"]["options"] |= options
    file = checkpoint_with(json.dumps(tree), tmp_path / "c.pt")
    asked = [0][:0]
    monkeypatch.setattr(socket.socket, "connect", lambda *_: asked.append(1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.append(1))
    with pytest.raises(UserError, match=name):
        restore(file)
    assert not asked


@pytest.mark.parametrize("text", [BOMB, "[" * 20_000, "a: [", "7", "a: !!python/object/apply:os.getcwd []"])
def test_the_recipe_of_a_checkpoint_is_within_bounds(text: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"c\.pt: its recipe is not one of eagleray"):
        restore(checkpoint_with(text, tmp_path / "c.pt"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", 2**60),
        ("images", -1),
        ("images", "x"),
        ("method", 1),
        ("method", {1: torch.zeros(1)}),
        ("plugins", 7),
        ("plugins", [7]),
        ("plugins", [{"x": 1}]),
    ],
)
def test_a_checkpoint_with_values_of_other_types_is_one_line(name: str, value: object, small: Path, tmp_path: Path):
    tree = config.to_plain(recipe.load(str(small)))
    state = {"images": 10, "method": {}} | ({name: value} if name != "plugins" else {})
    text = json.dumps(tree | ({name: value} if name == "plugins" else {}))
    torch.save(dict.fromkeys(KEYS, 1) | {"recipe": text} | state, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"c\.pt: not a checkpoint written by eagleray: its values are of other types"):
        restore(str(tmp_path / "c.pt"))


def test_weights_that_do_not_fit_are_one_line(small: Path, tmp_path: Path):
    text = json.dumps(config.to_plain(recipe.load(str(small))))
    torch.save(dict.fromkeys(KEYS, 1) | {"recipe": text, "images": 10, "method": {}}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"c\.pt: its weights do not fit its recipe") as caught:
        restore(str(tmp_path / "c.pt"))
    assert "\n" not in str(caught.value)


def test_an_export_is_no_damaged_checkpoint(tmp_path: Path):
    for name in "backbone.safetensors", "backbone.json":
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"backbone\.safetensors: an export; expected a run or a checkpoint$"):
        restore(str(tmp_path / "backbone.safetensors"))
