"""Run networks of any library in evaluation mode, and turn the errors of their forward passes into clear messages."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone

NOT_FINITE = "its features are not finite numbers"


class Net(Protocol):
    """An object with a training mode, such as a PyTorch module or a model of another library."""

    training: bool

    def train(self, mode: bool = True) -> object: ...


N = TypeVar("N", bound=Net)
P = ParamSpec("P")
R = TypeVar("R")


def in_eval_mode(f: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[N, P], R]:
    """Decorate a function whose first argument is a network, so that it runs with the network in evaluation mode.

    The mode that the network had before is restored at the end, even after an error."""

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
def explain_failure(backbone: Backbone, lacks: str) -> Iterator[None]:
    """Turn any error that the backbone's model raises in this context into a UserError, which says what it `lacks`.

    The error also names the model. It ends with the original message, which depends on the architecture."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        why = " ".join(str(e).split())[:200]
        raise UserError(f"{type(backbone.model).__name__} {lacks}: {why}") from None


@torch.inference_mode()
def check_images(backbone: Backbone, size: int) -> None:
    """Raise UserError when the backbone cannot process square images of `size` pixels."""
    with explain_failure(backbone, f"cannot take images of --size {size}"):
        pooled = backbone.pooled(
            torch.zeros(1, backbone.channels, size, size, device=next(backbone.parameters()).device)
        )
        if not pooled.isfinite().all():
            raise ValueError(NOT_FINITE)


@torch.inference_mode()
def check_patches(backbone: Backbone, size: int) -> None:
    """Raise UserError when the backbone does not return a grid of patch tokens for square images of `size` pixels."""
    with explain_failure(backbone, f"has no patch tokens for images of --size {size}, which this protocol needs"):
        features = backbone(torch.zeros(1, backbone.channels, size, size, device=next(backbone.parameters()).device))
        if not features.patches.isfinite().all():
            raise ValueError(NOT_FINITE)
