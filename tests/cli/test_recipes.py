"""`eagleray list recipes`: filters, JSON, and a table that fits."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from eagleray.base.errors import UserError
from eagleray.cli import main, recipes
from eagleray.config import bundled


def test_the_list_of_recipes_has_the_published_numbers():
    rows = recipes.matching([])
    assert [row["name"] for row in rows] == bundled.names()
    [row] = [row for row in rows if row["name"] == "esvit_swint_in1k_ep300"]
    assert {k: row[k] for k in ("method", "backbone", "data", "epochs")} == {
        "method": "esvit",
        "backbone": "swint",
        "data": "in1k",
        "epochs": 300,
    }
    assert row["published"][0] == {"linear": 78.1, "knn": 75.7, "source": "EsViT, table 1"}
    assert recipes.best(row) == "linear 78.1 %, kNN 75.7 %"


def test_filters_and_words_all_have_to_fit():
    rows = recipes.matching(["windows"], method="esvit", backbone="swin", data="in1k")
    assert {row["name"] for row in rows} == {f"esvit_swin{size}14_in1k_ep300" for size in "tsb"}
    assert {row["backbone"] for row in recipes.matching([], backbone="swin_base")} == {"swinb", "swinb14"}
    assert {row["data"] for row in recipes.matching([], data="coco")} == {"coco"}
    with pytest.raises(UserError, match="--method dinno: no recipe"):
        recipes.matching([], method="dinno")
    with pytest.raises(UserError, match="no recipe matches"):
        recipes.matching(["nothing", "like this"])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal_and_cuts_no_name(width: int):
    text = io.StringIO()
    rows = recipes.matching([], method="mocov3")
    Console(file=text, width=width, force_terminal=True, color_system=None).print(recipes.table(rows))
    assert max(map(len, text.getvalue().splitlines())) <= width
    assert all(row["name"] in text.getvalue() for row in rows)


def test_recipes_to_begin_with_exist():
    assert set(recipes.FIRST) <= set(bundled.names())


def test_the_list_as_json_is_that_of_all_recipes():
    done = CliRunner().invoke(main.app, ["list", "recipes", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == recipes.matching([])
