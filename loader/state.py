"""Where a run of batches stands: a few integers, and what they mean.

A position counts global batches, which are the same whatever number of ranks and workers read them. Only
inside of a step, with accumulation, it also counts the batches of a rank, which have a meaning for the same
world and batch size alone. ``RunProgress`` knows what was delivered, where the next epoch begins, and
whether no step was left out.

``SkippedSteps`` are what a run left out, as after a spike of the loss: steps of the order, which are global
batches counted through all epochs from 0. What was trained is fewer steps than the order went on. Ranges are
kept as a text, ``1000-1199,4000``: a state has the same keys always, as torch.distributed.checkpoint needs
it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from shardprep.errors import BrokenShard, OtherTokenizer, Refused, UsageError

if TYPE_CHECKING:
    from loader.run_steps import RunSteps

_HASH_DIGITS = 64
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
STATE_FORMAT = "shardprep-loader-state"
_WHY = {
    "data": "these are other shards, or others of them are excluded",
    "tokenizer": "another tokenizer",
    "seed": "the order is another one",
    "global_batch_size": "it fixes the order; keep it, and change batch_size",
    "law_version": "the sampling order changed; go on with the shardprep that saved it",
}


class OtherRun(Refused):
    """A loader's state is of other data, or of another order."""


MAX_EPOCH = 2**31 - 1  # workers are told the epoch in an int64


@dataclass(frozen=True)
class SkippedSteps:
    """Ranges [first, end) of steps of the order, ascending and apart."""

    ranges: tuple[tuple[int, int], ...] = ()

    def and_from(self, first: int, num_steps: int) -> SkippedSteps:
        """These and ``num_steps`` from ``first`` on, which lies behind them or at the last one's end."""
        kept = tuple(item for item in self.ranges if item[1] < first)
        joined = [item for item in self.ranges if item[1] >= first]
        return SkippedSteps((*kept, (min([first, *(start for start, _ in joined)]), first + num_steps)))

    def up_to(self, step: int) -> SkippedSteps:
        """Those that a run has left out which stands before a step of the order."""
        return SkippedSteps(tuple(item for item in self.ranges if item[0] < step))

    def order_step(self, trained: int) -> int:
        """The step of the order that comes next after ``trained`` steps were trained."""
        step = trained
        for first, end in self.ranges:
            if step >= first:
                step += end - first
        return step

    def text(self) -> str:
        return ",".join(f"{first}-{end - 1}" for first, end in self.ranges)

    @staticmethod
    def of_text(text: object) -> SkippedSteps:
        """What ``text`` gave. Raises BrokenShard for anything else."""
        ranges: list[tuple[int, int]] = []
        for part in text.split(",") if isinstance(text, str) and text else []:
            match = _RANGE.fullmatch(part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
            if last < first or (ranges and first < ranges[-1][1]):
                raise BrokenShard(
                    f"the state is damaged: its skipped is {text!r}, expected such as 100-199,300"
                )
            ranges.append((first, last + 1))
        if not isinstance(text, str):
            raise BrokenShard(f"the state is damaged: its skipped is {text!r}, expected a text")
        return SkippedSteps(tuple(ranges))


class Position(NamedTuple):
    """What was delivered: whole global batches of an epoch, and batches of the step after them.

    A new one for every batch, hence no frozen dataclass: 0.4 us instead of 1.2.
    """

    epoch: int = 0
    step: int = 0
    num_micro: int = 0

    def after(self, micro_batches: int, steps_per_epoch: int) -> Position:
        """One batch later, of ``micro_batches`` a step."""
        if self.num_micro + 1 < micro_batches:
            return Position(self.epoch, self.step, self.num_micro + 1)
        if self.step + 1 < steps_per_epoch:
            return Position(self.epoch, self.step + 1)
        return Position(self.epoch + 1)


def state_of(
    position: Position,
    fingerprint: Mapping[str, Any],
    layout: Mapping[str, int],
    skipped: SkippedSteps = SkippedSteps(),
) -> dict[str, Any]:
    """The state as plain numbers and strings, which JSON and torch.save keep.

    Always the same keys: torch.distributed.checkpoint reads those alone that a fresh loader's state has.
    """
    return {
        "format": STATE_FORMAT,
        "epoch": position.epoch,
        "step": position.step,
        "num_micro": position.num_micro,
        "skipped": skipped.text(),
        "layout": dict(layout),
        "fingerprint": dict(fingerprint),
    }


def position_of(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], layout: Mapping[str, int], run: RunSteps
) -> Position:
    """The position that a state holds, for a loader of the same fingerprint.

    Raises OtherRun or OtherTokenizer naming everything that differs, BrokenShard for no state at all,
    UsageError for a state from inside of a step of another layout.
    """
    if state.get("format") != STATE_FORMAT or not isinstance(state.get("fingerprint"), Mapping):
        raise BrokenShard(
            f"this is no state of a loader: its format is {state.get('format')!r}, expected {STATE_FORMAT!r}"
        )
    _check_fingerprint(dict(state["fingerprint"]), dict(fingerprint))
    position = Position(*(_whole_number(state, name) for name in Position._fields))
    if position.num_micro and state.get("layout") != dict(layout):
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
            f"{MAX_EPOCH}"
        )
    num_batches = run.batches_in(run.step_of(position))
    if position.num_micro >= num_batches:
        raise UsageError(f"the state has {position.num_micro} batches of a step of {num_batches}")
    return position


def _whole_number(state: Mapping[str, Any], name: str) -> int:
    try:
        return index(state[name])
    except (KeyError, TypeError):
        found = repr(state[name]) if name in state else "missing"
        raise BrokenShard(f"the state is damaged: its {name} is {found}, expected a whole number") from None


def _check_fingerprint(saved: dict[str, Any], mine: dict[str, Any]) -> None:
    names = {**mine, **saved}
    differing = [name for name in names if not _is_same(name, saved.get(name), mine.get(name))]
    if not differing:
        return
    parts = [
        f"{name} {_short(saved.get(name))} in the state, {_short(mine.get(name))} here"
        + (f" ({_WHY[name]})" if name in _WHY else "")
        for name in differing
    ]
    error = OtherTokenizer if differing == ["tokenizer"] else OtherRun
    raise error(
        f"the state is of another run: {'; '.join(parts)}; make the loader as it was when the state was "
        "saved, or start without the state"
    )


def _is_same(name: str, saved: Any, mine: Any) -> bool:
    if name == "schedule" and isinstance(saved, str) and isinstance(mine, str):
        from loader.mixture import is_same_schedule  # which imports this module

        return is_same_schedule(saved, mine)
    return bool(saved == mine)


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
    skipped: SkippedSteps = SkippedSteps()

    def begin_epoch(self) -> Position:
        """Take the epoch that is next; the one after it is next then."""
        start, self.next = self.next, Position(epoch=self.next.epoch + 1)
        if start != self.delivered:
            self.left = self.delivered
        self.delivered = start
        self.is_loaded = False
        return start

    def load(self, position: Position, skipped: SkippedSteps) -> None:
        """Go on behind what a state says was delivered: a run begins there."""
        self.delivered = self.next = self.began = position
        self.left, self.is_loaded, self.skipped = None, True, skipped

    def skip(self, num_steps: int, run: RunSteps) -> None:
        """Leave out the steps behind what was delivered. Raises UsageError inside of a step."""
        if self.delivered.num_micro:
            raise UsageError(
                f"skip leaves out whole steps, and {self.delivered.num_micro} batches of a step are "
                "delivered; call it between two optimizer's steps"
            )
        first = run.step_of(self.delivered)
        self.skipped = self.skipped.and_from(first, num_steps)
        self.delivered = self.next = run.position(first + num_steps)
        self.is_loaded = True

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
        self.delivered = self.next = Position(epoch=epoch)

    def check_unbroken(self) -> None:
        """Raises UsageError where steps of the loop are no longer steps of the order."""
        if self.left is not None:
            raise UsageError(
                f"the run left epoch {self.left.epoch} after {self.left.step} of its steps and began another "
                "epoch, so the number of trained steps does not say which samples came; save state_dict() "
                "after the optimizer's step instead, and look at a first batch with loader.peek()"
            )
