"""How a disturbed command ended, and the table that counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Kind = Literal["refused", "equal", "wrong", "traceback", "hang", "memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SHOWN_FILES = 4


@dataclass(frozen=True)
class Outcome:
    """One disturbed run."""

    campaign: str
    form: str  # of the data set
    file: str  # what was disturbed
    command: str
    fault: str  # how, so exactly that it can be done again
    kind: Kind
    what: str  # the message, the exception with its last line, or what is not equal


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those that are neither refused nor equal."""
    return [outcome for outcome in outcomes if outcome.kind not in ("refused", "equal")]


def table(outcomes: Sequence[Outcome]) -> str:
    """Count tried runs and how they ended, a line for each campaign and command."""
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
    """Return each distinct failure with how often it came, its files and one fault that shows it."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in failures(outcomes):
        # Those that agree in this have one cause, most likely.
        cause = (outcome.campaign, outcome.command, outcome.kind, outcome.what)
        groups.setdefault(cause, []).append(outcome)
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
    """Return the outcomes as JSON keeps them."""
    return [asdict(outcome) for outcome in outcomes]


def spread(size: int, number: int) -> list[int]:
    """Return up to ``number`` of ``range(size)``, evenly."""
    number = min(size, number)
    return [place * size // number for place in range(number)]
