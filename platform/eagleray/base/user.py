"""The name of the person whose command this is, also where it runs on a cluster as somebody else."""

import contextlib
import getpass
import os

NAME = "EAGLERAY_USER"  # jobs get it from the machine that submits them


def user() -> str:
    """Return the value of EAGLERAY_USER, else the name of this process's user; nothing where a container has none."""
    with contextlib.suppress(OSError, KeyError):
        return os.environ.get(NAME) or getpass.getuser()
    return ""
