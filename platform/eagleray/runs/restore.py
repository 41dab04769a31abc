"""Restore a run from its checkpoints: the recipe, the method and the weights of the backbone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from eagleray import config
from eagleray.base.errors import UserError, explained, one_line
from eagleray.config import plugins, yaml_text
from eagleray.engine import checkpoint
from eagleray.engine.export import read_export
from eagleray.engine.export_files import export_in
from eagleray.methods.method import Method
from eagleray.models import layouts, weights
from eagleray.models.backbone import Backbone
from eagleray.models.lora import merge
from eagleray.models.network import HF, TIMM
from eagleray.models.tensor_files import KEY, load_tensors
from eagleray.models.weights import Weights
from eagleray.runs.build import build_method
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import check_exists, check_run, no_checkpoint
from eagleray.storage import store

MOST_IMAGES = 2**31  # most images of a checkpoint, as a method may keep a vector of each
KEYS = {"recipe", "method", "images"}  # every checkpoint of eagleray has these keys


class Restored(NamedTuple):
    """A method with the weights of a checkpoint."""

    recipe: Recipe
    method: Method
    folder: Path  # the run's files on this machine


def restore(path: str) -> Restored:
    """Restore a run from its newest checkpoint or one checkpoint file. Raises UserError when it cannot be read."""
    return restored(path, *read_state(path))


def read_state(path: str) -> tuple[dict[str, Any], Path]:
    """Return the state of a checkpoint, and the folder of its run on this machine. If `path` is a run, it is the newest
    checkpoint or, with `start.keep_best`, the best one. Raises UserError when none can be read."""
    check_run(path)
    file = Path(path)
    if store.may_be_folder(path):
        folder = run_store(path.rstrip("/")).view
        where = f"{path.rstrip('/')}/checkpoints", folder / "checkpoints"
        state = checkpoint.newest(*where)
        if state is None:
            raise no_checkpoint(path)
        best = guard.get("returns") if isinstance(guard := state.get("guard"), dict) else None
        if isinstance(best, int) and best != state.get("step"):
            state = checkpoint.newest(*where, step=best) or state
    else:
        folder, state = file.parent.parent, _load(file)
    if not (isinstance(state, dict) and state.keys() >= KEYS):
        raise UserError(f"{path}: not a checkpoint written by eagleray: expected the keys {', '.join(sorted(KEYS))}")
    return state, folder


def restored(path: str, state: Mapping[str, Any], folder: Path) -> Restored:
    """Return the method with the weights of a checkpoint's state, with LoRA adapters merged into them.
    Raises UserError when the recipe, the plug-ins or the weights of the state do not fit."""
    with explained(f"{path}: its recipe is not one of eagleray", yaml.YAMLError, ValueError):
        tree = yaml_text.parse(str(state["recipe"]))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: its recipe is not one of eagleray: expected keys and values")
    other = UserError(f"{path}: not a checkpoint written by eagleray: its values are of other types")
    if not _are_plugins(tree.get("plugins", [])):
        raise other
    missing = [p["name"] for p in tree.get("plugins", ()) if p["name"] not in plugins.loaded_plugins()]
    if missing:
        raise UserError(
            f"{path}: was trained with the plug-in {missing[0]}, which is not loaded: name it with --plugin; its "
            f"source is in {folder / plugins.FOLDER}"
        )
    recipe = config.check(Recipe, tree, path)
    method = build_method(recipe)
    if not _are_weights(state["images"], state["method"]):
        raise other
    method.allocate(state["images"])
    try:
        method.load_state_dict(state["method"])
    except RuntimeError as e:
        changed = [p.name for p in recipe.plugins if p not in plugins.loaded_plugins().values()]
        if not changed:
            raise UserError(f"{path}: its weights do not fit its recipe: {one_line(e)}") from e
        raise UserError(
            f"{path}: was trained with another version of the plug-in {changed[0]}, which is in "
            f"{folder / plugins.FOLDER}: the weights do not fit this one"
        ) from e
    for part in method.modules():
        if isinstance(part, Backbone):
            merge(part)
    return Restored(recipe, method, folder)


def _are_plugins(listed: Any) -> bool:
    """Return whether a value from a checkpoint, which may come from a stranger, is a list of plug-ins."""
    return isinstance(listed, list) and all(isinstance(p, dict) and isinstance(p.get("name"), str) for p in listed)


def _are_weights(images: Any, weights: Any) -> bool:
    """Return whether two values of a checkpoint are a number of images and the state of a method."""
    counted = type(images) is int and 0 <= images <= MOST_IMAGES
    return counted and isinstance(weights, dict) and all(isinstance(key, str) for key in weights)


def _load(file: Path) -> Any:
    """Return the content of a checkpoint file. Raises UserError when it is missing, damaged or no checkpoint."""
    if export_in(file):
        raise UserError(f"{file}: an export; expected a run or a checkpoint")
    if file.with_suffix(".json").exists() and not checkpoint.intact(file):
        raise UserError(f"{file}: damaged: the checkpoint does not match its manifest")
    with explained(f"{file}: not a checkpoint written by eagleray", Exception):  # torch reports damage in many ways
        return checkpoint.read(file)


def pretrained(source: str) -> Weights:
    """Return the weights that `backbone.weights` names: those of a run, a checkpoint, an export, a file of tensors,
    `timm:NAME` or `hf:NAME`. Raises UserError when they cannot be read."""
    if public := public_weights(source, KEY):
        return public
    if file := export_in(source):
        return weights.from_module(source, read_export(file).backbone.model)
    if (tensors := file_tensors(source, KEY)) is not None:
        return weights.from_tensors(source, tensors)._replace(heads=getattr(layouts.recognise(tensors), "heads", {}))
    return weights.from_module(source, restore(source).method.export().model)


def public_weights(source: str, key: str) -> Weights | None:
    """Return the weights of `timm:NAME` or `hf:NAME`, or None for other sources. `key` of the recipe names the source.
    Raises UserError when the weights cannot be read."""
    if source.startswith(TIMM):
        return weights.from_timm(source, key)
    return weights.from_hub(source, key) if source.startswith(HF) else None


def file_tensors(source: str, key: str) -> dict[str, Any] | None:
    """Return the tensors in a file; None for a run and for one of its checkpoints. Raises UserError when there is no
    such file or folder."""
    check_exists(source, key)
    if store.may_be_folder(source):
        return None
    tensors = load_tensors(Path(source), key)
    return None if tensors.keys() >= KEYS else tensors
