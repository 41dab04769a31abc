"""Closes the token and the folder of a local Ray to the machine's other users, who could run code as this one."""

import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path


def session_dir() -> Path:
    """Return a folder for the sessions of Ray, within one that only this user can enter, as Ray opens its own to all.

    Its path is short, as those of sockets have at most 107 characters."""
    base = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    path = base / f"ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(path, stat.S_ISDIR):  # somebody else was there first
        path = Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    path.chmod(0o700)
    return path / "ray"


def protect_token() -> None:
    """Create the token that Ray would create, or close the one that it has created, for everybody but this user."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_ours(path.parent, stat.S_ISDIR):
        path.parent.chmod(0o700)
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        if _is_ours(path, stat.S_ISREG):
            path.chmod(0o600)


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    about = path.lstat()
    return about.st_uid == os.getuid() and is_kind(about.st_mode)
