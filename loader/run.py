"""A run of training: its sources, its stages, which samples each step takes, and how a process reads them.

A run has one source or several, each with an order of its own (order.py). A **tick** takes L samples, one for
each of its L places; a training **step** is one tick or several. A **stage** sets the
weights of the sources and the global batch size from a step on. Everything else follows from the stages:

* An epoch has R ticks: as many as one epoch of each source that the run began with, together. It ends where
  the next step would not fit, and the ticks that are left are not used. Ticks are counted through all epochs,
  unused ones included, so tick t of a run with one source is always tick t % R of that source's epoch t // R.
* Weights are rounded to **shares**, whole ticks of a cycle of 65,536, and these are evenly spread. So how
  many ticks a source has had before tick t follows from t alone.
* A **round** is 64 ticks, in which every slot takes equally many samples of a source, each slot in an order
  of its own. Rounds are counted from the tick at which shares begin to hold, and the last round before other
  shares is laid out to end where it ends. At the end of a round all slots stand at the same place in each
  source, which is why an amendment begins there: nothing is repeated, nothing is lost.

Say L is 12, and the only source has 700 samples: R is 58. With steps of 5 ticks an epoch is 11 steps, and its
last 3 ticks are not used: step 11 is the first one of epoch 1, which begins at tick 58.

The price: each source keeps windows of its own in memory, and one that has less than 1/64 of the ticks is in
some rounds only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loader.chunks import ORIGIN, Chunk, Ragged
from loader.order import ORDER_VERSION, Int64s, Order, hash_array, hash_ints
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from loader.reading import ShardReader
    from loader.samples import Samples, Window

ROUND = 64  # ticks
CYCLE = 1 << 16  # ticks
_PATTERN, _SEED = 6, 7  # what a hash is for, beside those of order.py
_NEVER = 1 << 62  # the step, and the tick, at which the last stage ends


class Position(NamedTuple):
    """Where a run stands: steps through all epochs, and batches of a rank in the next one."""

    # No frozen dataclass: a new position for every batch takes 0.4 us, there 1.2.
    step: int = 0
    num_micro: int = 0

    def after(self, num_batches: int) -> Position:
        """Return the position one batch later, in a step of ``num_batches``."""
        if self.num_micro + 1 < num_batches:
            return Position(self.step, self.num_micro + 1)
        return Position(self.step + 1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a run: its name, its data and its order."""

    name: str
    data: str  # fingerprint of its shards, 16 hex digits
    order: Order
    added_at: int = 0  # the step at which an amendment added it; 0: the run began with it
    # What to read; None where this loader was not given it, since the run has dropped it.
    samples: Samples | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The weights and the global batch size from a step on."""

    step: int
    global_batch_size: int
    weights: Mapping[str, float]  # parts of the samples by the source's name, 1 in all
    begins_round: bool = True  # False: the weights are the last stage's, whose round goes on
    is_amended: bool = False  # an amendment begins here

    def __str__(self) -> str:
        weights = [f"{name} {weight:.4g}" for name, weight in self.weights.items()]
        return f"from step {self.step}: {', '.join(weights)}, global_batch_size {self.global_batch_size}"


class _Stretch(NamedTuple):
    """Steps of equal size: the rest of an epoch, or all epochs from the beginning of one on."""

    step: int  # the first one
    epoch: int  # in which it begins
    tick: int  # of that epoch, at which it begins
    size: int  # ticks of a step
    num_steps: int  # from that tick to the end of the epoch


class _Mix(NamedTuple):
    """Consecutive ticks with the same shares."""

    first: int
    end: int  # _NEVER for the last ones
    shares: tuple[int, ...]  # of all sources
    taken: Int64s  # ticks of each source before it

    def taken_before(self, tick: int) -> Int64s:
        """Count the ticks of each source before a tick of this mix: int64[sources]."""
        num_cycles, rest = divmod(tick - self.first, CYCLE)
        in_cycle = np.bincount(spread(self.shares)[:rest], minlength=len(self.shares))
        return self.taken + num_cycles * np.array(self.shares, np.int64) + in_cycle


class Round(NamedTuple):
    """Consecutive ticks in which every slot takes equally many samples of a source."""

    first: int
    end: int
    sources: Int64s  # number of the source of each tick, before slots shuffle them
    taken: Int64s  # ticks of each source before the round


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's order, by its number among all sources that the run has had."""
    return hash_ints(seed, _SEED, number)


@lru_cache(maxsize=16)
def spread(shares: tuple[int, ...]) -> Int64s:
    """Return the source of each tick of a cycle, evenly spread: int64[CYCLE].

    The n-th tick of a source stands at (n + 1/2) / its share of the cycle.
    """
    counts = np.array(shares, np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)
    return source[np.lexsort((source, (2 * number + 1) / counts[source]))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which samples each step of a run takes. Raises UsageError where a step is more than an epoch."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]  # ascending from step 0
    batches_per_tick: int  # of each rank
    seed: int = 0
    is_mixture: bool = False  # sources are named, and have seeds of their own
    settings: Mapping[str, Any] = field(default_factory=dict)  # what else a sample depends on

    def __post_init__(self) -> None:
        largest = max(stage.global_batch_size for stage in self.stages)
        most = self.ticks_per_epoch * self.tick_samples
        if largest > most:
            raise UsageError(
                found=f"a global batch of {largest} samples", expected=f"at most those of an epoch, {most}"
            )

    @property
    def order(self) -> Order:
        """Return the order of the first source: all have its L, group, shuffle and tail."""
        return self.sources[0].order

    @property
    def tick_samples(self) -> int:
        """Return L."""
        return self.order.tick_samples

    @property
    def is_validation(self) -> bool:
        return self.order.keeps_tail

    @cached_property
    def ticks_per_epoch(self) -> int:
        """Return R."""
        return sum(source.order.ticks_per_epoch for source in self.sources if not source.added_at)

    @property
    def samples(self) -> list[Samples]:
        """Return the samples of the sources that this loader reads."""
        return [source.samples for source in self.sources if source.samples is not None]

    @cached_property
    def row_tokens(self) -> int:
        """Return the tokens of every sample where all are rows of one length, else 0."""
        return self.samples[0].row_tokens

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the order beside sources and stages."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "shuffle": self.order.shuffle,
            "is_mixture": self.is_mixture,
            "group_by_length": self.order.group,
            "keeps_tail": self.is_validation,
            **self.settings,
        }

    # Steps and epochs.

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        found = []
        epoch = tick = 0
        ends = [*(stage.step for stage in self.stages[1:]), _NEVER]
        for stage, end in zip(self.stages, ends, strict=True):
            step, size = stage.step, stage.global_batch_size // self.tick_samples
            while step < end:
                num_steps = (self.ticks_per_epoch - tick) // size
                if not num_steps:  # the next step does not fit
                    epoch, tick = epoch + 1, 0
                    continue
                found.append(_Stretch(step, epoch, tick, size, num_steps))
                if tick == 0 and end == _NEVER:
                    break  # all epochs from here on are alike
                # From the beginning of an epoch on there may be many epochs up to the end of the stage. The
                # next stage begins behind the last step, maybe in the same epoch.
                num_taken = min(num_steps, end - step) if tick else end - step
                epoch += (num_taken - 1) // num_steps
                tick += ((num_taken - 1) % num_steps + 1) * size
                step += num_taken
        return found

    def _stretch(self, step: int) -> _Stretch:
        last = self._stretches[-1]  # asked for each step of training
        if step >= last.step:
            return last
        return self._stretches[bisect_right(self._stretches, step, key=lambda each: each.step) - 1]

    def epoch_and_tick(self, position: Position) -> tuple[int, int]:
        """Return the epoch of a position, and the ticks of that epoch before it."""
        stretch = self._stretch(position.step)
        num_epochs, within = divmod(position.step - stretch.step, stretch.num_steps)
        tick = stretch.tick + within * stretch.size + position.num_micro // self.batches_per_tick
        return stretch.epoch + num_epochs, tick

    def epoch_of(self, step: int) -> int:
        return self.epoch_and_tick(Position(step))[0]

    def ticks_in_step(self, step: int) -> int:
        return self._stretch(step).size

    def batches_in_step(self, step: int) -> int:
        """Return the batches of a rank in a step."""
        return self.batches_per_tick * self.ticks_in_step(step)

    def first_step(self, epoch: int) -> int:
        # An epoch begins where a stretch does, or a whole number of epochs behind one that begins an epoch.
        stretch = next(each for each in reversed(self._stretches) if not each.tick and each.epoch <= epoch)
        return stretch.step + (epoch - stretch.epoch) * stretch.num_steps

    def steps_in(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def ticks_in(self, epoch: int) -> int:
        """Count the ticks that an epoch uses: all of them unless the steps do not fit."""
        last = self.first_step(epoch + 1) - 1
        return self.epoch_and_tick(Position(last))[1] + self.ticks_in_step(last)

    def batches_before(self, position: Position) -> int:
        """Count the batches of a rank in the position's epoch before it."""
        tick = self.epoch_and_tick(position)[1]
        return tick * self.batches_per_tick + position.num_micro % self.batches_per_tick

    def tick_of(self, position: Position) -> int:
        """Count the ticks before a position through all epochs, unused ones included."""
        epoch, tick = self.epoch_and_tick(position)
        return epoch * self.ticks_per_epoch + tick

    # Rounds.

    def shares(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        """Return the ticks of each source in a cycle, which depend on the order of the sources."""
        # Sums are rounded, so that the shares make a whole cycle.
        sums = [0.0, *accumulate(weights.get(source.name, 0.0) for source in self.sources)]
        return tuple(np.diff(np.rint(np.array(sums) * CYCLE).astype(np.int64)).tolist())

    @cached_property
    def _mixes(self) -> list[_Mix]:
        mixes: list[_Mix] = []
        for stage in self.stages:
            if not stage.begins_round:
                continue
            first, taken = self.tick_of(Position(stage.step)), np.zeros(len(self.sources), np.int64)
            if mixes:
                taken = mixes[-1].taken_before(first)
                mixes[-1] = mixes[-1]._replace(end=first)
            mixes.append(_Mix(first, _NEVER, self.shares(stage.weights), taken))
        return mixes

    def _mix_at(self, tick: int) -> _Mix:
        return self._mixes[bisect_right(self._mixes, tick, key=lambda mix: mix.first) - 1]

    def round_at(self, tick: int) -> Round:
        """Return the round that holds a tick. The last one before other shares ends where these begin."""
        mix = self._mix_at(tick)
        first = tick - (tick - mix.first) % ROUND
        end = min(first + ROUND, mix.end)
        within = (first - mix.first) % CYCLE  # a cycle is a multiple of a round
        return Round(first, end, spread(mix.shares)[within : within + end - first], mix.taken_before(first))

    def only_source_at(self, tick: int) -> tuple[int, int, int] | None:
        """Return the only source of the ticks from this one on, or None where several share them.

        Its number, how many ticks it has had, and the tick at which that ends.
        """
        mix = self._mix_at(tick)
        if CYCLE not in mix.shares:
            return None
        source = mix.shares.index(CYCLE)
        return source, int(mix.taken[source]) + tick - mix.first, mix.end

    def pattern(self, of_round: Round, slots: range) -> Int64s:
        """Return the source of each slot at each tick of a round: int64[len(slots), ticks]."""
        keys = [[hash_ints(self.seed, _PATTERN, of_round.first, slot)] for slot in slots]
        hashes = hash_array(np.array(keys, np.uint64), np.arange(len(of_round.sources)))
        return of_round.sources[np.argsort(hashes, axis=1, kind="stable")]

    def _samples_before(self, tick: int) -> Int64s:
        """Count the samples of each source before a tick, unused ticks included: int64[sources]."""
        of_round = self.round_at(tick)
        pattern = self.pattern(of_round, range(self.order.num_slots))[:, : tick - of_round.first]
        within = np.bincount(pattern.reshape(-1), minlength=len(self.sources)) * self.order.group
        return of_round.taken * self.tick_samples + within

    def source_samples(self, position: Position) -> dict[str, int]:
        """Count the samples of each source that were delivered before a position, all ranks together."""
        counts = self._samples_before(self.tick_of(position))
        for epoch in range(self.epoch_of(position.step)):
            end = (epoch + 1) * self.ticks_per_epoch
            if num_unused := self.ticks_per_epoch - self.ticks_in(epoch):
                counts = counts - self._samples_before(end) + self._samples_before(end - num_unused)
        return {source.name: int(count) for source, count in zip(self.sources, counts, strict=True)}

    def source_epochs(self, position: Position) -> dict[str, float]:
        """Return where each source stands, in its epochs: 1.5 is the middle of its second."""
        counts = self._samples_before(self.tick_of(position)).tolist()
        return {
            source.name: count / (source.order.ticks_per_epoch * self.tick_samples)
            for source, count in zip(self.sources, counts, strict=True)
        }

    # Amendments.

    def in_order_of(self, sources: Sequence[Source]) -> Run:
        """Return this run with its sources in the order of others, by which shares are rounded."""
        places = {source.name: number for number, source in enumerate(sources)}
        ordered = sorted(self.sources, key=lambda source: places.get(source.name, len(places)))
        return replace(self, sources=tuple(ordered))

    def held_from(self, step: int) -> list[Stage]:
        """Return the stages from a step on, for a comparison of two runs.

        Weights are rounded and above 0, and each stage differs from the one before it.
        """
        found: list[Stage] = []
        for stage in self.stages:
            of_sources = zip(self.sources, self.shares(stage.weights), strict=True)
            weights = {source.name: share / CYCLE for source, share in of_sources if share}
            first, size = max(stage.step, step), stage.global_batch_size
            held = Stage(step=first, global_batch_size=size, weights=weights)
            if stage.step <= step:
                found = [held]
            elif replace(held, step=found[-1].step) != found[-1]:
                found.append(held)
        return found

    def amended(self, step: int, plan: Run) -> tuple[Run, int]:
        """Return this run, continued by a plan from the next border on, and the step of that border.

        The border is the first step, from ``step`` on, before which each round that has begun is over. An
        amendment that has not begun is replaced, and its sources are gone: the plan's are added in its order.
        The plan has this run's L, and ``step`` is above 0.
        """
        tick = self.tick_of(Position(step))
        begun = self.round_at(tick)
        is_begun = begun.first < tick
        free_tick = begun.end if is_begun else tick  # from which on no round has begun
        border = step
        while self.tick_of(Position(border)) < free_tick:
            border += 1
        while True:
            run = self._up_to(border, plan)
            # With other sizes a step may begin elsewhere: smaller ones may fit into the end of an epoch. The
            # past must stay, and a round that has begun must end where it was laid out to end.
            round_stays = not is_begun or run.round_at(tick)[:2] == begun[:2]
            step_stays = run.tick_of(Position(step)) == tick
            if round_stays and step_stays and run.tick_of(Position(border)) >= free_tick:
                return run, border
            border += 1

    def _up_to(self, step: int, plan: Run) -> Run:
        """Return this run up to a step, and the plan from there on."""
        sources = [source for source in self.sources if source.added_at < step]
        known = {source.name for source in sources}
        for source in plan.sources:
            if source.name not in known:
                order = replace(source.order, seed=source_seed(self.seed, len(sources)))
                sources.append(replace(source, order=order, added_at=step))
        plan = plan.in_order_of(sources)
        stages = [stage for stage in self.stages if stage.step < step]
        before = self.held_from(step - 1)[0]
        # The round before a change of shares was laid out to end there, so another one must begin there.
        begins_round = any(stage.step == step and stage.begins_round for stage in self.stages)
        for held in plan.held_from(step):
            goes_on = held.weights == before.weights and not (begins_round and held.step == step)
            if not goes_on or held.global_batch_size != before.global_batch_size:
                stages.append(replace(held, begins_round=not goes_on, is_amended=held.step == step))
            before = held
        return replace(self, sources=tuple(sources), stages=tuple(stages))


# How a process reads the ticks of its slots.


class RunReader:
    """The ticks of a run, in a process that reads some of the slots. It keeps shards open until ``close``."""

    def __init__(self, run: Run, slots: range) -> None:
        self._run, self._slots = run, slots
        self._sources = [_SourceReader(source, number, slots) for number, source in enumerate(run.sources)]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def chunks(self, epoch: int, tick: int, chunk_ticks: int, *, endless: bool) -> Iterator[Chunk]:
        """Yield the ticks of an epoch from one on, and of later epochs if it is endless.

        A chunk has up to ``chunk_ticks``, and ends where a window, a round or an epoch ends.
        """
        run = self._run
        of_round: Round | None = None
        laid_out: Chunk | None = None  # the ticks of that round
        for number in count(epoch) if endless else (epoch,):
            first_tick = number * run.ticks_per_epoch
            at = first_tick + (tick if number == epoch else 0)
            end = first_tick + run.ticks_in(number)  # behind it ticks may be left that no step fits into
            while at < end:
                only = run.only_source_at(at)
                if only is not None:
                    source, source_tick, stage_end = only
                    most = min(at + chunk_ticks, stage_end, end) - at
                    chunk = self._sources[source].chunk(source_tick, most)
                    at += chunk.num_ticks
                    yield chunk
                    del chunk  # it may hold its window; the next one is read now
                    continue
                if laid_out is None or of_round is None or not of_round.first <= at < of_round.end:
                    laid_out = None  # likewise
                    of_round = run.round_at(at)
                    laid_out = self._lay_out(of_round)
                first, at = at, min(at + chunk_ticks, of_round.end, end)
                ticks = slice(first - of_round.first, at - of_round.first)
                ids, documents = laid_out.ids.ticks(ticks), laid_out.documents
                yield replace(
                    laid_out,
                    lengths=laid_out.lengths[:, ticks],
                    # Documents are joined here, which costs less than tick by tick.
                    ids=ids if run.row_tokens else ids.joined(),
                    documents=documents and documents.ticks(ticks),
                )
                laid_out = replace(laid_out, num_cut=0)  # the first chunk has counted them

    def _lay_out(self, of_round: Round) -> Chunk:
        """Read a round: each slot takes the next ticks of a source where its pattern has that source.

        Samples stay where they lie, in windows and chunks of their sources.
        """
        run = self._run
        pattern = np.repeat(run.pattern(of_round, self._slots), run.order.group, axis=0)
        lengths, num_cut = np.empty(pattern.shape, np.int32), 0
        ids = Ragged.empty(pattern.shape, run.row_tokens)
        documents, has_origins = Ragged.empty(pattern.shape), False
        rows = np.arange(len(pattern))[:, None]
        for number in np.unique(of_round.sources).tolist():
            columns = np.nonzero(pattern == number)[1].reshape(len(pattern), -1)  # of each row, ascending
            done, num_ticks = 0, columns.shape[1]
            while done < num_ticks:
                tick = int(of_round.taken[number]) + done
                chunk = self._sources[number].chunk(tick, num_ticks - done)
                places = (rows, columns[:, done : done + chunk.num_ticks])
                done += chunk.num_ticks
                num_cut += chunk.num_cut
                lengths[places] = chunk.lengths
                # The source's next window would overwrite what is not copied.
                chunk = chunk if done == num_ticks else chunk.joined()
                ids.put(places, chunk.ids)
                if chunk.documents is not None:
                    documents.put(places, chunk.documents)
                    has_origins = chunk.has_origins
                del chunk
        return Chunk(
            lengths=lengths,
            ids=ids,
            row_tokens=run.row_tokens,
            num_cut=num_cut,
            documents=documents if documents.flats else None,
            has_origins=has_origins,
        )


class _SourceReader:
    """The ticks of one source, window by window."""

    def __init__(self, source: Source, number: int, slots: range) -> None:
        self._order, self._samples, self._number, self._slots = source.order, source.samples, number, slots
        self._reader: ShardReader | None = None  # opens files as it reads them
        self._window: Window | None = None
        self._place = (0, 0, 0)  # of the window: epoch, first tick and end

    def close(self) -> None:
        self._window = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def chunk(self, tick: int, most: int) -> Chunk:
        """Return the ticks of the source from one on, counted through its epochs: as many as ``most``, or as
        its window still has."""
        epoch, tick = divmod(tick, self._order.ticks_per_epoch)
        window_epoch, first, end = self._place
        if self._window is None or epoch != window_epoch or not first <= tick < end:
            # A whole window is read at once: a part of it would be many small reads.
            self._window = None
            samples = self._samples
            assert samples is not None, "a loader is refused a run whose sources it lacks"
            # Its slots tell which part of the shards this process opens first.
            reader = self._reader or samples.open(self._slots.start, self._order.num_slots)
            self._reader = reader
            first, end = next(self._order.windows(tick))
            self._place = epoch, first, end
            num_tokens = partial(samples.num_tokens, reader)
            numbers = self._order.samples_of(epoch, self._slots, first, end, num_tokens)
            self._window = samples.read(reader, numbers, self._order.offset(epoch, samples.offsets))
        stop = min(tick + most, end)
        chunk = self._window(tick - first, stop - first)
        if stop == end:
            self._window = None  # before the next one is read: half the memory
        if chunk.has_origins and chunk.documents is not None:
            chunk.documents.flats[0][ORIGIN.index("source") :: len(ORIGIN)] = self._number
        return chunk
