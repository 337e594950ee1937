"""The position of a run, its steps, and the state that a checkpoint keeps.

A position counts global batches, which are the same on every number of ranks and workers; inside of a step it
also counts the batches of a rank. A step of training is a step of the order; with ``batch_size_schedule`` it
is some of them, each of as many samples as the greatest number that divides all sizes. An amendment may
change the sizes to other multiples of that number. So the order never changes. An epoch ends where another
global batch would not fit.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import gcd
from operator import index
from typing import Any, NamedTuple

from loader.mixture import check_first_steps
from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UnknownVersion, UsageError

_HASH_DIGITS = 64
STATE_FORMAT, STATE_VERSION = "shardprep-loader-state", 3
_WHY = {
    "data": "these are other shards",
    "tokenizer": "another tokenizer",
    "seed": "the order is another one",
}


class OtherRun(Refused):
    """A loader's state is of other data, or of another order."""


MAX_EPOCH = 2**31 - 1  # workers are told the epoch in an int64


class Position(NamedTuple):
    """What was delivered: whole global batches of an epoch, and batches of the step after them."""

    # No frozen dataclass: a new one for every batch takes 0.4 us instead of 1.2.
    epoch: int = 0
    step: int = 0
    num_micro: int = 0

    def after(self, micro_batches: int, steps_per_epoch: int) -> Position:
        """One batch later."""
        if self.num_micro + 1 < micro_batches:
            return Position(self.epoch, self.step, self.num_micro + 1)
        if self.step + 1 < steps_per_epoch:
            return Position(self.epoch, self.step + 1)
        return Position(self.epoch + 1)


def position_of(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], layout: Mapping[str, int], run: RunSteps
) -> Position:
    """The position that a state holds, for a loader of the same fingerprint. Raises OtherRun or
    OtherTokenizer, BrokenShard, or UsageError for one inside of a step of another layout."""
    check_run(state, fingerprint)
    counts = []
    for name in Position._fields:
        try:
            counts.append(index(state[name]))
        except (KeyError, TypeError):
            found = repr(state[name]) if name in state else "missing"
            raise BrokenShard(
                f"the state is damaged: its {name} is {found}, expected a whole number",
                found=f"{name} is {found}",
                expected="a whole number",
            ) from None
    position = Position(*counts)
    if position.num_micro and not are_equal(state.get("layout"), dict(layout)):
        raise UsageError(
            f"the state was saved inside of a step, after {position.num_micro} batches of "
            f"{state.get('layout')}, this loader has {dict(layout)}; save it after the optimizer's step "
            "to change them, or resume with the same"
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
    num_batches = run.batches_in(run.step_of(position))
    if position.num_micro >= num_batches:
        raise UsageError(f"the state has {position.num_micro} batches of a step of {num_batches}")
    return position


def check_run(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Raises BrokenShard for what is no state, OtherRun or OtherTokenizer for one of another fingerprint."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"the state is {state!r:.80}, expected what state_dict() returned; of a file: "
            "loader.load_state_dict(torch.load(PATH))",
            found=f"{state!r:.80}",
            expected="what state_dict() returned",
            remedy="loader.load_state_dict(torch.load(PATH))",
        )
    if state.get("format") != STATE_FORMAT:
        raise BrokenShard(
            f"this is no state of a loader: its format is {state.get('format')!r}, expected "
            f"{STATE_FORMAT!r}; pass what state_dict() returned",
            found=repr(state.get("format")),
            expected=STATE_FORMAT,
            remedy="state_dict()",
        )
    if not are_equal(state.get("version"), STATE_VERSION):
        raise UnknownVersion(
            f"the state has version {state.get('version')!r:.80}, this shardprep reads {STATE_VERSION}; go "
            "on with the shardprep that saved it, or start without the state",
            found=f"{state.get('version')!r:.80}",
            expected=STATE_VERSION,
        )
    saved = state.get("fingerprint")
    if not isinstance(saved, Mapping):
        raise BrokenShard(
            f"the state is damaged: its fingerprint is {saved!r:.80}, expected a dict; take another state",
            found=f"fingerprint is {saved!r:.80}",
            expected="a dict",
        )
    found, expected = saved.get("law_version"), fingerprint.get("law_version")
    if found != expected:
        raise UnknownVersion(
            f"the state has version {found!r:.80} of the order of samples, this shardprep has {expected}; go "
            "on with the shardprep that saved it, or start without the state",
            found=f"{found!r:.80}",
            expected=expected,
        )
    names = {**fingerprint, **saved}
    differing = [name for name in names if not are_equal(saved.get(name), fingerprint.get(name))]
    if not differing:
        return
    parts = [
        f"{name} {_short(saved.get(name))} in the state, {_short(fingerprint.get(name))} here"
        + (f" ({_WHY[name]})" if name in _WHY else "")
        for name in differing
    ]
    error = OtherTokenizer if differing == ["tokenizer"] else OtherRun
    raise error(
        f"the state is of another run: {'; '.join(parts)}; make the loader as it was when the state was "
        "saved, or start without the state",
        found="; ".join(f"{name} {_short(saved.get(name))}" for name in differing),
        expected="; ".join(f"{name} {_short(fingerprint.get(name))}" for name in differing),
    )


def are_equal(saved: Any, mine: Any) -> bool:
    """Whether two values are; an array in a state is nothing that this loader has."""
    try:
        return bool(saved == mine)
    except (RuntimeError, ValueError, TypeError):
        return False


def _short(value: Any) -> str:
    is_hash = isinstance(value, str) and len(value) == _HASH_DIGITS
    return repr(value[:12] if is_hash else value)


logger = logging.getLogger(__name__)

_BEGINNING = Position()


@dataclass(kw_only=True)
class RunProgress:
    """Changed by the loop of a TokenLoader, and by nothing that only looks."""

    delivered: Position = _BEGINNING
    next: Position = _BEGINNING  # where the next iter() begins
    began: Position = _BEGINNING  # where the run began: a new loader's beginning, or a loaded state
    left: Position | None = None  # where the run left an epoch, or jumped, if it did
    is_loaded: bool = False  # a state was loaded, and not iterated since
    trained: Position | None = None  # of the optimizer's last step; None: the loop has not said it

    @property
    def to_save(self) -> Position:
        """What a state has: what was trained, where the loop says it, else what was delivered."""
        return self.delivered if self.trained is None else self.trained

    def jump(self, position: Position) -> None:
        """Stand at a position that the loop did not come to by batches."""
        self.delivered = self.next = position
        if self.trained is not None:
            self.trained = position

    def begin_epoch(self) -> Position:
        """Take the epoch that is next; the one after it is next then."""
        start, self.next = self.next, Position(epoch=self.next.epoch + 1)
        if start != self.delivered:
            self.left = self.delivered
        self.delivered = start
        self.is_loaded = False
        return start

    def load(self, position: Position) -> None:
        """Go on behind what a state says was delivered: a run begins there."""
        self.jump(position)
        self.began = position
        self.left, self.is_loaded = None, True

    def set_epoch(self, epoch: int) -> None:
        """Make an epoch the next one. Raises UsageError where a loaded state would be thrown away."""
        if epoch == self.next.epoch:
            return
        if epoch > MAX_EPOCH:
            raise UsageError(f"epoch is {epoch}, expected at most {MAX_EPOCH}")
        if self.is_loaded:
            raise UsageError(
                f"set_epoch({epoch}) would throw away the state that was loaded, which goes on in epoch "
                f"{self.next.epoch} after {self.next.step} steps; let the loop begin there, as "
                f'range(loader.state_dict()["epoch"], num_epochs) does, or make a loader without the state'
            )
        if self.delivered != self.began:
            self.left = self.delivered
        else:
            self.began = Position(epoch=epoch)
            if epoch:
                logger.warning(
                    "set_epoch(%d) on a loader that delivered nothing: epoch %d comes from its first step. A "
                    "run that goes on inside of it needs load_state_dict before, also under Trainer's "
                    "ignore_data_skip=True",
                    epoch,
                    epoch,
                )
        self.jump(Position(epoch=epoch))

    def check_unbroken(self) -> None:
        """Raises UsageError where steps of the loop are no longer steps of the order."""
        if self.left is not None:
            raise UsageError(
                f"the run left epoch {self.left.epoch} after {self.left.step} of its steps and began another "
                "epoch, so the number of trained steps does not say which samples came; save state_dict() "
                "after the optimizer's step instead, and look at a first batch with loader.peek()"
            )


Ramp = Sequence[tuple[int, int]]  # from which step on which number


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """What each step of a run is made of; steps are counted through all epochs from 0. Raises UsageError
    where a global batch is more than an epoch."""

    order_steps_per_epoch: int
    num_batches: int  # of a rank, in a step of the order
    sizes: Ramp = ((0, 1),)  # steps of the order in a step of training
    amended: Sequence[tuple[int, int]] = ()  # at which steps the sizes were amended, in which epoch

    def __post_init__(self) -> None:
        most = max(size for _, size in self.sizes)
        if most > self.order_steps_per_epoch:
            raise UsageError(
                f"a global batch is {most} x the least, and an epoch has {self.order_steps_per_epoch} of "
                "these; lower it, or add data"
            )

    @cached_property
    def is_ramped(self) -> bool:
        return len(self.sizes) > 1

    def history(self, order_batch_size: int) -> int | str:
        """The sizes as a state has them, see ``SizeHistory``."""
        if (self.sizes, self.amended) == (RunSteps.sizes, RunSteps.amended):
            return order_batch_size
        epochs = {step: f"/{epoch}" for step, epoch in self.amended}
        stages = [f"{step}{epochs.get(step, '')}: {size * order_batch_size}" for step, size in self.sizes]
        return "; ".join([str(order_batch_size), *stages])

    @property
    def amended_at(self) -> int:
        """The step of the last amendment of sizes; 0 where there is none."""
        return max((step for step, _ in self.amended), default=0)

    def order_steps_in(self, step: int) -> int:
        return _at(self.sizes, step)

    def batches_in(self, step: int) -> int:
        """Batches of a rank in a step."""
        return self.num_batches * _at(self.sizes, step)

    @cached_property
    def _first_steps(self) -> list[int]:
        """Where epochs begin, as far as they were asked for; all from the first one in the last stage on."""
        return [0]

    def first_step(self, epoch: int) -> int:
        known = self._first_steps
        last_stage, size = self.sizes[-1]
        while len(known) <= epoch and known[-1] < last_stage:
            # An epoch that was over stays so.
            amended = [step for step, epoch in self.amended if step > known[-1] and epoch >= len(known)]
            known.append(min([self._last_fitting(known[-1]), *amended]))
        beyond = max(epoch - len(known) + 1, 0)
        return known[min(epoch, len(known) - 1)] + beyond * (self.order_steps_per_epoch // size)

    def steps_in(self, epoch: int) -> int:
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def order_steps_of(self, epoch: int) -> int:
        """Steps of the order that an epoch uses; all of them unless the steps of training do not fit."""
        first = self.first_step(epoch)
        return self._taken(first, self.first_step(epoch + 1))

    def order_step(self, position: Position) -> int:
        """The step of the order, in its epoch, at which a position stands."""
        first = self.first_step(position.epoch)
        return self._taken(first, first + position.step) + position.num_micro // self.num_batches

    def step_of(self, position: Position) -> int:
        return self.first_step(position.epoch) + position.step

    def position(self, step: int) -> Position:
        """Where a step begins."""
        fewest = self.order_steps_per_epoch // max(size for _, size in self.sizes)  # steps of a whole epoch
        epochs = range(step // fewest + len(self.amended) + 1)
        epoch = bisect_right(epochs, step, key=self.first_step) - 1
        return Position(epoch=epoch, step=step - self.first_step(epoch))

    def total_order_steps(self, position: Position) -> int:
        """Steps of the order before a position, counted through all epochs, with what these leave out."""
        return position.epoch * self.order_steps_per_epoch + self.order_step(position)

    def first_of_order(self, step: int) -> int:
        """The step of the order at which a step begins, counted through all epochs."""
        return self.total_order_steps(self.position(step))

    def step_from(self, order_step: int) -> int:
        """The step that begins at a step of the order, counted through all epochs."""
        epoch, within = divmod(order_step, self.order_steps_per_epoch)
        first = self.first_step(epoch)
        ends = range(first, first + self.order_steps_per_epoch)
        return first + bisect_left(ends, within, key=partial(self._taken, first))

    def _last_fitting(self, first: int) -> int:
        """Where an epoch that begins at a step has no room for another one."""
        ends = range(first, first + self.order_steps_per_epoch + 1)
        return ends[bisect_right(ends, self.order_steps_per_epoch, key=partial(self._taken, first)) - 1]

    def _taken(self, first: int, end: int) -> int:
        """Steps of the order in the steps of [first, end)."""
        total = 0
        for (begin, size), (stop, _) in pairwise([*self.sizes, (max(end, self.sizes[-1][0]), 0)]):
            total += max(min(end, stop) - max(first, begin), 0) * size
        return total


_STAGE = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,9}))?: ([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class SizeHistory:
    """The sizes of a run, by step, as ``global_batch_size`` of its state has them.

    A number, that of the order, or a text where it changes: ``256; 0: 256; 900/1: 512`` is an order of 256
    samples a step, and global batches of 512 from step 900 in epoch 1 on, by an amendment; without ``/1`` as
    it was planned.
    """

    order_batch_size: int
    sizes: Ramp  # samples of a global batch
    amended: Sequence[tuple[int, int]]

    @property
    def changes(self) -> bool:
        """Whether steps differ in size."""
        return len(self.sizes) > 1 or bool(self.amended)

    @staticmethod
    def of_fingerprint(fingerprint: Mapping[str, Any]) -> SizeHistory | None:
        """The sizes in a state's fingerprint; None where it has none. Raises BrokenShard."""
        size, sizes, amended = _stages_of(fingerprint.get("global_batch_size"))
        if size is None or size < 1:
            return None
        if any(samples < 1 or samples % size for _, samples in sizes):
            raise BrokenShard(
                f"the state is damaged: its global_batch_size is {fingerprint['global_batch_size']!r}, "
                "expected multiples of the first number"
            )
        return SizeHistory(order_batch_size=size, sizes=sizes or ((0, size),), amended=amended)


def _stages_of(value: Any) -> tuple[int | None, Ramp, Sequence[tuple[int, int]]]:
    """The first number, the stages, and the steps of amendments among them with their epochs."""
    if not isinstance(value, str):
        return (value if type(value) is int else None), (), ()
    first, *texts = value.split("; ")
    stages = [match for match in map(_STAGE.fullmatch, texts) if match]
    ramp = tuple((int(match[1]), int(match[3])) for match in stages)
    steps = [step for step, _ in ramp]
    are_stages = re.fullmatch("[0-9]{1,9}", first) and len(stages) == len(texts) and steps[:1] == [0]
    if not are_stages or any(step >= later for step, later in pairwise(steps)):
        raise BrokenShard(
            f"the state is damaged: its global_batch_size is {value!r}, expected such as 256; 0: 256"
        )
    return int(first), ramp, tuple((int(match[1]), int(match[2])) for match in stages if match[2])


def _at(ramp: Ramp, step: int) -> int:
    first, value = ramp[-1]
    if step >= first:
        return value
    return next(value for first, value in reversed(ramp) if first <= step)


def ramp_sizes(schedule: Ramp, global_batch_size: int | None, *, is_validation: bool) -> tuple[int, Ramp]:
    """Samples of a step of the order, the greatest number that divides all sizes, and steps of it by step.
    Raises UsageError for what is no such schedule."""
    check_ramp("batch_size_schedule", schedule)
    if global_batch_size is not None:
        raise UsageError(
            f"global_batch_size is {global_batch_size}, and batch_size_schedule gives global batches by "
            "step; pass one of them"
        )
    if is_validation:
        raise UsageError("batch_size_schedule is for training; leave it out with split='validation'")
    least = gcd(*(size for _, size in schedule))
    return least, tuple((first, size // least) for first, size in schedule)


def check_ramp(name: str, schedule: Ramp) -> None:
    """Raises UsageError unless these are stages with whole numbers."""
    try:
        pairs = [(first, value) for first, value in schedule]
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {schedule!r}, expected pairs such as [(0, 256), (1000, 512)]") from None
    check_first_steps(name, [first for first, _ in pairs])
    wrong = [value for _, value in pairs if not isinstance(value, int) or value < 1]
    if wrong:
        raise UsageError(f"{name} has {wrong[0]!r}, expected whole numbers from 1 on")
