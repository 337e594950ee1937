"""The steps of a run: which steps of the order each takes, how long its rows are, where epochs begin.

A step of training is a global batch. Without ``batch_size_schedule`` it is one step of the order. With it,
the order has steps of as many samples as the greatest number that divides all sizes, and a global batch is
some of them one after another. So the order never changes, nothing comes twice, and a position in the run is
what it is without: a step, counted through all epochs. An epoch ends where another global batch would not
fit; what is left out of it is less than one. ``seq_len_schedule`` is in row_lengths.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

from loader.state import Position
from shardprep.errors import UsageError

Ramp = Sequence[tuple[int, int]]  # from which step on which number


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """What each step of a run is made of; steps are counted through all epochs from 0.

    Raises UsageError where a global batch is more than an epoch.
    """

    order_steps_per_epoch: int
    num_batches: int  # of a rank, in a step of the order
    sizes: Ramp = ((0, 1),)  # steps of the order in a step of training
    row_lengths: Ramp = ((0, 0),)  # tokens that rows are cut to; 0: as they are

    def __post_init__(self) -> None:
        most = max(size for _, size in self.sizes)
        if most > self.order_steps_per_epoch:
            raise UsageError(
                f"batch_size_schedule has a global batch of {most} x the least, and an epoch has "
                f"{self.order_steps_per_epoch} of these; lower it, or add data"
            )

    @cached_property
    def is_ramped(self) -> bool:
        """Whether steps differ in size."""
        return len(self.sizes) > 1

    def settings(self, order_batch_size: int) -> dict[str, str]:
        """The schedules as a state has them, where there are any."""
        found = {}
        if self.sizes != RunSteps.sizes:
            found["batch_size_schedule"] = _text([(n, size * order_batch_size) for n, size in self.sizes])
        if self.row_lengths != RunSteps.row_lengths:
            found["seq_len_schedule"] = _text(self.row_lengths)
        return found

    def batches_in(self, step: int) -> int:
        """Batches of a rank in a step."""
        return self.num_batches * _at(self.sizes, step)

    def order_steps_in(self, step: int) -> int:
        """Steps of the order in a step."""
        return _at(self.sizes, step)

    def row_length(self, step: int) -> int:
        """Tokens that the rows of a step are cut to; 0: as they are."""
        return _at(self.row_lengths, step)

    @cached_property
    def _first_steps(self) -> list[int]:
        """Where epochs begin, as far as they were asked for; all from the first one in the last stage on."""
        return [0]

    def first_step(self, epoch: int) -> int:
        """The steps before an epoch."""
        known = self._first_steps
        last_stage, size = self.sizes[-1]
        while len(known) <= epoch and known[-1] < last_stage:
            known.append(known[-1] + self._fitting(known[-1]))
        beyond = max(epoch - len(known) + 1, 0)
        return known[min(epoch, len(known) - 1)] + beyond * (self.order_steps_per_epoch // size)

    def steps_in(self, epoch: int) -> int:
        """Steps of an epoch."""
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
        """The step of a position."""
        return self.first_step(position.epoch) + position.step

    def position(self, step: int) -> Position:
        """Where a step begins."""
        self.first_step(0)
        while self._first_steps[-1] <= step and self._first_steps[-1] < self.sizes[-1][0]:
            self.first_step(len(self._first_steps))
        known = self._first_steps
        if step < known[-1]:
            epoch = bisect_right(known, step) - 1
            return Position(epoch=epoch, step=step - known[epoch])
        epoch, within = divmod(step - known[-1], self.order_steps_per_epoch // self.sizes[-1][1])
        return Position(epoch=len(known) - 1 + epoch, step=within)

    def _fitting(self, first: int) -> int:
        """The steps from one on that an epoch has room for."""
        step, room = first, self.order_steps_per_epoch
        for (_, size), (end, _) in pairwise([*self.sizes, (first + room + 1, 0)]):
            if step < end:
                fitting = min(room // size, end - step)
                step, room = step + fitting, room - fitting * size
                if step < end:
                    break
        return step - first

    def _taken(self, first: int, end: int) -> int:
        """Steps of the order in the steps of [first, end)."""
        total = 0
        for (begin, size), (stop, _) in pairwise([*self.sizes, (max(end, self.sizes[-1][0]), 0)]):
            total += max(min(end, stop) - max(first, begin), 0) * size
        return total


def _text(ramp: Ramp) -> str:
    return "; ".join(f"{first}: {value}" for first, value in ramp)


def _at(ramp: Ramp, step: int) -> int:
    first, value = ramp[-1]
    if step >= first:
        return value
    return next(value for first, value in reversed(ramp) if first <= step)


def check_first_steps(name: str, firsts: Sequence[object]) -> None:
    """Raises UsageError unless stages begin at whole steps, ascending from 0."""
    are_steps = all(isinstance(first, int) and not isinstance(first, bool) for first in firsts)
    # mypy does not see that all are int where they are compared.
    if not are_steps or list(firsts[:1]) != [0] or any(a >= b for a, b in pairwise(firsts)):  # type: ignore[operator]
        raise UsageError(
            f"{name} has stages from the steps {list(firsts)}, expected whole numbers from 0 on, ascending"
        )


def ramp_sizes(schedule: Ramp, global_batch_size: int | None, *, is_validation: bool) -> tuple[int, Ramp]:
    """Samples of a step of the order, the greatest number that divides all sizes, and steps of it by step.

    Raises UsageError for what is no such schedule.
    """
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
