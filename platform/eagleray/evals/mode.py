"""Evaluation mode for as long as something is measured."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


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
