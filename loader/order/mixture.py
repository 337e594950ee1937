"""A run of training: its sources, its stages, the samples of each step, and its state.

A run has one or more sources, each with its own order (order.py). A **tick** takes L samples, one for each of
its L places; a training **step** is one or more ticks. A **stage** sets the weights of the sources and the
global batch size from a step on. Everything else follows from the stages:

* An epoch has R ticks: the sum of one epoch of each source that the run began with. It ends when the next
  step does not fit, and the remaining ticks are not used. Ticks are counted through all epochs, including
  unused ones. So with one source, tick t of the run is always tick t % R of the source's epoch t // R.
* Weights are rounded to **shares**, the ticks of each source in a cycle of 65,536 ticks. The ticks of a
  source are evenly spread, so the number of its ticks before tick t follows from t alone.
* In a **round** of 64 ticks every slot takes equally many samples of a source, but in its own order. Rounds
  are counted from the tick at which the shares take effect, and the last round before other shares ends
  where those begin. At the end of a round, all slots are at the same place in each source. That is why an
  amendment begins there: no sample is repeated or lost.

Example: L is 12 and the only source has 700 samples, so R is 58. With steps of 5 ticks, an epoch has 11 steps
and leaves its last 3 ticks unused. Step 11 is the first step of epoch 1, which begins at tick 58.

The price: each source has its own windows, and one with less than 1/64 of the ticks is not in every round.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd
from operator import index
from pathlib import Path
from typing import Annotated, Any, NamedTuple, SupportsIndex

import numpy as np
from msgspec import Meta

from loader.order.hashes import Int64s, hash_array, hash_ints
from loader.order.order import ORDER_VERSION, Order, choose_windows
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError
from shardprep.format.names import as_type

ROUND = 64  # ticks
CYCLE = 1 << 16  # ticks
_PATTERN, _SEED = 6, 7  # purposes of a hash, besides those in order.py
_NEVER = 1 << 62  # the step and the tick at which the last stage ends


class Position(NamedTuple):
    """A place in a run: completed steps of all epochs, and batches of each rank in the next step."""

    # A position is made for every batch: 0.4 us as a NamedTuple, 1.2 us as a frozen dataclass.
    step: int = 0
    num_micro: int = 0

    def after(self, num_batches: int) -> Position:
        """Return the position one batch later, in a step of ``num_batches`` batches per rank."""
        if self.num_micro + 1 < num_batches:
            return Position(self.step, self.num_micro + 1)
        return Position(self.step + 1)


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    data: str  # fingerprint of its shards, 16 hex digits
    order: Order
    added_at: int = 0  # the step at which an amendment added it; 0: the run began with it
    num_bytes: int = field(default=0, compare=False)  # of its tars; 0 in the run of a state


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The weights and the global batch size from a step on."""

    step: int
    global_batch_size: int
    weights: Mapping[str, float]  # each source's share of the samples, by its name; the sum is 1
    begins_round: bool = True  # False: the weights are those of the stage before, and its round continues
    is_amended: bool = False  # whether an amendment begins here

    def __str__(self) -> str:
        shares = ", ".join(f"{_percents(weight)}% {name}" for name, weight in self.weights.items())
        mixture = "" if [*self.weights] == ["all"] else f" ({shares})"  # "all": the data have no source names
        return f"from step {self.step}: global_batch_size {self.global_batch_size}{mixture}"


def _percents(share: float) -> str:
    """Return a share in percents. 10 % is 6,554 of 65,536 ticks, so two decimals: 10, and not 10.0006."""
    rounded = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    if rounded in ("0", "100"):  # a share that is nearly nothing, or nearly all
        return f"{100 * share:.7g}"
    return rounded


class _Stretch(NamedTuple):
    """Steps of equal size: the rest of an epoch, or whole epochs from the beginning of one on."""

    step: int  # the first step
    epoch: int  # of the first step
    tick: int  # of that epoch, at which the first step begins
    size: int  # ticks per step
    num_steps: int  # from that tick to the end of the epoch


class _Mix(NamedTuple):
    """Consecutive ticks with the same shares."""

    first: int
    end: int  # _NEVER for the last mix
    shares: tuple[int, ...]  # of all sources
    taken: Int64s  # ticks of each source before this mix

    def taken_before(self, tick: int) -> Int64s:
        """Count the ticks of each source before a tick of this mix: int64[sources]."""
        num_cycles, rest = divmod(tick - self.first, CYCLE)
        in_cycle = np.bincount(spread(self.shares)[:rest], minlength=len(self.shares))
        return self.taken + num_cycles * np.array(self.shares, np.int64) + in_cycle


class Round(NamedTuple):
    """Consecutive ticks in which every slot takes equally many samples of a source."""

    first: int
    end: int
    sources: Int64s  # number of the source of each tick, before each slot shuffles them
    taken: Int64s  # ticks of each source before the round


def source_seed(seed: int, number: int) -> int:
    """Return the seed of a source's order. ``number`` counts all sources that the run has had."""
    return hash_ints(seed, _SEED, number)


@lru_cache(maxsize=16)
def spread(shares: tuple[int, ...]) -> Int64s:
    """Return the source of each tick of a cycle: int64[CYCLE]."""
    # The n-th tick of a source is placed at (n + 1/2) / share of the cycle.
    counts = np.array(shares, np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)
    return source[np.lexsort((source, (2 * number + 1) / counts[source]))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The samples of each step, from sources and stages. Raises UsageError if a step exceeds an epoch."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]  # ascending from step 0
    batches_per_tick: int  # of each rank
    seed: int = 0
    is_mixture: bool = False  # sources have names and their own seeds
    settings: Mapping[str, Any] = field(default_factory=dict)  # other settings that determine the samples

    def __post_init__(self) -> None:
        largest = max(stage.global_batch_size for stage in self.stages)
        if largest > (most := self.ticks_per_epoch * self.tick_samples):
            found = f"a global batch of {largest} samples"
            raise UsageError(found=found, expected=f"at most {most}, the samples of an epoch")

    @property
    def order(self) -> Order:
        """Return the order of the first source. All sources have its L, group, shuffle and keeps_tail."""
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

    @cached_property
    def row_tokens(self) -> int:
        """Return the tokens per sample if all samples are rows of one length, else 0."""
        return int(self.settings.get("seq_len", 0))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that determine the order, besides sources and stages."""
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
        stretches = []
        epoch = tick = 0
        ends = [*(stage.step for stage in self.stages[1:]), _NEVER]
        for stage, end in zip(self.stages, ends, strict=True):
            step, size = stage.step, stage.global_batch_size // self.tick_samples
            while step < end:
                num_steps = (self.ticks_per_epoch - tick) // size
                if not num_steps:  # the next step does not fit
                    epoch, tick = epoch + 1, 0
                    continue
                stretches.append(_Stretch(step, epoch, tick, size, num_steps))
                if tick == 0 and end == _NEVER:
                    break  # all epochs from here on have the same steps
                # A stretch that starts at the beginning of an epoch covers all epochs of this stage. The next
                # stage begins after its last step, possibly in the middle of an epoch.
                num_taken = min(num_steps, end - step) if tick else end - step
                epoch += (num_taken - 1) // num_steps
                tick += ((num_taken - 1) % num_steps + 1) * size
                step += num_taken
        return stretches

    def _stretch(self, step: int) -> _Stretch:
        last = self._stretches[-1]  # the usual case, in each training step
        if step >= last.step:
            return last
        return self._stretches[bisect_right(self._stretches, step, key=lambda each: each.step) - 1]

    def epoch_and_tick(self, position: Position) -> tuple[int, int]:
        """Return the epoch of a position, and the number of ticks of that epoch before it."""
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
        # An epoch begins with a stretch, or a whole number of epochs after a stretch that begins an epoch.
        stretch = next(each for each in reversed(self._stretches) if not each.tick and each.epoch <= epoch)
        return stretch.step + (epoch - stretch.epoch) * stretch.num_steps

    def steps_in(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def ticks_in(self, epoch: int) -> int:
        """Count the ticks that an epoch uses: all of them if its steps fill it exactly."""
        last = self.first_step(epoch + 1) - 1
        return self.epoch_and_tick(Position(last))[1] + self.ticks_in_step(last)

    def batches_before(self, position: Position) -> int:
        """Count the batches of a rank before a position, in the position's epoch."""
        tick = self.epoch_and_tick(position)[1]
        return tick * self.batches_per_tick + position.num_micro % self.batches_per_tick

    def tick_of(self, position: Position) -> int:
        """Count the ticks before a position through all epochs, including unused ticks."""
        epoch, tick = self.epoch_and_tick(position)
        return epoch * self.ticks_per_epoch + tick

    # Rounds.

    def shares(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        """Return the ticks of each source in a cycle. Their rounding depends on the order of the sources."""
        # Round cumulative sums, so that the shares add up to a whole cycle.
        sums = [0.0, *accumulate(weights.get(source.name, 0.0) for source in self.sources)]
        return tuple(np.diff(np.rint(np.array(sums) * CYCLE).astype(np.int64)).tolist())

    @cached_property
    def _mixes(self) -> list[_Mix]:
        mixes: list[_Mix] = []
        for stage in (stage for stage in self.stages if stage.begins_round):
            first, taken = self.tick_of(Position(stage.step)), np.zeros(len(self.sources), np.int64)
            if mixes:
                taken = mixes[-1].taken_before(first)
                mixes[-1] = mixes[-1]._replace(end=first)
            mixes.append(_Mix(first, _NEVER, self.shares(stage.weights), taken))
        return mixes

    def _mix_at(self, tick: int) -> _Mix:
        return self._mixes[bisect_right(self._mixes, tick, key=lambda mix: mix.first) - 1]

    def round_at(self, tick: int) -> Round:
        """Return the round that contains a tick. It ends early where other shares begin."""
        mix = self._mix_at(tick)
        first = tick - (tick - mix.first) % ROUND
        end = min(first + ROUND, mix.end)
        within = (first - mix.first) % CYCLE  # a cycle is a multiple of a round
        return Round(first, end, spread(mix.shares)[within : within + end - first], mix.taken_before(first))

    def only_source_at(self, tick: int) -> tuple[int, int, int] | None:
        """Return (source, its ticks before, end) if one source has all ticks from ``tick`` to ``end``."""
        mix = self._mix_at(tick)
        if CYCLE not in mix.shares:
            return None
        source = mix.shares.index(CYCLE)
        return source, int(mix.taken[source]) + tick - mix.first, mix.end

    def pattern(self, round_: Round, slots: range) -> Int64s:
        """Return the source of each slot at each tick of a round: int64[len(slots), ticks]."""
        keys = [[hash_ints(self.seed, _PATTERN, round_.first, slot)] for slot in slots]
        hashes = hash_array(np.array(keys, np.uint64), np.arange(len(round_.sources)))
        return round_.sources[np.argsort(hashes, axis=1, kind="stable")]

    def _samples_before(self, tick: int) -> Int64s:
        """Count the samples of each source before a tick, including unused ticks: int64[sources]."""
        round_ = self.round_at(tick)
        pattern = self.pattern(round_, range(self.order.num_slots))[:, : tick - round_.first]
        within = np.bincount(pattern.reshape(-1), minlength=len(self.sources)) * self.order.group
        return round_.taken * self.tick_samples + within

    def source_samples(self, position: Position, since: int = 0) -> dict[str, int]:
        """Count the samples of each source from a step to a position, on all ranks together.

        The price: 50 us for each epoch in between.
        """
        counts = self._samples_before(self.tick_of(position))
        counts = counts - self._samples_before(self.tick_of(Position(since)))
        for epoch in range(self.epoch_of(since), self.epoch_of(position.step)):
            end = (epoch + 1) * self.ticks_per_epoch
            if num_unused := self.ticks_per_epoch - self.ticks_in(epoch):  # they deliver no samples
                counts = counts - self._samples_before(end) + self._samples_before(end - num_unused)
        return dict(zip((source.name for source in self.sources), counts.tolist(), strict=True))

    def source_epochs(self, position: Position) -> dict[str, float]:
        """Return the epochs of each source before a position: 1.5 is the middle of its second epoch."""
        sizes = [source.order.ticks_per_epoch * self.tick_samples for source in self.sources]
        epochs = (self._samples_before(self.tick_of(position)) / sizes).tolist()
        return dict(zip((source.name for source in self.sources), epochs, strict=True))

    # Amendments.

    def in_order_of(self, sources: Sequence[Source]) -> Run:
        """Return this run with its sources sorted like others, so that their shares are rounded equally."""
        places = {source.name: number for number, source in enumerate(sources)}
        ordered = sorted(self.sources, key=lambda source: places.get(source.name, len(places)))
        return replace(self, sources=tuple(ordered))

    def stages_from(self, step: int) -> list[Stage]:
        """Return the stages from a step on that change anything, with rounded weights above 0."""
        changes: list[Stage] = []
        for stage in self.stages:
            shares = zip(self.sources, self.shares(stage.weights), strict=True)
            weights = {source.name: share / CYCLE for source, share in shares if share}
            first, size = max(stage.step, step), stage.global_batch_size
            rounded = Stage(step=first, global_batch_size=size, weights=weights)
            if stage.step <= step:
                changes = [rounded]
            elif replace(rounded, step=changes[-1].step) != changes[-1]:
                changes.append(rounded)
        return changes

    def amended(self, step: int, plan: Run) -> tuple[Run, int]:
        """Return this run, continued by a plan from the next border on, and the step of that border.

        The border is the first step from ``step`` on at which every round that has begun is complete. An
        amendment that has not begun is replaced, and the sources that it added are removed. New sources are
        added in the plan's order. The plan must have this run's L, and ``step`` must be above 0.
        """
        tick = self.tick_of(Position(step))
        current = self.round_at(tick)
        has_begun = current.first < tick
        free_tick = current.end if has_begun else tick  # the first tick whose round has not begun
        border = step
        while self.tick_of(Position(border)) < free_tick:
            border += 1
        while True:
            run = self._up_to(border, plan)
            # Other sizes can move the beginning of a step: smaller steps may still fit into an epoch. Earlier
            # steps must not move, and a round that has begun must not end at another tick.
            round_stays = not has_begun or run.round_at(tick)[:2] == current[:2]
            step_stays = run.tick_of(Position(step)) == tick
            if round_stays and step_stays and run.tick_of(Position(border)) >= free_tick:
                return run, border
            border += 1

    def _up_to(self, step: int, plan: Run) -> Run:
        """Return this run up to a step, followed by the plan."""
        sources = [source for source in self.sources if source.added_at < step]
        known = {source.name for source in sources}
        for source in plan.sources:
            if source.name not in known:
                order = replace(source.order, seed=source_seed(self.seed, len(sources)))
                sources.append(replace(source, order=order, added_at=step))
        plan = plan.in_order_of(sources)
        stages = [stage for stage in self.stages if stage.step < step]
        before = self.stages_from(step - 1)[0]
        # The round before a change of shares ends at that step, so a new round must begin there.
        round_ended = any(stage.step == step and stage.begins_round for stage in self.stages)
        for stage in plan.stages_from(step):
            is_border = stage.step == step
            begins_round = stage.weights != before.weights or (round_ended and is_border)
            # The border is kept even if nothing changes there, since later arguments count from it on.
            if is_border or begins_round or stage.global_batch_size != before.global_batch_size:
                stages.append(replace(stage, begins_round=begins_round, is_amended=is_border))
            before = stage
        return replace(self, sources=tuple(sources), stages=tuple(stages))

    def last_amended(self) -> int:
        """Return the step at which the last amendment begins; 0 without one."""
        return max((stage.step for stage in self.stages if stage.is_amended), default=0)

    def with_amended_mark(self, step: int) -> Run:
        """Return this run with an amendment at a step that changes nothing."""
        before = [stage for stage in self.stages if stage.step <= step]
        later = [stage for stage in self.stages if stage.step > step]
        marked = replace(before[-1], is_amended=True)
        if marked.step == step:
            before.pop()
        else:
            marked = replace(marked, step=step, begins_round=False)
        return replace(self, stages=(*before, marked, *later))


# The state in a checkpoint has a position and the run that led to it: sources and stages, as lists of plain
# values. A loader's arguments describe a run, too: the plan. If both are equal from there on, the loader
# resumes the state's run. Otherwise it raises an error or, with amend, follows the plan from the next border.

STATE_FORMAT, STATE_VERSION = "shardprep-loader-state", 5
MAX_EPOCH = 2**31 - 1  # so that ticks, counted through all epochs, fit into an int64
_Count = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
_Number = Annotated[int, Meta(ge=1, le=2**62)]
_SIZES = ("num_samples", "block_samples", "window_samples")  # fields of both Order and _SourceRow


class Skips(NamedTuple):
    """What ``set_epoch`` skipped or repeated."""

    num_left: int = 0  # steps that were skipped, minus those that were repeated
    since: int = 0  # the step to which it moved last
    delivered: Mapping[str, int] = {}  # samples of each source that were delivered before it moved there


class OtherRun(Refused):
    """A loader's state has other data or another order."""


class _SourceRow(NamedTuple):
    name: str
    data: str
    num_samples: _Number
    block_samples: _Number
    window_samples: _Number
    added_at: _Count
    num_delivered: Annotated[int, Meta(ge=0)]  # samples before ``since``


class _StageRow(NamedTuple):
    step: _Count
    global_batch_size: _Number
    shares: list[_Count] | None  # ticks of each source in a cycle; None: unchanged
    is_amended: bool


@dataclass(frozen=True)
class _State:
    """The values of a state, without its format and version."""

    epoch: _Count
    step: _Count
    num_micro: _Count
    num_left: int
    since: Annotated[int, Meta(ge=0)]
    layout: dict[str, _Number]
    targets: str
    tick_samples: _Number
    sources: Annotated[list[_SourceRow], Meta(min_length=1)]
    stages: Annotated[list[_StageRow], Meta(min_length=1)]
    fingerprint: dict[str, Any]


def state_of(
    run: Run, position: Position, layout: Mapping[str, int], skips: Skips, targets: str
) -> dict[str, Any]:
    """Return the state at a position. ``layout`` and ``targets`` are those of the batches.

    All states have the same keys, and no dicts in lists, as torch.distributed.checkpoint requires.
    """
    epoch = run.epoch_of(position.step)
    sources = [[*row, skips.delivered.get(row[0], 0)] for row in _source_rows(run)]
    state = {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "epoch": epoch,
        "step": position.step - run.first_step(epoch),
        "num_micro": position.num_micro,
        "num_left": skips.num_left,
        "since": skips.since,
        "layout": dict(layout),
        "targets": targets,
        "tick_samples": run.tick_samples,
        "sources": sources,
        "stages": _stage_rows(run),
        "fingerprint": run.fingerprint,
    }
    return {**state, "checksum": checksum_of(state)}


def _source_rows(run: Run) -> list[list[Any]]:
    """Return the sources as lists of plain values, without the samples that were delivered."""
    rows = []
    for source in run.sources:
        sizes = [getattr(source.order, name) for name in _SIZES]
        rows.append([source.name, source.data, *sizes, source.added_at])
    return rows


def _stage_rows(run: Run) -> list[list[Any]]:
    rows = []
    for stage in run.stages:
        shares = list(run.shares(stage.weights)) if stage.begins_round else None
        rows.append([stage.step, stage.global_batch_size, shares, stage.is_amended])
    return rows


def is_same_run(one: Run, other: Run) -> bool:
    """Return whether two runs deliver the same samples. Rows are compared, since states round the weights."""
    if (one.tick_samples, one.fingerprint) != (other.tick_samples, other.fingerprint):
        return False
    return _source_rows(one) == _source_rows(other) and _stage_rows(one) == _stage_rows(other)


def checksum_of(state: Mapping[str, Any]) -> str:
    """Return the checksum of a state's values, 16 hex digits. Raises TypeError if they are not plain."""
    names = ["format", "version", *_State.__annotations__]
    known = {name: state[name] for name in names if name in state}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


class Resumed(NamedTuple):
    """What a loader continues with."""

    run: Run
    position: Position
    skips: Skips
    border: int | None = None  # the step at which an amendment begins, if this load has made one


def resume_run(
    plan: Run, state: Mapping[str, Any], layout: Mapping[str, int], *, current: Run, amend: bool
) -> Resumed:
    """Resume a loader with a plan from a state, or raise an error that names the difference.

    A state of ``current``, the loader's run, is a position in it: the plan has been compared before.
    """
    saved = _read_state(state)
    _check_fingerprint(saved, plan)
    _check_data(saved, plan)
    skips = _skips_of(saved)
    # Before the first sample an amendment replaces the whole run, which may have another L.
    is_new = not (saved.epoch or saved.step or saved.num_micro)
    as_planned = Resumed(plan, Position(), skips, border=0)
    has_other_ticks = saved.tick_samples != plan.tick_samples
    if amend and is_new and has_other_ticks and saved.tick_samples != current.tick_samples:
        return as_planned
    run = _run_of(saved, plan, layout)
    position = _position_of(saved, run, layout)
    if is_same_run(run, current):
        _check_sources(run, plan, position.step)
        return Resumed(run, position, skips)
    if amend and is_new and has_other_ticks:
        return as_planned
    step = position.step
    plan = _in_ticks_of(run, plan)
    # The arguments may already describe an amendment that begins later: compare the steps from it on.
    amended_at = run.last_amended()
    since = max(step, amended_at)
    saved_stages = run.stages_from(since)
    planned_stages = plan.in_order_of(run.sources).stages_from(since)
    border = None
    if saved_stages != planned_stages:
        if not amend or run.is_validation:
            was, wanted = "; ".join(map(str, saved_stages)), "; ".join(map(str, planned_stages))
            remedy = None if run.is_validation else "amend=True"
            advice = f"{remedy} to change the run from the next border on, or " if remedy else ""
            found = f"the state of step {step} belongs to another run: {was}"
            expected = f"{wanted}; pass {advice}the arguments of that run"
            raise OtherRun(found=found, expected=expected, remedy=remedy)
        if position.num_micro:
            found = f"amend=True with a state from within a step (num_micro {position.num_micro})"
            raise UsageError(found=found, expected="a state that was saved after the optimizer's step")
        if is_new:
            return as_planned
        run, border = run.amended(step, plan)
    elif amend and plan.in_order_of(run.sources).stages_from(amended_at) != run.stages_from(amended_at):
        # The arguments differ from the run's past alone. They count from this step on.
        run = run.with_amended_mark(step)
    _check_sources(run, plan, step)
    return Resumed(run, position, skips, border)


def run_as_saved(data: Run, state: Mapping[str, Any], layout: Mapping[str, int]) -> Resumed:
    """Return the run of a state at the beginning of its step, if ``data`` has the samples that it reads.

    Stages and sizes of ``data`` do not count. Raises an error for other data or another order.
    """
    saved = _read_state(state)
    _check_fingerprint(saved, data)
    _check_data(saved, data)
    run = _run_of(saved, data, layout)
    position = Position(_position_of(replace(saved, num_micro=0), run, layout).step)
    _check_sources(run, data, position.step)
    return Resumed(run, position, _skips_of(saved))


def _check_sources(run: Run, data: Run, step: int) -> None:
    """Raise OtherRun if a run needs other sources than those of ``data`` from a step on."""
    given = [source.name for source in data.sources]
    for stage in run.stages_from(step):
        for name in stage.weights.keys() - set(given):
            found = f"sources {given}, but the run has samples of {name} from step {stage.step} on"
            expected = f"{name} in input_shards as well, without a weight if you want to drop it"
            raise OtherRun(found=found, expected=expected)


def _skips_of(saved: _State) -> Skips:
    delivered = {row.name: row.num_delivered for row in saved.sources}
    return Skips(saved.num_left, saved.since, delivered)


def _read_state(state: Mapping[str, Any]) -> _State:
    """Check a state and return its values. Raises UsageError, BrokenShard or UnknownVersion."""
    if not isinstance(state, Mapping):
        found, remedy = f"the state is {state!r:.80}", "loader.load_state_dict(torch.load(PATH))"
        raise UsageError(found=found, expected="a dict that state_dict() returned", remedy=remedy)
    if state.get("format") != STATE_FORMAT:
        for name, value in state.items():
            if isinstance(value, Mapping) and value.get("format") == STATE_FORMAT:
                remedy = f"loader.load_state_dict(checkpoint[{name!r}])"
                found = f"a dict that has the state under {name!r}"
                raise BrokenShard(found=found, expected="the state itself", remedy=remedy)
        found, remedy = f"the state's format is {state.get('format')!r:.80}", "state_dict()"
        raise BrokenShard(found=found, expected=f"{STATE_FORMAT}, as {remedy} returns it", remedy=remedy)
    if state.get("version") != STATE_VERSION:
        found = f"the state has version {state.get('version')!r:.80}"
        advice = "resume with the shardprep that saved it, or start without the state"
        raise UnknownVersion(found=found, expected=STATE_VERSION, advice=advice)
    try:
        checksum = checksum_of(state)
    except (TypeError, ValueError, RecursionError):
        raise _damaged_state("values are not plain numbers and texts", "the values of state_dict()") from None
    if state.get("checksum") != checksum:
        raise _damaged_state("checksum does not fit its values", f"{checksum}, unless values were edited")
    known = {name: state[name] for name in _State.__annotations__ if name in state}
    try:
        saved = as_type(Path("state"), known, _State)
    except BrokenShard as error:
        raise _damaged_state(error.found, error.expected) from None
    names, added = [row.name for row in saved.sources], [row.added_at for row in saved.sources]
    steps, shares = [row.step for row in saved.stages], [row.shares for row in saved.stages]
    is_consistent = (
        len(set(names)) == len(names)
        and added[0] == 0
        and added == sorted(added)
        and steps[0] == 0
        and steps == sorted(set(steps))
        and shares[0] is not None
        and all(each is None or (len(each) <= len(names) and sum(each) == CYCLE) for each in shares)
        and not any(row.global_batch_size % saved.tick_samples for row in saved.stages)
    )
    if not is_consistent:
        raise _damaged_state("sources and stages do not fit together", "sources and stages of one run")
    return saved


def _damaged_state(found: object, expected: object) -> BrokenShard:
    wrong = f"the state is damaged: its {found}"
    return BrokenShard(found=wrong, expected=expected, advice="use another state")


def _check_fingerprint(saved: _State, plan: Run) -> None:
    """Raise OtherRun, OtherTokenizer or UnknownVersion if the state's fingerprint is not the plan's."""
    old, new = dict(saved.fingerprint), plan.fingerprint
    if not plan.is_mixture:  # it cannot get more sources, so its data is as fixed as its settings
        old["data"], new["data"] = saved.sources[0].data, plan.sources[0].data
    differing = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not differing:
        return
    found = "; ".join(f"{name} {old.get(name)!r:.20}" for name in differing)
    wanted = "; ".join(f"{name} {new.get(name)!r:.20}" for name in differing)
    error: type[Refused] = OtherTokenizer if differing == ["tokenizer"] else OtherRun
    if "order_version" in differing:
        error = UnknownVersion
    advice = "resume with the shardprep and the arguments of that run, or start without the state"
    raise error(found=f"the state belongs to another run: {found}", expected=wanted, advice=advice)


def _check_data(saved: _State, plan: Run) -> None:
    """Raise OtherRun if the data of a source is not the state's."""
    planned = {source.name: source for source in plan.sources}
    for row in saved.sources:
        source = planned.get(row.name)
        if source and (row.data, row.num_samples) != (source.data, source.order.num_samples):
            found = f"the source {row.name} in the state has data {row.data}, {row.num_samples:,} samples"
            remedy = f'{{"{row.name}": ..., "{row.name}_2": NEW}}'
            advice = f"Keep its folders and their order; add others as another source, {remedy}"
            expected = f"data {source.data}, {source.order.num_samples:,} samples. {advice}"
            expected += ", with weights for both and amend=True"
            raise OtherRun(found=found, expected=expected, remedy=remedy)


def _run_of(saved: _State, plan: Run, layout: Mapping[str, int]) -> Run:
    """Return the run of a state, divided into this loader's batches. Raises BrokenShard or OtherRun."""
    size = saved.tick_samples
    try:
        check_batch(size, plan.order.group, **layout)
    except UsageError as error:
        found = f"{error.found} in the state, whose order takes {size} samples at a time"
        samples_per_rank, rest = divmod(size, layout["world_size"])
        advice = f"use a number of ranks that divides {size}"
        if not rest:
            batch_size = gcd(samples_per_rank, layout["batch_size"])
            of_run = saved.stages[0].global_batch_size
            advice = f"pass the run's global_batch_size={of_run} and batch_size={batch_size}"
        raise OtherRun(found=found, expected=error.expected, advice=advice) from None
    sources, stages = [], []
    weights: dict[str, float] = {}
    try:
        for number, row in enumerate(saved.sources):
            seed = source_seed(plan.seed, number) if plan.is_mixture else plan.seed
            sizes = {name: getattr(row, name) for name in _SIZES}
            order = replace(plan.order, tick_samples=size, seed=seed, **sizes)
            sources.append(Source(name=row.name, data=row.data, order=order, added_at=row.added_at))
        for step, global_batch_size, shares, is_amended in saved.stages:
            if shares is not None:
                weights = {source.name: share / CYCLE for source, share in zip(sources, shares, strict=False)}
            stage = Stage(step=step, global_batch_size=global_batch_size, weights=weights)
            stages.append(replace(stage, begins_round=shares is not None, is_amended=is_amended))
        num_batches = size // (layout["batch_size"] * layout["world_size"])
        return replace(plan, sources=tuple(sources), stages=tuple(stages), batches_per_tick=num_batches)
    except UsageError as error:  # impossible orders or sizes
        raise BrokenShard(f"the state is damaged: {error}") from None


def _position_of(saved: _State, run: Run, layout: Mapping[str, int]) -> Position:
    """Return the position of a state. Raises BrokenShard or UsageError if it does not fit the run."""
    if saved.num_micro and saved.layout != layout:
        found = f"a state from within a step (num_micro {saved.num_micro}) with {saved.layout}"
        expected = f"a state saved after the optimizer's step, or those sizes, not {dict(layout)}"
        raise UsageError(found=found, expected=expected)
    if saved.step >= (num_steps := run.steps_in(saved.epoch)):
        raise _damaged_state(f"step is {saved.step} of epoch {saved.epoch}", f"a step below {num_steps}")
    position = Position(run.first_step(saved.epoch) + saved.step, saved.num_micro)
    if saved.num_micro >= (num_batches := run.batches_in_step(position.step)):
        raise UsageError(found=f"a state with num_micro {saved.num_micro}", expected=f"below {num_batches}")
    if saved.since > position.step:
        raise _damaged_state(f"since is {saved.since}", f"at most {position.step}, its step")
    return position


def _in_ticks_of(run: Run, plan: Run) -> Run:
    """Return a plan in the ticks of a run. Raises OtherRun if its sizes are not multiples of L."""
    size = run.tick_samples
    for stage in plan.stages:
        if stage.global_batch_size % size:
            found = f"global_batch_size={stage.global_batch_size} from step {stage.step} on"
            expected = f"a multiple of {size}, which the state's order takes at a time"
            raise OtherRun(found=found, expected=expected)
    sources = []
    for source in plan.sources:
        num_samples = source.order.num_samples
        sizes = sizes_of_order(num_samples, source.num_bytes, size, source.order.group)
        sources.append(replace(source, order=replace(source.order, **sizes)))
    return replace(plan, sources=tuple(sources))


def whole_number(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return the value as an int. Raises UsageError unless it is whole, and from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError.of_value(name, value, f"a whole number of at least {least}")
    if (number := index(value)) < least:
        raise UsageError.of_value(name, number, f"at least {least}")
    if most is not None and number > most:
        raise UsageError.of_value(name, number, f"at most {most}")
    return number


def check_batch(global_batch_size: int, group: int, *, batch_size: int, world_size: int) -> None:
    """Raise UsageError unless a global batch gives each rank equally many batches and slots."""
    if global_batch_size % (step_samples := batch_size * world_size):
        expected = f"a multiple of batch_size {batch_size} x {world_size} ranks, {step_samples}"
        raise UsageError.of_value("global_batch_size", global_batch_size, expected)
    num_slots, rest = divmod(global_batch_size, group)
    if not rest and num_slots % world_size:  # Order refuses a group that leaves a rest
        found = f"{world_size} ranks, which cannot share {num_slots} groups of {group} samples evenly"
        raise UsageError(found=found, expected=[n for n in range(1, num_slots + 1) if num_slots % n == 0])


def sizes_of_order(num_samples: int, num_bytes: int, tick_samples: int, group: int) -> dict[str, Any]:
    """Choose the sizes of a source's order, by their names in Order."""
    sizes = {"num_samples": num_samples, "tick_samples": tick_samples}
    block, window = choose_windows(**sizes, num_bytes=num_bytes, group=group)
    return {**sizes, "block_samples": block, "window_samples": window}
