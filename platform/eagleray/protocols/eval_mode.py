"""Networks of any library, while something is measured with them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone

NOT_FINITE = "its features are not finite numbers"


class Net(Protocol):
    training: bool

    def train(self, mode: bool = True) -> object: ...


N = TypeVar("N", bound=Net)
P = ParamSpec("P")
R = TypeVar("R")


def evaluating(f: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[N, P], R]:
    """A function whose first argument is a network, which is in evaluation mode meanwhile and in its own again
    afterwards, whatever happens."""

    @functools.wraps(f)
    def wrapped(net: N, *args: P.args, **kwargs: P.kwargs) -> R:
        training = net.training
        net.train(False)
        try:
            return f(net, *args, **kwargs)
        finally:
            net.train(training)

    return wrapped


@contextlib.contextmanager
def trying(backbone: Backbone, lacks: str) -> Iterator[None]:
    """Raises UserError with what the backbone lacks for an error of its model, which each says in its own way."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(f"{type(backbone.model).__name__} {lacks}: {why}") from None
