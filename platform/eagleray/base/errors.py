"""Exceptions that are meant for a person, each with a message of one line."""

import re


class UserError(ValueError):
    """The user has to change something: the message says which key, file or shard is wrong and what was expected.

    The command line exits with status 2."""


class PluginError(UserError):
    """A plug-in cannot be found or imported, or does not behave as its interface requires."""


class Outage(RuntimeError):
    """A store or a server has not answered for too long; the same command may succeed later.

    The command line exits with status 1."""


class Preempted(RuntimeError):
    """A machine is about to be preempted, and the run has been saved."""


class Futile(RuntimeError):
    """Workers were started again and again without any progress."""


def hide_secrets(text: str) -> str:
    """Return a text without the users and passwords in its URLs."""
    return re.sub(r"(?<=://)[^/\s]*@", "", re.sub(r"(?i)((?:password|token|secret)=)[^&\s]+", r"\1...", text))


def one_line(error: Exception) -> str:
    """Return an error as one line without secrets, with the cause that a message of urllib3 hides."""
    text = hide_secrets(" ".join(str(error).split()))
    cause = re.search(r"Caused by \w+\(.*: (.*?)[\"')]*$", text)  # what urllib3 wraps in three lines
    return cause[1] if cause else text[:300]
