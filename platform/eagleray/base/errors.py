"""Exceptions that are meant for a person, each with a message of one line."""


class UserError(ValueError):
    """The person who started this must change something: what was given, what was expected, which key, file or shard.
    The command line exits with 2."""


class PluginError(UserError):
    """A plug-in cannot be found or imported, or does not keep a contract."""


class Outage(RuntimeError):
    """A store or a server did not answer for too long; the same command may succeed later. The command
    line exits with 1."""


class Preempted(RuntimeError):
    """A machine is about to be preempted, and the run has been saved."""


class Futile(RuntimeError):
    """Workers were started again and again without any progress."""
