"""Weighted mixing: which source each place of a global batch takes its next sample from. Pure arithmetic.

Every source has a sampling order of its own (order.py), with the global batch size and the slots of the whole
run. A **round** is ROUND_STEPS global batches. In each round every slot takes equally many samples of a
source, in an order of its own, by a hash of seed, round and slot. So between rounds all slots of a source
stand at the same step, each source counts its own epochs, and a source is read by the windows of its order.

The weights of a stage are whole numbers of CYCLE_STEPS, spread evenly over a cycle. How many steps of one
are behind step n follows from n alone. So a position in the run stays one integer, and the batches are the
same for every number of ranks and workers. A new stage begins with a new round, at its exact step.

The price: each source has windows of its own in memory. A source whose weight is below 1 / ROUND_STEPS comes
in some rounds only, there in all slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loader.order import BatchOrder, Order, hash_array, hash_ints
from shardprep.errors import UsageError

ROUND_STEPS = 64
CYCLE_STEPS = 1 << 16
_PATTERN = 6  # what a hash is for, beside those of order.py

Schedule = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps with the same weights, from ``first_step`` on."""

    first_step: int
    weights: tuple[float, ...]  # of each source; their sum is 1

    @cached_property
    def cycle(self) -> npt.NDArray[np.int64]:
        """The source of each step of a cycle, evenly spread: int64[CYCLE_STEPS]."""
        ends = _cycle_ends(self.weights)
        counts = np.diff(ends)
        source = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(CYCLE_STEPS) - np.repeat(ends[:-1], counts)
        return source[np.lexsort((source, (2 * number + 1) / counts[source]))]

    @cached_property
    def counts_before(self) -> npt.NDArray[np.int64]:
        """Steps of each source before each step of a cycle: int64[CYCLE_STEPS + 1, sources]."""
        taken = self.cycle[:, None] == np.arange(len(self.weights))
        return np.concatenate([np.zeros((1, len(self.weights)), np.int64), np.cumsum(taken, axis=0)])

    def counts(self, num_steps: int) -> npt.NDArray[np.int64]:
        """Steps of each source among the first ``num_steps`` of the stage: int64[sources]."""
        cycles, rest = divmod(num_steps, CYCLE_STEPS)
        return cycles * self.counts_before[-1] + self.counts_before[rest]


def _cycle_ends(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """The weights as whole steps of a cycle, added up: int64[sources + 1]. They alone decide the order."""
    return np.rint(np.cumsum([0.0, *weights]) * CYCLE_STEPS).astype(np.int64)


def is_same_schedule(text: str, other: str) -> bool:
    """Whether the schedules of two states make the same order, as whole steps of a cycle.

    Equal shares may differ in their last digit, in states of versions that divided floats.
    """
    try:
        return _cycles(text) == _cycles(other)
    except (ValueError, TypeError, RecursionError):  # a damaged state
        return False


def _cycles(text: str) -> list[tuple[str, list[int]]]:
    stages = [stage.partition(": ") for stage in text.split("; ")]
    return [(first, _cycle_ends(json.loads(weights)).tolist()) for first, _, weights in stages]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Consecutive steps in which every slot takes equally many samples of a source."""

    first_step: int
    end_step: int
    sources: npt.NDArray[np.int64]  # of its steps, in no order yet: int64[end_step - first_step]
    taken: npt.NDArray[np.int64]  # steps of each source before the round: int64[sources]


@dataclass(frozen=True, kw_only=True)
class Mixture(BatchOrder):
    """The sources of a run and their weights by step. Raises UsageError where they make no schedule.

    ``steps_per_epoch`` only says where ``for batch in loader`` ends; the steps go on through it.
    """

    names: tuple[str, ...]
    orders: tuple[Order, ...]
    stages: tuple[Stage, ...]

    @property
    def num_samples(self) -> int:
        return sum(order.num_samples for order in self.orders)

    @property
    def num_left_out(self) -> int:
        return sum(order.num_left_out for order in self.orders)

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as one epoch of each source has, together."""
        return sum(order.steps_per_epoch for order in self.orders)

    @property
    def sizes(self) -> dict[str, str]:
        """What must be the same where a run is resumed: the sources with their orders, and the stages."""
        orders = zip(self.names, self.orders, strict=True)
        return {
            "sources": "; ".join(
                f"{name} {order.num_samples} {[*order.sizes.values()]}" for name, order in orders
            ),
            "schedule": "; ".join(f"{stage.first_step}: {list(stage.weights)}" for stage in self.stages),
        }

    def round_at(self, step: int) -> Round:
        """The round of a global step, counted from 0 through the whole run."""
        number = sum(stage.first_step <= step for stage in self.stages) - 1
        stage = self.stages[number]
        before = np.zeros(len(self.names), np.int64)
        for earlier, later in pairwise(self.stages[: number + 1]):
            before += earlier.counts(later.first_step - earlier.first_step)
        first = (step - stage.first_step) // ROUND_STEPS * ROUND_STEPS
        end = first + ROUND_STEPS
        if number + 1 < len(self.stages):
            end = min(end, self.stages[number + 1].first_step - stage.first_step)
        at = first % CYCLE_STEPS
        return Round(
            first_step=stage.first_step + first,
            end_step=stage.first_step + end,
            sources=stage.cycle[at : at + end - first],
            taken=before + stage.counts(first),
        )

    def pattern(self, part: Round, slots: range) -> npt.NDArray[np.int64]:
        """The source of each slot at each step of a round: int64[len(slots), steps]."""
        keys = [[hash_ints(self.seed, _PATTERN, part.first_step, slot)] for slot in slots]
        hashes = hash_array(np.array(keys, np.uint64), np.arange(len(part.sources)))
        return part.sources[np.argsort(hashes, axis=1, kind="stable")]

    def num_delivered(self, step: int) -> dict[str, int]:
        """Samples of each source in the first ``step`` global batches, all ranks together."""
        part = self.round_at(step)
        pattern = self.pattern(part, range(self.num_slots))[:, : step - part.first_step]
        within = np.bincount(pattern.reshape(-1), minlength=len(self.names)) * self.group
        return dict(zip(self.names, (part.taken * self.global_batch_size + within).tolist(), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """The same in epochs of each source: 1.5 is the middle of the second."""
        sizes = [order.steps_per_epoch * order.global_batch_size for order in self.orders]
        return {
            name: count / size
            for (name, count), size in zip(self.num_delivered(step).items(), sizes, strict=True)
        }


def check_first_steps(name: str, firsts: Sequence[object]) -> None:
    """Raises UsageError unless stages begin at whole steps, ascending from 0."""
    are_steps = all(isinstance(first, int) and not isinstance(first, bool) for first in firsts)
    # mypy does not see that all are int where they are compared.
    if not are_steps or list(firsts[:1]) != [0] or any(a >= b for a, b in pairwise(firsts)):  # type: ignore[operator]
        raise UsageError(
            f"{name} has stages from the steps {list(firsts)}, expected whole numbers from 0 on, ascending"
        )


def make_stages(
    names: Sequence[str],
    weights: Mapping[str, float] | None,
    weights_schedule: Schedule | None,
    mean_tokens: Sequence[float] | None,
) -> tuple[Stage, ...]:
    """The stages that ``weights`` or ``weights_schedule`` describe, as shares of samples.

    ``mean_tokens`` of each source's samples where weights are shares of tokens. Raises UsageError.
    """
    if (weights is None) == (weights_schedule is None):
        raise UsageError(
            "input_shards names sources: pass either weights= or weights_schedule=, for each a weight"
        )
    given = [(0, weights)] if weights_schedule is None else list(weights_schedule)
    check_first_steps("weights_schedule", [first for first, _ in given])
    return tuple(
        Stage(first_step=first, weights=_shares(names, of_stage or {}, mean_tokens))
        for first, of_stage in given
    )


def _shares(
    names: Sequence[str], weights: Mapping[str, float], mean_tokens: Sequence[float] | None
) -> tuple[float, ...]:
    """Shares of samples, of each source. A source without a weight in this stage has 0."""
    unknown = sorted(set(weights) - set(names))
    values = [weights.get(name, 0.0) for name in names]
    is_number = all(isinstance(value, (int, float)) and 0 <= value < float("inf") for value in values)
    if unknown or not is_number or not sum(values) > 0:
        raise UsageError(
            f"weights are {dict(weights)}, expected for {', '.join(names)} numbers from 0 on, not all 0"
        )
    # Exactly, and 0.1 as 1/10: weights in equal proportions are equal shares to the last digit.
    exact = [Fraction(str(value)) if isinstance(value, float) else Fraction(value) for value in values]
    means = mean_tokens or [1.0] * len(names)
    by_sample = [value / Fraction(tokens) for value, tokens in zip(exact, means, strict=True)]
    shares = tuple(float(value / sum(by_sample)) for value in by_sample)
    too_small = [name for name, share in zip(names, shares, strict=True) if 0 < share < 1 / CYCLE_STEPS]
    if too_small:
        raise UsageError(
            f"{too_small[0]} would be less than one of {CYCLE_STEPS} samples; give it more, or 0"
        )
    return shares
