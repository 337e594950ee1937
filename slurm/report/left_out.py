"""Documents left out: how many bytes by reason, and some examples with the text that can be seen of them.

How many there are stands in the manifests. Bytes and examples stand in the quarantine files; of many files
some are read, evenly over the shards, and the bytes of the others follow from theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preprocess.plan import Plan
from shardprep.console import printable
from shardprep.errors import ShardprepError
from shardprep.format.names import offset_unit, quarantine_path
from shardprep.regular_files import close_read, open_regular, read_beginning

MOST_FILES = 64
_MOST_BYTES = 4 << 20  # of one quarantine file: some 20,000 documents
_EXCERPT_BYTES = 480
_EXCERPT_CHARS = 160
_MOST_DETAIL = 300


@dataclass(kw_only=True)
class _Seen:
    """What the files that were read say of one reason."""

    num_documents: int = 0
    num_bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def left_out(
    folder: Path,
    plan: Plan,
    quarantined: Mapping[str, int],
    shard_ids: Sequence[int],
    num_examples: int,
) -> list[dict[str, Any]]:
    """By reason, the most frequent first. ``shard_ids``: those that left documents out."""
    step = max(1, -(-len(shard_ids) // MOST_FILES))
    seen: dict[str, _Seen] = {}
    for shard_id in shard_ids[::step]:
        for entry in _entries(folder, shard_id):
            own = seen.setdefault(entry["reason"], _Seen())
            own.num_documents += 1
            own.num_bytes += entry["num_bytes"]
            if len(own.examples) < num_examples:
                own.examples.append(entry)
    paths = {item.path for item in plan.inputs}
    found = []
    for reason, number in sorted(quarantined.items(), key=lambda item: (-item[1], item[0])):
        own = seen.get(reason, _Seen())
        is_whole = own.num_documents == number
        share = number / own.num_documents if own.num_documents else 0
        found.append(
            {
                "reason": reason,
                "num_documents": number,
                "num_bytes": round(own.num_bytes * share) if own.num_documents else None,
                "num_bytes_is_estimate": not is_whole,
                "examples": [_example(plan, entry, paths) for entry in own.examples],
            }
        )
    return found


def _entries(folder: Path, shard_id: int) -> list[dict[str, Any]]:
    """The lines of a quarantine file that are whole; none where it cannot be read."""
    try:
        lines = read_beginning(quarantine_path(folder, shard_id), _MOST_BYTES).split(b"\n")
    except ShardprepError:
        return []
    return [entry for entry in map(_entry, lines) if entry]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match data:
        case {
            "source": str(path),
            "source_offset": int(offset),
            "num_bytes": int(num_bytes),
            "reason": str(reason),
            "detail": str(detail),
        } if 0 <= offset < 2**63 and 0 <= num_bytes < 2**63:
            return {
                "input": path,
                "offset": offset,
                "num_bytes": num_bytes,
                "reason": reason,
                "detail": detail[:_MOST_DETAIL],
            }
    return None


def _example(plan: Plan, entry: Mapping[str, Any], paths: set[str]) -> dict[str, Any]:
    kept = {name: entry[name] for name in ("input", "offset", "num_bytes", "detail")}
    text = _excerpt(plan, entry) if entry["input"] in paths else ""
    return {**kept, "unit": offset_unit(entry["input"]), "text": text}


def _excerpt(plan: Plan, entry: Mapping[str, Any]) -> str:
    """The beginning of the text where it can be read at its place: inputs that are there, and not packed."""
    if offset_unit(entry["input"]) != "byte":
        return ""
    try:
        handle = open_regular(plan.input_dir / entry["input"])
        try:
            raw = os.pread(handle, min(entry["num_bytes"], _EXCERPT_BYTES), entry["offset"])
        finally:
            close_read(handle)
        text = raw.decode(plan.options.encoding, "replace")
    except (OSError, ShardprepError, LookupError, ValueError):
        return ""
    shown = printable(text.strip())
    return shown if len(shown) <= _EXCERPT_CHARS else f"{shown[:_EXCERPT_CHARS]}..."
