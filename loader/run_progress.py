"""How far a run is: what was delivered, where the next epoch begins, and whether no step was left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from loader.loader_state import Position
from preprocess.shard_format import UsageError

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
        self.delivered = self.next = self.began = position
        self.left, self.is_loaded = None, True

    def set_epoch(self, epoch: int) -> None:
        """Make an epoch the next one. Raises UsageError where a loaded state would be thrown away."""
        if epoch == self.next.epoch:
            return
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
