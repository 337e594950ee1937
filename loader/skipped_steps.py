"""Steps of the order that a run leaves out, as after a spike of the loss: they are part of its state.

A step of the order is a global batch, counted through all epochs from 0. What was trained is fewer steps than
the order went on: ``order_step`` turns the one into the other. Ranges are kept as a text, ``1000-1199,4000``:
a state has the same keys always, as torch.distributed.checkpoint needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardprep.errors import BrokenShard

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


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
