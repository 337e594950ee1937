"""What a worker does for a run of several sources: it reads each by its own order, and mixes rounds.

A round of this worker's lanes is laid out at once, 64 steps of them; see mixture.py for the order. ``mix``
makes the mixture and its samples of the sources that a user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.chunks import Chunk, RowsOfWindows, ScatteredRows
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
    _stand: Stand | None = None  # where an epoch ended: the next one needs no window read again

    def close(self) -> None:
        self._stand = None
        super().close()

    def _epoch_chunks(self, reader: Any, epoch: int, step: int, lanes: range) -> Iterator[Chunk]:
        mixture: Mixture = self.order
        first_of_epoch = epoch * mixture.steps_per_epoch
        at, end = first_of_epoch + step, first_of_epoch + self.run.order_steps_of(epoch)
        chunk_steps = self._chunk_steps()
        stand, self._stand = self._stand, None
        if stand is None or (stand.step, stand.lanes, stand.reader) != (at, lanes, reader):
            taken = mixture.round_at(at).taken.tolist()
            chunks = (self._source_chunks(reader, n, first, lanes) for n, first in enumerate(taken))
            stand = Stand(step=at, lanes=lanes, reader=reader, streams=[*map(SourceSteps, chunks)])
        while stand.step < end:
            if stand.mixed is None:
                stand.part = mixture.round_at(stand.step)
                stand.mixed = self._mixed_round(stand.part, stand.streams, lanes)
            assert stand.part is not None
            last = min(stand.part.end_step, end)
            while stand.step < last:
                first, stand.step = stand.step, min(stand.step + chunk_steps, last)
                yield stand.mixed.chunk(first - stand.part.first_step, stand.step - stand.part.first_step)
            if last == stand.part.end_step:
                stand.mixed = None
        self._stand = stand

    def _source_chunks(
        self, reader: MixedReader, number: int, first_step: int, lanes: range
    ) -> Iterator[Chunk]:
        """The chunks of one source from one of its steps on, without end."""
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
            yield from source._epoch_chunks(reader.readers[number], later, first, lanes)  # noqa: SLF001  its own class's

    def _mixed_round(self, part: Round, streams: list[SourceSteps], lanes: range) -> MixedRound:
        pattern = np.repeat(self.order.pattern(part, lanes), self.order.group, axis=0)
        mixed = MixedRound(pattern.shape, self.samples.row_tokens)
        for number in np.unique(part.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            done = 0
            for chunk, steps in streams[number].take(columns.shape[1]):
                end = done + steps.stop - steps.start
                mixed.put(columns[:, done:end], chunk, steps, is_last=end == columns.shape[1])
                done = end
                del chunk  # it may hold its window; the next one is read now
        return mixed


@dataclass(kw_only=True)
class Stand:
    """Where a worker stands in the run: the next step, its sources, and the round that the step is in."""

    step: int  # from the first of the run, not of the epoch
    lanes: range
    reader: MixedReader
    streams: list[SourceSteps]
    part: Round | None = None
    mixed: MixedRound | None = None


class SourceSteps:
    """The steps of one source, one after another."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._chunk: Chunk | None = None
        self._place = 0  # the next step of the chunk

    def take(self, num_steps: int) -> Iterator[tuple[Chunk, slice]]:
        """The next steps: chunks, and which steps of each. A chunk may end with the next one."""
        while num_steps:
            if self._chunk is None:
                self._chunk, self._place = next(self._chunks), 0
            first, held = self._place, self._chunk.lengths.shape[1]
            self._place = min(first + num_steps, held)
            num_steps -= self._place - first
            steps, chunk = slice(first, self._place), [self._chunk]
            if self._place == held:
                self._chunk = None  # nothing holds its window when the next one is read
            yield chunk.pop(), steps


class MixedRound:
    """The samples of a round, where they lie: in windows and chunks of their sources."""

    def __init__(self, shape: tuple[int, int], row_tokens: int) -> None:
        self._row_tokens = row_tokens
        self._num_cut = 0
        self._lengths = np.empty(shape, np.int32)  # [samples per step, steps]
        self._ids = ScatteredParts.of_shape(shape)
        self._num_starts: npt.NDArray[np.int32] | None = None
        self._starts = ScatteredParts.of_shape(shape)

    def put(self, columns: npt.NDArray[np.int64], chunk: Chunk, steps: slice, *, is_last: bool) -> None:
        """Lay steps of a source to these columns of each row: int64[samples per step, number of steps].

        ``is_last``: of the source in this round, so that its window stays until the round has been delivered.
        """
        places = (np.arange(len(columns))[:, None], columns)
        self._lengths[places] = chunk.lengths[:, steps]
        if steps.start == 0:
            self._num_cut += chunk.num_cut
        if not self._row_tokens:
            by_step = chunk.lengths.T
            ends = np.cumsum(by_step, dtype=np.int64).reshape(by_step.shape).T
            self._ids.put(places, chunk.ids, (ends - chunk.lengths)[:, steps])
        elif is_last and isinstance(chunk.ids, ScatteredRows) and chunk.ids.mask is None:
            self._ids.put(places, chunk.ids.flat, chunk.ids.at[:, steps])
        else:
            rows = np.array(chunk.ids[:, steps]).reshape(-1)
            self._ids.put(places, rows, np.arange(0, len(rows), self._row_tokens).reshape(columns.shape))
        if chunk.starts is not None and chunk.num_starts is not None:
            if self._num_starts is None:
                self._num_starts = np.empty_like(self._lengths)
            self._num_starts[places] = chunk.num_starts[:, steps]
            ends = np.cumsum(chunk.num_starts, dtype=np.int64).reshape(chunk.num_starts.shape)
            self._starts.put(places, chunk.starts, (ends - chunk.num_starts)[:, steps])

    def chunk(self, first: int, end: int) -> Chunk:
        """Its steps from ``first`` up to ``end``."""
        lengths, ids = self._lengths[:, first:end], self._ids.steps(first, end)
        num_cut, self._num_cut = self._num_cut, 0
        num_starts = starts = None
        if self._num_starts is not None:
            num_starts = self._num_starts[:, first:end]
            starts = self._starts.steps(first, end).joined(num_starts)
        return Chunk(
            lengths=lengths,
            ids=ids.rows(self._row_tokens) if self._row_tokens else ids.by_step.joined(lengths.T),
            row_tokens=self._row_tokens,
            num_cut=num_cut,
            num_starts=num_starts,
            starts=starts,
        )


@dataclass(frozen=True, kw_only=True)
class ScatteredParts:
    """Parts of several flat arrays, one for each sample."""

    flats: list[npt.NDArray[np.integer[Any]]]
    number: npt.NDArray[np.intp]  # intp[samples per step, steps]: which flat each part lies in
    at: npt.NDArray[np.int64]  # int64[samples per step, steps]: where in it the part begins

    @staticmethod
    def of_shape(shape: tuple[int, int]) -> ScatteredParts:
        return ScatteredParts(flats=[], number=np.empty(shape, np.intp), at=np.empty(shape, np.int64))

    def put(self, places: Any, flat: Any, at: npt.NDArray[np.int64]) -> None:
        """Let the parts of some samples lie in one array."""
        self.number[places], self.at[places] = len(self.flats), at
        self.flats.append(flat)

    def steps(self, first: int, end: int) -> ScatteredParts:
        """Those of the steps from ``first`` up to ``end``."""
        return replace(self, number=self.number[:, first:end], at=self.at[:, first:end])

    @property
    def by_step(self) -> ScatteredParts:
        """The same with one step after another."""
        return replace(self, number=self.number.T, at=self.at.T)

    def rows(self, row_tokens: int) -> RowsOfWindows:
        """The parts as rows of one length."""
        return RowsOfWindows(flats=self.flats, window=self.number, at=self.at, row_tokens=row_tokens)

    def joined(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The parts of these lengths, one after another."""
        places = zip(*(each.reshape(-1).tolist() for each in (self.number, self.at, lengths)), strict=True)
        parts = [self.flats[number][begin : begin + length] for number, begin, length in places]
        joined: npt.NDArray[np.int32] = np.concatenate(parts).astype(np.int32, copy=False)
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
