"""The settings of a process that makes shards. They change no byte of the shards.

What changes bytes is an option of the plan, see ``shardprep/format/plan_options.py``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.make.resources import memory_limits
from shardprep.errors import UsageError
from shardprep.format.plan_options import BAD_HELP, ENGINE_HELP, INPUT, TEXT, TOKENS, EngineName
from shardprep.option import option


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Where the input of a plan is now. Each field is a flag of the commands that read it."""

    input_dir: Path | None = option(
        None, "folder of the raw input files, if they moved", shown="the plan's", group=INPUT
    )
    transform: Path | None = option(
        None, "the file of the plan's --transform, unchanged; required if the plan has one", group=TEXT
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(InputSettings):
    """Each field is a flag of ``--shard_id N`` and of ``run``."""

    engine: EngineName = option("auto", ENGINE_HELP, group=TOKENS)
    max_bad_fraction: float | None = option(None, BAD_HELP, shown="the plan's", group=TEXT)
    memory_gb: float | None = option(
        None, "memory of a process, in GiB", shown="the limit of Slurm and the cgroup", group="resources"
    )
    again: bool = option(False, "make shards again that are done, such as damaged ones", group="resources")
    max_batch_documents: int | None = option(None)  # from DATASET_BATCH_SIZE; not a flag
    stretch_bytes: int | None = option(None)  # from SHARDPREP_STRETCH_BYTES; not a flag

    def __post_init__(self) -> None:
        if self.memory_gb is not None and not 0 < self.memory_gb < math.inf:
            raise UsageError.of_value("--memory_gb", self.memory_gb, "more than 0, and a number")


def environment_number(name: str) -> int | None:
    """Return an environment variable that is a positive integer, None if it is not set. Raises UsageError."""
    text = os.environ.get(name, "")
    if text and not (text.isdigit() and int(text)):
        raise UsageError.of_value(name, text, "an integer of 1 or more in the environment")
    return int(text) if text else None


def worker_settings(given: dict[str, Any]) -> WorkerSettings:
    """Return the worker's options: ``given``, else from DATASET_[WRITER_]BATCH_SIZE, else the defaults."""
    numbers = map(environment_number, ("DATASET_BATCH_SIZE", "DATASET_WRITER_BATCH_SIZE"))
    settings = {"memory_gb": min(memory_limits().values()) / 2**30, **given}
    settings["stretch_bytes"] = environment_number("SHARDPREP_STRETCH_BYTES")
    return WorkerSettings(max_batch_documents=min(filter(None, numbers), default=None), **settings)
