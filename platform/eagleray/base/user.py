"""The name of the person who gave the command, also where it runs on a cluster under another user name."""

import contextlib
import getpass
import os

NAME = "EAGLERAY_USER"  # environment variable that the submitting machine sets for a job


def user() -> str:
    """Return EAGLERAY_USER, or else the name of this process's user, or "" if there is none, as in some containers."""
    with contextlib.suppress(OSError, KeyError):
        return os.environ.get(NAME) or getpass.getuser()
    return ""
