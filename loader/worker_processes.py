"""Worker processes that no stop signal ends: the process that trains decides, and they end with it.

Slurm, torchrun and a terminal send a signal to all processes of a job. A worker that died of it would end the
process that trains, by an error of torch's DataLoader, before that one has saved its checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.utils.data import DataLoader

from shardprep.console import stop_signals_wait

_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY_S = 1.0  # whether the process that trains is still there; 50 us of CPU each time


def iter_with_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``; workers that it starts begin with the signals blocked, while they import, too."""
    if not loader.num_workers or loader._iterator is not None:  # noqa: SLF001  torch keeps persistent workers there
        return iter(loader)
    context = loader.multiprocessing_context or multiprocessing.get_context()
    with stop_signals_wait(_SIGNALS):
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # when it starts the tracker it unblocks SIGINT and SIGTERM
        with stop_signals_wait(_SIGNALS):
            return iter(loader)


def follow_main_process(_: int) -> None:
    """As a DataLoader's ``worker_init_fn``: block the signals, and end when the main process does.

    torch looks for the main process too, but not while a worker waits for room in a pipe, and not under
    forkserver, whose server lives on.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_end_with_main_process, args=(os.getppid(),), daemon=True).start()


def _end_with_main_process(parent_pid: int) -> None:
    """End this process once the main one is gone or sends SIGTERM, as torch does to a worker that hangs."""
    main = multiprocessing.parent_process()
    assert main is not None
    while os.getppid() == parent_pid and main.is_alive():
        received = signal.sigtimedwait((signal.SIGTERM,), _LOOK_EVERY_S)
        if received is not None and received.si_pid == main.pid:
            os._exit(0)
    shutil.rmtree(get_temp_dir(), ignore_errors=True)  # of the sockets by which tensors are sent
    os._exit(0)
