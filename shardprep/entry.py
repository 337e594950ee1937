"""The way in of the command ``shardprep``."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command of this process and return its exit code.

    Ctrl-C while Python still imports waits until the command can stop cleanly.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from shardprep.__main__ import main as run

    return run()
