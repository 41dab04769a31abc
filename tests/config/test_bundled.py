"""Recipe files: one recipe, rows over shared keys, or a grid; bases by name or by file; one line for a wrong layout."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagleray.base.errors import UserError
from eagleray.config import bundled, tables
from eagleray.runs import recipe

WORDS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "recipes.py"))
published_words, cost_words, ours_words = (WORDS[f"{what}_words"] for what in ("published", "cost", "ours"))

GRID = """
about: "{method} on {backbone}."
note: All alike.
name: "{method}_{backbone}_in1k"
cost: {gpus: 8, source: paper}
method: {name: dino, dim: 4}
axes:
  backbone:
    a: {title: A}
    b: {title: B, note: Not this., cost: null, backbone: {name: bee}}
  method:
    dino:
    esvit: {title: EsViT, method: {name: esvit}}
exceptions:
  - {when: {backbone: [a, b], method: esvit}, method: {region_from: 2}}
published:
  source: table 1
  metric: knn
  a: {dino: 70.5, esvit: {linear: 71, source: table 2}}
  b: {dino: [{knn: 1.5}, {knn: 2.5, epochs: 7}]}
"""
ROWS = """
about: MoCo, {title}.
published: {source: table 1}
method: {name: moco}
recipes:
  moco_a: {title: small, published: {linear: 60}}
  moco_b: {title: large, note: Slow., published: {linear: 61, source: notes}, method: {dim: 8}}
"""


def read(text: str) -> dict[str, tables.ShippedRecipe]:
    return {one.name: one for one in tables.expand(Path("table.yaml"), yaml.safe_load(text))}


def test_a_grid_has_a_recipe_for_every_combination():
    grid = read(GRID)
    assert list(grid) == ["dino_a_in1k", "esvit_a_in1k", "dino_b_in1k", "esvit_b_in1k"]
    last = grid["esvit_b_in1k"]
    assert last.keys == {"method": {"name": "esvit", "dim": 4, "region_from": 2}, "backbone": {"name": "bee"}}
    assert (last.about, last.note, last.cost, last.published) == ("EsViT on B.", "All alike. Not this.", {}, ())
    assert grid["dino_a_in1k"].about == "dino on A."
    assert grid["dino_a_in1k"].cost == {"gpus": 8, "source": "paper"}
    assert grid["dino_a_in1k"].published == ({"knn": 70.5, "source": "table 1"},)
    assert grid["esvit_a_in1k"].published == ({"linear": 71, "source": "table 2"},)
    assert [entry["knn"] for entry in grid["dino_b_in1k"].published] == [1.5, 2.5]


def test_another_value_of_an_axis_is_one_line():
    more = read(GRID.replace("  method:\n    dino:", "    c: {title: C, backbone: {name: sea}}\n  method:\n    dino:"))
    assert more.keys() - read(GRID).keys() == {"dino_c_in1k", "esvit_c_in1k"}
    assert more["esvit_c_in1k"].keys == {"method": {"name": "esvit", "dim": 4}, "backbone": {"name": "sea"}}


def test_rows_are_over_the_keys_of_their_file():
    rows = read(ROWS)
    assert rows["moco_a"].keys == {"method": {"name": "moco"}}
    assert rows["moco_b"].keys == {"method": {"name": "moco", "dim": 8}}
    assert (rows["moco_b"].about, rows["moco_b"].note) == ("MoCo, large.", "Slow.")
    assert rows["moco_a"].published == ({"linear": 60, "source": "table 1"},)
    assert rows["moco_b"].published == ({"linear": 61, "source": "notes"},)


def test_a_plain_file_is_a_recipe_of_its_name():
    [one] = tables.expand(Path("moco_x.yaml"), {"about": "One.", "base": "moco_a", "method": {"name": "moco"}})
    assert (one.name, one.base, one.keys) == ("moco_x", "moco_a", {"method": {"name": "moco"}})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{method}_{backbone}_in1k", "{methd}", r"table\.yaml: name: expected a pattern of the axes, .* got 'methd'"),
        ("when: {backbone: [a, b]", "when: {bacbone: [a, b]", "exceptions.0.when.bacbone: .*did you mean 'backbone'"),
        ("backbone: [a, b]", "backbone: [a, c]", "exceptions.0.when.backbone: .*known are a, b, got 'c'"),
        ("on {backbone}.", "on {model}.", "about: expected a sentence with backbone, method in braces, got 'model'"),
        ("a: {title: A}", "a: 3", "axes.backbone.a: expected a mapping, got 3"),
        ("dino: 70.5", "dino: many", "published of dino_a_in1k: expected a mapping, got 'many'"),
        ("  a: {dino", "  c: {dino", "published.c: is not a value of the axis backbone"),
    ],
)
def test_a_wrong_grid_is_one_line_with_file_and_key(old: str, new: str, message: str):
    assert old in GRID
    with pytest.raises(UserError, match=message) as error:
        read(GRID.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"dino_vits16_in1k_ep10: no recipe of this name; did you mean 'dino"):
        bundled.read_recipe("dino_vits16_in1k_ep10")
    with pytest.raises(
        UserError, match=r"esvit_swimt: no recipe of this name; did you mean 'esvit_swint_in1k_ep300'\?"
    ):
        bundled.read_recipe("esvit_swimt")
    with pytest.raises(UserError, match=r"none\.yaml: no such recipe file"):
        bundled.read_recipe("none.yaml")


def test_a_users_file_may_be_over_a_shipped_name_or_over_files_in_a_chain(tmp_path: Path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    write("one.yaml", "about: Mine.\nbase: dino_vits16_in1k_ep100\noptim: {epochs: 7}\n")
    two = write("two.yaml", "base: one.yaml\noptim: {batch: 64}\ncost: {gpus: 1}\n")
    r = recipe.load(two)
    assert (r.method.name, r.optim.epochs, r.optim.batch, r.optim.lr.warmup) == ("dino", 7, 64, 10)
    assert r.out == "runs/two"
    unknown = write("three.yaml", "base: dino_vits16\n")
    with pytest.raises(UserError, match=r"three\.yaml: base: dino_vits16: no recipe of this name"):
        recipe.load(unknown)
    old = write("four.yaml", "base: pipelines/dino_vits16_in1k_ep100.yaml\n")
    with pytest.raises(UserError, match=r"four\.yaml: base: .*: no such file; .* write base: dino_vits16_in1k_ep100"):
        recipe.load(old)
    table = write("five.yaml", ROWS)
    with pytest.raises(UserError, match=r"five\.yaml: recipes: the file holds several recipes"):
        recipe.load(table)


def test_loading_twice_gives_the_same_and_overrides_do_not_stay():
    before = bundled.tree("dino_vits16_in1k_ep100")
    recipe.load("dino_vits16_in1k_ep100", ["optim.epochs=3", "method.prototypes=8"])
    assert bundled.tree("dino_vits16_in1k_ep100") == before
    assert recipe.load("dino_vits16_in1k_ep100").optim.epochs == 100


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "none"),
        ([{"linear": 78.1, "knn": 75.7, "source": "EsViT, table 1"}], "linear 78.1 %, kNN 75.7 % (EsViT, table 1)"),
        (
            [
                {"davis": 1.5, "data": "COCO", "source": "a"},
                {"linear": 2, "epochs": 3, "note": "recalled", "source": "b"},
            ],
            "DAVIS 1.5 J&F on COCO (a); linear 2 % with optim.epochs=3, recalled (b)",
        ),
        ([{"gain": -1.3, "note": "points", "source": "c"}], "-1.3 points (c)"),
        ([{"note": "no gain", "source": "d"}], "no gain (d)"),
    ],
)
def test_published_numbers_in_words(entries: list[dict[str, Any]], words: str):
    assert published_words(entries) == words


def test_cost_and_our_numbers_in_words():
    assert cost_words({}) == "not published"
    assert cost_words({"gpus": 16, "source": "a"}) == "16 GPUs (a)"
    assert cost_words({"hours": 2.1, "tpus": 256, "kind": "v3", "source": "b"}) == "2.1 hours on 256 TPUs v3 (b)"
    assert cost_words({"note": "minutes"}) == "minutes"
    assert ours_words({}) == "not run"
    assert ours_words({"knn": 40.0, "untrained": {"knn": 30.0}}) == "kNN 40.0 % (untrained: kNN 30.0 %)"
    assert ours_words({"top1": 40.2, "deviation": 0.8, "note": "three seeds"}) == "top-1 40.2 % +- 0.8, three seeds"
