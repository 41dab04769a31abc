"""Decorators with which a plug-in registers its methods, view operations, dataset sources, protocols and callbacks.

    from eagleray import Method, register

    @register.method("my_method")
    class MyMethod(Method): ...

Eagleray has no decorator for backbones: recipes can use every name that timm's `register_model` has registered."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from eagleray.base.errors import PluginError

Kind = Literal["method", "view", "source", "protocol", "callback"]
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A class or function that a plug-in has registered."""

    kind: Kind
    name: str
    target: Any
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module that defines the class or function."""
        return str(self.target.__module__)


_ENTRIES: dict[tuple[Kind, str], Entry] = {}


def entries(kind: Kind) -> dict[str, Entry]:
    """Return everything of one kind that plug-ins have registered, by name."""
    return {name: entry for (k, name), entry in _ENTRIES.items() if k == kind}


class Registry(Mapping[str, T]):
    """A mapping of names to everything of one kind: what eagleray ships and what plug-ins register."""

    def __init__(self, kind: Kind, shipped: Mapping[str, T], make: Callable[[Entry], T]) -> None:
        """`make` turns the entry of a plug-in into a value of the same type as the values of `shipped`."""
        self.kind, self.shipped, self.make = kind, shipped, make

    def __getitem__(self, name: str) -> T:
        plugins = entries(self.kind)
        if name in plugins and name in self.shipped:
            owner = plugins[name].module
            raise PluginError(f"{self.kind} {name!r} already exists in eagleray; rename the one that {owner} registers")
        return self.make(plugins[name]) if name in plugins else self.shipped[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.shipped, *entries(self.kind)]))

    def __len__(self) -> int:
        return len(list(iter(self)))


def forget(package: str, *, keep: Container[str] = ()) -> None:
    """Remove everything that a package's modules have registered, except for the modules in `keep`."""
    for key, entry in list(_ENTRIES.items()):
        if entry.module.partition(".")[0] == package and entry.module not in keep:
            del _ENTRIES[key]


def _register(kind: Kind, name: str, target: T, **details: Any) -> T:
    other = _ENTRIES.get((kind, name))
    if other and other.module != getattr(target, "__module__", None):
        raise PluginError(f"{kind} {name!r} is registered twice: by {other.module} and by {target.__module__}")
    _ENTRIES[kind, name] = Entry(kind, name, target, details)
    return target


def method(name: str) -> Callable[[T], T]:
    """Register a subclass of Method under the name that `method:` in a recipe gives.

    Its keyword-only parameters are the keys of the recipe's method section."""
    return lambda target: _register("method", name, target)


def view(name: str) -> Callable[[T], T]:
    """Register an operation on the crops of a view, for `operations: [name]` of a view in a recipe.

    The function takes a crop, uint8 (3, S, S), and a seed below 2**63, and returns a crop of the same shape and type.
    The seed depends on the run's seed, the epoch, the sample and the view alone: draw everything random from it."""
    return lambda target: _register("view", name, target)


def source(name: str, **details: Any) -> Callable[[T], T]:
    """Register a source of images for `eagleray prepare NAME`; `details` are fields of its Source, such as
    `licence`."""
    return lambda target: _register("source", name, target, **details)


def protocol(name: str) -> Callable[[T], T]:
    """Register a subclass of Protocol for `eagleray evaluate --protocol NAME`; its fields are the settings."""
    return lambda target: _register("protocol", name, target)


def callback(target: T) -> T:
    """Register a subclass of Callback; every run whose recipe names the plug-in calls an object of it."""
    return _register("callback", f"{target.__module__}.{target.__qualname__}", target)  # type: ignore[attr-defined]
