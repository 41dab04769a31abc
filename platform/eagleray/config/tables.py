"""Expands a recipe file into its recipes: a single one, several named ones, or a grid over the values of axes."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagleray.config.tree import RecipeError, merge, nearest

# Keys that describe a recipe and are not passed to the run.
ABOUT = ("about", "title", "note", "published", "cost", "ours")
# Keys that say which recipes a file holds, how they are named and on which recipe they are based.
LAYOUT = ("base", "name", "axes", "exceptions", "recipes")


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A recipe of pipelines/: its description, and the keys in which it differs from its base recipe."""

    name: str
    file: Path
    base: str | None  # the name of another recipe, which has no base itself
    keys: Mapping[str, Any]
    about: str  # sentence that describes the recipe
    note: str  # full sentences on what the recipe assumes and how it differs from the published one
    published: tuple[Mapping[str, Any], ...]  # for each result its metrics by name, and source, data, epochs or note
    cost: Mapping[str, Any]  # keys hours, gpus or tpus, source and note; empty if not published
    ours: Mapping[str, Any]  # metrics of our own run, `untrained` and `note`; empty if not run


def own_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree without keys such as `about` and `published`, which describe a recipe and change no run."""
    return {key: value for key, value in tree.items() if key not in ABOUT}


def expand(path: Path, tree: Mapping[str, Any]) -> list[ShippedRecipe]:
    """Return the recipes of a file in the file's order. Raises RecipeError for a wrong layout."""
    shared = {key: value for key, value in tree.items() if key not in LAYOUT}
    if "axes" in tree:
        rows = _grid(path, tree, shared)
    elif "recipes" in tree:
        defaults = _mapping(path, "published", shared.pop("published", {}))
        named = _mapping(path, "recipes", tree["recipes"]).items()
        rows = ((n, _over(shared, _mapping(path, f"recipes.{n}", row)), defaults, {}) for n, row in named)
    else:
        rows = iter([(path.stem, shared, {}, {})])
    return [_shipped(path, tree.get("base"), *row) for row in rows]


Row = tuple[str, dict[str, Any], Mapping[str, Any], Mapping[str, str]]


def _grid(path: Path, tree: Mapping[str, Any], shared: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for every combination of the axes' values; the value of the last axis changes fastest."""
    axes = _mapping(path, "axes", tree["axes"])
    exceptions = tree.get("exceptions", [])
    printed = _mapping(path, "published", shared.pop("published", {}))
    defaults = {key: printed[key] for key in ("source", "metric") if key in printed}
    _check_exceptions(path, axes, exceptions)
    first = next(iter(axes))
    for value in printed.keys() - {"source", "metric"} - axes[first].keys():
        raise RecipeError(
            f"{path}: published.{value}: is not a value of the axis {first}{nearest(value, [*axes[first]])}"
        )
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        row, titles = shared, {}
        for axis, value in at.items():
            over = _mapping(path, f"axes.{axis}.{value}", axes[axis][value] or {})
            titles[axis] = over.get("title", value)
            row = _over(row, over)
        for one in exceptions:
            if all(at[axis] in (v if isinstance(v, list) else [v]) for axis, v in one["when"].items()):
                row = _over(row, {key: value for key, value in one.items() if key != "when"})
        numbers: Any = printed
        for value in values:
            numbers = numbers.get(value, {}) if isinstance(numbers, Mapping) else {}
        if "published" not in row:
            row = row | {"published": numbers}
        example = "_".join(f"{{{a}}}" for a in axes)
        name = _formatted(f"{path}: name: expected a pattern of the axes, such as {example}", tree.get("name"), at)
        yield name, row, defaults, titles


def _formatted(expected: str, pattern: Any, values: Mapping[str, Any]) -> str:
    """Return `pattern` with `values` in its braces. Raises RecipeError, which begins with `expected`, if that fails."""
    try:
        return str(pattern.format(**values))
    except (KeyError, ValueError, AttributeError) as e:
        raise RecipeError(f"{expected}, got {e}") from None


def _check_exceptions(path: Path, axes: Mapping[str, Any], exceptions: Any) -> None:
    for i, one in enumerate(exceptions):
        when = _mapping(path, f"exceptions.{i}.when", one.get("when"))
        for axis, values in when.items():
            if axis not in axes:
                raise RecipeError(f"{path}: exceptions.{i}.when.{axis}: is not an axis{nearest(axis, [*axes])}")
            for value in values if isinstance(values, list) else [values]:
                if value not in axes[axis]:
                    raise RecipeError(
                        f"{path}: exceptions.{i}.when.{axis}: is not a value of the axis"
                        f"{nearest(value, [*axes[axis]])}, got {value!r}"
                    )


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the recipe keys of `over` into those of `under`.

    The two notes are joined. Any other descriptive key of `over` replaces that of `under`."""
    said = {key: over[key] for key in ABOUT if key in over}
    if under.get("note") and over.get("note"):
        said["note"] = f"{under['note']} {over['note']}"
    return merge(under, own_keys(over)) | said


def _mapping(path: Path, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{path}: {key}: expected a mapping, got {value!r}")
    return value


def _shipped(
    path: Path, base: str | None, name: str, row: Mapping[str, Any], defaults: Mapping[str, Any], titles: Any
) -> ShippedRecipe:
    titles = titles or {"title": row.get("title", "")}
    expected = f"{path}: about: expected a sentence with {', '.join(titles)} in braces"
    return ShippedRecipe(
        name=name,
        file=path,
        base=base,
        keys=own_keys(row),
        about=_formatted(expected, str(row.get("about", "")), titles),
        note=" ".join(str(row.get("note") or "").split()),
        published=tuple(published_entries(path, name, row.get("published"), defaults)),
        cost=row.get("cost") or {},
        ours=row.get("ours") or {},
    )


def published_entries(path: Path, name: str, numbers: Any, defaults: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield every published result as a mapping of metrics.

    `numbers` is a mapping, a single number, or a list of these. A single number is the value of the metric that
    `defaults` names."""
    for one in numbers if isinstance(numbers, list) else [numbers] if numbers not in (None, {}) else []:
        if isinstance(one, int | float) and "metric" in defaults:
            one = {defaults["metric"]: one}
        entry = {**_mapping(path, f"published of {name}", one)}
        if "source" in defaults:
            entry.setdefault("source", defaults["source"])
        yield entry
