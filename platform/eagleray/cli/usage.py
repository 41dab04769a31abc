"""Say in one line what is wrong with the words of a command, and what to type instead."""

import sys
from collections.abc import Iterator
from typing import Any

import typer

from eagleray.base.errors import UserError

# click's UsageError, taken from typer's class: depending on its version, typer contains click or uses the package.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
RENAMED = {"data": "data.train", "lr": "optim.lr.value"}  # keys by the names that users of other tools type


def explain(error: Any) -> UserError:
    """Return a UsageError as an error of one line, or print the help that it holds and exit."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        sys.exit(2)
    called = context.command_path if context else "eagleray"
    option = getattr(error, "option_name", "")
    takes_keys = context and any(p.name == "overrides" for p in context.command.params)
    if type(error).__name__ == "NoSuchOption" and takes_keys:
        key, value = _key_of(option.lstrip("-")), next(_values(option), "VALUE")
        return UserError(f"{option}: no such option; keys of the recipe are KEY=VALUE, without dashes: {key}={value}")
    said = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    if type(error).__name__ == "MissingParameter" and "RECIPE" in said:
        return UserError(
            f"RECIPE: missing; expected `{called} RECIPE [KEY=VALUE]...`; `eagleray list recipes` lists all, and "
            "`eagleray init FOLDER` writes one for images of your own"
        )
    return UserError(f"{said[:1].lower()}{said[1:]}; `{called} --help` says what there is")


def _key_of(word: str) -> str:
    """Return the key of a recipe that an option such as --data.train or --epochs means."""
    from eagleray.config import keys_named
    from eagleray.runs.recipe import Recipe

    word = word.replace("-", "_")
    return RENAMED.get(word) or next(iter(keys_named(word, Recipe)), word)


def _values(option: str) -> Iterator[str]:
    """Yield the value of an option on the command line, each time that the option is given."""
    for word, following in zip(sys.argv[1:], [*sys.argv[2:], "VALUE"], strict=True):
        if word.startswith(f"{option}="):
            yield word.partition("=")[2]
        elif word == option and not following.startswith("-"):
            yield following
