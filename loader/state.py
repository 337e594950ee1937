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
from operator import index
from typing import Any, NoReturn

from loader.order import Order
from loader.run import CYCLE, Held, Position, Run, Source, Stage, source_seed
from loader.sources import Plan, check_batch, check_slots, make_order
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError

logger = logging.getLogger(__name__)

STATE_FORMAT, STATE_VERSION = "shardprep-loader-state", 4
MAX_EPOCH = 2**31 - 1  # workers are told the epoch in an int64
_HASH_DIGITS = 64
_OTHERWISE = "make the loader as it was when the state was saved, or start without the state"


class OtherRun(Refused):
    """A loader's state is of other data, or of another order."""


def state_of(plan: Plan, position: Position, layout: Mapping[str, int], num_left: int) -> dict[str, Any]:
    """Return the state of a position. ``num_left``: steps of epochs that the loop left.

    All states have the same keys, and lists without dicts in them: torch.distributed.checkpoint reads only
    the keys that a fresh loader's state has.
    """
    run = plan.run
    return {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        **position._asdict(),
        "num_left": num_left,
        "layout": dict(layout),
        "tick_samples": run.tick_samples,
        "sources": [
            [
                source.name,
                source.data,
                source.order.num_samples,
                source.order.block_samples,
                source.order.window_samples,
                source.added_at,
            ]
            for source in run.sources
        ],
        "stages": [
            [
                stage.step,
                stage.ticks_per_step * run.tick_samples,
                None if stage.shares is None else list(stage.shares),
                stage.is_amended,
            ]
            for stage in run.stages
        ],
        "fingerprint": dict(plan.fingerprint),
    }


def go_on(
    plan: Plan, state: Mapping[str, Any], layout: Mapping[str, int], *, amend: bool
) -> tuple[Plan, Position, int | None]:
    """Return what a loader of a plan delivers behind a state, from where on, and the step from which on that
    amends the state's run, None if it does not.

    Raises OtherRun, OtherTokenizer, BrokenShard or UsageError.
    """
    _check_state(state, plan)
    is_new = all(_are_equal(state.get(name), 0) for name in Position._fields)
    if amend and is_new and not _are_equal(state.get("tick_samples"), plan.run.tick_samples):
        return plan, Position(), 0  # no sample was delivered in ticks of that size
    run = _run_of(state, plan, layout)
    _check_data(run, plan.run)
    position = _position_of(state, run, layout)
    step = run.step_of(position)
    since = max(step, run.last_amendment())
    found, wanted = run.held_from(since), plan.run.held_from(since)
    if found == wanted:
        return _with_run(plan, run, step), position, None
    difference = _difference(found, wanted)
    if plan.run.sources[0].order.keeps_tail:
        _refuse(f"the state is of another run: {difference}; {_OTHERWISE}", found, wanted)
    if not amend:
        raise OtherRun(
            f"the state, of step {step}, is of another run: {difference}; pass amend=True to change the run "
            f"from the next border on, at most 64 steps later, or {_OTHERWISE}",
            found=_words(found),
            expected=_words(wanted),
            remedy="amend=True",
        )
    if position.num_micro:
        raise UsageError(
            f"the state was saved inside of a step, after {position.num_micro} batches, and a run is "
            "amended between two steps; take a state of after the optimizer's step"
        )
    if not step:
        return plan, position, 0  # no sample was delivered: the run begins with the plan
    _check_past(run, plan.run, step)
    amended, border = run.amended(position, _laid_out(plan, run))
    return _with_run(plan, amended, step), position, border


def _refuse(message: str, found: Sequence[Held], wanted: Sequence[Held]) -> NoReturn:
    raise OtherRun(message, found=_words(found), expected=_words(wanted))


def _damaged(name: str, value: object, expected: str) -> BrokenShard:
    found = f"{name} is {value!r:.80}"
    return BrokenShard(
        f"the state is damaged: its {found}, expected {expected}; take another state",
        found=found,
        expected=expected,
    )


def _check_state(state: Mapping[str, Any], plan: Plan) -> None:
    """Raise BrokenShard for what is no state, OtherRun or OtherTokenizer for one of another fingerprint."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"the state is {state!r:.80}, expected what state_dict() returned; of a file: "
            "loader.load_state_dict(torch.load(PATH))",
            found=f"{state!r:.80}",
            expected="what state_dict() returned",
            remedy="loader.load_state_dict(torch.load(PATH))",
        )
    if not _are_equal(state.get("format"), STATE_FORMAT):
        raise BrokenShard(
            f"this is no state of a loader: its format is {state.get('format')!r:.80}, expected "
            f"{STATE_FORMAT!r}; pass what state_dict() returned",
            found=f"{state.get('format')!r:.80}",
            expected=STATE_FORMAT,
            remedy="state_dict()",
        )
    saved = state.get("fingerprint")
    version = state.get("version")
    if _are_equal(version, STATE_VERSION) and not isinstance(saved, Mapping):
        raise _damaged("fingerprint", saved, "a dict")
    expected = STATE_VERSION
    if _are_equal(version, STATE_VERSION) and isinstance(saved, Mapping):
        version, expected = saved.get("order_version"), plan.fingerprint["order_version"]
    if not _are_equal(version, expected):
        raise UnknownVersion(
            f"the state, or the order of samples in it, has version {version!r:.80}, this shardprep reads "
            f"{expected}; go on with the shardprep that saved it, or start without the state",
            found=f"{version!r:.80}",
            expected=expected,
        )
    assert isinstance(saved, Mapping)
    here = plan.fingerprint
    if not plan.run.is_mixture and isinstance(data := _data_in(state), str):
        saved, here = {"data": data, **saved}, {"data": plan.run.sources[0].data, **here}
    differing = [name for name in {**here, **saved} if not _are_equal(saved.get(name), here.get(name))]
    if differing:
        parts = [
            f"{name} {_short(saved.get(name))} in the state, {_short(here.get(name))} here"
            for name in differing
        ]
        error = OtherTokenizer if differing == ["tokenizer"] else OtherRun
        raise error(
            f"the state is of another run: {'; '.join(parts)}; {_OTHERWISE}",
            found="; ".join(f"{name} {_short(saved.get(name))}" for name in differing),
            expected="; ".join(f"{name} {_short(here.get(name))}" for name in differing),
        )


def _data_in(state: Mapping[str, Any]) -> object:
    """Return which data the only source of a state is, if it says so."""
    try:
        return state["sources"][0][1]
    except (KeyError, IndexError, TypeError):
        return None


def _are_equal(saved: Any, mine: Any) -> bool:
    """Compare two values; an array in a state equals nothing that this loader has."""
    try:
        return bool(saved == mine)
    except (RuntimeError, ValueError, TypeError):
        return False


def _short(value: Any) -> str:
    is_hash = isinstance(value, str) and len(value) == _HASH_DIGITS
    return f"{value[:12] if is_hash else value!r:.80}"


# A row of ``sources``, and of ``stages``: what each value has to be.
_SOURCE_ROW = (str, str, int, int, int, int)
_STAGE_ROW = (int, int, (list, type(None)), bool)


def _rows(state: Mapping[str, Any], name: str, kinds: Sequence[Any]) -> list[list[Any]]:
    """Return the rows of a state's list. Raises BrokenShard unless they have these values, none below 0."""
    rows = state.get(name)
    expected = f"a list of rows of {len(kinds)} values"
    if not isinstance(rows, list) or not rows:
        raise _damaged(name, rows, expected)
    for row in rows:
        if not isinstance(row, list) or len(row) != len(kinds):
            raise _damaged(name, row, expected)
        for value, kind in zip(row, kinds, strict=True):
            is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if not is_right or (isinstance(value, int) and value < 0):
                raise _damaged(name, row, "other values in this row")
    return rows


def _run_of(state: Mapping[str, Any], plan: Plan, layout: Mapping[str, int]) -> Run:
    """Return the run of a state, in equal batches of this loader. Raises BrokenShard or OtherRun."""
    size = state.get("tick_samples")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _damaged("tick_samples", size, "a whole number of at least 1")
    of_plan = plan.run
    if size != of_plan.tick_samples:
        try:
            check_batch(layout["batch_size"], size, layout["world_size"])
            check_slots(size, of_plan.group, layout["world_size"])
        except UsageError as error:
            raise OtherRun(
                f"global_batch_size {size} in the state, {of_plan.tick_samples} here; the order of the state "
                f"takes {size} samples at once, of which any later size is a multiple, in equal batches: "
                f"{error}",
                found=error.found,
                expected=error.expected,
            ) from None
    try:
        return Run(
            sources=tuple(_sources_of(state, of_plan, size)),
            stages=tuple(_stages_of(state, size)),
            batches_per_tick=size // (layout["batch_size"] * layout["world_size"]),
            seed=of_plan.seed,
            is_mixture=of_plan.is_mixture,
        )
    except UsageError as error:  # of orders and sizes that no run has
        raise BrokenShard(f"the state is damaged: {error}") from None


def _sources_of(state: Mapping[str, Any], plan: Run, size: int) -> list[Source]:
    sources: list[Source] = []
    like = plan.sources[0].order
    for name, data, num_samples, block_samples, window_samples, added_at in _rows(
        state, "sources", _SOURCE_ROW
    ):
        order = Order(
            num_samples=num_samples,
            tick_samples=size,
            block_samples=block_samples,
            window_samples=window_samples,
            seed=source_seed(plan.seed, len(sources)) if plan.is_mixture else plan.seed,
            shuffle=like.shuffle,
            group=like.group,
            keeps_tail=like.keeps_tail,
        )
        sources.append(Source(name=name, data=data, order=order, added_at=added_at))
        if not block_samples or not window_samples:
            raise _damaged("sources", state["sources"], "blocks and windows of at least 1 sample")
    names, added = [source.name for source in sources], [source.added_at for source in sources]
    if len(set(names)) < len(names) or added[0] or added != sorted(added):
        raise _damaged("sources", state["sources"], "different names, in the order in which they were added")
    return sources


def _stages_of(state: Mapping[str, Any], size: int) -> list[Stage]:
    stages: list[Stage] = []
    num_sources = len(state["sources"])
    for step, global_batch_size, shares, is_amended in _rows(state, "stages", _STAGE_ROW):
        are_shares = shares is None or (
            len(shares) <= num_sources
            and all(type(share) is int and share >= 0 for share in shares)
            and sum(shares) == CYCLE
        )
        if not are_shares or not global_batch_size or global_batch_size % size:
            expected = f"shares of {num_sources} sources, {CYCLE} in all, and a multiple of {size}"
            raise _damaged("stages", state["stages"], expected)
        stages.append(
            Stage(
                step=step,
                ticks_per_step=global_batch_size // size,
                shares=None if shares is None else tuple(shares),
                is_amended=is_amended,
            )
        )
    steps = [stage.step for stage in stages]
    if steps[0] or any(first >= later for first, later in pairwise(steps)) or stages[0].shares is None:
        raise _damaged("stages", state["stages"], "steps that ascend from 0, the first one with shares")
    return stages


def whole_number_in(state: Mapping[str, Any], name: str) -> int:
    """Return a number of a state. Raises BrokenShard."""
    try:
        return index(state[name])
    except (KeyError, TypeError):
        raise _damaged(name, state.get(name), "a whole number") from None


def _position_of(state: Mapping[str, Any], run: Run, layout: Mapping[str, int]) -> Position:
    """Return the position that a state holds. Raises BrokenShard, or UsageError for one inside of a step of
    another layout."""
    position = Position(*(whole_number_in(state, name) for name in Position._fields))
    if position.num_micro and not _are_equal(state.get("layout"), dict(layout)):
        raise UsageError(
            f"the state was saved inside of a step, after {position.num_micro} batches of "
            f"{state.get('layout')!r:.80}, this loader has {dict(layout)}; save it after the optimizer's "
            "step to change them, or resume with the same"
        )
    most = max(position.epoch, position.num_micro)
    steps_per_epoch = run.steps_in(position.epoch) if 0 <= position.epoch <= MAX_EPOCH else 0
    if min(position) < 0 or position.step >= steps_per_epoch or most > MAX_EPOCH:
        raise BrokenShard(
            f"the state stands at {position}, expected a step below {steps_per_epoch} of an epoch up to "
            f"{MAX_EPOCH}",
            found=position,
            expected=f"a step below {steps_per_epoch}",
        )
    num_batches = run.batches_in_step(run.step_of(position))
    if position.num_micro >= num_batches:
        raise UsageError(f"the state has {position.num_micro} batches of a step of {num_batches}")
    return position


def _check_data(run: Run, plan: Run) -> None:
    """Raise OtherRun where a source is other data than in the state."""
    here = {source.name: source for source in plan.sources}
    for then in run.sources:
        now = here.get(then.name, then)
        if (now.data, now.order.num_samples) == (then.data, then.order.num_samples):
            continue
        found = f"data {then.data}, {then.order.num_samples:,} samples"
        expected = f"data {now.data}, {now.order.num_samples:,} samples"
        raise OtherRun(
            f"the source {then.name} is other data: {found} in the state, {expected} here. A source keeps "
            "its folders, in their order, through a run: give it those, and add others as a source of their "
            "own, "
            f'{{"{then.name}": ..., "{then.name}_2": NEW}}, with weights for both and amend=True',
            found=found,
            expected=expected,
            remedy=f'{{"{then.name}": ..., "{then.name}_2": NEW}}',
        )


def _check_past(run: Run, plan: Run, step: int) -> None:
    """Raise OtherRun where stages of the plan that were over at a step are not those of the run since its
    last amendment. A plan of one stage says nothing of the past."""
    first = max((stage.step for stage in run.stages if stage.is_amended and stage.step <= step), default=0)
    end = [held.step for held in plan.held_from(0) if held.step <= step][-1]
    if first >= end:
        return
    found, wanted = run.held_from(first, end), plan.held_from(first, end)
    if found != wanted:
        _refuse(
            f"the arguments have other stages in the steps {first} to {end} than the state: "
            f"{_difference(found, wanted)}; keep the stages that are over, or pass weights and "
            "global_batch_size without a schedule",
            found,
            wanted,
        )


def _laid_out(plan: Plan, run: Run) -> Run:
    """Return the plan's run in ticks of another run. Raises OtherRun where its sizes do not fit them."""
    of_plan, size = plan.run, run.tick_samples
    for held in of_plan.held_from(0):
        if held.global_batch_size % size:
            less = max(held.global_batch_size // size, 1) * size
            raise OtherRun(
                f"the global batch is {held.global_batch_size} here from step {held.step} on, and the order "
                f"of the state takes {size} samples at once: expected a multiple of {size}, such as {less} "
                f"or {less + size}; pass one of these, or start without the state",
                found=held.global_batch_size,
                expected=f"a multiple of {size}",
            )
    if size == of_plan.tick_samples:
        return of_plan
    like = of_plan.sources[0].order
    sources = []
    for source, samples in zip(of_plan.sources, plan.samples, strict=True):
        assert samples is not None
        order = make_order(samples, size, like.group, seed=source.order.seed, shuffle=like.shuffle)
        sources.append(replace(source, order=order))
    ticks = of_plan.tick_samples // size
    stages = [replace(stage, ticks_per_step=stage.ticks_per_step * ticks) for stage in of_plan.stages]
    return replace(of_plan, sources=tuple(sources), stages=tuple(stages))


def _with_run(plan: Plan, run: Run, step: int) -> Plan:
    """Return the plan by another run, with its samples of each source. Raises OtherRun where it lacks some
    that are needed from a step on."""
    known = {source.name: samples for source, samples in zip(plan.run.sources, plan.samples, strict=True)}
    held = run.held_from(step)
    for each, end in zip(held, [*(later.step for later in held[1:]), None], strict=True):
        for name in each.shares.keys() - known.keys():
            until = f"the steps from {each.step} up to {end}" if end else f"all steps from {each.step} on"
            raise OtherRun(
                f"{until} have samples of {name}, which this loader does not have; keep it in input_shards, "
                "without a weight if it is to be dropped",
                found=list(known),
                expected=name,
            )
    return replace(plan, run=run, samples=tuple(known.get(source.name) for source in run.sources))


def _difference(found: Sequence[Held], wanted: Sequence[Held]) -> str:
    sizes = [[(each.step, each.global_batch_size) for each in held] for held in (found, wanted)]
    has_equal_sizes = {size for _, size in sizes[0]} == {size for _, size in sizes[1]} and (
        len({size for _, size in sizes[0]}) == 1
    )
    there, here = _words(found, sizes=not has_equal_sizes), _words(wanted, sizes=not has_equal_sizes)
    return f"{there} in the state, {here} here"


def _words(held: Sequence[Held], *, sizes: bool = True) -> str:
    """Say what holds: ``from step 0 on web 0.5, code 0.5, global_batch_size 8``."""
    stages = []
    for each in held:
        words = [f"{name} {share / CYCLE:.4g}" for name, share in each.shares.items()]
        if [*each.shares] == ["all"]:
            words = []
        if sizes or not words:
            words.append(f"global_batch_size {each.global_batch_size}")
        stages.append((f"from step {each.step} on " if len(held) > 1 or each.step else "") + ", ".join(words))
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
