"""``verify --deep``: makes some shards again with the reference engine, and compares the hashes.

The worker's own path makes them, in a temporary folder of the data set. So shards are found that agree with
their manifest and not with their input: of another engine, of another version, or written by a machine that
errs. What this version itself reads wrongly, it reads wrongly again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from preprocess.make.resources import bind_to_task_cpus, worker_settings
from preprocess.make.worker import load_worker
from shardprep.console import Progress, counted, print_lines
from shardprep.errors import BrokenShard, ShardprepError
from shardprep.files import PublishedFolder
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import VOUCHED_PATHS, id_ranges, remake_command
from shardprep.format.plan import Plan

_COMPARED = ("tar", "idx", "ids", "digests")  # words in a quarantine file are those of a library's version


def verify_deep(
    folder: Path, plan: Plan, args: argparse.Namespace, *, again: Iterable[int]
) -> list[tuple[int, ShardprepError]]:
    """Return the shards that come out otherwise when they are made again.

    ``args.deep`` shards that have input are chosen, the same ones for a plan each time; those of ``again``
    come on top. Raises what loading the tokenizer raises, and Refused where a library that changes or renders
    text has another version than planned.
    """
    num_cpus = bind_to_task_cpus(offset=0)
    full = [shard_id for shard_id, size in enumerate(plan.shard_bytes()) if size]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    chosen = sorted({*chooser.sample(full, min(args.deep, len(full))), *again})
    settings = replace(worker_settings(args), engine="tokenizers", max_bad_fraction=1.0)
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=lambda _: None)
    problems: list[tuple[int, ShardprepError]] = []
    progress = Progress("making shards again", len(chosen), unit="shards")
    for shard_id in chosen:
        try:
            # Of no shard's name: whoever finishes a shard removes the temporaries of its name.
            with PublishedFolder(folder / "verify") as scratch:
                made = worker.make_into(scratch.temporary, worker.plan.shard(shard_id))
            _compare(folder, read_manifest(folder, shard_id), made)
        except ShardprepError as error:
            problems.append((shard_id, error))
        progress.add(1)
    if not problems:
        print_lines(
            f"the reference engine makes the same of the input of {counted(len(chosen), 'shard')} "
            f"({id_ranges(chosen)}), byte for byte"
        )
    return problems


def _compare(folder: Path, found: Manifest, made: Manifest) -> None:
    """Compare a manifest with that of the shard made again. Raises BrokenShard, naming what differs."""
    shard_id = found.shard_id
    differing = [
        f"{VOUCHED_PATHS[name](Path(), shard_id)} has another sha256"
        for name in _COMPARED
        if getattr(found, name) != getattr(made, name)
    ]
    for item in fields(made.counts):
        there, expected = getattr(found.counts, item.name), getattr(made.counts, item.name)
        if there != expected:
            differing.append(f"{item.name} is {there}, expected {expected}")
    if differing:
        raise BrokenShard(
            f"it is not what the reference engine makes of its input: {'; '.join(differing)}; run: "
            f"{remake_command(shard_id, folder)} --engine tokenizers"
        )
