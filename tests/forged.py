"""Edit JSON files of a data set and update their hashes, as somebody who forges them would.

The hashes are computed here as docs/format.md describes them, without the code that checks them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.world import call_main


def content_sha256(values: dict[str, Any]) -> str:
    """Return the ``content_sha256`` of a file with these values."""
    kept = {name: value for name, value in values.items() if name not in ("content_sha256", "run")}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def checksum_of_state(state: Mapping[str, Any]) -> str:
    """Return the checksum of a loader's state: sha256 of its other values."""
    values = {name: value for name, value in state.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def with_its_hash(data: bytes) -> bytes | None:
    """Return a file with an updated hash, or None if it has no hash or cannot be parsed."""
    try:
        digest = content_sha256(json.loads(data))
    except (ValueError, AttributeError, RecursionError):
        return None
    forged = re.sub(rb'("content_sha256": ?)"\w+"', rb'\1"' + digest.encode() + b'"', data)
    return forged if forged != data else None


def rewrite_json(path: Path, /, **changes: Any) -> None:
    """Set values of a file by their dotted names, and update its hashes."""
    values = json.loads(path.read_bytes())
    for place, value in changes.items():
        inner = values
        *above, name = place.split(".")
        for each in above:
            inner = inner[int(each)] if isinstance(inner, list) else inner[each]
        inner[int(name) if isinstance(inner, list) else name] = value
    if "content_sha256" in values:
        values["content_sha256"] = content_sha256(values)
    if isinstance(run := values.get("run"), dict):
        run["run_sha256"] = content_sha256({name: run[name] for name in run if name != "run_sha256"})
    path.write_text(json.dumps(values), encoding="utf-8")


def rewrite_plan(path: Path, old: str, new: str) -> None:
    """Replace a JSON text in the head or a table of plan.json, and update all hashes and offsets."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    line, _, behind = text.replace(old, new).partition("\n")
    head = json.loads(line + "}")
    data = behind.encode()
    for name, table in head["tables"].items():
        opening = f'"{name}":[\n'.encode()
        table["offset"] = at = data.index(opening) + len(opening)
        for block in table["blocks"]:
            # Rows contain no line ends, and a block ends where the next block or the table ends.
            end = min(place for place in (data.find(b"]]\n", at), data.find(b"],\n", at)) if place >= 0) + 1
            block[:] = [end - at, hashlib.sha256(data[at:end]).hexdigest()]
            at = end + len(b",\n")
    rows = json.loads("{" + behind.lstrip(","))
    # Path, size, hash and, if it is not that of the option, encoding; input, byte, hash.
    hashed_columns = {"inputs": (0, 1, 3, 4), "cuts": (0, 1, 3)}
    for name, columns in hashed_columns.items():
        lines = [[row[column] for column in columns if column < 4 or row[column]] for row in rows[name]]
        text = "".join(json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in lines)
        head[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    write_head(path, head, data)
    # The plan id depends on options and these hashes. Take it from a command's message about the old id.
    expected = re.search(r"plan_id .*expected ([0-9a-f]{64})", call_main("verify", path.parent).err)
    if expected:
        write_head(path, {**head, "plan_id": expected[1]}, data)


def write_head(path: Path, head: dict[str, Any], rows: bytes) -> None:
    """Write plan.json with this head, which is its first line, and these tables."""
    head["content_sha256"] = content_sha256(head)
    path.write_bytes(json.dumps(head, separators=(",", ":")).encode()[:-1] + b"\n" + rows)
