"""Names from archives and recipes are shown on a terminal, and never obeyed by it."""

import io

import pytest
from rich.table import Table

from eagleray.base.console import SafeConsole, print_error

NAME = "\x1b]0;PWNED\x07 \x9b31m \u202egnp.exe"
SHOWN = r"\x1b]0;PWNED\x07 \x9b31m \u202egnp.exe"


@pytest.mark.parametrize("within_a_table", [False, True])
def test_escapes_are_shown_and_not_obeyed(within_a_table: bool) -> None:
    console = SafeConsole(file=io.StringIO(), highlight=False, soft_wrap=True)
    table = Table("shard")
    table.add_row(NAME)
    console.print(table if within_a_table else NAME, markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert SHOWN in text
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_an_error_shows_neither_escapes_nor_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"https://me:secret@host/{NAME}: no such file")
    assert capsys.readouterr().err == f"error: https://host/{SHOWN}: no such file\n"
