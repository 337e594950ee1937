"""Asks Slurm again where it gives no answer: a controller that restarts is back in a minute."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import TypeVar

from slurm.slurm_commands import SlurmAway, SlurmMissing

T = TypeVar("T")

_DELAYS_S = (5, 10, 20, 40)  # then 60 s each
_LONGEST_DELAY_S = 60
_MOST_FAILURES = 60  # in a row: about an hour


class Patience:
    """Counts the failures in a row, so that one wait outlasts many short ones."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._num_failures = 0

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, however often it takes. Raises SlurmAway after about an hour without one."""
        while True:
            try:
                answer = question()
            except SlurmMissing:
                raise
            except SlurmAway as error:
                self._num_failures += 1
                if self._num_failures > _MOST_FAILURES:
                    raise
                delay_s = self.delay_s()
                self._say(f"{error}; asking again in {delay_s} s. What runs goes on meanwhile")
                sleep(delay_s)
            else:
                self._num_failures = 0
                return answer

    def delay_s(self) -> float:
        """How long to wait before the next question."""
        return (*_DELAYS_S, _LONGEST_DELAY_S)[min(self._num_failures - 1, len(_DELAYS_S))]
