"""What the doctor found: a line per check, good, warning or bad, each with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardprep.errors import ShardprepError

Level = Literal["good", "warning", "bad"]
WARNING_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check."""

    topic: str  # one word: cpus, memory, tokenizer, engine, input, output, threads, versions, torch
    level: Level
    text: str  # what was found, where, and what was expected
    todo: str = ""  # what to do; empty where nothing is
    exit_code: int = 0  # of what is bad, as shardprep.errors has them


def good(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="good", text=text)


def warning(topic: str, text: str, todo: str) -> Finding:
    return Finding(topic=topic, level="warning", text=text, todo=todo)


def bad(topic: str, text: str, todo: str, error: type[ShardprepError]) -> Finding:
    """Something that the work would fail by, with the exit code of ``error``."""
    return Finding(topic=topic, level="bad", text=text, todo=todo, exit_code=error.exit_code)


def of_error(topic: str, error: ShardprepError) -> Finding:
    """An error as a finding; its message says what to do behind the last semicolon."""
    text, semicolon, todo = str(error).rpartition("; ")
    if not semicolon:
        text, todo = todo, "see the message"
    return Finding(topic=topic, level="bad", text=text, todo=todo, exit_code=error.exit_code)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is good, 1 for warnings, else the code of the first that is bad."""
    for finding in findings:
        if finding.level == "bad":
            return finding.exit_code
    return WARNING_EXIT_CODE if any(finding.level == "warning" for finding in findings) else 0


def as_text(findings: Sequence[Finding]) -> list[str]:
    """A line per finding, and one for what to do; the sum at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8}{finding.topic:<10}{finding.text}")
        if finding.todo:
            lines.append(f"{'':18}-> {finding.todo}")
    counts = {
        level: sum(finding.level == level for finding in findings) for level in ("bad", "warning", "good")
    }
    return [*lines, f"{counts['bad']} bad, {counts['warning']} warnings, {counts['good']} good"]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "worst": next((f.level for f in findings if f.level == "bad"), None)
        or next((f.level for f in findings if f.level == "warning"), "good"),
        "exit_code": exit_code(findings),
        "findings": [{"topic": f.topic, "level": f.level, "text": f.text, "todo": f.todo} for f in findings],
    }
