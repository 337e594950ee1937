"""Weighted mixing: which source each place of a global batch takes its next sample from. Pure arithmetic.

Every source has an order of its own (order.py). A **round** is ROUND_STEPS global batches, in which every
slot takes equally many samples of a source, in an order of its own. The weights of a stage are whole numbers
of CYCLE_STEPS, spread evenly, so how many steps of a source are behind step n follows from n alone. An
amendment is a stage that may begin within a round: that one was laid out up to ``cut_end``, and slot l has
had c(l, s) steps of source s of it. A slot's place in a source is the steps of the whole rounds and c(l, s)
of each cut one. The price: each source has windows of its own, and after an amendment chunks are kept for the
slots behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from loader.order import BatchOrder, Int64s, Order, hash_array, hash_ints
from shardprep.errors import UsageError

ROUND_STEPS = 64
CYCLE_STEPS = 1 << 16
_PATTERN, _SEED = 6, 7  # what a hash is for, beside those of order.py

Schedule = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps with the same weights, from ``first_step`` on."""

    first_step: int
    weights: tuple[float, ...]  # of each source; their sum is 1
    cut_end: int = 0  # of an amendment: where the round that it cut would have ended; 0: as was planned

    @cached_property
    def cycle(self) -> Int64s:
        """The source of each step of a cycle, evenly spread: int64[CYCLE_STEPS]."""
        ends = _cycle_ends(self.weights)
        counts = np.diff(ends)
        source = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(CYCLE_STEPS) - np.repeat(ends[:-1], counts)
        return source[np.lexsort((source, (2 * number + 1) / counts[source]))]

    @property
    def cycle_counts(self) -> Int64s:
        """Steps of each source in a cycle: int64[sources]. They are the shares that decide the order."""
        return np.diff(_cycle_ends(self.weights))

    def counts(self, num_steps: int) -> Int64s:
        """Steps of each source among the first ``num_steps`` of the stage: int64[sources]."""
        cycles, rest = divmod(num_steps, CYCLE_STEPS)
        return cycles * self.cycle_counts + np.bincount(self.cycle[:rest], minlength=len(self.weights))


def _cycle_ends(weights: Sequence[float]) -> Int64s:
    """The weights as whole steps of a cycle, added up: int64[sources + 1]. They alone decide the order."""
    return np.rint(np.cumsum([0.0, *weights]) * CYCLE_STEPS).astype(np.int64)


_SOURCE = re.compile(
    r"(?P<name>.*) (?P<num_samples>\d{1,18}) \[(?P<block>\d{1,18}), (?P<window>\d{1,18})\]"
    r"( (?P<data>[0-9a-f]{16}))?(?P<added> added)?"
)


def _stages(schedule: str) -> list[tuple[int, int, list[int]]]:
    """First step, ``cut_end`` and steps of a cycle of each stage. Raises ValueError or TypeError."""
    found = []
    for text in schedule.split("; "):
        begin, _, weights = text.partition(": ")
        first, _, cut_end = begin.partition("/")
        shares: list[float] = json.loads(weights)
        total = sum(shares)
        if not (min(shares) >= 0 and (total == CYCLE_STEPS or abs(total - 1) < 1e-6)):
            raise ValueError(f"a stage of the shares {weights}")
        if total != CYCLE_STEPS:  # of a run that was not amended
            shares = np.diff(_cycle_ends(shares)).tolist()
        if cut_end and not 0 <= int(cut_end) - int(first) < ROUND_STEPS:
            raise ValueError(f"an amendment at step {first} of a round that ends at {cut_end}")
        counts: list[int] = np.trim_zeros(np.array(shares, np.int64), "b").tolist()
        found.append((int(first), int(cut_end or 0), counts))
    return found


def _padded(counts: Sequence[int], num_sources: int) -> tuple[float, ...]:
    """The weights of so many sources, of steps of a cycle. Raises ValueError where these are more."""
    if len(counts) > num_sources:
        raise ValueError(f"{list(counts)} are not the shares of {num_sources} sources")
    return (*(count / CYCLE_STEPS for count in counts), *[0.0] * (num_sources - len(counts)))


def source_seed(seed: int, number: int) -> int:
    """The seed of a source's order, by its number among all sources that the run has had."""
    return hash_ints(seed, _SEED, number)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Consecutive steps in which every slot takes equally many samples of a source."""

    first_step: int
    end_step: int
    sources: Int64s  # of its steps, in no order yet; of a round that was cut, as laid out
    taken: Int64s  # of each source before it, by the slot furthest behind: int64[sources]
    ahead: Int64s  # steps that slots are ahead of that one: int64[slots, sources]

    @property
    def was_cut(self) -> bool:
        """Whether an amendment ended it before all of it was delivered."""
        return self.end_step - self.first_step < len(self.sources)


@dataclass(frozen=True, kw_only=True)
class Mixture(BatchOrder):
    """The sources of a run and their weights by step. Raises UsageError where they make no schedule.
    ``steps_per_epoch`` only says where ``for batch in loader`` ends; the steps go on through it."""

    names: tuple[str, ...]
    orders: tuple[Order, ...]
    stages: tuple[Stage, ...]
    data: tuple[str, ...] = ()  # fingerprint of each source's data, 16 hex digits; "": none was given
    num_first: int = 0  # sources that the run began with, where amendments added some; 0: all

    @property
    def num_samples(self) -> int:
        return sum(order.num_samples for order in self.orders)

    @property
    def num_left_out(self) -> int:
        return sum(order.num_left_out for order in self.orders)

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as one epoch of each source has, together, of those that the run began with."""
        return sum(order.steps_per_epoch for order in self.orders[: self.num_first or None])

    @property
    def amended_at(self) -> int:
        """The step of the last amendment; 0 where there is none."""
        return max((stage.first_step for stage in self.stages if stage.cut_end), default=0)

    @property
    def sizes(self) -> dict[str, str]:
        """What must be the same where a run is resumed: the sources with their orders, and the stages."""
        sources = [
            f"{name} {order.num_samples} {[*order.sizes.values()]}"
            for name, order in zip(self.names, self.orders, strict=True)
        ]
        if any(self.data):
            sources = [f"{text} {data}".rstrip() for text, data in zip(sources, self.data, strict=True)]
        first = self.num_first or len(sources)
        return {
            "sources": "; ".join([*sources[:first], *(f"{text} added" for text in sources[first:])]),
            "schedule": "; ".join(map(self._stage_text, self.stages)),
        }

    def _stage_text(self, stage: Stage) -> str:
        """Of a run that was amended with shares as steps of a cycle, so that many take little room."""
        if not self.num_first and not any(each.cut_end for each in self.stages):
            return f"{stage.first_step}: {list(stage.weights)}"
        cut = f"/{stage.cut_end}" if stage.cut_end else ""
        counts = ",".join(map(str, np.trim_zeros(stage.cycle_counts, "b").tolist()))
        return f"{stage.first_step}{cut}: [{counts}]"

    @staticmethod
    def of_sizes(sizes: Mapping[str, object], like: Mixture) -> Mixture | None:
        """The mixture whose ``sizes`` these are, its other fields as of another; None for what are none."""
        found = [_SOURCE.fullmatch(text) for text in str(sizes.get("sources")).split("; ")]
        sources = [match for match in found if match]
        is_added = [match["added"] is not None for match in sources]
        names = tuple(match["name"] for match in sources)
        if len({*names}) < len(found) or is_added[0] or is_added != sorted(is_added):
            return None
        try:
            stages = tuple(
                Stage(first_step=first, weights=_padded(counts, len(found)), cut_end=cut_end)
                for first, cut_end, counts in _stages(str(sizes.get("schedule")))
            )
            check_first_steps("schedule", [stage.first_step for stage in stages])
            orders = [
                replace(
                    like.orders[0],
                    num_samples=int(match["num_samples"]),
                    block_samples=int(match["block"]),
                    window_samples=int(match["window"]),
                    seed=source_seed(like.seed, number),
                )
                for number, match in enumerate(sources)
            ]
        except (ValueError, TypeError, RecursionError, UsageError):
            return None
        return replace(
            like,
            names=names,
            orders=tuple(orders),
            stages=stages,
            data=tuple(match["data"] or "" for match in sources),
            num_first=is_added.index(True) if is_added[-1] else 0,
        )

    def round_at(self, step: int) -> Round:
        """The round of a global step, counted from 0 through the whole run."""
        number = sum(stage.first_step <= step for stage in self.stages) - 1
        return self._round(number, step, *self._before[number])

    def _round(self, number: int, step: int, taken: Int64s, ahead: Int64s) -> Round:
        """The round of a step in a stage, before which slots have taken so many steps of each source."""
        stage = self.stages[number]
        first = (step - stage.first_step) // ROUND_STEPS * ROUND_STEPS
        end = laid_end = first + ROUND_STEPS
        if number + 1 < len(self.stages):
            later = self.stages[number + 1]
            end = min(end, later.first_step - stage.first_step)
            laid_end = min(laid_end, (later.cut_end or later.first_step) - stage.first_step)
        return Round(
            first_step=stage.first_step + first,
            end_step=stage.first_step + end,
            sources=stage.cycle[first % CYCLE_STEPS :][: laid_end - first],
            taken=taken + stage.counts(first),
            ahead=ahead,
        )

    @cached_property
    def _before(self) -> list[tuple[Int64s, Int64s]]:
        """Of each stage ``Round.taken`` and ``Round.ahead`` at its first step."""
        num_sources = len(self.names)
        found = [(np.zeros(num_sources, np.int64), np.zeros((self.num_slots, num_sources), np.int64))]
        for number, (stage, later) in enumerate(pairwise(self.stages)):
            taken, ahead = found[-1]
            num_steps = later.first_step - stage.first_step
            if not later.cut_end:
                found.append((taken + stage.counts(num_steps), ahead))
                continue
            last = self._round(number, later.first_step - 1, taken, ahead)
            pattern = self.pattern(last, range(self.num_slots))[:, : later.first_step - last.first_step]
            ahead = ahead + (pattern[:, :, None] == np.arange(num_sources)).sum(axis=1)
            least = ahead.min(axis=0)
            found.append((last.taken + least, ahead - least))
        return found

    def pattern(self, part: Round, slots: range) -> Int64s:
        """The source of each slot at each step of a round: int64[len(slots), steps]."""
        keys = [[hash_ints(self.seed, _PATTERN, part.first_step, slot)] for slot in slots]
        hashes = hash_array(np.array(keys, np.uint64), np.arange(len(part.sources)))
        return part.sources[np.argsort(hashes, axis=1, kind="stable")]

    def num_delivered(self, step: int) -> dict[str, int]:
        """Samples of each source in the first ``step`` global batches, all ranks together."""
        part = self.round_at(step)
        pattern = self.pattern(part, range(self.num_slots))[:, : step - part.first_step]
        within = np.bincount(pattern.reshape(-1), minlength=len(self.names)) + part.ahead.sum(axis=0)
        within *= self.group
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
            f"{name} has stages from the steps {list(firsts)}, expected whole numbers from 0 on, ascending",
            found=f"{name} {list(firsts)}",
            expected="whole numbers from 0 on, ascending",
        )


def make_stages(
    names: Sequence[str],
    weights: Mapping[str, float] | None,
    weights_schedule: Schedule | None,
    mean_tokens: Sequence[float] | None,
) -> tuple[Stage, ...]:
    """The stages that ``weights`` or ``weights_schedule`` describe, as shares of samples. ``mean_tokens`` of
    each source's samples where weights are shares of tokens. Raises UsageError."""
    if (weights is None) == (weights_schedule is None):
        raise UsageError(
            "input_shards names sources: pass either weights= or weights_schedule=, for each a weight",
            found="input_shards",
            expected="either weights= or weights_schedule=",
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
    given = dict(weights) if isinstance(weights, Mapping) else {}
    values = [given.get(name, 0.0) for name in names]
    is_number = all(isinstance(value, (int, float)) and 0 <= value < float("inf") for value in values)
    if set(given) - set(names) or not is_number or not sum(values) > 0:
        raise UsageError(
            f"weights must be a dict of non-negative numbers for {', '.join(names)}, not all zero "
            f"(got {weights!r})",
            found=f"weights={weights!r}",
            expected=f"a dict of non-negative numbers for {', '.join(names)}, not all zero",
        )
    # Exactly, and 0.1 as 1/10: weights in equal proportions are equal shares to the last digit.
    exact = [Fraction(str(value)) if isinstance(value, float) else Fraction(value) for value in values]
    means = mean_tokens or [1.0] * len(names)
    by_sample = [value / Fraction(tokens) for value, tokens in zip(exact, means, strict=True)]
    shares = tuple(float(value / sum(by_sample)) for value in by_sample)
    too_small = [name for name, share in zip(names, shares, strict=True) if 0 < share < 1 / CYCLE_STEPS]
    if too_small:
        raise UsageError(
            f"{too_small[0]} would be less than one of {CYCLE_STEPS} samples; give it more, or 0",
            found=too_small[0],
            expected=f"one of {CYCLE_STEPS} samples",
        )
    return shares
