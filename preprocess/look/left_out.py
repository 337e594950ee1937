"""The documents that a shard left out, as its quarantine file has them: where, why, and how they begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardprep.console import printable
from shardprep.errors import ShardprepError
from shardprep.files import ReadFile, read_beginning
from shardprep.format.input_formats import input_kind
from shardprep.format.json_files import load_json
from shardprep.format.names import quarantine_path
from shardprep.format.plan import Plan

EXCERPT_CHARS = 160
_MAX_QUARANTINE_BYTES = 4 << 20  # of one file: some 20,000 documents
_EXCERPT_BYTES, _DETAIL_CHARS = 480, 300


def left_out_at(folder: Path, plan: Plan, shard_ids: Sequence[int], path: str, offset: int) -> list[str]:
    """Return what is known of a document that was left out, in lines; none where none begins there."""
    for shard_id in shard_ids:
        for reason, entry in quarantined(folder, shard_id):
            if (entry["input"], entry["offset"]) == (path, offset):
                size = "" if entry["num_bytes"] is None else f", {entry['num_bytes']} bytes"
                why = f"left out of shard {shard_id:05d} as {reason}{size}: {entry['detail']}"
                text = excerpt_of(plan, entry)
                return [f"{entry['address']} was {why}", *([f"  {text}"] if text else []), ""]
    return []


def quarantined(folder: Path, shard_id: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(reason, place and size) of each whole line of a quarantine file; none where it cannot be read."""
    try:
        lines = read_beginning(quarantine_path(folder, shard_id), _MAX_QUARANTINE_BYTES).split(b"\n")
    except ShardprepError:
        return
    for line in lines:
        try:
            match load_json(line):
                case {
                    "source": str(path),
                    "source_offset": int(offset),
                    "num_bytes": int(num_bytes),
                    "reason": str(reason),
                    "detail": str(detail),
                } if 0 <= offset < 2**63 and 0 <= num_bytes < 2**63:
                    unit = input_kind(path).unit
                    size = None if unit == "row" else num_bytes  # that of a row is not known
                    place = {"input": path, "offset": offset, "unit": unit, "address": f"{path}:{offset}"}
                    yield reason, {**place, "num_bytes": size, "detail": detail[:_DETAIL_CHARS]}
        except ValueError:
            continue


def excerpt_of(plan: Plan, entry: Mapping[str, Any]) -> str:
    """The beginning of a document's text, if its input is there; nothing of tables and compressed files."""
    known = any(item.path == entry["input"] for item in plan.inputs)
    if not known or entry["unit"] == "row" or input_kind(entry["input"]).compression:
        return ""
    try:
        with ReadFile(plan.input_dir / entry["input"]) as file:
            raw = file.read_beginning(entry["offset"], min(entry["num_bytes"], _EXCERPT_BYTES))
    except (ShardprepError, OSError):
        return ""
    text = printable(raw.decode(plan.options.encoding, "replace").strip())
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]}..."
