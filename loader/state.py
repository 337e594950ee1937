"""The state that a checkpoint keeps, and how a loader goes on behind one.

A state has a position and the run that led there (run.py): its sources and its stages, as lists of plain
values. A loader's arguments say a run, too: its *plan*. Where the plan holds the same as the state's run from
the position on, the loader goes on by the state's. Else it refuses and says what differs, or, with ``amend``,
goes on by the plan from the next border on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from loader.order import Order
from loader.run import CYCLE, Held, Position, Run, Source, Stage, source_seed
from loader.sources import Plan, check_batch, check_slots, make_order, round_shares
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError

logger = logging.getLogger(__name__)

STATE_FORMAT, STATE_VERSION = "shardprep-loader-state", 4
MAX_EPOCH = 2**31 - 1  # workers are told the epoch in an int64
_OTHERWISE = "make the loader as it was when the state was saved, or start without the state"
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
    """The values of a state that another run may have other ones of."""

    epoch: _Count
    step: _Count
    num_micro: _Count
    num_left: int
    tick_samples: _Number
    sources: Annotated[list[_SourceRow], Meta(min_length=1)]
    stages: Annotated[list[_StageRow], Meta(min_length=1)]


def state_of(plan: Plan, position: Position, layout: Mapping[str, int], num_left: int) -> dict[str, Any]:
    """Return the state of a position. ``num_left``: steps of epochs that the loop left.

    All states have the same keys, and lists without dicts in them: torch.distributed.checkpoint reads only
    the keys that a fresh loader's state has.
    """
    run = plan.run
    sources, stages = [], []
    for source in run.sources:
        order = source.order
        sizes = order.num_samples, order.block_samples, order.window_samples
        sources.append([*_SourceRow(source.name, source.data, *sizes, source.added_at)])
    for stage in run.stages:
        shares = None if stage.shares is None else list(stage.shares)
        size = stage.ticks_per_step * run.tick_samples
        stages.append([*_StageRow(stage.step, size, shares, stage.is_amended)])
    return {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        **position._asdict(),
        "num_left": num_left,
        "layout": dict(layout),
        "tick_samples": run.tick_samples,
        "sources": sources,
        "stages": stages,
        "fingerprint": dict(plan.fingerprint),
    }


class GoesOn(NamedTuple):
    """How a loader goes on behind a state."""

    plan: Plan
    position: Position
    num_left: int
    amended_at: int | None  # the step from which on the loader's own plan holds, if it does not already


def go_on(plan: Plan, state: Mapping[str, Any], layout: Mapping[str, int], *, amend: bool) -> GoesOn:
    """Return what a loader of a plan delivers behind a state, and from where on.

    Raises OtherRun, OtherTokenizer, BrokenShard, UnknownVersion or UsageError.
    """
    _check_fingerprint(state, plan)
    saved = _read(state)
    position = Position(saved.epoch, saved.step, saved.num_micro)
    if amend and position == Position() and saved.tick_samples != plan.run.tick_samples:
        return GoesOn(plan, position, saved.num_left, 0)  # no sample was delivered in ticks of that size
    run = _run_of(saved, plan, layout)
    given, plan = plan, _in_order_of(run, plan)
    _check_data(run, plan.run)
    _check_position(position, state, run, layout)
    step = run.step_of(position)
    # What was amended later is compared from there on: a step before it is gone on from as it was.
    since = max(step, run.last_amendment())
    found, wanted = run.held_from(since), plan.run.held_from(since)
    if found == wanted:
        return GoesOn(_with_run(plan, run, step), position, saved.num_left, None)
    difference = f"{_words(found)} in the state, {_words(wanted)} here"
    if not amend or run.is_validation:
        advice = "" if run.is_validation else "pass amend=True to change the run from the next border on, or "
        raise OtherRun(
            f"the state, of step {step}, is of another run: {difference}; {advice}{_OTHERWISE}",
            found=_words(found),
            expected=_words(wanted),
            remedy=None if run.is_validation else "amend=True",
        )
    if position.num_micro:
        raise UsageError(
            f"the state was saved inside of a step, after {position.num_micro} batches, and a run is "
            "amended between two steps; take a state of after the optimizer's step"
        )
    if not step:
        return GoesOn(given, position, saved.num_left, 0)  # no sample was delivered: the plan begins
    _check_past(run, plan.run, step, since)
    amended, border = run.amended(position, plan.run, _sources_in_ticks_of(run, plan))
    return GoesOn(_with_run(plan, amended, step), position, saved.num_left, border)


def _check_fingerprint(state: Mapping[str, Any], plan: Plan) -> None:
    """Raise BrokenShard for what is no state, OtherRun or OtherTokenizer for one of another fingerprint."""
    if not isinstance(state, Mapping):
        remedy = "loader.load_state_dict(torch.load(PATH))"
        raise UsageError(
            f"the state is {state!r:.80}, expected what state_dict() returned; of a file: {remedy}",
            found=f"{state!r:.80}",
            expected="what state_dict() returned",
            remedy=remedy,
        )
    if not _are_equal(state.get("format"), STATE_FORMAT):
        raise BrokenShard(
            f"this is no state of a loader: its format is {state.get('format')!r:.80}, expected "
            f"{STATE_FORMAT!r}; pass what state_dict() returned",
            found=f"{state.get('format')!r:.80}",
            expected=STATE_FORMAT,
            remedy="state_dict()",
        )
    saved, here = state.get("fingerprint"), dict(plan.fingerprint)
    version, expected = state.get("version"), STATE_VERSION
    if _are_equal(version, expected):
        if not isinstance(saved, Mapping):
            raise BrokenShard(found=f"the state's fingerprint is {saved!r:.80}", expected="a dict")
        version, expected = saved.get("order_version"), here["order_version"]
    if not _are_equal(version, expected):
        raise UnknownVersion(
            f"the state, or the order of samples in it, has version {version!r:.80}, this shardprep reads "
            f"{expected}; go on with the shardprep that saved it, or start without the state",
            found=f"{version!r:.80}",
            expected=expected,
        )
    assert isinstance(saved, Mapping)
    if not plan.run.is_mixture and isinstance(data := _data_in(state), str):
        saved, here = {"data": data, **saved}, {"data": plan.run.sources[0].data, **here}
    differing = [name for name in {**here, **saved} if not _are_equal(saved.get(name), here.get(name))]
    if differing:
        found = "; ".join(f"{name} {saved.get(name)!r:.20}" for name in differing)
        wanted = "; ".join(f"{name} {here.get(name)!r:.20}" for name in differing)
        error = OtherTokenizer if differing == ["tokenizer"] else OtherRun
        raise error(
            f"the state is of another run: {found} in the state, {wanted} here; {_OTHERWISE}",
            found=found,
            expected=wanted,
        )


def _are_equal(saved: Any, mine: Any) -> bool:
    """Compare two values; an array in a state equals nothing that this loader has."""
    try:
        return bool(saved == mine)
    except (RuntimeError, ValueError, TypeError):
        return False


def _data_in(state: Mapping[str, Any]) -> object:
    """Return which data the only source of a state is, if it says so."""
    try:
        return state["sources"][0][1]
    except (KeyError, IndexError, TypeError):
        return None


def _read(state: Mapping[str, Any]) -> _State:
    """Return the values of a state that have a meaning of their own. Raises BrokenShard."""
    try:
        saved = msgspec.convert(
            {name: state[name] for name in _State.__annotations__ if name in state}, _State
        )
    except msgspec.ValidationError as error:
        raise BrokenShard(
            f"the state is damaged: {error}; take another one", found=str(error), expected="other values"
        ) from None
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


def _damaged(name: str, expected: str) -> BrokenShard:
    found = f"{name} of the state"
    return BrokenShard(
        f"{found} are damaged, expected {expected}; take another one", found=found, expected=expected
    )


def _run_of(saved: _State, plan: Plan, layout: Mapping[str, int]) -> Run:
    """Return the run of a state, in equal batches of this loader. Raises BrokenShard or OtherRun."""
    of_plan, size = plan.run, saved.tick_samples
    like = of_plan.sources[0].order
    if size != like.tick_samples:
        try:
            check_batch(layout["batch_size"], size, layout["world_size"])
            check_slots(size, like.group, layout["world_size"])
        except UsageError as error:
            raise OtherRun(
                f"global_batch_size {size} in the state, {like.tick_samples} here; the order of the state "
                f"takes {size} samples at once, of which any later size is a multiple, in equal batches: "
                f"{error}",
                found=error.found,
                expected=error.expected,
            ) from None
    try:
        sources = []
        for number, row in enumerate(saved.sources):
            order = Order(
                num_samples=row.num_samples,
                tick_samples=size,
                block_samples=row.block_samples,
                window_samples=row.window_samples,
                seed=source_seed(of_plan.seed, number) if of_plan.is_mixture else of_plan.seed,
                shuffle=like.shuffle,
                group=like.group,
                keeps_tail=like.keeps_tail,
            )
            sources.append(Source(name=row.name, data=row.data, order=order, added_at=row.added_at))
        stages = [
            Stage(
                step=row.step,
                ticks_per_step=row.global_batch_size // size,
                shares=None if row.shares is None else tuple(row.shares),
                is_amended=row.is_amended,
            )
            for row in saved.stages
        ]
        return Run(
            sources=tuple(sources),
            stages=tuple(stages),
            batches_per_tick=size // (layout["batch_size"] * layout["world_size"]),
            seed=of_plan.seed,
            is_mixture=of_plan.is_mixture,
        )
    except UsageError as error:  # of orders and sizes that no run has
        raise BrokenShard(f"the state is damaged: {error}") from None


def _in_order_of(run: Run, plan: Plan) -> Plan:
    """Return the plan with its sources in the order that a run has them in, by which shares are rounded."""
    places = {source.name: number for number, source in enumerate(run.sources)}
    of_plan = plan.run.sources
    order = sorted(range(len(of_plan)), key=lambda number: places.get(of_plan[number].name, len(places)))
    weights = {step: tuple(shares[number] for number in order) for step, shares in plan.weights}
    stages = [
        stage if stage.shares is None else replace(stage, shares=round_shares(weights[stage.step]))
        for stage in plan.run.stages
    ]
    sources = tuple(of_plan[number] for number in order)
    return replace(
        plan,
        run=replace(plan.run, sources=sources, stages=tuple(stages)),
        samples=tuple(plan.samples[number] for number in order),
        weights=tuple(weights.items()),
    )


def _check_position(
    position: Position, state: Mapping[str, Any], run: Run, layout: Mapping[str, int]
) -> None:
    """Raise BrokenShard for a position that the run does not have, UsageError for one inside of a step of
    another layout."""
    if position.num_micro and not _are_equal(state.get("layout"), dict(layout)):
        raise UsageError(
            f"the state was saved inside of a step, after {position.num_micro} batches of "
            f"{state.get('layout')!r:.80}, this loader has {dict(layout)}; save it after the optimizer's "
            "step to change them, or resume with the same"
        )
    steps_per_epoch = run.steps_in(position.epoch)
    if position.step >= steps_per_epoch:
        raise BrokenShard(
            f"the state stands at {position}, expected a step below {steps_per_epoch}",
            found=position,
            expected=f"a step below {steps_per_epoch}",
        )
    num_batches = run.batches_in_step(run.step_of(position))
    if position.num_micro >= num_batches:
        raise UsageError(f"the state has {position.num_micro} batches of a step of {num_batches}")


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
                "keeps its folders, in their order, through a run: give it those, and add others as a source "
                f"of their own, {remedy}, with weights for both and amend=True",
                found=found,
                expected=expected,
                remedy=remedy,
            )


def _check_past(run: Run, plan: Run, step: int, since: int) -> None:
    """Raise OtherRun where stages of the plan that were over at a step are not those of the run since its
    last amendment. An argument without a schedule says nothing of the past, and one that changes nothing is
    not asked."""
    first = max((stage.step for stage in run.stages if stage.is_amended and stage.step <= step), default=0)
    for field in ("global_batch_size", "shares"):
        if _stages_of(run.held_from(since), field) == _stages_of(plan.held_from(since), field):
            continue
        end = [begin for begin, _ in _stages_of(plan.held_from(0), field) if begin <= step][-1]
        found, wanted = run.held_from(first, end), plan.held_from(first, end)
        if first < end and _stages_of(found, field) != _stages_of(wanted, field):
            raise OtherRun(
                f"the stages of the steps {first} to {end} are over: {_words(found)} in the state, "
                f"{_words(wanted)} here; keep them, or pass weights and global_batch_size without a schedule",
                found=_words(found),
                expected=_words(wanted),
            )


def _stages_of(held: Sequence[Held], field: str) -> list[tuple[int, Any]]:
    """Return the steps at which one field of what holds changes, with its values."""
    stages: list[tuple[int, Any]] = []
    for each in held:
        value = getattr(each, field)
        if not stages or stages[-1][1] != value:
            stages.append((each.step, value))
    return stages


def _sources_in_ticks_of(run: Run, plan: Plan) -> list[Source]:
    """Return the plan's sources in ticks of another run. Raises OtherRun where its sizes do not fit them."""
    size, like = run.tick_samples, plan.run.sources[0].order
    for held in plan.run.held_from(0):
        if held.global_batch_size % size:
            least = max(held.global_batch_size // size, 1) * size
            raise OtherRun(
                f"the global batch is {held.global_batch_size} here from step {held.step} on, and the order "
                f"of the state takes {size} samples at once: expected a multiple of {size}, such as {least} "
                f"or {least + size}; pass one of these, or start without the state",
                found=held.global_batch_size,
                expected=f"a multiple of {size}",
            )
    sources = []
    for source, samples in zip(plan.run.sources, plan.present, strict=True):
        order = source.order
        if order.tick_samples != size:
            order = make_order(samples, size, like.group, seed=order.seed, shuffle=like.shuffle)
        sources.append(replace(source, order=order))
    return sources


def _with_run(plan: Plan, run: Run, step: int) -> Plan:
    """Return the plan by another run, with its samples of each source. Raises OtherRun where it lacks some
    that are needed from a step on."""
    known = {source.name: samples for source, samples in zip(plan.run.sources, plan.samples, strict=True)}
    for held in run.held_from(step):
        for name in held.shares.keys() - known.keys():
            raise OtherRun(
                f"the run has samples of {name} from step {held.step} on, and this loader lacks them; keep "
                "it in input_shards, without a weight if it is to be dropped",
                found=list(known),
                expected=name,
            )
    return replace(plan, run=run, samples=tuple(known.get(source.name) for source in run.sources))


def _words(held: Sequence[Held]) -> str:
    """Say what holds: ``web 0.5, code 0.5, global_batch_size 8; from step 64 on web 1, ...``."""
    stages = []
    for each in held:
        begin = f"from step {each.step} on " if each.step else ""
        shares = [f"{name} {share / CYCLE:.4g}" for name, share in each.shares.items()]
        stages.append(begin + ", ".join([*shares, f"global_batch_size {each.global_batch_size}"]))
    return "; ".join(stages)


@dataclass(kw_only=True)
class Progress:
    """Where a loader's loop stands. Nothing that only looks changes it."""

    delivered: Position = Position()  # noqa: RUF009  immutable
    trained: Position | None = None  # of the optimizer's last step; None: the loop has not said it
    # Steps of the run that the loop left out by set_epoch, minus those that it got again; and how many it had
    # got when it last did so.
    num_left: int = 0
    left_at: int = 0
    is_loaded: bool = False  # a state was loaded, and not iterated since

    @property
    def to_save(self) -> Position:
        """What a state has: what was trained, where the loop says it, else what was delivered."""
        return self.delivered if self.trained is None else self.trained

    def load(self, position: Position, num_left: int) -> None:
        """Go on behind what a state says was delivered."""
        self._jump(position)
        self.num_left, self.left_at, self.is_loaded = num_left, 0, True

    def leave_for(self, epoch: int, run: Run) -> None:
        """Make an epoch the next one, from its first step.

        Raises UsageError where a state that was loaded would be thrown away.
        """
        if epoch > MAX_EPOCH:
            raise UsageError(f"epoch is {epoch}, expected at most {MAX_EPOCH}")
        if self.is_loaded:
            raise UsageError(
                f"set_epoch({epoch}) would throw away the state that was loaded, which goes on in epoch "
                f"{self.delivered.epoch} after {self.delivered.step} steps; let the loop begin there, as "
                f'range(loader.state_dict()["epoch"], num_epochs) does, or make a loader without the state'
            )
        if self.delivered == Position():
            logger.warning(
                "set_epoch(%d) on a loader that delivered nothing: epoch %d comes from its first step. A run "
                "that goes on inside of it needs load_state_dict before, also under Trainer's "
                "ignore_data_skip=True",
                epoch,
                epoch,
            )
        before = run.step_of(self.delivered)
        self.left_at = before - self.num_left
        self._jump(Position(epoch=epoch))
        self.num_left += run.step_of(self.delivered) - before

    def _jump(self, position: Position) -> None:
        """Stand at a position that the loop did not come to by batches."""
        self.delivered = position
        if self.trained is not None:
            self.trained = position
