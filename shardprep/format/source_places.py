"""Where a sample came from, in words, and the names of a plan's inputs for who reads shards alone."""

from __future__ import annotations

from pathlib import Path

from shardprep.format.checked_json import Fields, read_checked
from shardprep.format.names import PLAN_NAME

MAX_PLAN_BYTES = 256 << 20  # some 10^6 inputs


def place_text(path: str, offset: int) -> str:
    """``ko_1.txt byte 4512``."""
    return f"{path} byte {offset}"


def read_input_names(folder: Path) -> list[str]:
    """The inputs of a data set's plan, relative to its input folder; an idx names them by their position.

    Raises FileNotFoundError or NotADirectoryError where there is no plan, BrokenShard, UnknownVersion,
    ReadWriteError.
    """
    fields: Fields = read_checked(folder / PLAN_NAME, "shardprep-plan", max_bytes=MAX_PLAN_BYTES)
    return [item.text("path") for item in fields.objects("inputs")]
