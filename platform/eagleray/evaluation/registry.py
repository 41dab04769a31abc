"""Find evaluation protocols by name: those shipped with Eagleray, and those of plug-ins."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagleray import config
from eagleray.base.errors import PluginError, UserError
from eagleray.config import register
from eagleray.dense import catalogue as dense
from eagleray.protocols import catalogue
from eagleray.protocols.protocol import Listed, Protocol

# Shipped protocols, in the order of `eagleray list protocols`.
SHIPPED = {**catalogue.SHIPPED, **dense.SHIPPED}


def _from_plugin(entry: register.Entry) -> Listed:
    """Return the list entry of a plug-in's protocol. Raises PluginError when it is no subclass of Protocol."""
    kind: Any = entry.target
    if not (isinstance(kind, type) and issubclass(kind, Protocol)):
        raise PluginError(f"protocol {entry.name!r}: expected a subclass of eagleray.Protocol, got {kind!r}")
    return Listed(kind, kind.about or entry.name)


PROTOCOLS = register.Registry("protocol", SHIPPED, _from_plugin)


def select(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return those of the names that are protocols, and an error message for each of the others."""
    unique = list(dict.fromkeys(names))
    return [n for n in unique if n in PROTOCOLS], [
        f"--protocol {n}: unknown{config.nearest(n, list(PROTOCOLS))}; see `eagleray list protocols`"
        for n in unique
        if n not in PROTOCOLS
    ]


def check_asked(names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises UserError when none of the names is a protocol, or when a setting belongs to none of these protocols."""
    found, refused = select(names)
    if not found:
        raise UserError("; ".join(refused))
    known = sorted({s for name in found for s in PROTOCOLS[name].settings})
    known += [f"{name}.{s}" for name in found for s in PROTOCOLS[name].settings]
    for key in settings:
        if key not in known:
            raise UserError(f"--{key}: not a setting of {', '.join(found)}{config.nearest(key, known)}")
