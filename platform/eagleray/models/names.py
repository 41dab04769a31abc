"""Reads the names of timm's models and weights from its source, because importing timm and PyTorch takes seconds."""

import difflib
import functools
import importlib.util
import re
import sys
from pathlib import Path

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models.network import TESTED, TIMM, Network

REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(", re.MULTILINE)
RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)\}\)", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"""['"]([\w.-]+)['"]\s*:""")


@functools.cache
def _names() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all models, including eagleray's and deprecated ones, and of all weights as MODEL.TAG."""
    found = importlib.util.find_spec("timm")
    assert found
    assert found.origin
    folders = (Path(found.origin).with_name("models"), Path(__file__).with_name("zoo"))
    text = "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    models = {*REGISTERED.findall(text), *(name for old in RENAMED.findall(text) for name in KEY.findall(old))}
    return frozenset(models), frozenset(key for key in KEY.findall(text) if key.partition(".")[0] in models)


def has_model(name: str) -> bool:
    """Return whether timm, our zoo or an imported plug-in has the model of a name such as MODEL or MODEL.TAG."""
    base = name.partition(".")[0]
    if not _is_read():
        register_ours()
    timm = sys.modules.get("timm")  # imported by now if a plug-in has registered a backbone with timm
    return base in _names()[0] or bool(timm and timm.is_model(base))


def register_ours() -> None:
    """Import eagleray's models that timm lacks; each registers itself with timm."""
    from eagleray.models.zoo import cvt13, cvt_esvit, pvt, resnet_32, sk_resnet, swin, t2t, vil  # noqa: F401


def _is_read() -> bool:
    """Return whether names were found in timm's source; another version of timm may register models differently."""
    models, weights = _names()
    return models.issuperset(TESTED) and bool(weights)


def no_model(name: str, key: str = "backbone.name") -> UserError:
    """Return the error for the unknown model `name`, the value of a recipe's `key`; it suggests the closest name."""
    close = difflib.get_close_matches(name.partition(".")[0], sorted(_names()[0]), 1)
    return UserError(f"{key}={name}: timm has no such model" + (f"; did you mean {close[0]}?" if close else ""))


def check_network(network: Network, section: str) -> None:
    """Raises UserError when a section of a recipe names a model that does not exist, or weights that timm lacks."""
    if not has_model(network.name):
        raise no_model(network.name, f"{section}.name")
    if network.weights:
        check_weights(network.weights, f"{section}.weights=")


def check_weights(source: str, given: str = "") -> None:
    """Raises UserError when a source is timm:NAME and timm has no weights NAME; the message begins with `given`.

    A tag passes if any model has it: names are read from timm's source, which lacks the names MODEL.TAG that timm
    composes when it is imported."""
    (models, weights), name = _names(), source.removeprefix(TIMM)
    base, _, tag = name.partition(".")
    known = has_model(name)
    if known and tag and base in models and _is_read():
        known = any(other.endswith(f".{tag}") for other in weights)
    if source.startswith(TIMM) and not known:
        near = config.nearest(name, sorted(weights)) if base in models else config.nearest(base, sorted(models))
        raise UserError(f"{given}{TIMM}{name}: timm has no weights of this name{near}")
