"""What a node reads in the first steps of a run, from the real order, without opening a shard."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from loader.order.hashes import Int64s
from loader.order.mixture import Position, Run
from loader.order.order import share
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


class _Worker:
    """The windows that a worker reads from one source."""

    def __init__(self, run: Run, number: int, samples: Samples, slots: range) -> None:
        self._order = run.sources[number].order
        self._samples = samples
        self._slots = slots
        self._open: OrderedDict[int, None] = OrderedDict()  # shards, the latest one last
        self._window = (-1, -1)  # epoch and first tick of the newest one

    def held(self) -> tuple[int, int]:
        """Return how many files are open, and the bytes of idx records in memory."""
        num_files = num_bytes = 0
        for shard in self._open:
            part, row = self._samples.shards.locate(shard)
            num_files += 1
            if part.records is not None:  # of a tar of another tool, whose samples were listed at the start
                continue
            idx_bytes = int(part.num_samples[row]) * IDX_DTYPES[part.spec.kind].itemsize
            if idx_bytes > HELD_IDX_BYTES:
                num_files += 1
            else:
                num_bytes += idx_bytes
        return num_files, num_bytes

    @property
    def window_samples(self) -> int:
        num_ticks = min(self._order.window_ticks, self._order.ticks_per_epoch)
        return len(self._slots) * self._order.group * num_ticks

    def read(self, first: int, end: int) -> tuple[int, int]:
        """Read ticks of the source. Returns how many shards are opened, and how many samples are read."""
        num_opened = num_samples = 0
        while first < end:
            epoch, tick = divmod(first, self._order.ticks_per_epoch)
            start, stop = next(self._order.windows(tick))
            first += stop - tick
            if (epoch, start) == self._window:
                continue
            self._window = (epoch, start)
            samples = self._samples_in(epoch, start, stop)
            num_samples += len(samples)
            for shard in self._shards_of(epoch, samples).tolist():
                if shard in self._open:
                    self._open.move_to_end(shard)
                    continue
                num_opened += 1
                self._open[shard] = None
                if len(self._open) > MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
        return num_opened, num_samples

    def _samples_in(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the samples of a window, in any order: int64[n]."""
        order = self._order
        if not order.shuffle:
            return order.samples_of(epoch, self._slots, start, stop).reshape(-1)
        # positions: int64[slots, samples of a slot]
        within = np.arange((stop - start) * order.group)
        slots = np.arange(self._slots.start, self._slots.stop)[:, None]
        return order.samples_at(
            epoch, (slots * order.ticks_per_epoch + start) * order.group + within
        ).reshape(-1)

    def _shards_of(self, epoch: int, samples: Int64s) -> Int64s:
        """Return the shards of samples, ascending. A row that is packed at load may lie in several."""
        if not isinstance(self._samples, JoinedRows):
            return np.unique(self._samples.shards.shard_of(samples))
        size = self._samples.row_tokens
        offset = self._order.offset(epoch, self._samples.num_offsets)
        tokens = (offset + samples * size) % self._samples.num_offsets
        ends = (tokens + size - 1) % self._samples.num_offsets
        both = np.concatenate([tokens, ends])
        return np.unique(np.searchsorted(self._samples.first_token, both, side="right") - 1)


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
    sample_bytes = {name: each.shards.tar_bytes / each.num_samples for name, each in samples.items()}
    opened = Counter[int]()  # by step
    num_bytes = 0.0
    num_files = 0
    window_bytes = 0.0
    idx_bytes = 0
    for rank in ranks:
        slots = share(range(run.order.num_slots), rank, world_size)
        of_rank = min(max(num_workers, 1), len(slots))
        for number in range(of_rank):
            own = share(slots, number, of_rank)
            workers = {
                index: _Worker(run, index, samples[source.name], own)
                for index, source in enumerate(run.sources)
                if source.name in samples
            }
            for step, index, num_opened, num_samples in _reads(run, workers, num_steps):
                opened[step] += num_opened
                num_bytes += num_samples * sample_bytes[run.sources[index].name]
            for index, worker in workers.items():
                window_bytes += worker.window_samples * sample_bytes[run.sources[index].name]
                files_of_worker, bytes_of_worker = worker.held()
                num_files += files_of_worker
                idx_bytes += bytes_of_worker
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


def _reads(run: Run, workers: Mapping[int, _Worker], num_steps: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield what a worker reads: step, source, shards opened, samples."""
    last = num_steps - 1
    end = run.tick_of(Position(last)) + run.ticks_in_step(last)
    step = tick = 0
    while tick < end:
        while run.tick_of(Position(step)) + run.ticks_in_step(step) <= tick:
            step += 1
        round_ = run.round_at(tick)
        # One source alone is read window by window, and a mixture round by round.
        is_alone = run.only_source_at(tick) is not None
        stop = min(tick + 1 if is_alone else round_.end, end)
        for index in np.unique(round_.sources).tolist():
            first = int(round_.taken[index])
            count = int((round_.sources == index).sum())
            if is_alone:
                first += tick - round_.first
                count = stop - tick
            yield step, index, *workers[index].read(first, first + count)
        tick = stop


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
