"""Whether workers can hand their tensors over: torch does it through a socket below TMPDIR."""

from __future__ import annotations

import os
import tempfile

import torch

from preprocess.shard_format import UsageError

_MOST_PATH_BYTES = 107  # of a Unix socket
_SOCKET_BYTES = len("/pymp-12345678/listener-12345678")


def check_worker_sockets() -> None:
    """Raise UsageError where TMPDIR is too long for a socket below it.

    A worker would say so on standard error, lose its batches, and the loop would wait for them for ever.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    folder, most = tempfile.gettempdir(), _MOST_PATH_BYTES - _SOCKET_BYTES
    if len(os.fsencode(folder)) > most:
        raise UsageError(
            f"the folder for temporary files, {folder}, has a path of {len(os.fsencode(folder))} bytes, and "
            f"workers can hand over their batches below one of {most} at most; set TMPDIR to a shorter one "
            "(export TMPDIR=/tmp), or num_workers to 0"
        )
