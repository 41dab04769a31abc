"""Exceptions with a message of one line for the user, and functions that reword or redact messages."""

import contextlib
import re
from collections.abc import Iterator


class UserError(ValueError):
    """An error that the user can correct: the message says which key, file or shard is wrong and what was expected.

    The command line prints the message and exits with status 2."""


class PluginError(UserError):
    """A plug-in cannot be found or imported, or it does not behave as its interface requires."""


class Busy(UserError):
    """Another process is working on the same run or sweep."""


class Outage(RuntimeError):
    """A store or a server has not answered for too long; the same command may succeed later.

    The command line exits with status 75 (EX_TEMPFAIL of sysexits.h), so Slurm and KubeRay start the command again."""


class Superseded(Outage):
    """Another process has taken over the files that this process was writing; this process must stop writing them."""


class Preempted(RuntimeError):
    """A machine is about to be preempted or added, and the run has saved a checkpoint to continue from."""


class Futile(RuntimeError):
    """Workers were restarted again and again without any progress."""


@contextlib.contextmanager
def named(key: str, hint: str = "") -> Iterator[None]:
    """A context that puts `key` and a colon before the message of a UserError, and `hint` behind it."""
    try:
        yield
    except UserError as e:
        raise UserError(f"{key}: {e}{hint}") from None


# USER is a user name with its colon, unless a port follows. LOGIN is the login in a URL: all from :// to the @ before
# the host, as AWS keys may contain slashes, and passwords any character.
USER = r"[^\s/@:]*:(?!\d+(?:[/?#\s]|$))"
LOGIN = re.compile(rf"(?<=://)(?:{USER}\S{{0,400}}@|[^/\s]{{0,400}}@|{USER}[^@\n]{{0,80}}@)")
# PARAMETER is a secret parameter of a URL, such as its signature, or an assignment such as MLFLOW_TRACKING_PASSWORD=x.
KEYS = r"api[_-]?key|(?:access|account|storage)[_-]?key(?:[_-]?id)?|accesskeyid"
WORDS = rf"password|passwd|pwd|passphrase|secret|signature|credential|{KEYS}"
PARAMETER = re.compile(
    rf"(?i)((?:(?<![.\w-])[\w-]*(?:{WORDS}|[_-]token)|(?<![.\w-])token|(?<=[?&;])(?:sig|key|auth))=)"
    r"(?!\.\.\.)[^&\s;,'\"]+"
)


def hide_secrets(text: str) -> str:
    """Return a text without the users, passwords, keys and signatures in its URLs and assignments."""
    return LOGIN.sub("", PARAMETER.sub(r"\1...", text))


def has_secrets(text: str) -> bool:
    """Return whether a text contains anything that `hide_secrets` removes."""
    return hide_secrets(text) != text


@contextlib.contextmanager
def explained(
    message: str, *kinds: type[Exception], why: bool = True, error: type[UserError] = UserError
) -> Iterator[None]:
    """A context that turns errors of these `kinds` into an `error` with the text `message`. With `why`, a colon and the
    original error in one line follow. A UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except kinds as e:
        said = getattr(e, "strerror", None) or one_line(e) or type(e).__name__  # an OSError's text repeats the path
        said += " is missing" * isinstance(e, KeyError)
        raise error(f"{message}: {said}" if why else message) from None


@contextlib.contextmanager
def reworded(*words: tuple[str, str]) -> Iterator[None]:
    """A context that rewords the message of a UserError. `words` are pairs (text to replace, new text)."""
    try:
        yield
    except UserError as e:
        line = str(e)
        for old, new in words:
            line = line.replace(old, new)
        raise UserError(line) from None


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line without secrets. For a nested error of urllib3 it is the innermost
    cause, for other errors the first 300 characters."""
    text = hide_secrets(" ".join(str(error).split()))
    cause = re.search(r"Caused by \w+\(.*: (.*?)[\"')]*$", text)  # how urllib3 writes the innermost cause
    return cause[1] if cause else text[:300]


def first_line(error: Exception) -> str:
    """Return the first line of the message of an error, or an empty text if it has none."""
    return next(iter(str(error).strip().splitlines()), "")
