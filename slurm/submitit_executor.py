"""Shards by an executor of submitit.

A job's ``result()`` is the manifests of its shards, and raises where a shard was not made. Before a time
limit or a preemption submitit asks a job for its ``checkpoint()``: the worker is stopped, cleans up, and the
same shards are sent again; those that are done are skipped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardprep.errors import ReadWriteError, UsageError
from shardprep.format.manifest import Manifest, find_made_shards, read_manifest
from shardprep.format.names import MAX_SHARDS, ids_of_ranges
from shardprep.format.plan import need_plan
from slurm.commands import SlurmAway, read_config
from slurm.script import tasks_of_shards

_STOP_S = 60.0  # for a worker to remove what it has not finished; submitit kills 90 s after its signal
# ``python -m preprocess``, but with the current folder, which may have a preprocess.py, behind all packages.
_WORKER = (
    "import sys, runpy; from importlib.util import find_spec; "
    "sys.path[:] = [place for place in sys.path if place]; find_spec('preprocess') or sys.path.append(''); "
    "runpy.run_module('preprocess', run_name='__main__', alter_sys=True)"
)


class ShardsFailed(ReadWriteError):
    """A job's worker ended with an error. The job's own log has its words."""


def submit_with_submitit(
    output_dir: str | Path, executor: Any, *, shards_per_task: int | None = None
) -> list[Any]:
    """Submit the missing shards to a submitit executor, as one ``map_array``, and return its jobs.

    ``shards_per_task`` (default 1) is raised where Slurm's MaxArraySize asks for it. The result of a job is
    the list of its shards' manifests; it raises ShardsFailed. ``verify`` is left to the caller. Raises
    NotFound, UsageError or ReadWriteError.
    """
    if shards_per_task is not None and shards_per_task < 1:
        raise UsageError(f"shards_per_task is {shards_per_task}, expected 1 or more")
    folder = Path(output_dir).resolve()
    plan = need_plan(folder)
    missing = sorted(set(range(plan.num_shards)) - find_made_shards(folder, plan.spec).done.keys())
    if not missing:
        return []
    most_tasks = len(missing)
    if "slurm" in getattr(executor, "cluster", type(executor).__name__).lower():
        with contextlib.suppress(SlurmAway):  # submitit's own test executors; sbatch itself still decides
            most_tasks = int(read_config()["MaxArraySize"])
    parts = tasks_of_shards(missing, most_tasks, shards_per_task)
    jobs: list[Any] = executor.map_array(MakeShards(), [str(folder)] * len(parts), parts)
    return jobs


class MakeShards:
    """Body of a job. The worker is a process of its own, so that nothing of submitit's is in it."""

    _worker: subprocess.Popen[bytes] | None = None  # while it runs: it cannot be pickled

    def __call__(self, folder: str, shards: str) -> list[Manifest]:
        """Make these shards and return their manifests. Raises ShardsFailed."""
        # Slurm sends submitit's USR2 to all processes of a step, and it would kill the worker.
        self._worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, "run", folder, "--shards", shards],
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
        try:
            code = self._worker.wait()
        except BaseException:
            self._stop()
            raise
        finally:
            self._worker = None
        if code:
            raise ShardsFailed(
                f"shards {shards} of {folder} were not all made: the worker ended with exit code {code}, and "
                "its words are in this job's log; submit again what is missing"
            )
        return [read_manifest(Path(folder), shard_id) for shard_id in ids_of_ranges(shards, end=MAX_SHARDS)]

    def checkpoint(self, folder: str, shards: str) -> Any:
        """Stop the worker, and have submitit send the same shards again."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        return DelayedSubmission(MakeShards(), folder, shards)

    def _stop(self) -> None:
        """End the worker as a signal of Slurm's would, and wait until it has cleaned up.

        It runs in a signal's handler, while ``__call__`` waits for the same process with a lock of Popen's.
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
