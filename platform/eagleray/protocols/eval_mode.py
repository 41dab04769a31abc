"""Networks of any library, while something is measured with them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

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


@torch.inference_mode()
def check_images(backbone: Backbone, size: int) -> None:
    """Raises UserError when the backbone cannot take images of this size."""
    with trying(backbone, f"cannot take images of --size {size}"):
        found = backbone.pooled(torch.zeros(1, 3, size, size, device=next(backbone.parameters()).device))
        if not found.isfinite().all():
            raise ValueError(NOT_FINITE)


@torch.inference_mode()
def check_patches(backbone: Backbone, size: int) -> None:
    """Raises UserError when the backbone has no patch tokens on a grid."""
    with trying(backbone, f"has no patch tokens for images of --size {size}, which this needs"):
        found = backbone(torch.zeros(1, 3, size, size, device=next(backbone.parameters()).device))
        if found.patches.shape[1] != found.grid[0] * found.grid[1]:
            raise ValueError("their number is not that of a grid")
        if not found.patches.isfinite().all():
            raise ValueError(NOT_FINITE)
