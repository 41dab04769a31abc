"""A recipe from a stranger is a recipe, or one line that names it, in bounded time and memory."""

from pathlib import Path
from random import Random

import pytest
import yaml
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.mutations import change_bytes, change_tree
from helpers.recipes import METHODS, small_recipe

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.runs import recipe
from eagleray.runs.recipe import Recipe

TEXTS = [small_recipe(method) for method in METHODS]
TREES = [yaml.safe_load(text) for text in TEXTS]


def changed(rng: Random) -> bytes:
    """Draw a recipe whose text or whose values are changed."""
    if rng.random() < 0.4:
        return change_bytes(rng, rng.choice(TEXTS).encode())
    return yaml.safe_dump(change_tree(rng, rng.choice(TREES))).encode(errors="surrogatepass")


@pytest.mark.parametrize("count", counts(150))
def test_mutated_recipes_end_in_a_recipe_or_a_line(count: int | None, tmp_path: Path):
    path = tmp_path / "changed.yaml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        loaded = None
        with one_line(most=4000):
            loaded = recipe.load(str(path))
        assert loaded is None or config.check(Recipe, config.to_plain(loaded), "again") == loaded

    examples(generators(count).map(changed), check, count, many=2000)


@pytest.mark.parametrize("value", [".nan", "-.inf"])
def test_options_are_finite(value: str, tmp_path: Path):
    """They have no type of their own, and nan would make a recipe differ from itself."""
    (path := tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    with pytest.raises(UserError, match=r"backbone.options.num_heads: expected a finite number"):
        recipe.load(str(path), [f"backbone.options.num_heads={value}"])
    with pytest.raises(UserError, match=r"optim.clip: input should be a finite number"):
        recipe.load(str(path), [f"optim.clip={value}"])
