"""fields/shard-N.jsonl: place and ``--keep_fields`` of each document that begins in a shard's samples.

Lines stand in the order of the idx, and within a row in the order of its starts, as digests do. So a line is
found by the idx alone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard
from shardprep.files import ReadFile, errors_named, read_lines
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import read_idx
from shardprep.format.names import fields_path, remake_command


class KeptDocument(NamedTuple):
    input_number: int
    offset: int  # of the input, in the unit of its format
    fields: dict[str, Any]


class KeptFields:
    """The lines of one shard; each takes 8 bytes of memory. Raises FileNotFoundError if there is no file."""

    def __init__(self, folder: Path, spec: DatasetSpec, shard_id: int) -> None:
        self._path = fields_path(folder, shard_id)
        self._remedy = f"run: {remake_command(shard_id, folder)}"
        records = read_idx(folder, spec, shard_id)
        self._places = records[["source", "source_offset"]]
        counts = records["num_starts"] if spec.has_rows else np.ones(len(records), np.int64)
        self._firsts = np.append(0, np.cumsum(counts, dtype=np.int64))  # line of each sample's first start
        self._begins: npt.NDArray[np.int64] = self._line_begins()
        if len(self._begins) - 1 != self._firsts[-1]:
            raise BrokenShard(
                f"{self._path} has {len(self._begins) - 1} lines, expected {self._firsts[-1]}; {self._remedy}"
            )

    def of(self, sample: int, document: int = 0) -> KeptDocument | None:
        """Return the line of a sample's document, numbered as in addresses; None if there is none."""
        first, end = self._firsts[sample : sample + 2].tolist()
        place = tuple(self._places[sample].tolist())
        with errors_named(self._path), ReadFile(self._path) as file:
            is_rest = first == end or self._line(file, first)[:2] != place
            if is_rest and not document:  # it began in a row before
                before = (self._line(file, line) for line in range(first - 1, -1, -1))
                return next((found for found in before if found[:2] == place), None)
            number = first + document - is_rest
            return self._line(file, number) if number < end else None

    def _line_begins(self) -> npt.NDArray[np.int64]:
        lengths = np.fromiter(map(len, read_lines(self._path)), np.int64)
        return np.append(0, np.cumsum(lengths))

    def _line(self, file: ReadFile, number: int) -> KeptDocument:
        begin, end = self._begins[number : number + 2].tolist()
        line = bytes(file.read(begin, end - begin))
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found = KeptDocument(*json.loads(line))
            if [*map(type, found)] == [int, int, dict]:
                return found
        raise BrokenShard(f"{self._path} has the line {line[:60]!r}; {self._remedy}")
