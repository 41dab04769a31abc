"""The one exception that means: the person who started this must change something."""


class UserError(ValueError):
    """What was given, what was expected, which key, file or shard; one line. The command line exits with 2."""
