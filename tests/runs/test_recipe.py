"""The identity of a recipe."""

import subprocess
import sys
from pathlib import Path

from helpers.recipes import SMALL

from eagleray import config
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


def test_a_digest_is_of_the_values_that_differ_from_defaults(tmp_path: Path):
    """A key with a default that a later version adds changes no digest, nor does a default that is written out."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    plain = recipe.load(str(path))
    written = recipe.load(str(path), ["seed=0", "data.decode=full", "optim.beta2=0.999", "method.temperature=0.2"])
    assert config.chosen(written) == config.chosen(plain)
    assert "decode" not in config.chosen(plain)["data"]
    assert recipe.digest(written) == recipe.digest(plain)
    assert recipe.digest(recipe.load(str(path), ["optim.beta2=0.99"])) != recipe.digest(plain)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(plain))
    assert recipe.digest(recipe.load(str(again))) == recipe.digest(plain)
