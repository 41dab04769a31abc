"""Check a method from a plug-in before a run depends on it: it must be a subclass of Method that defines what Method
requires."""

import contextlib
import inspect
from collections.abc import Iterator

from pydantic import PydanticUserError, create_model

from eagleray.base.errors import Outage, PluginError, UserError, first_line
from eagleray.config import Part, register, signature
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone


def check_method_class(entry: register.Entry) -> None:
    """Raises PluginError when a registered class cannot be a method, whatever its settings are."""
    where, target = _name(entry), entry.target
    if not (isinstance(target, type) and issubclass(target, Method)):
        raise PluginError(f"{where}: expected a subclass of eagleray.Method, got {target!r}")
    views = getattr(target, "views", None)
    if not (isinstance(views, tuple) and len(views) == 2 and all(isinstance(n, int) for n in views)):
        raise PluginError(f"{where}: expected `views = (fewest, most)`, two numbers of views, got {views!r}")
    for required in ("forward", "export"):
        if getattr(target, required) is getattr(Method, required):
            raise PluginError(f"{where}: does not define {required}()")
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is parameter.empty:
            raise PluginError(f"{where}: __init__: expected a type for {parameter.name}, such as {parameter.name}: int")
    try:
        create_model(entry.name, **signature.from_import(target))  # type: ignore[call-overload]
    except (PydanticUserError, NameError) as e:
        raise PluginError(
            f"{where}: __init__: a parameter has a type that recipes do not support: {first_line(e)}"
        ) from None


def build(part: Part, backbone: Backbone) -> Method:
    """Build the method of a plug-in. Raises PluginError when the plug-in's code fails or when export() does not
    return a Backbone."""
    where = _name(register.entries("method")[part.name])
    with foreign_code(f"{where}: cannot be built"):
        method: Method = part.build(backbone)
        exported = method.export()
    if not isinstance(exported, Backbone):
        raise PluginError(f"{where}: export() returned a {type(exported).__name__}, expected the Backbone")
    return method


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """A context for code of a plug-in. Its errors are raised as PluginErrors that begin with `what`, except UserError
    and Outage, which are meant for a person and stay as they are."""
    try:
        yield
    except (UserError, Outage):
        raise
    except Exception as e:
        raise PluginError(f"{what}: {type(e).__name__}: {first_line(e)}") from e


def _name(entry: register.Entry) -> str:
    """Return a text that names the method and its plug-in."""
    return f"method {entry.name!r} of the plug-in {entry.module}"
