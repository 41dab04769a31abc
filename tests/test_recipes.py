"""The recipes of pipelines/ as a collection: no two alike, none longer than it need be, all of them in the docs."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from eagleray import config, recipe

ROOT = Path(__file__).parent.parent
NAMES = recipe.names()
NAME = (
    r"(?P<method>[a-z0-9_]+?)_(?P<backbone>vit(?P<size>xs|[sblh])(?P<patch>\d+)(?P<kind>[a-z]*)|[a-z0-9]+)"
    r"_(?:in1k|in10|coco|in22k|openimages|webvision|cifar10|shapes)_(?:ep(?P<epochs>\d+)|demo)(?P<variant>_.+)?"
)
SIZES = {"xs": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
KINDS = {"": ("timm", "timm"), "bn": ("batch", "timm"), "conv": ("timm", "conv")}


def docs() -> ModuleType:
    """docs/recipes.py, which is a script and no module of the package."""
    spec = importlib.util.spec_from_file_location("docs_recipes", ROOT / "docs" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree(name: str) -> dict[str, Any]:
    return yaml.safe_load(recipe.find(name).read_text())


def test_no_two_recipes_are_the_same_experiment():
    seen: dict[str, str] = {}
    for name in NAMES:
        digest = recipe.digest(recipe.load(name))
        assert digest not in seen, f"{name} and {seen[digest]}"
        seen[digest] = name


@pytest.mark.parametrize("name", [name for name in NAMES if "base" in tree(name)])
def test_a_recipe_repeats_nothing_of_its_base(name: str):
    own = tree(name)
    base = config.flat(config.read(recipe.find(Path(own.pop("base")).stem)))
    assert not [key for key, value in config.flat(own).items() if key in base and base[key] == value]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_is_in_the_recipe(name: str):
    r, said = recipe.load(name), re.fullmatch(NAME, name)
    assert said, "<method>_<backbone>_<data>_<length>[_<variant>]"
    assert r.method.name == said["method"]
    assert said["epochs"] in (str(r.optim.epochs), None)
    if said["size"]:
        assert r.backbone.name.startswith(f"vit_{SIZES[said['size']]}_patch")
        drawn_for = re.search(r"patch(\d+)", r.backbone.name)
        assert drawn_for
        assert int(said["patch"]) == r.backbone.options.get("patch_size", int(drawn_for[1]))
        assert (r.backbone.norm, r.backbone.stem) == KINDS[said["kind"]]
    variant = dict(re.findall(r"_(lr|bs)([\de-]+)", said["variant"] or ""))
    assert float(variant.get("lr", r.optim.lr.value)) == r.optim.lr.value
    assert int(variant.get("bs", r.optim.batch)) == r.optim.batch


def test_the_study_of_moco_v3_freezes_the_patch_projection_unless_the_name_says_learned():
    for name in NAMES:
        if re.match(r"(mocov3|simclr|byol|swav)_vit[sblh]\d+(bn)?_in1k", name):
            assert recipe.load(name).backbone.freeze_patch != ("_learned" in name), name


def test_every_method_has_a_recipe_for_two_cores():
    small = {recipe.load(name).method.name for name in NAMES if name.endswith("_cifar10_ep2")}
    assert small == set(config.parts("eagleray.methods"))


def test_the_page_of_recipes_is_up_to_date():
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert docs().page(text) == text, "run `python docs/recipes.py`"
    assert text.count("<!--") == 1
    for name in NAMES:
        assert text.count(f"\n| `{name}` |") == 1


@pytest.mark.parametrize("missing", ["Published", "Cost", "Ours"])
def test_a_header_without_a_label_is_an_error(missing: str):
    text = "# A run.\n# Published: linear 1.5 % (table 2).\n# Cost: 3 hours on\n# 4 GPUs.\n# Ours: not run.\nbase: x\n"
    assert docs().header(text) == ["linear 1.5 % (table 2)", "3 hours on 4 GPUs", "not run"]
    with pytest.raises(ValueError, match=missing):
        docs().header(text.replace(f"{missing}:", "About:"))
    with pytest.raises(ValueError, match="A run"):
        docs().header(text.replace(f"# {missing}:", f"base: x\n# {missing}:"))
