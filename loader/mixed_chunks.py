"""What a worker does for a run of several sources: it reads each by its own order, and mixes rounds.

A round of this worker's lanes is laid out at once, 64 steps of them; see mixture.py for the order. ``mix``
makes the mixture and its samples of the sources that a user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk, split_ids
from loader.dataset import ChunkDataset, Samples, WindowReader
from loader.mixture import Mixture, Round, Schedule, make_stages
from loader.order import Order, hash_ints
from loader.run_steps import RunSteps, check_first_steps
from loader.shards.shard_set import ShardSet
from shardprep.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MixedSamples:
    """The samples of all sources, as a loader asks for them."""

    sources: tuple[Samples, ...]

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where all are rows of one length, else 0."""
        lengths = {source.row_tokens for source in self.sources}
        return lengths.pop() if len(lengths) == 1 else 0

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def mean_tokens(self) -> float:
        """Of the source with the longest: chunks must be small enough for all."""
        return max(source.mean_tokens for source in self.sources)

    @property
    def offsets(self) -> int:
        return 1  # each source has its own

    def open(self) -> MixedReader:
        """A reader of each source for this process."""
        return MixedReader([source.open() for source in self.sources])


class MixedReader:
    """The readers of all sources."""

    def __init__(self, readers: list[WindowReader]) -> None:
        self.readers = readers

    def close(self) -> None:
        """Close every file."""
        for reader in self.readers:
            reader.close()


class MixedChunkDataset(ChunkDataset):
    """A ChunkDataset of several sources; ``order`` is a Mixture, ``samples`` are MixedSamples."""

    samples: Any
    order: Any

    def _epoch_chunks(self, reader: Any, epoch: int, step: int, lanes: range) -> Iterator[Chunk]:
        mixture: Mixture = self.order
        first_of_epoch = epoch * mixture.steps_per_epoch
        at, end = first_of_epoch + step, first_of_epoch + self.run.order_steps_of(epoch)
        chunk_steps = self._chunk_steps()
        streams: list[Iterator[tuple[Chunk, int]]] = []
        while at < end:
            part = mixture.round_at(at)
            if not streams:
                taken = part.taken.tolist()
                streams = [self._source_steps(reader, n, first, lanes) for n, first in enumerate(taken)]
            mixed = self._mixed_round(part, streams, lanes)
            last = min(part.end_step, end)
            while at < last:
                stop = min(at + chunk_steps, last)
                yield mixed.chunk(at - part.first_step, stop - part.first_step)
                at = stop
            del mixed

    def _source_steps(
        self, reader: MixedReader, number: int, first_step: int, lanes: range
    ) -> Iterator[tuple[Chunk, int]]:
        """The steps of one source from one of them on, without end: a chunk, and which step of it."""
        order = self.order.orders[number]
        source = ChunkDataset(
            samples=self.samples.sources[number],
            order=order,
            run=RunSteps(order_steps_per_epoch=order.steps_per_epoch, num_batches=1),
            lanes=self.lanes,
            endless=True,
        )
        epoch, step = divmod(first_step, order.steps_per_epoch)
        for later in count(epoch):
            first = step if later == epoch else 0
            for chunk in source._epoch_chunks(reader.readers[number], later, first, lanes):  # noqa: SLF001  its own class's
                for place in range(chunk.lengths.shape[1]):
                    yield chunk, place

    def _mixed_round(
        self, part: Round, streams: list[Iterator[tuple[Chunk, int]]], lanes: range
    ) -> MixedRound:
        pattern = np.repeat(self.order.pattern(part, lanes), self.order.group, axis=0)
        mixed = MixedRound(pattern.shape, self.samples.row_tokens)
        every_row = np.arange(len(pattern))
        for number in np.unique(part.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            for column in columns.T:
                mixed.put(every_row, column, *next(streams[number]))
        return mixed


@dataclass
class MixedRound:
    """The samples of a round, copied from the windows of their sources, which may end meanwhile."""

    shape: tuple[int, ...]  # samples per step, steps
    row_tokens: int
    num_cut: int = 0
    lengths: npt.NDArray[np.int32] = field(init=False)
    rows: npt.NDArray[np.int32] = field(init=False)  # where all samples are rows
    ids: npt.NDArray[np.object_] = field(init=False)  # else, of each sample
    starts: npt.NDArray[np.object_] | None = None

    def __post_init__(self) -> None:
        self.lengths = np.empty(self.shape, np.int32)
        if self.row_tokens:
            self.rows = np.empty((*self.shape, self.row_tokens), np.int32)
        else:
            self.ids = np.empty(self.shape, np.object_)

    def put(
        self, rows: npt.NDArray[np.int64], column: npt.NDArray[np.int64], chunk: Chunk, step: int
    ) -> None:
        """Lay one step of a source to the places of these columns, one in each row."""
        self.lengths[rows, column] = chunk.lengths[:, step]
        if step == 0:
            self.num_cut += chunk.num_cut
        if self.row_tokens:
            self.rows[rows, column] = chunk.ids[:, step]
        else:
            _put_all(self.ids, column, split_ids(chunk.ids_of(step), chunk.lengths[:, step]))
        if chunk.starts is not None:
            if self.starts is None:
                self.starts = np.empty(self.shape, np.object_)
            _put_all(self.starts, column, chunk.starts_of(step))

    def chunk(self, first: int, end: int) -> Chunk:
        """Its steps from ``first`` up to ``end``."""
        lengths = self.lengths[:, first:end]
        num_cut, self.num_cut = self.num_cut, 0
        ids = self.rows[:, first:end] if self.row_tokens else _joined(self.ids[:, first:end].T)
        if self.starts is None:
            return Chunk(lengths=lengths, ids=ids, row_tokens=self.row_tokens, num_cut=num_cut)
        starts = self.starts[:, first:end]
        num_starts = np.array([len(each) for each in starts.flat], np.int32).reshape(starts.shape)
        return Chunk(
            lengths=lengths,
            ids=ids,
            row_tokens=self.row_tokens,
            num_cut=num_cut,
            num_starts=num_starts,
            starts=_joined(starts),
        )


def _put_all(target: npt.NDArray[np.object_], column: npt.NDArray[np.int64], items: list[Any]) -> None:
    for row, (place, item) in enumerate(zip(column.tolist(), items, strict=True)):
        target[row, place] = item


def _joined(parts: npt.NDArray[np.object_]) -> npt.NDArray[np.int32]:
    joined: npt.NDArray[np.int32] = np.concatenate(list(parts.flat)).astype(np.int32, copy=False)
    return joined


WeightsIn = Literal["tokens", "samples"]
_COUNTED = 1 << 20  # samples whose lengths tell the mean of a source
_SEED = 7  # what a hash is for, beside those of order.py and mixture.py


def check_mixing(
    input_shards: object,
    weights: Mapping[str, float] | None,
    schedule: Schedule | None,
    weights_in: WeightsIn,
    *,
    is_validation: bool,
    excludes: bool,
) -> bool:
    """Whether sources are mixed. Raises UsageError where the arguments do not fit each other."""
    if not isinstance(input_shards, Mapping):
        if weights is not None or schedule is not None:
            raise UsageError(
                'weights and schedule are for named sources; pass input_shards={"web": ..., "code": ...}'
            )
        return False
    if weights_in not in get_args(WeightsIn):
        raise UsageError(
            f"weights_in is {weights_in!r}, expected {' or '.join(map(repr, get_args(WeightsIn)))}"
        )
    if is_validation:
        raise UsageError("a validation loader reads one set in a fixed order; make one for each source")
    if excludes:
        raise UsageError("exclude_shards has no meaning for named sources; name the shards of each source")
    return True


def mix(
    shards: Mapping[str, ShardSet],
    samples: Sequence[Samples],
    orders: Sequence[Order],
    run: RunSteps,
    *,
    weights: Mapping[str, float] | None,
    schedule: Schedule | None,
    weights_in: WeightsIn,
) -> tuple[Mixture, MixedSamples]:
    """The mixture of some sources, each with its samples and its order. Raises UsageError."""
    names = tuple(shards)
    lengths = {source.row_tokens for source in samples}
    if len(lengths) > 1:
        found = ", ".join(f"{name} {source.row_tokens}" for name, source in zip(names, samples, strict=True))
        raise UsageError(
            f"sources have rows of different lengths ({found}; 0: documents), expected one length"
        )
    means = None
    if weights_in == "tokens":
        means = [_mean_tokens(part, source) for part, source in zip(shards.values(), samples, strict=True)]
    if schedule is not None and run.is_ramped:
        schedule = _in_steps_of_the_order(schedule, run)
    mixture = Mixture(
        names=names,
        orders=tuple(
            replace(order, seed=hash_ints(order.seed, _SEED, number)) for number, order in enumerate(orders)
        ),
        stages=make_stages(names, weights, schedule, means),
        seed=orders[0].seed,
    )
    return mixture, MixedSamples(sources=tuple(samples))


def _in_steps_of_the_order(schedule: Schedule, run: RunSteps) -> Schedule:
    """Where the stages begin, counted as a Mixture does. Raises UsageError for what is no schedule."""
    check_first_steps("schedule", [first for first, _ in schedule])
    begins = [run.position(first) for first, _ in schedule]
    return [
        (begin.epoch * run.order_steps_per_epoch + run.order_step(begin), weights)
        for begin, (_, weights) in zip(begins, schedule, strict=True)
    ]


def _mean_tokens(shards: ShardSet, samples: Samples) -> float:
    """Tokens of a sample, by the manifests; else of at most a million samples, evenly chosen."""
    if samples.row_tokens:
        return float(samples.row_tokens)
    is_whole = samples.num_samples == shards.num_samples and samples.mean_tokens == shards.mean_tokens
    if is_whole and not shards.has_external and shards.split is None:
        return shards.mean_tokens
    chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, _COUNTED)).astype(np.int64)
    reader = samples.open()
    mean = float(reader.num_tokens(chosen).mean())
    reader.close()
    return max(mean, 1.0)
