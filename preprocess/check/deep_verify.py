"""``verify --deep``: makes some shards again with the reference engine, and compares the hashes.

The worker's own path makes them, in a temporary folder of the data set. So shards are found that agree with
their manifest and not with their input: of another engine, of another version, or written by a machine that
errs. What this version itself reads wrongly, it reads wrongly again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from preprocess.check.verify import Problem
from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import load_worker
from shardprep.errors import BrokenShard, ShardprepError
from shardprep.files import PublishedFolder
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import VOUCHED_PATHS, remake_command
from shardprep.format.plan import Plan

_COMPARED = ("tar", "idx", "ids", "digests")  # words in a quarantine file are those of a library's version


def choose_shards(plan: Plan, num_shards: int) -> list[int]:
    """Return some shards that have input, ascending; the same ones for a plan each time."""
    sizes = plan.shard_bytes()
    full = [shard_id for shard_id in range(plan.num_shards) if sizes[shard_id]]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    return sorted(chooser.sample(full, min(num_shards, len(full))))


def verify_deep(
    folder: Path,
    plan: Plan,
    shard_ids: Sequence[int],
    *,
    settings: WorkerSettings,
    num_cpus: int,
    progress: Callable[[int], None],
) -> list[Problem]:
    """Return the shards that come out otherwise when they are made again.

    ``settings``: of the worker, but for the engine and how much may be bad. ``progress`` is told 1 for each
    shard. Raises what loading the tokenizer raises, and Refused where a library that changes or renders text
    has another version than planned.
    """
    settings = replace(settings, engine="tokenizers", max_bad_fraction=1.0)
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=lambda _: None)
    problems: list[Problem] = []
    for shard_id in shard_ids:
        try:
            # Of no shard's name: whoever finishes a shard removes the temporaries of its name.
            with PublishedFolder(folder / "verify") as again:
                made = worker.make_into(again.temporary, worker.plan.shard(shard_id))
            _compare(folder, read_manifest(folder, shard_id), made)
        except ShardprepError as error:
            problems.append(Problem(shard_id=shard_id, error=error))
        progress(1)
    return problems


def _compare(folder: Path, found: Manifest, made: Manifest) -> None:
    """Compare a manifest with that of the shard made again. Raises BrokenShard, naming what differs."""
    shard_id = found.shard_id
    there, again = found.counts, made.counts
    names = [item.name for item in fields(again) if getattr(there, item.name) != getattr(again, item.name)]
    counts = [f"{name} is {getattr(there, name)}, expected {getattr(again, name)}" for name in names]
    differing = [name for name in _COMPARED if getattr(found, name) != getattr(made, name)]
    files = [f"{VOUCHED_PATHS[name](Path(), shard_id)} has another sha256" for name in differing]
    if counts or files:
        raise BrokenShard(
            f"it is not what the reference engine makes of its input: {'; '.join([*files, *counts])}; run: "
            f"{remake_command(shard_id, folder)} --engine tokenizers"
        )
