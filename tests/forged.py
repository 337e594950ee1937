"""JSON files of a data set as who forges them would write them: with the hash of their new content.

It is computed here as docs/format.md says, without the code that checks it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tests.world import call_main


def content_sha256(values: dict[str, Any]) -> str:
    """Return the hash that a file of these values states."""
    kept = {name: value for name, value in values.items() if name not in ("content_sha256", "run")}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def with_its_hash(data: bytes) -> bytes | None:
    """Return a file with the hash that its values give; None where it has none or none can be given."""
    try:
        digest = content_sha256(json.loads(data))
    except (ValueError, AttributeError, RecursionError):
        return None
    forged = re.sub(rb'("content_sha256": ?)"\w+"', rb'\1"' + digest.encode() + b'"', data)
    return forged if forged != data else None


def seal(path: Path) -> None:
    """Give an edited JSON file of a data set the hashes of its new content."""
    if path.name != "plan.json":
        rewrite_json(path)
        return
    head, _, rows = path.read_bytes().partition(b"\n")  # which, closed by a brace, the hash is of
    write_head(path, json.loads(head + b"}"), rows)


def rewrite_json(path: Path, /, **changes: Any) -> None:
    """Give a file other values, by the dotted names of their places, and the hash that follows."""
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
    """Replace a JSON text in plan.json, in its head or in a table, with all hashes and places that follow."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    line, _, behind = text.replace(old, new).partition("\n")
    head = json.loads(line + "}")
    data = behind.encode()
    for name, table in head["tables"].items():
        opening = f'"{name}":[\n'.encode()
        table["offset"] = at = data.index(opening) + len(opening)
        for block in table["blocks"]:
            # Rows have no line ends, and a block ends where the next one or the table does.
            end = min(place for place in (data.find(b"]]\n", at), data.find(b"],\n", at)) if place >= 0) + 1
            block[:] = [end - at, hashlib.sha256(data[at:end]).hexdigest()]
            at = end + len(b",\n")
    rows = json.loads("{" + behind.lstrip(","))
    parts = {"inputs": (0, 1, 3), "cuts": (0, 1, 3)}  # of a row, which the plan's id has
    for name, columns in parts.items():
        lines = [[row[column] for column in columns] for row in rows[name]]
        told = "".join(json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in lines)
        head[f"{name}_sha256"] = hashlib.sha256(told.encode()).hexdigest()
    write_head(path, head, data)
    # The id, of options and the hashes above, is what a command says that it expected.
    expected = re.search(r"plan_id .*expected ([0-9a-f]{64})", call_main("verify", path.parent).err)
    if expected:
        write_head(path, {**head, "plan_id": expected[1]}, data)


def write_head(path: Path, head: dict[str, Any], rows: bytes) -> None:
    """Write a plan.json of this first line and these tables."""
    head["content_sha256"] = content_sha256(head)
    path.write_bytes(json.dumps(head, separators=(",", ":")).encode()[:-1] + b"\n" + rows)
