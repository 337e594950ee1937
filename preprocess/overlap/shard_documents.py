"""The documents of a shard, read back from its tar: their ids, and by what names people know them.

A document that goes on in other rows comes whole. Held at a time are about 130,000 tokens, or one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import Ids, Numbers
from shardprep.errors import BrokenShard
from shardprep.files import read_regular, size_of_file
from shardprep.format.documents import DIGEST, kept_ids
from shardprep.format.idx import ShardSamples
from shardprep.format.input_formats import name_of_input
from shardprep.format.manifest import Manifest
from shardprep.format.names import DIGEST_BYTES, digests_path, remake_command
from shardprep.format.plan import Plan

_BLOCK_TOKENS = 1 << 17  # few enough that what is worked out of them stays in a core's cache


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive documents of a shard."""

    first: int  # number of the first one
    ids: Ids  # uint32[tokens]
    offsets: Numbers  # int64[documents + 1]


class ShardDocuments:
    """The documents that begin in a shard, numbered as they are read."""

    def __init__(self, folder: Path, plan: Plan, manifest: Manifest, samples: ShardSamples) -> None:
        self._folder, self._plan, self._manifest, self._samples = folder, plan, manifest, samples
        self._paths = [item.path for item in plan.inputs]
        records = samples.records
        rows = np.arange(len(records))
        starts = (
            [samples.starts(row) for row in rows.tolist()]
            if plan.spec.has_rows
            else [np.zeros(1, np.int64)] * len(rows)
        )
        goes_on = np.array([not len(each) or each[0] > 0 for each in starts], np.bool_)
        counts = np.array([len(each) for each in starts], np.int64)
        firsts = np.cumsum(counts) - counts
        if plan.options.pack == "best_fit" and goes_on.any():
            # What goes on stands in rows further on, of the same place as its beginning: read them behind it.
            places = records[["source", "source_offset"]].tolist()
            begins_at = {places[row]: row for row in np.flatnonzero(~goes_on).tolist()}
            heads = [begins_at.get(places[row], row) if goes_on[row] else row for row in rows.tolist()]
            rows = np.argsort(heads, kind="stable")
            records = samples.records = records[rows]
        lengths = records["num_tokens"].astype(np.int64)
        row_begins = np.cumsum(lengths) - lengths
        turns = np.arange(counts.sum()) - np.repeat((np.cumsum(counts[rows]) - counts[rows]), counts[rows])
        at = np.repeat(np.arange(len(rows)), counts[rows])  # where among the rows that are read
        within = np.concatenate([np.empty(0, np.int64), *(starts[row] for row in rows)])
        self._bounds = np.append(row_begins[at] + within, lengths.sum())
        self._records = rows[at]
        self._positions = turns + goes_on[self._records]  # peek counts what goes on in a row as its first
        self._digest_numbers = firsts[self._records] + turns
        # A record says where the document of its first token lies.
        self._place_records = np.full(len(at), -1)
        of_first = np.searchsorted(self._bounds[:-1], row_begins, side="right") - 1
        self._place_records[of_first if plan.spec.has_rows else at] = np.arange(len(rows))

    def blocks(self) -> Iterator[Block]:
        """Yield all documents, some at a time. Raises BrokenShard, ReadWriteError."""
        bounds, held = self._bounds, np.empty(0, np.uint32)
        first, last = 0, len(bounds) - 1
        for piece in self._samples.pieces():
            held = np.concatenate([held, piece])
            until = int(np.searchsorted(bounds, bounds[first] + len(held), side="right")) - 1
            while first < until:
                cut = int(np.searchsorted(bounds, bounds[first] + _BLOCK_TOKENS, side="right")) - 1
                cut = min(max(cut, first + 1), until)
                offsets = bounds[first : cut + 1] - bounds[first]
                yield Block(first=first, ids=held[: offsets[-1]], offsets=offsets)
                held, first = held[offsets[-1] :], cut
        if first < last:  # documents without a token
            yield Block(first=first, ids=held, offsets=bounds[first:] - bounds[first])

    def names(self, number: int) -> dict[str, Any]:
        """Return the shard, the record, the address for ``peek``, and the place if the idx says it."""
        shard_id, record = self._samples.shard_id, int(self._records[number])
        position = f":{self._positions[number]}" if self._plan.spec.has_rows else ""
        place = None
        if (at := self._place_records[number]) >= 0:
            found = self._samples.records[at]
            name = name_of_input(self._paths, int(found["source"]))
            place = {"file": name, "byte": int(found["source_offset"])}
        return {
            "shard": shard_id,
            "record": record,
            "document": f"{shard_id}:{record}{position}",
            "place": place,
        }

    def ids_by_place(self) -> dict[tuple[str, int], str]:
        """Return the ids that the plan keeps, by file and byte."""
        if not self._plan.options.id_field:
            return {}
        kept = kept_ids(self._folder, self._samples.shard_id)
        return {(name_of_input(self._paths, source), offset): name for source, offset, name in kept}

    def digests(self) -> npt.NDArray[np.void] | None:
        """Return the digest of each document, DIGEST[documents]; None where the plan keeps none."""
        shard_id, stamp = self._samples.shard_id, self._manifest.digests
        if stamp is None:
            return None
        path, expected = digests_path(self._folder, shard_id), len(self._digest_numbers) * DIGEST_BYTES
        raw = read_regular(path, max_bytes=stamp.num_bytes) if size_of_file(path) else b""
        if len(raw) != expected:
            remedy = remake_command(shard_id, self._folder)
            raise BrokenShard(path=path, found=f"{len(raw)} bytes", expected=expected, remedy=remedy)
        return np.frombuffer(raw, DIGEST)[self._digest_numbers]
