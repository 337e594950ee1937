"""The ends of the logs of tasks."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from shardprep.errors import ShardprepError
from shardprep.files import ReadFile
from shardprep.format.data_folder import LOGS_FOLDER, DataFolder

_TAIL_BYTES = 16 << 10
_MAX_LINE_CHARS = 600
_NOISE = re.compile(r"^(shardprep: node \S+: .*(begins|ended with exit code \d+)|\s*)$")
_BEGINS = re.compile(r"^(?=shardprep: node \S+: .* begins$)", re.MULTILINE)


@functools.lru_cache(maxsize=1)
def _folder_of_logs(path: str) -> DataFolder:
    """Return the folder of a data set, opened once for thousands of logs."""
    return DataFolder(path)


def _open_log(path: Path) -> ReadFile:
    """Open a log, in the folder of a data set never through a link: others may write there."""
    folder, _, name = str(path).rpartition(f"/{LOGS_FOLDER}/")
    if folder and "/" not in name:
        return _folder_of_logs(folder).open(f"{LOGS_FOLDER}/{name}")
    return ReadFile(path)


def log_tail(path: Path, num_later: int = 0) -> str:
    """Return the end of a log before the last ``num_later`` starts of its task, or ""."""
    try:
        with _open_log(path) as file:
            start = max(file.num_bytes - _TAIL_BYTES, 0)
            raw = file.read_beginning(start, _TAIL_BYTES)
    except (OSError, ValueError, ShardprepError):  # ValueError: a NUL in the name
        return ""
    parts = _BEGINS.split(raw.decode("utf-8", "replace"))
    return parts[-1 - num_later] if num_later < len(parts) else ""


def shortened(line: str) -> str:
    """Return a line for people, cut after 600 characters, with a sign: most messages are shorter."""
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}..."


def last_lines(log: str, number: int = 3) -> list[str]:
    """Return the last informative lines of a log. Lines of srun are left out unless it failed."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    if "srun failed" not in log:
        lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))] or lines
    return lines[-number:]
