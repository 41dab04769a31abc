"""Prints the messages of commands and asks running work to stop at a signal."""

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

out = Console(highlight=False, soft_wrap=True)


@contextmanager
def silence(quiet: bool) -> Iterator[None]:
    """Suppress all console output in the block if `quiet`, which commands set when they print JSON for a program."""
    out.quiet = quiet
    try:
        yield
    finally:
        out.quiet = False


@contextmanager
def stop_on_signal(ask: Callable[[], object], message: str) -> Iterator[None]:
    """Call `ask` and print a message at the first SIGTERM or Ctrl-C; a second Ctrl-C ends the process at once."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's alone
        yield
        return
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if not asked:
            ask()
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out.print(f"{message}; once more ends at once")

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def shows_live(console: Console) -> bool:
    """Return whether a console can redraw what it shows: a terminal, or a notebook that has ipywidgets."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


def print_error(message: str) -> None:
    """Print an error as one line to standard error."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
