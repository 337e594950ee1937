"""What a plan is and costs, as ``plan`` prints it: three short lines, or the same as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shardprep.console import counted, short_bytes, short_number, short_time
from shardprep.format.inputs import input_kind
from shardprep.format.plan import Plan

_NUM_KINDS = 4  # of input files, named with their numbers
_MUCH_LARGER = 5  # than the text: then tokens alone take far less room


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a plan, scaled up from a sample."""

    num_tokens: int
    output_bytes: int  # of the finished data set
    core_s: float  # on one core
    longest_s: float  # of the longest shard, on one core
    num_cores: int  # that this process may use
    output_per_text_byte: float
    notes: list[str] = field(default_factory=list)  # warnings, and what may change a decision

    @property
    def here_s(self) -> float:
        """Return the time on this machine, in seconds."""
        return max(self.longest_s, self.core_s / self.num_cores)

    def lines(self, plan: Plan) -> list[str]:
        """Return the inputs, the shards and the cost, each in a line, and the notes."""
        sizes = plan.shard_bytes()
        kinds = Counter(input_kind(item.path).format.suffixes[0] for item in plan.inputs)
        shown = ", ".join(f"{number:,} {suffix}" for suffix, number in kinds.most_common(_NUM_KINDS))
        smallest = short_bytes(min(sizes))
        largest = short_bytes(max(sizes))
        each = largest if smallest == largest else f"{smallest} to {largest}"
        amounts = f"about {short_number(self.num_tokens)} tokens, {short_bytes(self.output_bytes)} on disk"
        times = f"{short_time(round(self.core_s))} on one core, {short_time(round(self.here_s))} here"
        return [
            f"inputs: {counted(len(plan.inputs), 'file')}, {short_bytes(sum(sizes))}: {shown}",
            f"plan {plan.plan_id[:12]}: {counted(plan.num_shards, 'shard')} of {each}",
            f"{amounts}; {times}",
            *self.all_notes(plan),
        ]

    def all_notes(self, plan: Plan) -> list[str]:
        """Return the notes, with one about the space on disk if another kind of samples takes far less."""
        if plan.spec.has_rows or self.output_per_text_byte <= _MUCH_LARGER:
            return self.notes
        times_text = f"{self.output_per_text_byte:.0f} times the text"
        return [*self.notes, f"note: shards take {times_text}; --record packed stores token ids alone"]

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Return the same for programs."""
        return {
            "plan_id": plan.plan_id,
            "num_inputs": len(plan.inputs),
            "input_bytes": sum(plan.shard_bytes()),
            "num_shards": plan.num_shards,
            "num_tokens": self.num_tokens,
            "output_bytes": self.output_bytes,
            "core_s": round(self.core_s, 1),
            "longest_shard_s": round(self.longest_s, 1),
            "here_s": round(self.here_s, 1),
            "notes": self.all_notes(plan),
        }
