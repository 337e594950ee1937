"""``status --metrics FILE``: the report in Prometheus' text format, for node_exporter's textfile collector.

The file appears whole by a rename, as the collector asks. Names and labels are an interface: they stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardprep.atomic_files import publish_bytes
from shardprep.format.names import ids_of_ranges

_STATES = ("done", "running", "pending", "failed", "not_submitted", "not_visible")


def write_metrics(path: Path, data: dict[str, Any]) -> None:
    """Write the file. Raises CannotWrite or ReadWriteError."""
    publish_bytes(path, metrics_text(data).encode("utf-8"))


def metrics_text(data: dict[str, Any]) -> str:
    """The report as lines of metrics; what is not known has no line."""
    folder = {"folder": data["folder"]}
    lines: list[str] = []

    def add(name: str, text: str, samples: list[tuple[dict[str, str], float | None]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.extend([f"# HELP shardprep_{name} {text}", f"# TYPE shardprep_{name} gauge"])
            lines.extend(f"shardprep_{name}{_labels({**folder, **own})} {value}" for own, value in known)

    states = [({"state": name}, float(_number(data[name]))) for name in _STATES]
    add("shards", "Shards of the data set by state.", list(states))
    failed = [({"cause": cause}, float(_number(ids))) for cause, ids in data["causes"].items()]
    add("shards_failed", "Failed shards by cause.", list(failed))
    add("tokens", "Tokens of the shards that are done.", [({}, data["num_tokens"])])
    speed = data["tokens_per_s"]
    add("tokens_per_second", "Tokens per second since the newest submission.", [({}, speed)])
    add("seconds_left", "Seconds until what is queued will be made, at this speed.", [({}, data["left_s"])])
    hours = data["core_hours"]
    core_hours = [({"kind": "all"}, hours["used"]), ({"kind": "failed"}, hours["failed"])]
    add("core_hours", "Core-hours of all attempts, and of those that failed.", core_hours)
    add("verified", "1 where index.json is there.", [({}, float(data["verified"]))])
    add("slurm_answers", "1 where Slurm said what waits and runs.", [({}, float(not data["slurm_away"]))])
    return "\n".join([*lines, ""])


def _number(ids: str) -> int:
    return len(ids_of_ranges(ids)) if ids else 0


def _labels(labels: dict[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
