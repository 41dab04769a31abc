"""Plug-ins are the user's own Python files and packages: they are loaded, identified by their source, and sent along.

A plug-in is named by the path of a file, by a module's dotted name, or by an installed package's entry point of the
group `eagleray.plugins`.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.dataclasses import dataclass as checked

from eagleray.base.errors import PluginError
from eagleray.config import register
from eagleray.config.tree import STRICT

GROUP = "eagleray.plugins"
FOLDER = "plugins"  # inside a run folder and a job's package
Sources = dict[str, bytes]  # by path below the folder that Python imports from


@checked(frozen=True, config=STRICT)
class Plugin:
    """A plug-in in a resolved recipe: its name and the digest of its source, which make it part of a run's identity."""

    name: str  # my_method.py, or the dotted name of a module
    sha256: str


@dataclass(frozen=True)
class Loaded:
    """A plug-in that this process has imported."""

    plugin: Plugin
    module: ModuleType
    sources: Sources  # empty where the plug-in is part of an installed package


_LOADED: dict[str, Loaded] = {}


def load(name: str, *folders: Path) -> Plugin:
    """Import a plug-in once, from the working folder or else from one of `folders`. Raises PluginError."""
    is_file = name.endswith(".py")
    path = next((p for p in (Path(name), *(f / name for f in folders)) if p.is_file()), Path(name))
    module_name = path.stem if is_file else name
    sources = _file(path, name) if is_file else _package(name, folders)
    plugin = Plugin(path.name if is_file else name, _digest(sources))
    known = _LOADED.get(plugin.name)
    if known and known.plugin == plugin:
        return plugin
    if known:  # somebody has changed the file since, as in a notebook
        register.forget(module_name)
        sys.modules.pop(module_name, None)
    module = _import(module_name, path if is_file else None, name)
    installed = not is_file and "site-packages" in (module.__file__ or "")
    _LOADED[plugin.name] = Loaded(plugin, module, {} if installed else sources)
    return plugin


def load_installed() -> None:
    """Import the plug-ins that installed packages announce. Raises PluginError."""
    for point in importlib.metadata.entry_points(group=GROUP):
        load(point.value)


def resolve(listed: Any, *, folder: Path | None = None) -> list[dict[str, str]]:
    """Load the plug-ins that a recipe in `folder` lists, and return them as the resolved recipe keeps them.

    An entry of a resolved recipe has a digest, which has to be that of the source. Raises PluginError."""
    if not isinstance(listed, list) or not all(isinstance(item, str | Mapping) for item in listed):
        raise PluginError(f"plugins: expected a list of files and modules, got {listed!r}")
    plugins: dict[str, Plugin] = {}
    for item in listed:
        name, digest = (item, None) if isinstance(item, str) else (item.get("name", ""), item.get("sha256"))
        known = _LOADED.get(name)
        if known and known.plugin.sha256 == digest:
            plugin = known.plugin
        else:
            plugin = load(name, *((folder / FOLDER, folder) if folder else ()))
        if digest not in (None, plugin.sha256):
            raise PluginError(f"plugins: {name} is not the file that the recipe was resolved with: its source differs")
        plugins[plugin.name] = plugin
    return [{"name": p.name, "sha256": p.sha256} for p in plugins.values()]


def loaded() -> set[str]:
    """The names of the plug-ins that this process has imported."""
    return set(_LOADED)


def used(name: str, kind: register.Kind = "method") -> Plugin | None:
    """The loaded plug-in that has registered something under this name."""
    entry = register.entries(kind).get(name)
    return next((p.plugin for p in _LOADED.values() if entry and p.module.__name__ == entry.module), None)


def modules(plugins: Iterable[Plugin]) -> list[str]:
    """The names of the modules of some loaded plug-ins."""
    return [_LOADED[p.name].module.__name__ for p in plugins if p.name in _LOADED]


def pack(plugins: Iterable[Plugin]) -> dict[str, Sources]:
    """The sources of loaded plug-ins, by name, to be sent to another process with `install`."""
    return {p.name: _LOADED[p.name].sources for p in plugins}


def install(packed: Mapping[str, Sources]) -> None:
    """Write plug-ins that another process has packed into a temporary folder, and import them. Raises PluginError."""
    names = [name for name in packed if name not in _LOADED]
    if names:
        folder = Path(tempfile.mkdtemp(prefix="eagleray-plugins-"))
        for name in names:
            write(folder, packed[name])
        sys.path.insert(0, str(folder))
        for name in names:
            load(name, folder)


def write(folder: Path, sources: Sources) -> None:
    """Write a plug-in's files below a folder."""
    for relative, data in sources.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _file(path: Path, name: str) -> Sources:
    try:
        return {path.name: path.read_bytes()}
    except OSError as e:
        raise PluginError(f"plugins: {name}: cannot be read: {e.strerror or e}") from None


def _package(name: str, folders: Iterable[Path]) -> Sources:
    """Every Python file of the top-level package or module, so that a change anywhere in it is noticed."""
    for folder in (Path.cwd(), *folders):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise PluginError(f"plugins: {name}: no such file and no module of this name")
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        return {origin.name: origin.read_bytes()}
    root = origin.parents[1]
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(origin.parent.rglob("*.py"))}


def _import(module_name: str, path: Path | None, name: str) -> ModuleType:
    try:
        if path is None:
            return importlib.import_module(module_name)
        if module_name in sys.modules or module_name in sys.stdlib_module_names:
            raise PluginError(f"plugins: {name}: a module called {module_name} exists already; rename the file")
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except PluginError:
        raise
    except Exception as e:  # whatever the user's code raises
        register.forget(module_name)
        sys.modules.pop(module_name, None)
        why = (str(e).splitlines() or [""])[0]
        raise PluginError(f"plugins: {name}: cannot be imported: {type(e).__name__}: {why}{_line(e, path)}") from e


def _line(error: Exception, path: Path | None) -> str:
    """Where in the plug-in's own file an error arose."""
    lines, trace = [], error.__traceback__
    while trace:
        if path and Path(trace.tb_frame.f_code.co_filename).name == path.name:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    number = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f" (line {number})" if number else ""


def _digest(sources: Sources) -> str:
    digest = hashlib.sha256()
    for relative, data in sorted(sources.items()):
        digest.update(f"{relative}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
