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
from loader.read.chunks import Chunk, Ragged, Window
from loader.read.reading import HELD_IDX_BYTES, MAX_OPEN_SHARDS
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
    """Samples of a source that are not read: only the shards that a worker opens for them are noted."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._open: OrderedDict[int, None] = OrderedDict()  # shards, the latest one last
        self.num_opened = 0
        self.num_samples = 0
        self.window_samples = 0  # of the largest window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def num_tokens(self, reader: object, samples: Int64s) -> Int64s:  # noqa: ARG002 - nothing is read
        return np.zeros_like(samples)  # a window in another order is in the same shards

    def read(self, reader: object, samples: Int64s, offset: int) -> Window:  # noqa: ARG002
        self.num_samples += samples.size
        self.window_samples = max(self.window_samples, samples.size)
        for shard in self._shards_of(samples, offset).tolist():
            if shard not in self._open:
                self.num_opened += 1
                self._open[shard] = None
            self._open.move_to_end(shard)
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        lengths = np.zeros(samples.shape, np.int32)

        def chunk_of(first: int, end: int) -> Chunk:
            here = lengths[:, first:end]
            return Chunk(lengths=here, ids=Ragged.of_joined(np.zeros(0, np.int32), here))

        return chunk_of

    def _shards_of(self, samples: Int64s, offset: int) -> Int64s:
        """Return the shards of samples, ascending. A row that is packed at load may lie in several."""
        joined = self._samples
        if not isinstance(joined, JoinedRows):
            return np.unique(joined.shards.shard_of(samples))
        first = (offset + samples * joined.row_tokens) % joined.num_offsets
        last = (first + joined.row_tokens - 1) % joined.num_offsets
        return np.unique(np.searchsorted(joined.first_token, [first, last], side="right") - 1)

    def held(self) -> tuple[int, int]:
        """Return how many files are open, and the bytes of idx records in memory."""
        num_files = len(self._open)
        num_bytes = 0
        for shard in self._open:
            part, row = self._samples.shards.locate(shard)
            if part.records is not None:  # of a tar of another tool, whose samples were listed at the start
                continue
            idx_bytes = int(part.num_samples[row]) * IDX_DTYPES[part.spec.kind].itemsize
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
    end = min(run.tick_of(Position(num_steps)), run.ticks_in(0))
    sample_bytes = {name: each.shards.tar_bytes / each.num_samples for name, each in samples.items()}
    opened = Counter[int]()  # by step
    num_bytes = 0.0
    window_bytes = 0.0
    num_files = 0
    idx_bytes = 0
    for rank in ranks:
        slots = share(range(run.order.num_slots), rank, world_size)
        of_rank = min(max(num_workers, 1), len(slots))
        for number in range(of_rank):
            unread: dict[str, Any] = {name: _Unread(each) for name, each in samples.items()}
            reader = RunReader(run, unread, share(slots, number, of_rank))
            chunks = reader.chunks(0, 0, end, endless=False)
            tick = 0
            while tick < end:
                step = bisect_right(range(num_steps), tick, key=lambda step: run.tick_of(Position(step))) - 1
                num_before = sum(each.num_opened for each in unread.values())
                tick += next(chunks).num_ticks
                opened[step] += sum(each.num_opened for each in unread.values()) - num_before
            for name, each in unread.items():
                num_bytes += each.num_samples * sample_bytes[name]
                window_bytes += each.window_samples * sample_bytes[name]
                files_of_source, bytes_of_source = each.held()
                num_files += files_of_source
                idx_bytes += bytes_of_source
    return ReadsForecast(
        first_rank=ranks.start,
        num_ranks=len(ranks),
        num_workers=num_workers,
        num_steps=num_steps,
        num_opened=opened.total(),
        most_opened=max(opened.values(), default=0),
        num_files=num_files,
        step_bytes=num_bytes / num_steps,
        window_bytes=int(window_bytes),
        idx_bytes=idx_bytes,
    )


def staged_bytes(samples: Mapping[str, Samples]) -> int:
    """Return the bytes of tars and idx of all sources, which ``stage`` copies to a node's disk."""
    num_bytes = 0
    for each in samples.values():
        for part in each.shards.parts:
            num_bytes += int(part.tar_bytes.sum())
            if part.records is None:
                counts = part.num_samples.tolist()
                num_bytes += sum(idx_num_bytes(part.spec.kind, count) for count in counts)
    return num_bytes
