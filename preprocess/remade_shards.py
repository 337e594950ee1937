"""Make some shards again, with the reference engine and the worker's code, and compare: ``verify --deep``.

This finds shards that agree with their manifest but not with their input, unless this version has the same
fault.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterable

import msgspec

from preprocess.make.resources import allowed_cpus, bind_to
from preprocess.make.settings import worker_settings
from preprocess.shard_checks import Problems
from shardprep import errors
from shardprep.console import counted, with_progress
from shardprep.format import commands, manifest, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.plan import Plan

_COMPARED = ("tar", "idx", "ids", "digests")  # quarantine/ depends on the versions of libraries


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepRequest:
    """How many shards ``--deep`` makes again."""

    num_shards: int | None  # None: all

    @classmethod
    def parsed(cls, word: str) -> DeepRequest:
        """Return the request of ``--deep WORD``. Raises UsageError."""
        if word == "all":
            return cls(num_shards=None)
        if not (word.isdecimal() and int(word) > 0):
            raise errors.UsageError.of_value("--deep", word, "a number of shards from 1, or: all")
        return cls(num_shards=int(word))

    def is_every(self, plan: Plan) -> bool:
        """Return whether all shards of a plan are made again."""
        return self.num_shards is None or self.num_shards >= plan.num_shards


def remake(
    folder: DataFolder,
    plan: Plan,
    given: dict[str, object],
    deep: DeepRequest,
    *,
    also: Iterable[int],
    wrong: Collection[int],
    tell: Callable[[str], None],
) -> Problems:
    """Make some shards again, but none of the ``wrong`` ones. Return the problems of those that differ.

    Of the shards with input as many as ``deep`` asks for are chosen, the same ones for a plan each time, and
    those in ``also``. ``given``: flags of the worker. ``tell`` gets a line if none differs.
    Raises the errors of loading a Worker.
    """
    from preprocess.make.worker import Worker

    num_cpus = bind_to(allowed_cpus(offset=0))
    full = [shard_id for shard_id, size in enumerate(plan.shard_bytes()) if size]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    num_chosen = len(full) if deep.num_shards is None else min(deep.num_shards, len(full))
    chosen = sorted({*chooser.sample(full, num_chosen), *also} - {*wrong})
    settings = worker_settings(given)
    settings = dataclasses.replace(settings, engine="tokenizers", max_bad_fraction=1.0)
    worker = Worker(plan.at(settings.input_dir), folder, settings, num_cpus=num_cpus, warn=lambda _: None)
    problems: Problems = {}
    for shard_id in with_progress("making shards again", chosen):
        try:
            # It must not have a shard's name: an attempt at this shard would remove it as a temporary file.
            with folder.temporary_folder("verify") as (_, scratch):
                made = worker.make_in(DataFolder(scratch), worker.plan.shard(shard_id))
            _refuse_differing(folder, read_manifest(folder, shard_id), made)
        except errors.ShardprepError as error:
            problems[shard_id] = error
    if not problems:
        shards = f"{counted(len(chosen), 'shard')} ({names.id_ranges(chosen)})"
        tell(f"the reference engine makes the same bytes from the input of {shards}")
    return problems


def _refuse_differing(folder: DataFolder, published: Manifest, made: Manifest) -> None:
    """Raise BrokenShard if a shard that was made again has other files or counts than the published one."""
    shard_id = published.shard_id
    others = [name for name in _COMPARED if getattr(published, name) != getattr(made, name)]
    differing = [names.STAMPED_NAMES[name](shard_id) for name in others]
    for item in msgspec.structs.fields(manifest.ShardCounts):
        before = getattr(published.counts, item.name)
        now = getattr(made.counts, item.name)
        if before != now:
            differing.append(f"{item.name} ({now} in place of {before})")
    if differing:
        message = f"from its input the reference engine makes another {', another '.join(differing)}"
        remedy = commands.shard(shard_id, folder, "--again", "--engine", "tokenizers")
        raise errors.BrokenShard(message, remedy=remedy)
