"""The commands that ``plan`` prints for the next step: each can be pasted into a shell in any folder."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shardprep
from shardprep.command_line import flag_words
from shardprep.console import quoted

_BATCH_CPUS = 8  # that prep_array.sh asks for
_DEFAULT_MAX_ARRAY_SIZE = 1001  # Slurm's own
_ANSWER_S = 3


def next_lines(folder: Path, num_shards: int) -> list[str]:
    """Return the commands that make a planned data set; sbatch comes first where the site takes its array."""
    place = quoted(folder)
    script = Path(shardprep.__file__).resolve().parent.parent / "slurm" / "prep_array.sh"
    lines = []
    if num_shards <= _max_array_size() and script.is_file():
        most = _cpus_of_nodes()
        cpus = f"--cpus-per-task={most} " if 0 < most < _BATCH_CPUS else ""
        lines.append(f"sbatch --array=0-{num_shards - 1} {cpus}{quoted(script)} {place}")
    lines.append(f"shardprep submit {place}  # within the site's limits, verify included")
    lines.append(f"shardprep run {place}  # here, without a cluster")
    return [f"next: {lines[0]}", *(f"  or: {line}" for line in lines[1:])]


_HUB_DATASET = re.compile(r"(?:(?:hf|https?):/+(?:huggingface\.co/+)?datasets/)?([\w-][\w.-]*/[\w-][\w.-]*)")

_FETCHED = {"input_dir": "raw", "recursive": True}


def hub_lines(input_dir: Path, given: Mapping[str, Any]) -> str | None:
    """Return the commands that fetch a data set of the hub and plan it; None if it has no such name."""
    if not (match := _HUB_DATASET.fullmatch(str(input_dir))):
        return None
    others = {name: value for name, value in given.items() if value is not None and name not in _FETCHED}
    words = flag_words(_FETCHED | others)
    fetch = f"hf download {match[1]} --repo-type dataset --local-dir raw"
    return f"{fetch} && shardprep plan {shlex.join(words)}"


def _max_array_size() -> int:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _answer("scontrol", "show", "config"), re.MULTILINE)
    return int(found[1]) if found else _DEFAULT_MAX_ARRAY_SIZE


def _cpus_of_nodes() -> int:
    """CPUs of the largest node of the partition that sbatch would take; 0 where Slurm does not say."""
    rows = re.findall(
        r"^(\S+?)(\*?)\|(\d+)", _answer("sinfo", "--noheader", "--exact", "--format=%P|%c"), re.MULTILINE
    )
    wanted = os.environ.get("SBATCH_PARTITION")
    return max((int(cpus) for name, star, cpus in rows if (name == wanted if wanted else star)), default=0)


def _answer(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, check=False, timeout=_ANSWER_S)
        return done.stdout.decode("utf-8", "replace")
    return ""
