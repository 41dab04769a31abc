"""The exceptions that are meant for a person and say all there is to say in one line."""


class UserError(ValueError):
    """The person who started this must change something: what was given, what was expected, which key, file or shard.
    The command line exits with 2."""


class Outage(RuntimeError):
    """What is needed stayed away for too long, and the same command may succeed later. The command line exits with
    1."""


class Preempted(RuntimeError):
    """A machine is about to be taken away, and all that was done has been saved."""


class Futile(RuntimeError):
    """Workers were started again and again without any progress."""
