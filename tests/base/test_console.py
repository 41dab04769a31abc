"""Names from archives and recipes are shown on a terminal, and never obeyed by it; a stop is told once."""

import io
import signal

import pytest
from rich.table import Table

from eagleray.base.console import SafeConsole, out, print_error, stop_on_signal

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


def test_a_stop_is_asked_and_told_once_and_a_second_ctrl_c_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[bool] = []
    with stop_on_signal(lambda: asked.append(True), "stopping"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [True]
    assert capsys.readouterr().out.count("stopping") == 1


@pytest.mark.parametrize("error", [SystemExit(1), OSError(5, "Input/output error")])
def test_a_stop_ends_nothing_though_it_cannot_be_told(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich exits when the reader of a pipe is gone, as `| tee` after Ctrl-C; a closed terminal is an error."""

    def gone(line: str) -> None:
        raise error

    asked: list[bool] = []
    monkeypatch.setattr(out, "print", gone)
    with stop_on_signal(lambda: asked.append(True), "stopping"):
        signal.raise_signal(signal.SIGINT)
        asked.append(False)  # the run goes on until it has saved
    assert asked == [True, False]
