"""Other users of a machine can neither read the token of a local Ray nor enter its folder."""

import os
import stat
from pathlib import Path

import pytest

from eagleray.cluster import session


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_private(home: Path) -> None:
    session.protect_token()
    token = home / ".ray" / "auth_token"
    assert (mode(token), mode(token.parent), len(token.read_text())) == (0o600, 0o700, 64)


def test_a_token_of_rays_own_is_closed_and_stays_the_same(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text("0123")
    token.chmod(0o644)
    session.protect_token()
    assert (mode(token), mode(token.parent), token.read_text()) == (0o600, 0o700, "0123")


def test_a_token_from_elsewhere_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    session.protect_token()
    assert not (home / ".ray").exists()


def test_sessions_have_a_folder_of_this_user(home: Path) -> None:
    folder = session.session_dir()
    folder.parent.chmod(0o755)
    assert session.session_dir() == folder == home / f"ray-{os.getuid()}" / "ray"
    assert mode(folder.parent) == 0o700


def test_a_folder_that_somebody_else_has_put_there_is_not_used(home: Path) -> None:
    (home / "theirs").mkdir()
    (home / f"ray-{os.getuid()}").symlink_to(home / "theirs")
    folder = session.session_dir().parent
    assert folder.parent == home
    assert not folder.is_symlink()
    assert mode(folder) == 0o700
    assert mode(home / "theirs") != 0o700
