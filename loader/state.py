"""The state that a checkpoint keeps, and how a loader goes on behind one.

A state has a position and the run that led there (run.py): its sources and its stages, as lists of plain
values. The loader's arguments describe a run, too: its *plan*. If both are equal from the position on, the
loader goes on with the state's run. Else it says what differs, or, with ``amend``, follows the plan from the
next border on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from loader.run import CYCLE, Position, Run, Source, Stage, source_seed
from loader.sources import check_batch, sizes_of_order
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError
from shardprep.format.names import as_type

logger = logging.getLogger(__name__)

STATE_FORMAT, STATE_VERSION = "shardprep-loader-state", 4
MAX_EPOCH = 2**31 - 1  # workers are told the epoch in an int64
_Count = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
_Number = Annotated[int, Meta(ge=1, le=2**62)]


class OtherRun(Refused):
    """A loader's state is of other data, or of another order."""


class _SourceRow(NamedTuple):
    name: str
    data: str
    num_samples: _Number
    block_samples: _Number
    window_samples: _Number
    added_at: _Count


class _StageRow(NamedTuple):
    step: _Count
    global_batch_size: _Number
    shares: list[_Count] | None  # ticks of each source in a cycle; None: as before
    is_amended: bool


@dataclass(frozen=True)
class _State:
    """The values of a state, but for its format, version and fingerprint."""

    epoch: _Count
    step: _Count
    num_micro: _Count
    num_left: int
    layout: dict[str, _Number]
    tick_samples: _Number
    sources: Annotated[list[_SourceRow], Meta(min_length=1)]
    stages: Annotated[list[_StageRow], Meta(min_length=1)]


def state_of(run: Run, position: Position, layout: Mapping[str, int], num_left: int) -> dict[str, Any]:
    """Return the state of a position. ``num_left``: steps of epochs that the loop left.

    All states have the same keys, and lists without dicts in them: torch.distributed.checkpoint reads only
    the keys that a fresh loader's state has.
    """
    epoch = run.epoch_of(position.step)
    sources, stages = [], []
    for source in run.sources:
        of = source.order
        sizes = of.num_samples, of.block_samples, of.window_samples
        sources.append([source.name, source.data, *sizes, source.added_at])
    for stage in run.stages:
        shares = list(run.shares(stage.weights)) if stage.begins_round else None
        stages.append([stage.step, stage.global_batch_size, shares, stage.is_amended])
    return {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "epoch": epoch,
        "step": position.step - run.first_step(epoch),
        "num_micro": position.num_micro,
        "num_left": num_left,
        "layout": dict(layout),
        "tick_samples": run.tick_samples,
        "sources": sources,
        "stages": stages,
        "fingerprint": run.fingerprint,
    }


def go_on(
    plan: Run, state: Mapping[str, Any], layout: Mapping[str, int], *, amend: bool
) -> tuple[Run, Position, int, int | None]:
    """Return what a loader with a plan delivers behind a state.

    Returns the run, the position, the steps that the loop left out, and the step at which an amendment
    begins, or None. Raises OtherRun, OtherTokenizer, BrokenShard, UnknownVersion or UsageError.
    """
    saved = _read(state, plan)
    _check_fingerprint(saved, state["fingerprint"], plan)
    # Where no sample was delivered, another plan begins, also in ticks of another size.
    is_new = not (saved.epoch or saved.step or saved.num_micro)
    if amend and is_new and saved.tick_samples != plan.tick_samples:
        return plan, Position(), saved.num_left, 0
    run = _run_of(saved, plan, layout)
    _check_data(run, plan)
    position = _position_of(saved, run, layout)
    step, given = position.step, plan
    plan = _in_ticks_of(run, plan)
    # The arguments may be of after an amendment, and the state of before it: compare the steps behind it.
    since = max([step, *(stage.step for stage in run.stages if stage.is_amended)])
    found, wanted = run.held_from(since), plan.in_order_of(run.sources).held_from(since)
    border = None
    if found != wanted:
        if not amend or run.is_validation:
            in_state, here = ("; ".join(map(str, stages)) for stages in (found, wanted))
            remedy = None if run.is_validation else "amend=True"
            advice = f"{remedy}, to change the run from the next border on, or " if remedy else ""
            raise OtherRun(
                f"the state, of step {step}, is of another run: {in_state} in the state, {here} here; pass "
                f"{advice}the arguments of the run",
                found=in_state,
                expected=here,
                remedy=remedy,
            )
        if position.num_micro:
            raise UsageError(
                found=f"amend=True for a state inside of a step, after {position.num_micro} batches",
                expected="a state that was saved after the optimizer's step",
            )
        if is_new:
            return given, position, saved.num_left, 0
        run, border = run.amended(step, plan)
    return _with_samples(run, given, step), position, saved.num_left, border


def _read(state: Mapping[str, Any], plan: Run) -> _State:
    """Return the values of a state. Raises UsageError, BrokenShard or UnknownVersion."""
    if not isinstance(state, Mapping):
        raise UsageError(
            found=f"the state is {state!r:.80}",
            expected="what state_dict() returned; of a file: loader.load_state_dict(torch.load(PATH))",
            remedy="loader.load_state_dict(torch.load(PATH))",
        )
    if state.get("format") != STATE_FORMAT:
        raise BrokenShard(
            found=f"the state's format is {state.get('format')!r:.80}",
            expected=f"{STATE_FORMAT}, as state_dict() returns it",
            remedy="state_dict()",
        )
    version, expected, of_run = state.get("version"), STATE_VERSION, state.get("fingerprint")
    if version == expected:
        if not isinstance(of_run, Mapping):
            raise _damaged(f"fingerprint is {of_run!r:.80}", "a dict")
        version, expected = of_run.get("order_version"), plan.fingerprint["order_version"]
    if version != expected:
        raise UnknownVersion(
            found=f"the state, or the order of samples in it, has version {version!r:.80}",
            expected=f"{expected}; go on with the shardprep that saved it, or start without the state",
        )
    known = {name: state[name] for name in _State.__annotations__ if name in state}
    try:
        saved = as_type(Path("state"), known, _State)
    except BrokenShard as error:
        raise _damaged(error.found, error.expected) from None
    names = [row.name for row in saved.sources]
    added = [row.added_at for row in saved.sources]
    if len(set(names)) < len(names) or added[0] or added != sorted(added):
        raise _damaged("sources", "different names, in the order in which they were added")
    steps = [row.step for row in saved.stages]
    if steps[0] or any(first >= later for first, later in pairwise(steps)) or saved.stages[0].shares is None:
        raise _damaged("stages", "steps that ascend from 0, the first one with shares")
    for row in saved.stages:
        if row.shares is not None and (len(row.shares) > len(names) or sum(row.shares) != CYCLE):
            raise _damaged("stages", f"shares of {len(names)} sources, {CYCLE} in all")
        if row.global_batch_size % saved.tick_samples:
            raise _damaged("stages", f"multiples of {saved.tick_samples}")
    return saved


def _damaged(found: object, expected: object) -> BrokenShard:
    return BrokenShard(found=f"the state is damaged: its {found}", expected=f"{expected}; take another one")


def _check_fingerprint(saved: _State, fingerprint: Mapping[str, Any], plan: Run) -> None:
    """Raise OtherRun or OtherTokenizer for a state of another fingerprint."""
    then, here = dict(fingerprint), plan.fingerprint
    if not plan.is_mixture:  # no source can be added: its only data is part of what it is
        then["data"], here["data"] = saved.sources[0].data, plan.sources[0].data
    differing = [name for name in {**here, **then} if then.get(name) != here.get(name)]
    if differing:
        found = "; ".join(f"{name} {then.get(name)!r:.20}" for name in differing)
        wanted = "; ".join(f"{name} {here.get(name)!r:.20}" for name in differing)
        error = OtherTokenizer if differing == ["tokenizer"] else OtherRun
        raise error(
            f"the state is of another run: {found} in the state, {wanted} here; make the loader as it was "
            "when the state was saved, or start without the state",
            found=found,
            expected=wanted,
        )


def _run_of(saved: _State, plan: Run, layout: Mapping[str, int]) -> Run:
    """Return the run of a state, in equal batches of this loader. Raises BrokenShard or OtherRun."""
    size = saved.tick_samples
    try:
        check_batch(size, plan.order.group, **layout)
    except UsageError as error:
        found = f"{error.found} in the state, whose order takes {size} samples at once"
        raise OtherRun(found=found, expected=error.expected) from None
    sources, stages = [], []
    weights: dict[str, float] = {}
    try:
        for number, row in enumerate(saved.sources):
            order = replace(
                plan.order,
                num_samples=row.num_samples,
                tick_samples=size,
                block_samples=row.block_samples,
                window_samples=row.window_samples,
                seed=source_seed(plan.seed, number) if plan.is_mixture else plan.seed,
            )
            sources.append(Source(name=row.name, data=row.data, order=order, added_at=row.added_at))
        for each in saved.stages:
            if each.shares is not None:
                of_names = zip(sources, each.shares, strict=False)
                weights = {source.name: share / CYCLE for source, share in of_names}
            stage = Stage(
                step=each.step,
                global_batch_size=each.global_batch_size,
                weights=weights,
                begins_round=each.shares is not None,
                is_amended=each.is_amended,
            )
            stages.append(stage)
        return replace(
            plan,
            sources=tuple(sources),
            stages=tuple(stages),
            batches_per_tick=size // (layout["batch_size"] * layout["world_size"]),
        )
    except UsageError as error:  # of orders and sizes that no run has
        raise BrokenShard(f"the state is damaged: {error}") from None


def _check_data(run: Run, plan: Run) -> None:
    """Raise OtherRun where a source is other data than in the state."""
    here = {source.name: source for source in plan.sources}
    for then in run.sources:
        now = here.get(then.name, then)
        if (now.data, now.order.num_samples) != (then.data, then.order.num_samples):
            found = f"data {then.data}, {then.order.num_samples:,} samples"
            expected = f"data {now.data}, {now.order.num_samples:,} samples"
            remedy = f'{{"{then.name}": ..., "{then.name}_2": NEW}}'
            raise OtherRun(
                f"the source {then.name} is other data: {found} in the state, {expected} here. A source "
                "keeps its folders, in their order, through a run; add others as a source of their own, "
                f"{remedy}, with weights for both and amend=True",
                found=found,
                expected=expected,
                remedy=remedy,
            )


def _position_of(saved: _State, run: Run, layout: Mapping[str, int]) -> Position:
    """Return the position of a state. Raises BrokenShard or UsageError where it does not fit the run."""
    if saved.num_micro and saved.layout != layout:
        raise UsageError(
            found=f"a state inside of a step, after {saved.num_micro} batches of {saved.layout}",
            expected=f"one of after the optimizer's step, or a loader of these batches, not {dict(layout)}",
        )
    steps_per_epoch = run.steps_in(saved.epoch)
    if saved.step >= steps_per_epoch:
        raise _damaged(f"step is {saved.step} of epoch {saved.epoch}", f"a step below {steps_per_epoch}")
    position = Position(run.first_step(saved.epoch) + saved.step, saved.num_micro)
    num_batches = run.batches_in_step(position.step)
    if position.num_micro >= num_batches:
        raise UsageError(found=f"a state after {position.num_micro} batches", expected=f"below {num_batches}")
    return position


def _in_ticks_of(run: Run, plan: Run) -> Run:
    """Return a plan with the ticks of a run. Raises OtherRun where its sizes are no multiples of them."""
    size = run.tick_samples
    if size == plan.tick_samples:
        return plan
    for stage in plan.stages:
        if stage.global_batch_size % size:
            raise OtherRun(
                found=f"global_batch_size={stage.global_batch_size} from step {stage.step} on",
                expected=f"a multiple of {size}, which the order of the state takes at once",
            )
    sources = []
    for source in plan.sources:
        assert source.samples is not None
        sizes = sizes_of_order(source.samples, size, source.order.group)
        sources.append(replace(source, order=replace(source.order, **sizes)))
    return replace(plan, sources=tuple(sources))


def _with_samples(run: Run, plan: Run, step: int) -> Run:
    """Return a run with the samples of a plan. Raises OtherRun where some from a step on are missing."""
    known = {source.name: source.samples for source in plan.sources}
    for held in run.held_from(step):
        for name in held.weights.keys() - known.keys():
            raise OtherRun(
                f"the run has samples of {name} from step {held.step} on; keep it in input_shards, without a "
                "weight if it is to be dropped",
                found=list(known),
                expected=name,
            )
    sources = [replace(source, samples=known.get(source.name)) for source in run.sources]
    return replace(run, sources=tuple(sources))


@dataclass(kw_only=True)
class Progress:
    """Where a loader's loop stands. Looking at the loader does not change it."""

    delivered: Position = Position()  # noqa: RUF009  immutable
    trained: Position | None = None  # of the optimizer's last step; None: the loop does not say it
    num_left: int = 0  # steps of the run that set_epoch left out, minus those that came again
    left_at: int = 0  # steps that the loop had when set_epoch last left an epoch
    is_loaded: bool = False  # a state was loaded, and no iter() began since

    @property
    def to_save(self) -> Position:
        """Return the position that a state has: what was trained, or else what was delivered."""
        return self.delivered if self.trained is None else self.trained

    def load(self, position: Position, num_left: int) -> None:
        """Stand where a state stands."""
        self._go_to(position)
        self.num_left, self.left_at, self.is_loaded = num_left, 0, True

    def leave_for(self, epoch: int, run: Run) -> None:
        """Make an epoch the next one, from its first step.

        Raises UsageError where a state that was loaded would be thrown away.
        """
        if epoch > MAX_EPOCH:
            raise UsageError.of_value("epoch", epoch, f"at most {MAX_EPOCH}")
        if self.is_loaded:
            raise UsageError(
                f"set_epoch({epoch}) would throw away the state that was loaded, which goes on in epoch "
                f"{run.epoch_of(self.delivered.step)}; let the loop begin there, as "
                'range(loader.state_dict()["epoch"], num_epochs) does, or make a loader without the state'
            )
        if self.delivered == Position():
            logger.warning(
                "set_epoch(%d) on a loader that delivered nothing: epoch %d comes from its first step. A run "
                "that goes on inside of it needs load_state_dict before, also under Trainer's "
                "ignore_data_skip=True",
                epoch,
                epoch,
            )
        before = self.delivered.step
        self.left_at = before - self.num_left
        self._go_to(Position(run.first_step(epoch)))
        self.num_left += self.delivered.step - before

    def _go_to(self, position: Position) -> None:
        self.delivered = position
        if self.trained is not None:
            self.trained = position
