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
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from loader.run import CYCLE, Position, Run, Source, Stage, source_seed
from loader.samples import check_batch, sizes_of_order
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
    """The values of a state, but for its format and version."""

    epoch: _Count
    step: _Count
    num_micro: _Count
    num_left: int
    layout: dict[str, _Number]
    tick_samples: _Number
    sources: Annotated[list[_SourceRow], Meta(min_length=1)]
    stages: Annotated[list[_StageRow], Meta(min_length=1)]
    fingerprint: dict[str, Any]


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
    saved = _read(state)
    _check_fingerprint(saved, plan)
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
                found=f"the state, of step {step}, is of another run: {in_state}",
                expected=f"{here}; pass {advice}the arguments of the run",
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
    known = {source.name: source.samples for source in given.sources}
    for held in run.held_from(step):
        for name in held.weights.keys() - known.keys():
            raise OtherRun(
                found=f"sources {list(known)}, in a run that has samples of {name} from step {held.step} on",
                expected=f"{name} in input_shards, too, without a weight if it is to be dropped",
            )
    sources = [replace(source, samples=known.get(source.name)) for source in run.sources]
    return replace(run, sources=tuple(sources)), position, saved.num_left, border


def _read(state: Mapping[str, Any]) -> _State:
    """Return the values of a state. Raises UsageError, BrokenShard or UnknownVersion."""
    if not isinstance(state, Mapping):
        raise UsageError(
            found=f"the state is {state!r:.80}",
            expected="what state_dict() returned",
            remedy="loader.load_state_dict(torch.load(PATH))",
        )
    if state.get("format") != STATE_FORMAT:
        found = f"the state's format is {state.get('format')!r:.80}"
        expected = f"{STATE_FORMAT}, as state_dict() returns it"
        raise BrokenShard(found=found, expected=expected, remedy="state_dict()")
    if state.get("version") != STATE_VERSION:
        raise UnknownVersion(
            found=f"the state has version {state.get('version')!r:.80}",
            expected=f"{STATE_VERSION}; go on with the shardprep that saved it, or start without the state",
        )
    known = {name: state[name] for name in _State.__annotations__ if name in state}
    try:
        saved = as_type(Path("state"), known, _State)
    except BrokenShard as error:
        raise _damaged(error.found, error.expected) from None
    names, added = [row.name for row in saved.sources], [row.added_at for row in saved.sources]
    steps, shares = [row.step for row in saved.stages], [row.shares for row in saved.stages]
    is_of_run = (
        len(set(names)) == len(names)
        and added[0] == 0
        and added == sorted(added)
        and steps[0] == 0
        and steps == sorted(set(steps))
        and shares[0] is not None
        and all(each is None or (len(each) <= len(names) and sum(each) == CYCLE) for each in shares)
        and not any(row.global_batch_size % saved.tick_samples for row in saved.stages)
    )
    if not is_of_run:
        raise _damaged("sources and stages", "some that a run can have")
    return saved


def _damaged(found: object, expected: object) -> BrokenShard:
    return BrokenShard(found=f"the state is damaged: its {found}", expected=f"{expected}; take another one")


def _check_fingerprint(saved: _State, plan: Run) -> None:
    """Raise OtherRun, OtherTokenizer or UnknownVersion for a state of another fingerprint."""
    then, here = dict(saved.fingerprint), plan.fingerprint
    if not plan.is_mixture:  # no source can be added: its only data is part of what it is
        then["data"], here["data"] = saved.sources[0].data, plan.sources[0].data
    differing = [name for name in {**here, **then} if then.get(name) != here.get(name)]
    if not differing:
        return
    found, wanted = ("; ".join(f"{name} {of.get(name)!r:.20}" for name in differing) for of in (then, here))
    error: type[Refused] = OtherTokenizer if differing == ["tokenizer"] else OtherRun
    advice = "make the loader as it was when the state was saved"
    if "order_version" in differing:
        error, advice = UnknownVersion, "go on with the shardprep that saved it"
    found, expected = f"the state is of another run: {found}", f"{wanted}; {advice}, or start without it"
    raise error(found=found, expected=expected)


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
        for step, global_batch_size, shares, is_amended in saved.stages:
            if shares is not None:
                of_names = zip(sources, shares, strict=False)
                weights = {source.name: share / CYCLE for source, share in of_names}
            stage = Stage(step=step, global_batch_size=global_batch_size, weights=weights)
            stages.append(replace(stage, begins_round=shares is not None, is_amended=is_amended))
        num_batches = size // (layout["batch_size"] * layout["world_size"])
        return replace(plan, sources=tuple(sources), stages=tuple(stages), batches_per_tick=num_batches)
    except UsageError as error:  # of orders and sizes that no run has
        raise BrokenShard(f"the state is damaged: {error}") from None


def _check_data(run: Run, plan: Run) -> None:
    """Raise OtherRun where a source is other data than in the state."""
    here = {source.name: source for source in plan.sources}
    for then in run.sources:
        now = here.get(then.name, then)
        found, expected = (f"data {of.data}, {of.order.num_samples:,} samples" for of in (then, now))
        if found != expected:
            remedy = f'{{"{then.name}": ..., "{then.name}_2": NEW}}'
            raise OtherRun(
                found=f"the source {then.name} is other data in the state: {found}",
                expected=f"{expected}. A source keeps its folders, in their order, through a run; add others "
                f"as a source of their own, {remedy}, with weights for both and amend=True",
                remedy=remedy,
            )


def _position_of(saved: _State, run: Run, layout: Mapping[str, int]) -> Position:
    """Return the position of a state. Raises BrokenShard or UsageError where it does not fit the run."""
    if saved.num_micro and saved.layout != layout:
        raise UsageError(
            found=f"a state inside of a step, after {saved.num_micro} batches of {saved.layout}",
            expected=f"one of after the optimizer's step, or a loader of these batches, not {dict(layout)}",
        )
    if saved.step >= (num_steps := run.steps_in(saved.epoch)):
        raise _damaged(f"step is {saved.step} of epoch {saved.epoch}", f"a step below {num_steps}")
    position = Position(run.first_step(saved.epoch) + saved.step, saved.num_micro)
    if saved.num_micro >= (num_batches := run.batches_in_step(position.step)):
        raise UsageError(found=f"a state after {saved.num_micro} batches", expected=f"below {num_batches}")
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
            at = run.epoch_of(self.delivered.step)
            found = f"set_epoch({epoch}), which would throw away a loaded state that goes on in epoch {at}"
            expected = 'range(loader.state_dict()["epoch"], num_epochs), or a loader without the state'
            raise UsageError(found=found, expected=expected)
        if self.delivered == Position():
            logger.warning(
                f"set_epoch({epoch}) on a loader that delivered nothing: that epoch comes from its first "
                "step. A run that goes on inside of it needs load_state_dict before, also under Trainer's "
                "ignore_data_skip=True"
            )
        before = self.delivered.step
        self.left_at = before - self.num_left
        self._go_to(Position(run.first_step(epoch)))
        self.num_left += self.delivered.step - before

    def _go_to(self, position: Position) -> None:
        self.delivered = position
        if self.trained is not None:
            self.trained = position
