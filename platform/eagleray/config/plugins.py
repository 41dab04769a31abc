"""Loads plug-ins, which are the user's own Python files and packages, and sends them to other processes.

A plug-in is named by the path of a file, by a module's dotted name, or by an installed package's entry point of the
group `eagleray.plugins`."""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked

from eagleray.base.errors import PluginError, explained
from eagleray.base.files import atomic_path, cache_folder
from eagleray.config import register, signature
from eagleray.config.tree import STRICT

GROUP = "eagleray.plugins"
FOLDER = "plugins"  # name of the folder for plug-ins in a run's folder and in a job's package
Sources = dict[str, bytes]  # contents of files, by path below the folder that Python imports from


@checked(frozen=True, config=STRICT)
class Plugin:
    """A plug-in in a resolved recipe: its name and the digest of its source. Both are part of a run's identity."""

    name: str  # my_method.py, or the dotted name of a module
    sha256: str


@dataclass(frozen=True)
class PluginCopy:
    """The Python files of one copy of a plug-in, with the folder that holds them."""

    folder: Path  # Python imports the plug-in from here
    sources: Sources

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the paths and contents of all files."""
        digest = hashlib.sha256()
        for relative, data in sorted(self.sources.items()):
            digest.update(f"{relative}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class LoadedPlugin:
    """A plug-in that this process has imported."""

    plugin: Plugin
    module: ModuleType
    sources: Sources  # empty if the plug-in is part of an installed package


_LOADED: dict[str, LoadedPlugin] = {}


def load(name: str, *folders: Path, sha256: str | None = None) -> Plugin:
    """Import a plug-in, unless this version of it is imported already.

    A plug-in is looked up in the working folder first, then in `folders`. If `sha256` is set, the first copy whose
    source has this digest is preferred. Raises PluginError when the plug-in is not found or cannot be imported."""
    is_file = name.endswith(".py")
    copies = _files(name, folders) if is_file else _packages(name, folders)
    copy = next((c for c in copies if sha256 in (None, c.sha256)), copies[0])
    plugin = Plugin(Path(name).name if is_file else name, copy.sha256)
    module_name = Path(name).stem if is_file else name
    known = _LOADED.get(plugin.name)
    if known and known.plugin == plugin:
        return plugin
    if known:  # the file has changed since its import, as it may while a notebook is open
        _unload(module_name)
    module = _import(module_name, copy, plugin.name, is_file=is_file)
    installed = not is_file and "site-packages" in copy.folder.parts
    _LOADED[plugin.name] = LoadedPlugin(plugin, module, {} if installed else copy.sources)
    return plugin


def use(names: Iterable[str | Path]) -> None:
    """Import installed packages' plug-ins, then `names`. Raises PluginError when one is missing or fails to import."""
    load_installed()
    resolve([str(name) for name in names])


def load_installed() -> None:
    """Import the plug-ins that installed packages declare as entry points. Raises PluginError when an import fails."""
    for module in _announced(tuple(sys.path)):
        if module not in _LOADED:
            load(module)


@functools.cache
def _announced(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules of all entry points of GROUP. `path`, which is `sys.path`, is only the cache's key."""
    return tuple(dict.fromkeys(point.module for point in importlib.metadata.entry_points(group=GROUP)))


def resolve(listed: Any, *, folder: Path | None = None, named: bool = False) -> list[dict[str, str]]:
    """Load the plug-ins that a recipe in `folder` lists, and return their names and digests for the resolved recipe.

    `named` is for recipes of strangers: nothing is loaded, and PluginError is raised for a plug-in that is not loaded
    yet, as the user has not named it. It is also raised for a plug-in whose source has not the listed digest."""
    folders = [folder / FOLDER, folder] if folder else []
    plugins: dict[str, Plugin] = {}
    for name, digest in _entries(listed):
        known = _known(name)
        if known and (named or known.sha256 == digest):
            plugin = known
        elif named:
            source = f"; its source may be in {folders[0]}" if folder else ""
            raise PluginError(f"plugins: {name} is not loaded, as plug-ins are code: name it with --plugin{source}")
        else:
            plugin = load(name, *folders, sha256=digest)
        if digest not in (None, plugin.sha256):
            raise PluginError(f"plugins: {name} is not the file that the recipe was resolved with: its source differs")
        if plugins.setdefault(plugin.name, plugin) != plugin:
            raise PluginError(f"plugins: two different files are called {plugin.name}; rename one of them")
    return [{"name": p.name, "sha256": p.sha256} for p in plugins.values()]


def unnamed(listed: Any) -> list[str]:
    """Return the names of listed plug-ins that are not loaded. Raises PluginError when `listed` is no list."""
    return [name for name, _ in _entries(listed) if _known(name) is None]


def _entries(listed: Any) -> list[tuple[str, str | None]]:
    """Return each listed name with its digest or None. Raises PluginError when `listed` is no list of plug-ins."""
    if not isinstance(listed, list | tuple) or not all(isinstance(item, str | Mapping) for item in listed):
        raise PluginError(f"plugins: expected a list of files and modules, got {repr(listed)[:80]}")
    return [(i, None) if isinstance(i, str) else (str(i.get("name", "")), i.get("sha256")) for i in listed]


def _known(name: str) -> Plugin | None:
    """Return the loaded plug-in of this name or path; None if there is none."""
    known = _LOADED.get(Path(name).name if name.endswith(".py") else name)
    return known.plugin if known else None


def unload() -> None:
    """Forget every plug-in and everything that plug-ins have registered, as in a new process."""
    for loaded_module in [p.module.__name__ for p in _LOADED.values()]:
        _unload(loaded_module)


def loaded_plugins() -> dict[str, Plugin]:
    """Return the plug-ins that this process has imported, by name."""
    return {name: loaded.plugin for name, loaded in _LOADED.items()}


def plugin_of(name: str, kind: register.Kind | Literal["backbone"] = "method") -> Plugin | None:
    """Return the loaded plug-in that has registered this name, or None. Backbones are registered with timm."""
    if kind == "backbone":
        timm = sys.modules.get("timm")  # if no plug-in has imported timm, none has registered a backbone
        module = timm.model_entrypoint(name).__module__ if timm and timm.is_model(name) else ""
    else:
        entry = register.entries(kind).get(name)
        module = entry.module if entry else ""
    return owner(module)


def owner(module: str) -> Plugin | None:
    """Return the loaded plug-in that a module belongs to; None if there is none.

    It is the module itself, the closest package around it, or else another module of its top-level package."""
    top = module.partition(".")[0]
    within = [p for p in _LOADED.values() if f"{module}.".startswith(f"{p.module.__name__}.")]
    beside = [p for p in _LOADED.values() if p.module.__name__.partition(".")[0] == top]
    nearest = sorted(within, key=lambda p: len(p.module.__name__))[-1:] or beside[:1]
    return nearest[0].plugin if nearest else None


def pack(plugins: Iterable[Plugin] | None = None) -> dict[str, Sources]:
    """Return the sources of loaded plug-ins by name, for `install` in another process; None packs all plug-ins."""
    names = list(_LOADED) if plugins is None else [p.name for p in plugins]
    return {name: _LOADED[name].sources for name in names}


def install(packed: Mapping[str, Sources]) -> None:
    """Import plug-ins whose sources another process has packed.

    The sources are first written into a folder of the user's cache. Processes that get the same sources share this
    folder. Raises PluginError when writing or an import fails."""
    missing = {n: sources for n, sources in packed.items() if n not in _LOADED or _LOADED[n].sources != sources}
    if missing:
        together = PluginCopy(Path(), {path: data for sources in missing.values() for path, data in sources.items()})
        folder = cache_folder("plugins") / together.sha256
        with explained(f"plugins: {folder}: cannot be written", OSError, error=PluginError):
            write(folder, together.sources)
        for name, sources in missing.items():
            load(name, folder, sha256=PluginCopy(folder, sources).sha256 if sources else None)


def write(folder: Path, sources: Sources) -> None:
    """Write plug-ins' files below a folder, except those that are there already. Readers never see half a file."""
    for relative, data in sources.items():
        path = folder / relative
        if not (path.is_file() and path.read_bytes() == data):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as part:
                part.write_bytes(data)


def _files(name: str, folders: Iterable[Path]) -> list[PluginCopy]:
    """Return all existing copies of a plug-in file. Raises PluginError when there is none or one cannot be read."""
    paths = [path for path in (Path(name), *(folder / name for folder in folders)) if path.is_file()]
    with explained(f"plugins: {name}: cannot be read", OSError, error=PluginError):
        copies = [PluginCopy(path.parent, {path.name: path.read_bytes()}) for path in paths]
    if not copies:
        raise PluginError(f"plugins: {name}: no such file in {', '.join(map(str, (Path.cwd(), *folders)))}")
    return copies


def _packages(name: str, folders: Iterable[Path]) -> list[PluginCopy]:
    """Return all existing copies of a plug-in module. Raises PluginError when there is none.

    A copy has every Python file of the top-level package, so that a change anywhere in it is noticed."""
    top = name.partition(".")[0]
    specs = [PathFinder.find_spec(top, [str(folder)]) for folder in (Path.cwd(), *folders)]
    with contextlib.suppress(ImportError, ValueError):  # `top` may be text that cannot name a module
        specs.append(importlib.util.find_spec(top))
    copies = []
    for spec in specs:
        if spec and spec.submodule_search_locations:
            package = Path(next(iter(spec.submodule_search_locations)))
            found = sorted(package.rglob("*.py"))
            copies.append(
                PluginCopy(package.parent, {str(f.relative_to(package.parent)): f.read_bytes() for f in found})
            )
        elif spec and spec.origin and spec.origin.endswith(".py"):
            path = Path(spec.origin)
            copies.append(PluginCopy(path.parent, {path.name: path.read_bytes()}))
    copies = [copy for copy in copies if copy.sources]
    if not copies:
        raise PluginError(f"plugins: {name}: no such file and no module of this name")
    return copies


def _import(module_name: str, copy: PluginCopy, name: str, *, is_file: bool) -> ModuleType:
    """Import a plug-in from its folder. Raises PluginError when another module has its name or the import fails."""
    _check_name(module_name, copy, name, is_file=is_file)
    before = set(sys.modules)
    try:
        if not is_file:
            _prefer(copy.folder, module_name.partition(".")[0])
            return importlib.import_module(module_name)
        if module_name in sys.modules:  # imported by the user's code; _check_name refuses another file's module
            return sys.modules[module_name]
        spec = importlib.util.spec_from_file_location(module_name, copy.folder / f"{module_name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as e:  # whatever the user's code raises
        _unload(module_name, keep=before)
        if isinstance(e, PluginError):
            raise PluginError(f"plugins: {name}: {e}{_where(e, copy)}") from e
        why = e.msg if isinstance(e, SyntaxError) else (str(e).splitlines() or [""])[0]
        raise PluginError(f"plugins: {name}: cannot be imported: {type(e).__name__}: {why}{_where(e, copy)}") from e


def _check_name(module_name: str, copy: PluginCopy, name: str, *, is_file: bool) -> None:
    """Raises PluginError when another module has the plug-in's name."""
    top = module_name if is_file else module_name.partition(".")[0]
    there = sys.modules.get(top)
    path = Path((there and (there.__file__ or next(iter(there.__path__), ""))) or "").resolve()
    folder = copy.folder.resolve()
    same = path == folder / f"{top}.py" if is_file else path.is_relative_to(folder)
    if top in (*sys.stdlib_module_names, "eagleray") or (there and not same):
        raise PluginError(f"plugins: {name}: another module is called {top} too; rename the file")


def _prefer(folder: Path, top: str) -> None:
    """Put a folder on Python's import path, at its end if `top` is imported from this folder then, else first."""
    importlib.invalidate_caches()
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)  # the last entry hides no other module
    spec = PathFinder.find_spec(top)
    origin = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    if not origin or not Path(origin).resolve().is_relative_to(path):
        sys.path.insert(0, path)


def _unload(module_name: str, *, keep: Container[str] = ()) -> None:
    """Drop the modules of a plug-in's package and what they registered, except the modules in `keep`.

    The next import then reads them again."""
    signature.forget()
    top = module_name.partition(".")[0]
    for name in [n for n, p in _LOADED.items() if p.module.__name__.partition(".")[0] == top and not keep]:
        del _LOADED[name]
    for module in [m for m in sys.modules if f"{m}.".startswith(f"{top}.") and m not in keep]:
        del sys.modules[module]
    register.forget(top, keep=keep)


def _where(error: BaseException, copy: PluginCopy) -> str:
    """Return the plug-in's file and line in which an error arose, as text; empty if it arose in other files."""
    lines = [(error.filename, error.lineno)] if isinstance(error, SyntaxError) else []
    lines += [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for file, line in lines[:1] if isinstance(error, SyntaxError) else reversed(lines):
        relative = os.path.relpath(file or "", copy.folder)
        if relative in copy.sources:
            return f" ({relative}, line {line})"
    return ""
