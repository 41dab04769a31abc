"""Finds the recipes and sweeps that eagleray ships, by name."""

import difflib
import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any, Literal

from eagleray.base.errors import UserError
from eagleray.config import yaml_text
from eagleray.config.tables import ShippedRecipe, expand, own_keys
from eagleray.config.tree import RecipeError, merge, nearest, read

Kind = Literal["recipe", "sweep"]
FOLDERS: dict[Kind, str] = {"recipe": "pipelines", "sweep": "tune"}
FIRST = "dino_vits16_in1k_ep100"  # recipe that serves as an example in the error for a missing name of a recipe
SCHEDULES = "detection"  # subfolder of pipelines/ that has schedules of detectors and no recipes


def folder(name: str) -> Path:
    """Return a folder of shipped files, such as `pipelines`, in the checkout or inside the installed wheel."""
    spec = importlib.util.find_spec("eagleray")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    inside = package / "_bundled" / name
    return inside if inside.exists() else package.parents[1] / name


def names(kind: Kind = "recipe") -> list[str]:
    """Return the names of all shipped recipes or sweeps, in alphabetical order."""
    if kind == "recipe":
        return list(recipes())
    return sorted(p.stem for p in folder(FOLDERS[kind]).glob("*.yaml"))


@functools.cache
def recipes() -> dict[str, ShippedRecipe]:
    """Return every shipped recipe by its name, in alphabetical order. Raises RecipeError for a wrong file."""
    shipped: dict[str, ShippedRecipe] = {}
    for path in sorted(folder(FOLDERS["recipe"]).glob("*/*.yaml")):
        if path.parent.name == SCHEDULES:
            continue
        tree = yaml_text.parse_written(path.read_text())
        for one in expand(path, tree):
            if one.name in shipped:
                raise RecipeError(f"{path}: {one.name}: {shipped[one.name].file} has a recipe of this name too")
            shipped[one.name] = one
    return dict(sorted(shipped.items()))


def recipe(name: str) -> ShippedRecipe:
    """Return a shipped recipe. Raises UserError for an unknown name; the message suggests similar names."""
    if name not in recipes():
        key = name if "=" in name else f"data.train={name}" if "/" in name or "://" in name else ""
        if key:
            raise UserError(
                f"{name}: no recipe and no run; expected RECIPE first, such as `{FIRST} {key}`; `eagleray list "
                "recipes` lists all, and `eagleray init FOLDER` writes one for images of your own"
            )
        begins = {known[: len(name)]: known for known in reversed(names())}  # `name` may be incomplete
        likely = [begins[b] for b in difflib.get_close_matches(name, begins, 1)]
        near = nearest(name, names()) or "".join(f"; did you mean {known!r}?" for known in likely)
        raise UserError(f"{name}: no recipe of this name{near}; see `eagleray list recipes`")
    return recipes()[name]


def tree(name: str) -> dict[str, Any]:
    """Return the keys of a shipped recipe, merged over those of its base recipe.

    Raises UserError for an unknown name or a base that has a base itself."""
    own = recipe(name)
    if own.base is None:
        return dict(own.keys)
    if recipe(own.base).base:
        raise RecipeError(f"{own.file}: base: {own.base} has a base itself; name a recipe that has none")
    return merge(recipe(own.base).keys, own.keys)


def read_recipe(name: str, beside: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Return the title of a recipe and its keys, which are not checked yet.

    `name` is the name of a shipped recipe or the path of a YAML file. The file may have a `base`, again a name or a
    path. A relative path is looked up in the folder `beside` first, then in the working folder. Raises UserError for an
    unknown name, and for a file that is missing, wrong or holds several recipes."""
    path = Path(name)
    if beside and (beside / name).is_file():
        path = beside / name
    elif path.suffix not in (".yaml", ".yml"):
        return name, tree(name)
    if not path.is_file():
        raise UserError(f"{name}: no such recipe file")
    own = own_keys(read(path, shipped=tree))
    for key in own.keys() & {"axes", "recipes"}:
        raise RecipeError(f"{path}: {key}: the file holds several recipes; expected a file with one recipe")
    return path.stem, own


def find_sweep(name: str) -> Path:
    """Return the file of a sweep, given by its path or shipped name. Raises UserError when there is none."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{name}: no such sweep file")
        return path
    own = folder(FOLDERS["sweep"]) / f"{name}.yaml"
    if not own.is_file():
        near = nearest(name, names("sweep"))
        raise UserError(f"{name}: no sweep of this name{near}; see `eagleray list sweeps`")
    return own


def header(path: Path) -> list[str]:
    """Return the lines of the comment that a file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]
