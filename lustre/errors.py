"""What can go wrong, with the exit code it ends a command with."""


class LustreError(Exception):
    """``lfs`` refused, failed, did not answer, or did something else than asked."""

    exit_code = 73


class LustreUsageError(LustreError):
    """A value that no Lustre could accept; nothing was run."""

    exit_code = 2
