"""Find the weights and data that a recipe or a command names, before PyTorch is imported to read them."""

from dataclasses import replace
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.files import read_history
from eagleray.config.source import Source
from eagleray.engine.checkpoint_files import names_in
from eagleray.engine.export_files import FILE, export_in
from eagleray.models.names import has_model
from eagleray.models.network import TIMM, is_public
from eagleray.runs import layout
from eagleray.runs.recipe import TEACHER, Recipe
from eagleray.storage import store

# Suffixes of files of weights. No name of a timm model ends in one of them.
FILES = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".pkl", ".npz", ".safetensors")


def absolute(source: str) -> str:
    """Return a source of weights that means the same in any working folder: a name, a URL or an absolute path."""
    if is_public(source) or store.is_remote(source):
        return source
    path = Path(source)
    if len(path.parts) == 1 and path.suffix not in FILES and not path.exists() and has_model(source):
        return TIMM + source
    return store.absolute(source)


def resolve_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, as a worker's working folder is not the user's.
    Raises UserError when `out` cannot be written to, or a teacher has no weights."""

    def all_of(sources: tuple[Source, ...] | None) -> tuple[Source, ...] | None:
        return sources and tuple(
            replace(
                s,
                url=store.absolute(s.url),
                exclude=s.exclude and store.absolute(s.exclude),
                columns=tuple(map(store.absolute, s.columns)),
            )
            for s in sources
        )

    store.check_writable(recipe.out, "out")
    cache = recipe.data.cache and store.absolute(recipe.data.cache)
    data = replace(recipe.data, train=all_of(recipe.data.train), test=all_of(recipe.data.test), cache=cache)
    source = recipe.backbone.weights and absolute(recipe.backbone.weights)
    network = replace(recipe.backbone, weights=source)
    start = recipe.start and recipe.start.at(absolute(recipe.start.source))
    out, method = store.absolute(recipe.out.rstrip("/")), recipe.method
    if teacher := recipe.teacher:
        if teacher.weights is None:
            raise UserError(f"{TEACHER}: missing; expected what start.from may name: a run, an export, timm:NAME, ...")
        named = replace(teacher, weights=absolute(teacher.weights))
        method = replace(method, args=method.args | {"teacher": named})
    return replace(recipe, out=out, data=data, backbone=network, start=start, method=method)


def weight_files(recipe: Recipe) -> dict[str, str]:
    """Return the files and folders that a run reads weights from, by key, without public names of timm and the Hub."""
    return {key: source for key, source in recipe.weight_sources.items() if not is_public(source)}


def check_exists(source: str, key: str = "") -> None:
    """Raises UserError when there is no file or folder that `key` of a recipe, or a command, names as weights."""
    if not store.may_exist(source):
        given = f"{key}={source}" if key else source
        raise UserError(f"{given}: no such run, checkpoint or file; a timm model is named timm:NAME")


def has_begun(folder: Path) -> bool:
    """Return whether the run in a folder has taken steps, after which it takes over no weights any more."""
    return bool(read_history(folder / layout.METRICS))


def check_run(path: str) -> None:
    """Raises UserError when a path on this machine is missing, or is a folder without checkpoint. A URL is accepted."""
    if not store.may_exist(path):
        raise UserError(f"{path}: no such run or checkpoint")
    if _lacks_checkpoint(path):
        raise no_checkpoint(path)


def check_weights(path: str) -> None:
    """Raises UserError when a path on this machine is missing, or is a folder without checkpoint or export.
    A URL is accepted here: whether it exists is checked when it is read."""
    check_exists(path)
    if _lacks_checkpoint(path) and not export_in(path):
        raise UserError(f"{no_checkpoint(path)}; nor is there an exported {FILE}")


def _lacks_checkpoint(path: str) -> bool:
    """Return whether `path` is a folder of this machine without a checkpoint."""
    folder = store.folder_of(path)
    return bool(folder and folder.is_dir() and not names_in(map(str, (folder / "checkpoints").glob("step-*"))))


def no_checkpoint(path: str) -> UserError:
    """Return the error of a run without a checkpoint that can be read."""
    return UserError(f"{path}: its checkpoints/ holds no intact checkpoint")
