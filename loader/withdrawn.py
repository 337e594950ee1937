"""Withdrawn documents: which tokens are masked, by what, and from which step of a run on.

The lists of each data set are read once, when the loader is made. Order and positions are as without them. A
state has what the run went by: ``0: 1f2e3d4c5b6a=0011223344556677; 1200: ...``, by the step of the order from
which on it held. Lists are named by their plan and by the hash of the last one.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.order import Int64s
from loader.shards import ShardSet
from shardprep.errors import BrokenShard
from shardprep.format.withdrawals import Withdrawals, withdrawal_path

logger = logging.getLogger(__name__)
_PLAN_DIGITS, _LIST_DIGITS = 12, 16
_HISTORY = re.compile(r"[0-9]{1,18}:( [0-9a-f]{12}=[0-9a-f]{16})*")


def places_of(begin: Int64s, lengths: Int64s, *, stride: int = 1) -> Int64s:
    """``begin[0], begin[0] + stride ...``: all places of some stretches, one after another."""
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    if stride > 1:
        within *= stride
    within += np.repeat(begin - stride * (np.cumsum(lengths) - lengths), lengths)
    return within


@dataclass(frozen=True, kw_only=True)
class WithdrawnTokens:
    """Which tokens of which stored samples are withdrawn; samples are counted through all shards."""

    sample: Int64s  # int64[n], ascending
    begin: Int64s  # int64[n]: the first token
    end: Int64s  # int64[n]; of a whole document more than it has

    def places(self, samples: Int64s, lengths: npt.NDArray[np.integer[Any]]) -> Int64s:
        """Where withdrawn tokens stand in samples that stand one after another, each of some length."""
        low = np.searchsorted(self.sample, samples)
        counts = np.searchsorted(self.sample, samples, side="right") - low
        if not counts.any():
            return counts[:0]
        mark, of = places_of(low, counts), np.repeat(np.arange(len(samples)), counts)
        begin = np.minimum(self.begin[mark], lengths[of])
        first = np.cumsum(lengths, dtype=np.int64) - lengths
        return places_of(first[of] + begin, np.minimum(self.end[mark], lengths[of]) - begin)


def withdrawn_tokens(shards: ShardSet) -> WithdrawnTokens | None:
    """What is withdrawn of some shards; None where that is nothing."""
    parts = [
        marks_of_lists(shards, number, source.withdrawn)
        for number, source in enumerate(shards.sources)
        if source.withdrawn.lists
    ]
    marks = np.concatenate([np.empty((0, 3), np.int64), *parts])
    sample, begin, end = marks[np.argsort(marks[:, 0], kind="stable")].T
    return WithdrawnTokens(sample=sample.copy(), begin=begin.copy(), end=end.copy()) if len(sample) else None


def marks_of_lists(shards: ShardSet, number: int, lists: Withdrawals) -> Int64s:
    """What lists of the data set that is a source name: int64[n, 3] of stored sample, first token and end."""
    source, first = shards.sources[number], int(shards.source_first[number])
    shard_of = {shard_id: first + row for row, shard_id in enumerate(source.shard_ids.tolist())}
    held = sorted(shard_of.keys() & set(lists.shard_ids), key=shard_of.__getitem__)
    parts = [np.empty((0, 3), np.int64)]
    for shard_id in held:
        shard, marks = shard_of[shard_id], lists.marks_of(shard_id, source.row_tokens)
        if len(marks) and int(marks[-1, 0]) >= int(shards.num_records[shard]):
            raise BrokenShard(
                f"{withdrawal_path(source.folder, 1).parent} names sample {int(marks[-1, 0])} of shard "
                f"{shard_id:05d}, which has {int(shards.num_records[shard])}; bring the folder back as it was"
            )
        parts.append(marks + np.array([shards.first_record[shard], 0, 0]))
    return np.concatenate(parts)


def lists_in_use(shards: ShardSet) -> str:
    """What masks, as a state names it: the last list of each data set that has any."""
    lists = [
        f"{source.spec.plan_id[:_PLAN_DIGITS]}={source.withdrawn.sha256[:_LIST_DIGITS]}"
        for source in shards.datasets
        if source.withdrawn.lists
    ]
    return " ".join(lists)


def describe_lists(shards: ShardSet) -> list[str]:
    """A line for each data set that has lists."""
    return [
        f"withdrawn: {source.withdrawn.num_documents:,} documents are masked, by list "
        f"{withdrawal_path(source.folder, len(source.withdrawn.lists))} ({source.withdrawn.sha256[:12]})"
        for source in shards.datasets
        if source.withdrawn.lists
    ]


@dataclass(frozen=True)
class ListHistory:
    """Which lists a run went by: (first step of the order, ``lists_in_use``), ascending."""

    held: tuple[tuple[int, str], ...] = ()

    @staticmethod
    def of_text(text: object) -> ListHistory:
        """What ``text`` gave. Raises BrokenShard for anything else."""
        parts = text.split("; ") if isinstance(text, str) and text else []
        if not isinstance(text, str) or not all(map(_HISTORY.fullmatch, parts)):
            raise BrokenShard(f"the state is damaged: its withdrawn is {text!r:.80}, expected such as 0: ...")
        cut = (part.partition(":") for part in parts)
        return ListHistory(tuple((int(first), lists.strip()) for first, _, lists in cut))

    def text(self) -> str:
        return "; ".join(f"{first}: {lists}".rstrip() for first, lists in self.held)

    def up_to(self, step: int) -> ListHistory:
        """What held in the steps before one."""
        return ListHistory(tuple(item for item in self.held if item[0] < max(step, 1)))

    def going_on(self, step: int, lists: str) -> ListHistory:
        """The same, and from a step on these lists."""
        before = tuple(item for item in self.held if item[0] < step)
        return ListHistory(before if (before[-1][1] if before else "") == lists else (*before, (step, lists)))


def warn_of_lost_lists(history: ListHistory, shards: ShardSet) -> None:
    """Say where the newest lists of a state are not among those of the data sets that they are of."""
    for name in history.held[-1][1].split() if history.held else []:
        plan, _, sha256 = name.partition("=")
        for source in shards.datasets:
            known = {each.sha256[:_LIST_DIGITS] for each in source.withdrawn.lists}
            if source.spec.plan_id.startswith(plan) and sha256 not in known:
                logger.warning(
                    "the state's run masked documents by list %s of %s, which is not in %s: they are seen "
                    "again; bring that file back and make the loader anew",
                    sha256,
                    source.folder,
                    withdrawal_path(source.folder, 1).parent,
                )
