"""The recipes and sweeps that eagleray ships, by name."""

import importlib.util
import itertools
from pathlib import Path
from typing import Literal

from eagleray.base.errors import UserError
from eagleray.config.tree import nearest

Kind = Literal["recipe", "sweep"]
FOLDERS: dict[Kind, str] = {"recipe": "pipelines", "sweep": "tune"}


def folder(name: str) -> Path:
    """The repository's own `pipelines/`, from a checkout or from inside the installed wheel."""
    spec = importlib.util.find_spec("eagleray")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    inside = package / "_bundled" / name
    return inside if inside.exists() else package.parents[1] / name


def names(kind: Kind = "recipe") -> list[str]:
    return sorted(p.stem for p in folder(FOLDERS[kind]).glob("*.yaml"))


def find(name: str, kind: Kind = "recipe") -> Path:
    """The file of a recipe, or of a sweep, given by path or by bundled name. Raises UserError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{name}: no such {kind} file")
        return path
    own = folder(FOLDERS[kind]) / f"{name}.yaml"
    if not own.is_file():
        near = nearest(name, names(kind))
        raise UserError(f"{name}: no {kind} of this name{near}; see `eagleray list {kind}s`")
    return own


def header(path: Path) -> list[str]:
    """The lines of the comment that a file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]
