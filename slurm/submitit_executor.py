"""A door to submitit, for those who already live in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from preprocess.plan import need_plan
from shardprep.format.names import id_ranges
from slurm.dataset_state import done_shards


def submit_with_submitit(output_dir: str | Path, executor: Any, *, shards_per_task: int = 1) -> list[Any]:
    """Submit the missing shards to a submitit executor; a job's result is the worker's exit code.

    submitit never splits an array at the site's limit, and says neither OOM nor TIMEOUT: where that
    matters take ``python -m slurm submit``. ``verify`` is left to the caller.
    """
    folder = Path(output_dir).resolve()
    plan = need_plan(folder)
    missing = sorted(set(range(plan.num_shards)) - done_shards(folder, plan))
    parts = [missing[first : first + shards_per_task] for first in range(0, len(missing), shards_per_task)]
    jobs: list[Any] = executor.map_array(make_shards, [str(folder)] * len(parts), map(id_ranges, parts))
    return jobs


# ``python -m preprocess``, but with the current folder behind installed packages: it may have a preprocess.py
# of its own.
_WORKER = (
    "import sys, runpy; from importlib.util import find_spec; "
    "sys.path[:] = [place for place in sys.path if place]; find_spec('preprocess') or sys.path.append(''); "
    "runpy.run_module('preprocess', run_name='__main__', alter_sys=True)"
)


def make_shards(folder: str, shards: str) -> int:
    """Body of a job: a process of its own, so that nothing of submitit's is in the worker."""
    command = [sys.executable, "-c", _WORKER, "run", folder, "--shards", shards]
    return subprocess.run(command, check=False).returncode
