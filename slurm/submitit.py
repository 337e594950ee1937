"""Jobs by submitit. ``result()`` of a job returns the manifests of its shards, or raises if one was not made.

Before a time limit or a preemption submitit calls ``checkpoint()``: the worker stops and cleans up, and the
same shards are sent again. Finished ones are skipped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from shardprep.errors import ReadWriteError, UsageError
from shardprep.format.data_folder import DataFolder
from shardprep.format.done import find_made_shards
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from shardprep.format.plan import need_plan
from shardprep.processes import start_python
from slurm.commands import SlurmAway, read_config
from slurm.scripts import tasks_of_shards

_STOP_S = 60.0  # a worker's time to remove unfinished files; submitit kills the job 90 s after its signal


class ShardsFailed(ReadWriteError):
    """A job's worker exited with an error. Its messages are in the job's log."""


def submit_with_submitit(
    output_dir: str | Path, executor: Any, *, shards_per_task: int | None = None
) -> list[Any]:
    """Submit the missing shards to a submitit executor as one ``map_array``, and return its jobs.

    ``shards_per_task`` (default 1) is increased if Slurm's MaxArraySize requires it. ``result()`` of a job
    returns the manifests of its shards, or raises ShardsFailed. Run ``verify`` yourself afterwards. Raises
    NotFound, UsageError or ReadWriteError.
    """
    if shards_per_task is not None and shards_per_task < 1:
        raise UsageError.of_value("shards_per_task", shards_per_task, "1 or more")
    folder = Path(output_dir).resolve()
    plan = need_plan(DataFolder(folder))
    missing = sorted(
        set(range(plan.num_shards)) - find_made_shards(DataFolder(folder), plan.spec).done.keys()
    )
    if not missing:
        return []
    max_tasks = len(missing)
    if "slurm" in getattr(executor, "cluster", type(executor).__name__).lower():
        with contextlib.suppress(SlurmAway):  # no Slurm here: sbatch itself will check the size
            max_tasks = int(read_config()["MaxArraySize"])
    parts = tasks_of_shards(missing, max_tasks, shards_per_task)
    jobs: list[Any] = executor.map_array(MakeShards(), [str(folder)] * len(parts), parts)
    return jobs


class MakeShards:
    """The body of a job. It runs the worker as a process, separate from submitit."""

    _worker: subprocess.Popen[bytes] | None = None  # only while it runs, because it cannot be pickled

    def __call__(self, folder: str, shards: str) -> list[Manifest]:
        """Make these shards and return their manifests. Raises ShardsFailed."""
        # Slurm sends submitit's USR2 to all processes of a step, and it would kill the worker.
        words = ["preprocess.__main__:main", "run", folder, "--shards", shards]
        self._worker = start_python(*words, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
        try:
            code = self._worker.wait()
        except BaseException:
            self._stop()
            raise
        finally:
            self._worker = None
        if code:
            found = f"shards {shards} were not all made: the worker ended with exit code {code}"
            expected = "0; see its messages in the job's log, then submit the missing shards again"
            raise ShardsFailed(path=folder, found=found, expected=expected)
        return [
            read_manifest(DataFolder(folder), shard_id) for shard_id in ids_of_ranges(shards, end=MAX_SHARDS)
        ]

    def checkpoint(self, folder: str, shards: str) -> Any:
        """Stop the worker, and return the same call for submitit to submit again."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        return DelayedSubmission(MakeShards(), folder, shards)

    def _stop(self) -> None:
        """Send the worker SIGTERM, as Slurm would, and wait until it has cleaned up.

        A signal handler calls this while ``__call__`` holds Popen's lock, so it uses no method of Popen.
        """
        if self._worker is None:
            return
        deadline = time.monotonic() + _STOP_S
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._worker.pid, signal.SIGTERM)
            while not os.waitid(os.P_PID, self._worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if time.monotonic() > deadline:
                    os.kill(self._worker.pid, signal.SIGKILL)
                    return
                time.sleep(0.05)
