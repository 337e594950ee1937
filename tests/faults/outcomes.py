"""How a disturbed command ended, and the table that counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["refused", "equal", "wrong", "traceback", "hang", "memory"]
KINDS: tuple[Kind, ...] = ("refused", "equal", "wrong", "traceback", "hang", "memory")
_SHOWN_FILES = 4
FAILURES: frozenset[Kind] = frozenset({"wrong", "traceback", "hang", "memory"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One disturbed run."""

    campaign: str
    form: str  # of the data set
    file: str  # what was disturbed
    command: str
    fault: str  # how, so exactly that it can be done again
    kind: Kind
    what: str  # the message, the exception with its last line, or what is not equal

    @property
    def distinct(self) -> tuple[str, str, Kind, str]:
        """Outcomes that agree in this have one cause, most likely."""
        return (self.campaign, self.command, self.kind, self.what)


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.kind in FAILURES]


def table(outcomes: Sequence[Outcome]) -> str:
    """Tried and ended how, a line for each campaign and command."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for outcome in outcomes:
        for key in ((outcome.campaign, outcome.command), (outcome.campaign, "all")):
            rows.setdefault(key, Counter())[outcome.kind] += 1
    head = f"{'campaign':<16}{'command':<16}{'tried':>8}" + "".join(f"{kind:>11}" for kind in KINDS)
    lines = [head, "-" * len(head)]
    for (campaign, command), counts in sorted(rows.items()):
        cells = "".join(f"{counts[kind]:>11}" for kind in KINDS)
        lines.append(f"{campaign:<16}{command:<16}{counts.total():>8}{cells}")
    return "\n".join(lines)


def findings(outcomes: Sequence[Outcome]) -> str:
    """Each distinct failure with how often it came, its files and one fault that shows it."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in failures(outcomes):
        groups.setdefault(outcome.distinct, []).append(outcome)
    lines = [f"{len(groups)} distinct failures"]
    for group in sorted(groups.values(), key=len, reverse=True):
        first = group[0]
        files = sorted({outcome.file for outcome in group})
        more = f" and {len(files) - _SHOWN_FILES} more" if len(files) > _SHOWN_FILES else ""
        lines.append(f"{len(group):>6} x {first.campaign}, {first.command}: {first.kind}: {first.what}")
        lines.append(f"         of {', '.join(files[:_SHOWN_FILES])}{more}")
        lines.append(f"         such as {first.form}, {first.file}: {first.fault}")
    return "\n".join(lines)


def as_json(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) for outcome in outcomes]
