"""The identity of a recipe."""

import subprocess
import sys

from eagleray.runs import recipe

ESVIT = "esvit_cvt_in1k_ep300_bs1024"


def test_a_method_names_the_keys_that_may_change():
    keys = recipe.identity(recipe.load(ESVIT))
    assert "method.region_from" not in keys
    assert "method.view_weight" in keys
    assert recipe.digest(recipe.load(ESVIT)) == recipe.digest(recipe.load(ESVIT, ["method.region_from=2"]))


def test_the_identity_is_known_without_pytorch():
    code = f"import sys; from eagleray.runs import recipe; recipe.digest(recipe.load({ESVIT!r})); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recipe_of_an_unknown_method_has_an_identity():
    assert recipe.identity({"method": {"name": "mine", "x": 1}, "out": "runs/a"}) == {
        "method.name": "mine",
        "method.x": 1,
    }
