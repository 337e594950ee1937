"""What a worker process does: it reads its slots, of one source or of several, and sends chunks.

A chunk is a few steps of a worker's slots as one compact tensor, so a worker sends 1 MiB at a time, not a
batch. Workers share the slots of the rank: if every worker took each n-th step instead, all of them together
would read everything n times. A run of several sources reads each by its own order, and lays out a round of
64 mixed steps at once.
"""

from __future__ import annotations

import os
import pickle
import resource
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from operator import index
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.chunks import ORIGIN, Chunk, Parts, ScatteredParts, ScatteredRows
from loader.find_shards import ShardSet, check_choice
from loader.mixture import Mixture, Round, Schedule, check_first_steps, make_stages, source_seed
from loader.order import Int64s, Order, choose_windows, share
from loader.reading import ShardReader
from loader.samples import Samples
from loader.state import RunSteps
from shardprep.errors import ReadWriteError, ShardprepError, UsageError

CHUNK_BYTES = 1 << 20  # of a chunk; a worker's message costs about 150 us whatever its size
MAX_CHUNK_STEPS = 256
_MOST_SUGGESTED = 1 << 14  # sizes that an error tries, to name those that fit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a loader delivers, and how a state names it."""

    order: Any  # Order, or a Mixture of several sources
    samples: Any  # Samples, or MixedSamples
    run: RunSteps
    fingerprint: Mapping[str, Any] = field(default_factory=dict)


class ChunkDataset(IterableDataset[Any]):
    """Runs of this rank's slots from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and step, shared with the workers. Items are a chunk of each worker in
    turn. Each process keeps its reader until ``close``: opening shards anew costs more than reading a window.
    """

    def __init__(self, plan: Plan, slots: range, *, endless: bool) -> None:
        self.plan = plan
        self.slots = slots
        self.endless = endless
        self.position = torch.zeros(2, dtype=torch.int64)
        self._reader: Any = None
        self._close_reader: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[Shared | Chunk | ShardprepError]:
        worker = get_worker_info()
        slots = self.slots if worker is None else share(self.slots, worker.id, worker.num_workers)
        if self._reader is None:
            self._reader = self.plan.samples.open()
            self._close_reader = weakref.finalize(self, self._reader.close)
        epoch, step = self.position.tolist()
        for number in count(epoch) if self.endless else (epoch,):
            chunks = self._epoch_chunks(self._reader, number, step if number == epoch else 0, slots)
            if worker is None:
                yield from chunks
                continue
            try:
                yield from (Shared(chunk.pack()) for chunk in chunks)
            except ShardprepError as error:
                # Raised here it would lose its fields: torch raises a new error of the traceback's text.
                yield error
                return

    def close(self) -> None:
        """Close the files that this process has open; the next ``iter`` opens them again."""
        if self._close_reader is not None:
            self._close_reader()
        self._reader = self._close_reader = None

    def _epoch_chunks(self, reader: ShardReader, epoch: int, step: int, slots: range) -> Iterator[Chunk]:
        order, source, chunk_steps = self.plan.order, self.plan.samples, self._chunk_steps()
        offset, num_tokens = order.offset(epoch, source.offsets), partial(source.num_tokens, reader)
        last = self.plan.run.order_steps_of(epoch)
        for start, end in order.windows(step):
            if start >= last:
                return
            samples = order.samples_of(epoch, slots, start, end, num_tokens)
            window = source.read(reader, samples, offset)  # whole: a part would be many small reads
            num_steps = min(end, last) - start
            for first in range(max(step - start, 0), num_steps, chunk_steps):
                yield window(first, min(first + chunk_steps, num_steps))
            del window  # before the next one is read: half the memory

    def _chunk_steps(self) -> int:
        """Steps per chunk, from what all workers know alike: their chunks must agree. Rows that are not sent
        take no memory until their step, see ScatteredRows."""
        worker = get_worker_info()
        samples = self.plan.samples
        if worker is None and samples.row_tokens:
            return MAX_CHUNK_STEPS
        slots = -(-len(self.slots) // (worker.num_workers if worker else 1))
        step_bytes = 4 * slots * self.plan.order.group * (samples.row_tokens or samples.mean_tokens)
        return max(1, min(MAX_CHUNK_STEPS, int(CHUNK_BYTES // step_bytes)))


class Shared:
    """A tensor on its way from a worker: the training process receives the tensor, in shared memory.

    torch would share it in a thread of its queue, which drops what it cannot share, and the training process
    would wait for it for ever. Raises ReadWriteError here, which torch raises in the training process.
    """

    def __init__(self, packed: torch.Tensor) -> None:
        try:
            self._pickled = bytes(ForkingPickler.dumps(packed))
        except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise cannot_share(error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._pickled,)


def _received(pickled: bytes) -> torch.Tensor:
    """Return what a worker shared. Runs where torch takes it from the queue, as the worker may end then."""
    try:
        packed: torch.Tensor = pickle.loads(pickled)  # noqa: S301  of our own process
    except (OSError, EOFError) as error:
        raise cannot_share(error) from error
    return packed


def cannot_share(error: BaseException) -> ReadWriteError:
    """Return the error to raise, which says how much there is of all that this takes."""
    shared = _room_in("/dev/shm")  # noqa: S108  where torch shares memory
    sockets = _room_in(tempfile.gettempdir())
    most_files, most_bytes = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    )
    try:
        num_files = len(list(Path("/proc/self/fd").iterdir()))
    except OSError:  # looking takes a file, too
        num_files = most_files
    reason = str(error) or "a worker ended before it had sent one (its last line says why)"
    size = (
        "" if most_bytes == resource.RLIM_INFINITY else f"; a file can have {most_bytes:,} bytes (ulimit -f)"
    )
    return ReadWriteError(
        f"workers and the training process cannot share batches: {reason}. "
        f"Shared memory: {shared}; sockets: {sockets}; files that process {os.getpid()} has open: "
        f"{num_files} of {most_files} (ulimit -n){size}. Raise what is full (--shm-size of a container, "
        "ulimit), pass a smaller num_workers or prefetch_factor, or num_workers=0, which needs none of these"
    )


def _room_in(folder: str) -> str:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be looked at ({error.strerror})"
    free, total = (blocks * room.f_frsize / 1e6 for blocks in (room.f_bavail, room.f_blocks))
    return f"{folder} has {free:,.1f} of {total:,.1f} MB and {room.f_favail:,} inodes free"


def make_order(
    samples: Samples,
    shards: ShardSet,
    global_batch_size: int,
    group: int,
    *,
    seed: int,
    shuffle: bool,
    keeps_tail: bool = False,
) -> Order:
    """Their sampling order. Raises UsageError where there are too few, or a group does not fit."""
    block_samples, window_samples = choose_windows(
        num_samples=samples.num_samples,
        num_bytes=shards.tar_bytes,
        global_batch_size=global_batch_size,
        group=group,
    )
    return Order(
        num_samples=samples.num_samples,
        global_batch_size=global_batch_size,
        block_samples=block_samples,
        window_samples=window_samples,
        group=group,
        seed=seed,
        shuffle=shuffle,
        keeps_tail=keeps_tail,
    )


def rank_slots(order: Order | Mixture, rank: int, world_size: int) -> range:
    """The slots of one rank. Raises UsageError where the ranks cannot share them evenly."""
    if order.num_slots % world_size:
        fitting = [n for n in range(1, order.num_slots + 1) if order.num_slots % n == 0]
        raise UsageError(
            f"a global batch of {order.global_batch_size} in groups of {order.group} makes {order.num_slots} "
            f"slots, which {world_size} ranks cannot share; the ranks can be {fitting}, "
            "or group_by_length less"
        )
    return share(range(order.num_slots), rank, world_size)


def group_size(group_by_length: bool | int, batch_size: int) -> int:
    """Samples of a group: ``True`` stands for batch_size, ``False`` for groups of one."""
    if isinstance(group_by_length, bool):
        return batch_size if group_by_length else 1
    return whole_number("group_by_length", group_by_length, least=0) or 1


def check_batch(batch_size: int, global_batch_size: int | None, world_size: int) -> int:
    """The global batch size, by default batch_size x world_size. Raises UsageError for no multiple of it."""
    batch_size = whole_number("batch_size", batch_size, least=1)
    step = batch_size * world_size
    if global_batch_size is None:
        return step
    global_batch_size = whole_number("global_batch_size", global_batch_size, least=1)
    if global_batch_size < step or global_batch_size % step:
        # The size may come out of a state of others: a list of all its divisors could take for ever.
        candidates = range(1, min(global_batch_size, _MOST_SUGGESTED) + 1)
        fitting = [n for n in candidates if global_batch_size % (n * world_size) == 0]
        worlds = [n for n in candidates if global_batch_size % (n * batch_size) == 0]
        sizes = f"batch_size can be {fitting}" if fitting else "no batch_size fits"
        ranks = f"the number of ranks can be {worlds}" if worlds else "no number of ranks fits"
        raise UsageError(
            f"global_batch_size {global_batch_size} is no multiple of batch_size {batch_size} x "
            f"{world_size} ranks; with these ranks {sizes}, with this batch_size {ranks}",
            found=f"global_batch_size={global_batch_size}",
            expected=f"multiple of batch_size {batch_size} x {world_size} ranks",
        )
    return global_batch_size


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int. Raises UsageError for what is none, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError.of_value(name, value, f"a whole number of at least {least}")
    if (number := index(value)) < least:
        raise UsageError.of_value(name, number, f"at least {least}")
    return number


@dataclass(frozen=True, kw_only=True)
class MixedSamples:
    """The samples of all sources, as a loader asks for them; None of one that was dropped."""

    sources: tuple[Samples | None, ...]
    offsets = 1  # each source has its own

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where all are rows of one length, else 0."""
        lengths = {source.row_tokens for source in filter(None, self.sources)}
        return lengths.pop() if len(lengths) == 1 else 0

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in filter(None, self.sources))

    @property
    def mean_tokens(self) -> float:
        """Of the source with the longest: chunks must be small enough for all."""
        return max(source.mean_tokens for source in filter(None, self.sources))

    def open(self) -> MixedReader:
        """A reader of each source for this process."""
        return MixedReader(None if source is None else source.open() for source in self.sources)


class MixedReader(list["ShardReader | None"]):
    """The readers of all sources."""

    def close(self) -> None:
        for reader in filter(None, self):
            reader.close()


class MixedChunkDataset(ChunkDataset):
    """A ChunkDataset of several sources."""

    _left: tuple[Any, ...] | None = None  # where an epoch ended: the next one needs no window read again

    def close(self) -> None:
        self._left = None
        super().close()

    def _epoch_chunks(self, reader: Any, epoch: int, step: int, slots: range) -> Iterator[Chunk]:
        first_of_epoch = epoch * self.plan.order.steps_per_epoch
        at, end = first_of_epoch + step, first_of_epoch + self.plan.run.order_steps_of(epoch)
        left, self._left, chunk_steps = self._left, None, self._chunk_steps()
        part: Any = None
        mixed: MixedRound | None = None
        if left is not None and left[:3] == (at, slots, reader):
            rounds, part, mixed = left[3:]
        else:
            rounds = self._rounds(reader, slots, at)
        while at < end:
            if mixed is None:
                part, mixed = next(rounds)
            first, at = at, min(at + chunk_steps, part.end_step, end)
            yield mixed.chunk(first - part.first_step, at - part.first_step)
            if at == part.end_step:
                mixed = None  # before the next one is laid out
        self._left = at, slots, reader, rounds, part, mixed

    def _rounds(self, reader: MixedReader, slots: range, step: int) -> Iterator[tuple[Round, MixedRound]]:
        """The rounds from the one that holds a step of the run on, without end."""
        streams: list[SourceSteps] = []
        while True:
            part = self.plan.order.round_at(step)
            streams = streams or self._streams(reader, part, slots)
            yield part, self._mixed_round(part, streams, slots)
            step = part.end_step
            if part.was_cut:
                streams = []  # they stand where the whole round would have ended

    def _streams(self, reader: MixedReader, part: Round, slots: range) -> list[SourceSteps]:
        """Each source from where the slots stand in it at a round."""
        ahead = np.repeat(part.ahead[slots.start : slots.stop], self.plan.order.group, axis=0)
        least = ahead.min(axis=0)
        return [
            SourceSteps(self._source_chunks(reader, number, first, slots), ahead[:, number] - least[number])
            for number, first in enumerate((part.taken + least).tolist())
        ]

    def _source_chunks(
        self, reader: MixedReader, number: int, first_step: int, slots: range
    ) -> Iterator[Chunk]:
        """The chunks of one source from one of its steps on, without end."""
        order = self.plan.order.orders[number]
        run = RunSteps(order_steps_per_epoch=order.steps_per_epoch, num_batches=1)
        plan = Plan(order=order, samples=self.plan.samples.sources[number], run=run)
        source = ChunkDataset(plan, self.slots, endless=True)
        epoch, step = divmod(first_step, order.steps_per_epoch)
        for later in count(epoch):
            first = step if later == epoch else 0
            of_source: Any = reader[number]
            for chunk in source._epoch_chunks(of_source, later, first, slots):  # noqa: SLF001  its own class's
                if chunk.origins is not None:
                    chunk.origins.flat[ORIGIN.index("source") :: len(ORIGIN)] = number
                yield chunk

    def _mixed_round(self, part: Round, streams: list[SourceSteps], slots: range) -> MixedRound:
        pattern = np.repeat(self.plan.order.pattern(part, slots), self.plan.order.group, axis=0)
        mixed = MixedRound(pattern.shape, self.plan.samples.row_tokens)
        for number in np.unique(part.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            streams[number].lay(columns, mixed)
        return mixed


class SourceSteps:
    """The steps of one source, one after another; ``ahead``: how many a row is ahead of the last one."""

    def __init__(self, chunks: Iterator[Chunk], ahead: Int64s) -> None:
        self._chunks = chunks
        self._ahead = ahead
        self._chunk: Chunk | None = None
        self._place = 0  # the next step of the chunk
        self._kept: list[tuple[int, Chunk]] = []  # where rows are ahead: chunks, and the first step of each
        self._num_read = self._num_laid = 0  # steps; laid: of the row that is furthest behind

    def lay(self, columns: Int64s, mixed: MixedRound) -> None:
        """Lay the next steps of each row to these columns of a round: int64[rows, number of steps]."""
        if self._ahead.any():
            self._lay_kept(columns, mixed)
            return
        rows, done, num_steps = np.arange(len(columns))[:, None], 0, columns.shape[1]
        while done < num_steps:
            if self._chunk is None:
                self._chunk, self._place = next(self._chunks), 0
            chunk, first, held = self._chunk, self._place, self._chunk.lengths.shape[1]
            self._place = min(first + num_steps - done, held)
            end = done + self._place - first
            places, steps = (rows, columns[:, done:end]), slice(first, self._place)
            mixed.put(places, chunk, (slice(None), steps), stays=end == num_steps)
            mixed.num_cut += 0 if first else chunk.num_cut
            done = end
            if self._place == held:
                self._chunk = None
            del chunk  # nothing holds its window when the next one is read

    def _lay_kept(self, columns: Int64s, mixed: MixedRound) -> None:
        num_steps = columns.shape[1]
        while self._num_read < self._num_laid + num_steps + self._ahead.max():
            chunk = next(self._chunks)
            mixed.num_cut += chunk.num_cut
            if mixed.row_tokens:  # a copy, for it outlives its window
                chunk = replace(chunk, ids=np.array(chunk.ids[:]))
            self._kept.append((self._num_read, chunk))
            self._num_read += chunk.lengths.shape[1]
        for first, chunk in self._kept:
            steps = np.arange(first, first + chunk.lengths.shape[1]) - self._num_laid - self._ahead[:, None]
            rows, at = np.nonzero((steps >= 0) & (steps < num_steps))
            if len(rows):
                mixed.put((rows, columns[rows, steps[rows, at]]), chunk, (rows, at), stays=True)
        self._num_laid += num_steps
        self._kept = [kept for kept in self._kept if kept[0] + kept[1].lengths.shape[1] > self._num_laid]


class MixedRound:
    """The samples of a round, where they lie: in windows and chunks of their sources."""

    def __init__(self, shape: tuple[int, int], row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.num_cut = 0
        self._lengths = np.empty(shape, np.int32)  # [samples per step, steps]
        self._ids = ScatteredParts.of_shape(shape)
        self._starts = ScatteredParts.of_shape(shape)
        self._origins = ScatteredParts.of_shape(shape)

    def put(self, places: Any, chunk: Chunk, at: Any, *, stays: bool) -> None:
        """Lay samples of a source's chunk, those ``at`` these places of it, to these places of the round.
        ``stays``: the chunk's memory does, until the round has been delivered."""
        lengths = self._lengths[places] = chunk.lengths[at]
        if not self.row_tokens:
            assert isinstance(chunk.ids, np.ndarray)
            begins = Parts(counts=chunk.lengths, flat=chunk.ids).begins
            self._ids.put(places, chunk.ids, begins[at], lengths)
        elif stays and isinstance(chunk.ids, ScatteredRows) and chunk.ids.is_plain:
            self._ids.put(places, chunk.ids.flat, chunk.ids.at[at], self.row_tokens)
        elif stays and isinstance(chunk.ids, np.ndarray):
            begins = np.arange(chunk.lengths.size).reshape(chunk.lengths.shape) * self.row_tokens
            self._ids.put(places, chunk.ids.reshape(-1), begins[at], self.row_tokens)
        else:
            rows = np.array(chunk.ids[at]).reshape(-1)
            begins = np.arange(0, len(rows), self.row_tokens).reshape(lengths.shape)
            self._ids.put(places, rows, begins, self.row_tokens)
        for target, told in ((self._starts, chunk.starts), (self._origins, chunk.origins)):
            if told is not None:
                target.put(places, told.flat, told.begins[at], told.counts[at])

    def chunk(self, first: int, end: int) -> Chunk:
        """Its steps from ``first`` up to ``end``."""
        ids = self._ids.steps(first, end)
        num_cut, self.num_cut = self.num_cut, 0
        starts, origins = (
            parts.steps(first, end).joined() if parts.flats else None
            for parts in (self._starts, self._origins)
        )
        return Chunk(
            lengths=self._lengths[:, first:end],
            ids=ids if self.row_tokens else ids.joined().flat,
            row_tokens=self.row_tokens,
            num_cut=num_cut,
            starts=starts,
            origins=origins,
        )


WeightsIn = Literal["tokens", "samples"]
_COUNTED = 1 << 20  # samples whose lengths tell the mean of a source


def check_mixing(
    input_shards: object,
    weights: Mapping[str, float] | None,
    weights_schedule: Schedule | None,
    weights_in: WeightsIn,
    *,
    is_validation: bool,
) -> bool:
    """Whether sources are mixed. Raises UsageError where the arguments do not fit each other."""
    if not isinstance(input_shards, Mapping):
        if weights is not None or weights_schedule is not None:
            raise UsageError(
                "weights and weights_schedule are for named sources; pass "
                'input_shards={"web": ..., "code": ...}',
                found="weights" if weights_schedule is None else "weights_schedule",
                remedy='input_shards={"web": ..., "code": ...}',
            )
        return False
    check_choice("weights_in", weights_in, WeightsIn)
    if is_validation:
        raise UsageError(
            'split="validation" reads one set in a fixed order; make one loader for each source',
            found='split="validation"',
            expected="one loader for each source",
        )
    return True


def mix(
    shards: Mapping[str, ShardSet],
    samples: Sequence[Samples],
    orders: Sequence[Order],
    run: RunSteps,
    *,
    weights: Mapping[str, float] | None,
    weights_schedule: Schedule | None,
    weights_in: WeightsIn,
) -> tuple[Mixture, MixedSamples]:
    """The mixture of some sources, each with its samples and its order. Raises UsageError."""
    names = tuple(shards)
    lengths = {source.row_tokens for source in samples}
    if len(lengths) > 1:
        found = ", ".join(f"{name} {source.row_tokens}" for name, source in zip(names, samples, strict=True))
        raise UsageError(
            f"sources have rows of different lengths ({found}; 0: documents), expected one length",
            found=found,
            expected="one length",
        )
    means = None
    if weights_in == "tokens":
        means = [_mean_tokens(part, source) for part, source in zip(shards.values(), samples, strict=True)]
    if weights_schedule is not None and run.is_ramped:
        check_first_steps("weights_schedule", [first for first, _ in weights_schedule])
        weights_schedule = [(run.first_of_order(first), each) for first, each in weights_schedule]
    mixture = Mixture(
        names=names,
        orders=tuple(
            replace(order, seed=source_seed(order.seed, number)) for number, order in enumerate(orders)
        ),
        data=tuple(part.fingerprint[:16] for part in shards.values()),
        stages=make_stages(names, weights, weights_schedule, means),
        global_batch_size=orders[0].global_batch_size,
        group=orders[0].group,
        seed=orders[0].seed,
        shuffle=orders[0].shuffle,
    )
    return mixture, MixedSamples(sources=tuple(samples))


def _mean_tokens(shards: ShardSet, samples: Samples) -> float:
    """Tokens of a sample, by the manifests; else of at most a million samples, evenly chosen."""
    if samples.row_tokens:
        return float(samples.row_tokens)
    is_whole = samples.num_samples == shards.num_samples and samples.mean_tokens == shards.mean_tokens
    if is_whole and not shards.has_external and shards.split is None:
        return shards.mean_tokens
    chosen = np.linspace(0, samples.num_samples - 1, min(samples.num_samples, _COUNTED)).astype(np.int64)
    reader = samples.open()
    mean = float(samples.num_tokens(reader, chosen).mean())
    reader.close()
    return max(mean, 1.0)
