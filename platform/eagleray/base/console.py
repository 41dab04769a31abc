"""Prints the messages of commands, and handles SIGTERM and Ctrl-C."""

import importlib.util
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from eagleray.base.contexts import replaced
from eagleray.base.errors import hide_secrets

# Control characters (C0 and C1) without tab and line feed, characters that reverse the direction of text, and
# surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class SafeConsole(Console):
    """A console that shows control characters, which may come from file names and recipes, instead of obeying them."""

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        return super().render_str(visible(text), **options)


out = SafeConsole(highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Print a line as it is, without interpreting markup."""
    out.print(line, markup=False)


def say_loading() -> None:
    """Print a line if PyTorch has not been imported yet, as the import takes seconds."""
    if "torch" not in sys.modules:
        say("loading PyTorch")


def silence(quiet: bool) -> AbstractContextManager[None]:
    """A context in which `out` prints nothing if `quiet`. Commands set `quiet` when they print JSON for a program."""
    return replaced(out, "quiet", quiet)


@contextmanager
def stop_on_signal(ask: Callable[[], object], message: str) -> Iterator[None]:
    """A context in which SIGTERM or Ctrl-C calls `ask` and prints a message. A further Ctrl-C ends the process."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:  # a later SIGTERM is ignored: a parent may send it after a terminal's Ctrl-C
            return
        asked = True
        ask()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(SystemExit, OSError):  # Ctrl-C has ended `| tee` too, on which Rich would exit before the save
            out.print(f"{message}; Ctrl-C once more ends at once")

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def shows_live(console: Console) -> bool:
    """Return whether a console can redraw its output: a terminal can, and a notebook with ipywidgets."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


def print_error(message: str) -> None:
    """Print an error as one line to standard error, without secrets, and with control characters escaped."""
    sys.stdout.flush()
    print(f"error: {visible(hide_secrets(message))}", file=sys.stderr)


def visible(text: str) -> str:
    """Return a text with control characters, such as terminal escapes, written as \\x1b. Tabs and line feeds stay."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
