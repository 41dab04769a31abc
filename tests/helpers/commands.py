"""Commands of the command line, run in this process."""

import sys

import pytest

from eagleray.cli import main


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line of a refusal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eagleray", *args])
        with pytest.raises(SystemExit) as stop:
            main.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]
