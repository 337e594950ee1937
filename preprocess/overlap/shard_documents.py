"""The documents of a shard, as its tar holds them: ids, addresses for ``peek``, places, ids and digests.

Documents that go on in other rows come whole. Some megabytes are held at a time, or one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some documents, one behind another."""

    ids: Ids  # uint32[tokens]
    offsets: Numbers  # int64[documents + 1]
    numbers: Numbers  # int64[documents], in the shard; -1 for a part of a document that comes whole later

    def ids_of(self, position: int) -> Ids:
        """Return the ids of the document at a position in the block."""
        return self.ids[self.offsets[position] : self.offsets[position + 1]]


class ShardDocuments:
    """The documents that begin in a shard, numbered in the order of its samples."""

    def __init__(self, folder: Path, plan: Plan, manifest: Manifest, samples: ShardSamples) -> None:
        self._samples, self._folder, self._plan, self._manifest = samples, folder, plan, manifest
        self._paths = [item.path for item in plan.inputs]
        records = samples.records
        lengths = records["num_tokens"].astype(np.int64)
        row_begins = np.cumsum(lengths) - lengths
        self._end = int(lengths.sum())
        self._rests: dict[int, list[int]] = {}  # of best_fit: document -> rows in which it goes on
        if not plan.spec.has_rows:
            self._records, self._begins = np.arange(len(records)), row_begins
            self._positions = np.full(len(records), -1)
            self._bounds, self._numbers_at = row_begins, self._records
            self._place_records = self._records
            return
        starts = [samples.starts(number) for number in range(len(records))]
        counts = np.array([len(each) for each in starts], np.int64)
        self._records = np.repeat(np.arange(len(records)), counts)
        flat = np.concatenate([*starts, np.empty(0, np.int64)])
        self._begins = row_begins[self._records] + flat
        goes_on = np.array([not len(each) or each[0] > 0 for each in starts], np.bool_)
        # peek counts what goes on from another row as document 0.
        turns = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._positions = turns + goes_on[self._records]
        # A record says where the document of its first token lies.
        self._place_records = np.full(len(flat), -1)
        of_first = np.searchsorted(self._begins, row_begins, side="right") - 1
        if plan.options.pack == "best_fit":
            self._bounds = np.unique(np.concatenate([row_begins, self._begins]))
            at = np.searchsorted(self._begins, self._bounds)
            at[at == len(self._begins)] = 0
            is_begin = (
                self._begins[at] == self._bounds if len(flat) else np.zeros(len(self._bounds), np.bool_)
            )
            self._numbers_at = np.where(is_begin, at, -1)
            # All parts of a document but the last fill a row, and all have its place.
            heads: dict[tuple[int, int], int] = {}
            for row in range(len(records)):
                place = (int(records["source"][row]), int(records["source_offset"][row]))
                if not goes_on[row]:
                    heads[place] = int(of_first[row])
            for row in np.flatnonzero(goes_on).tolist():
                place = (int(records["source"][row]), int(records["source_offset"][row]))
                if place in heads:
                    self._rests.setdefault(heads[place], []).append(row)
            of_first = of_first[~goes_on]
            self._place_records[of_first] = np.flatnonzero(~goes_on)
            for number in self._rests:
                self._numbers_at[self._numbers_at == number] = -1
        else:
            self._bounds, self._numbers_at = self._begins, np.arange(len(flat))
            self._place_records[of_first] = np.arange(len(records))

    def __len__(self) -> int:
        return len(self._begins)

    def blocks(self) -> Iterator[Block]:
        """Yield all documents, of about a million tokens at a time, or one."""
        bounds = np.append(self._bounds, self._end)
        held: list[Ids] = []
        first = num_held = 0
        for piece in self._samples.pieces():
            held.append(piece)
            num_held += len(piece)
            until = int(np.searchsorted(bounds, bounds[first] + num_held, side="right")) - 1
            if num_held < _BLOCK_TOKENS or until == first:
                continue
            ids = np.concatenate(held)
            yield self._block(ids, bounds, first, until)
            held = [ids[bounds[until] - bounds[first] :]]
            first, num_held = until, len(held[0])
        if first < len(self._bounds):
            yield self._block(
                np.concatenate([*held, np.empty(0, np.uint32)]), bounds, first, len(self._bounds)
            )
        for number, rows in self._rests.items():
            head = self._samples.ids(int(self._records[number]))
            ids = np.concatenate([head, *map(self._rest_of, rows)])
            yield Block(ids=ids, offsets=np.array([0, len(ids)]), numbers=np.array([number]))

    def _block(self, ids: Ids, bounds: Numbers, first: int, until: int) -> Block:
        offsets = bounds[first : until + 1] - bounds[first]
        return Block(ids=ids[: offsets[-1]], offsets=offsets, numbers=self._numbers_at[first:until])

    def _rest_of(self, row: int) -> Ids:
        """Return what stands in a row before the first document that begins there."""
        ids, starts = self._samples.ids(row), self._samples.starts(row)
        return ids[: starts[0]] if len(starts) else ids

    def address(self, number: int) -> tuple[int, str]:
        """Return the record in which a document begins, and its address for ``peek``."""
        record, position = int(self._records[number]), int(self._positions[number])
        address = f"{self._samples.shard_id}:{record}"
        return record, address if position < 0 else f"{address}:{position}"

    def place(self, number: int) -> tuple[str, int] | None:
        """Return the file, and the byte or row in it, where a document begins.

        It is known of documents, and of a document of which the first token of a row is.
        """
        record = int(self._place_records[number])
        if record < 0:
            return None
        found = self._samples.records[record]
        return name_of_input(self._paths, int(found["source"])), int(found["source_offset"])

    def ids_and_digests(self) -> tuple[dict[tuple[str, int], str], npt.NDArray[np.void] | None]:
        """Return the ids that the plan keeps, by place, and the digests: DIGEST[documents]."""
        shard_id, options, digests = self._samples.shard_id, self._plan.options, None
        ids: dict[tuple[str, int], str] = {}
        if options.id_field:
            for source, offset, kept in kept_ids(self._folder, shard_id):
                ids[name_of_input(self._paths, source), offset] = kept
        if stamp := self._manifest.digests:
            path = digests_path(self._folder, shard_id)
            raw = read_regular(path, max_bytes=stamp.num_bytes) if size_of_file(path) else b""
            if len(raw) != len(self) * DIGEST_BYTES:
                expected, again = f"{len(self)} digests", remake_command(shard_id, self._folder)
                raise BrokenShard(path=path, found=f"{len(raw)} bytes", expected=expected, remedy=again)
            digests = np.frombuffer(raw, DIGEST)
        return ids, digests
