"""Commands of the command line, run in this process."""

import sys

import pytest

from eagleray.cli import main


def status(*args: str) -> object:
    """Run a command and return its exit status, 0 or None where it did what it was to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eagleray", *args])
        with pytest.raises(SystemExit) as stop:
            main.main()
    return stop.value.code


def run(*args: str) -> None:
    """Run a command. Fails unless its exit status is 0."""
    code = status(*args)
    assert not code, f"eagleray {' '.join(args)}: status {code}"


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a refusal."""
    code = status(*args)
    captured = capsys.readouterr()
    assert code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]
