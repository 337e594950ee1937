"""What a node reads in the first steps of a run: its workers follow the real order, and open no shard."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.batch.run_reader import RunReader
from loader.order.hashes import Int64s
from loader.order.mixture import Position, Run
from loader.order.order import share
from loader.read.chunks import Window, window_of_lengths
from loader.read.reading import HELD_IDX_BYTES, MAX_OPEN_SHARDS, ShardReader
from loader.read.samples import JoinedRows, Samples
from shardprep.format.idx import IDX_DTYPES, idx_num_bytes


@dataclass(frozen=True, kw_only=True)
class ReadsForecast:
    """Reads of a node's ranks. A worker opens shards when it begins a window; the first step begins all."""

    first_rank: int
    num_ranks: int
    num_workers: int  # of a rank
    num_steps: int  # that were followed, from the first one
    num_opened: int  # shards that were opened in these steps
    most_opened: int  # in one of these steps
    num_files: int  # that are open after them: tars, and each idx that is too large for memory
    step_bytes: float  # of tars, in the mean of these steps
    window_bytes: int  # of all windows that are in memory at the same time
    idx_bytes: int  # of open shards, in memory


class _Unread:
    """Samples of a source that a worker does not read: the shards that it would open are noted."""

    def __init__(self, samples: Samples, opened: list[int]) -> None:
        self._samples = samples
        self._sample_bytes = samples.shards.tar_bytes / samples.num_samples
        self._open_shards: OrderedDict[int, None] = OrderedDict()  # the latest one last
        self._opened = opened  # gets each shard that is opened
        self.num_bytes = 0.0
        self.window_bytes = 0.0  # of the largest window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def num_tokens(self, reader: ShardReader, samples: Int64s) -> Int64s:
        self._open_each(reader, self._samples.shards.shard_of(samples))
        # Lengths decide the order inside of a window, but not its shards.
        return np.zeros_like(samples)

    def read(self, reader: ShardReader, samples: Int64s, offset: int) -> Window:
        if isinstance(self._samples, JoinedRows):
            shards: list[int] = []
            for _, _, shards_of_span in self._samples.spans(reader, np.unique(samples), offset):
                shards += [number for number, _, _ in shards_of_span]
            for shard in shards:
                self._open(shard)
            self._open_each(reader, np.array(shards))
        else:
            self._open_each(reader, self._samples.shards.shard_of(samples))
        num_bytes = samples.size * self._sample_bytes
        self.num_bytes += num_bytes
        self.window_bytes = max(self.window_bytes, num_bytes)
        return window_of_lengths(np.zeros(samples.shape, np.int32))

    def _open_each(self, reader: ShardReader, shards: Int64s) -> None:
        for shard in reader.opening_order(np.unique(shards)).tolist():
            self._open(shard)

    def _open(self, shard: int) -> None:
        """Open a shard as ``ShardReader`` does."""
        if shard not in self._open_shards:
            self._opened.append(shard)
            self._open_shards[shard] = None
        self._open_shards.move_to_end(shard)
        if len(self._open_shards) > MAX_OPEN_SHARDS:
            self._open_shards.popitem(last=False)

    def held(self) -> tuple[int, int]:
        """Return how many files are open, and the bytes of idx records in memory."""
        num_files = len(self._open_shards)
        num_bytes = 0
        for shard in self._open_shards:
            dataset, row = self._samples.shards.locate(shard)
            # The samples of another tool's tar were listed at the start.
            if dataset.records is not None:
                continue
            idx_bytes = int(dataset.num_samples[row]) * IDX_DTYPES[dataset.spec.kind].itemsize
            if idx_bytes > HELD_IDX_BYTES:
                num_files += 1
            else:
                num_bytes += idx_bytes
        return num_files, num_bytes


def reads_of(
    run: Run,
    samples: Mapping[str, Samples],
    *,
    ranks: range,
    world_size: int,
    num_workers: int,
    num_steps: int,
) -> ReadsForecast:
    """Follow the workers of a node's ranks through the first steps of a run, at most its first epoch."""
    num_steps = min(num_steps, run.steps_in(0))
    first_ticks = [run.tick_of(Position(step)) for step in range(num_steps)]
    end = first_ticks[-1] + run.ticks_in_step(num_steps - 1)
    num_opened = Counter[int]()  # by step
    unread: list[_Unread] = []
    for rank in ranks:
        slots = share(range(run.order.num_slots), rank, world_size)
        of_rank = min(num_workers, len(slots))
        for number in range(of_rank):
            opened: list[int] = []
            sources: dict[str, Any] = {name: _Unread(each, opened) for name, each in samples.items()}
            unread += sources.values()
            chunks = RunReader(run, sources, share(slots, number, of_rank)).chunks(0, 0, end, endless=False)
            tick = 0
            while tick < end:
                step = bisect_right(first_ticks, tick) - 1
                num_before = len(opened)
                tick += next(chunks).num_ticks
                num_opened[step] += len(opened) - num_before
    held = [each.held() for each in unread]
    return ReadsForecast(
        first_rank=ranks.start,
        num_ranks=len(ranks),
        num_workers=num_workers,
        num_steps=num_steps,
        num_opened=num_opened.total(),
        most_opened=max(num_opened.values()),
        num_files=sum(num_files for num_files, _ in held),
        step_bytes=sum(each.num_bytes for each in unread) / num_steps,
        window_bytes=int(sum(each.window_bytes for each in unread)),
        idx_bytes=sum(idx_bytes for _, idx_bytes in held),
    )


def staged_bytes(samples: Mapping[str, Samples]) -> int:
    """Return the bytes of tars and idx of all sources, which ``stage`` copies to a node's disk."""
    num_bytes = 0
    for each in samples.values():
        for dataset in each.shards.datasets:
            num_bytes += int(dataset.tar_bytes.sum())
            if dataset.records is None:
                num_bytes += int(idx_num_bytes(dataset.spec.kind, dataset.num_samples).sum())
    return num_bytes
