"""Which documents a step of training saw, and in which steps one is seen: arithmetic and the idx alone.

Everything follows from the order and the samples of a loader that is made as the run's was; no token id is
read. ``SeenDocuments.of_step`` goes from a step to files and bytes, ``steps_of`` the other way.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loader.reading.shard_reader import ShardReader
from loader.samples.joined_rows import JoinedRows
from loader.samples.whole_samples import WholeSamples
from loader.shards.shard_set import DatasetShards, ExternalTar
from loader.token_loader import TokenLoader
from shardprep.errors import NotFound, UsageError
from shardprep.format.dataset_spec import read_input_names
from shardprep.format.idx import read_idx
from shardprep.format.names import place_text
from shardprep.regular_files import NOT_THERE


@dataclass(frozen=True, kw_only=True)
class DocumentPart:
    """A part of a stored sample: of a document, or of a packed row."""

    tar: Path
    number: int  # of the stored sample in its shard, from 0
    is_row: bool
    place: str  # file and byte of the document; of a row, of the document of its first token
    num_documents: int  # that begin in a row; 1 for a document
    first_token: int  # of the stored sample
    num_tokens: int  # of it that were seen; an EOS that is put behind a document is not counted


@dataclass(frozen=True, kw_only=True)
class SeenSample:
    """One row of a batch."""

    rank: int
    batch: int  # of the rank's batches of the step
    row: int
    parts: list[DocumentPart]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """Where a document comes: a step of the order, counted through all epochs, and its place there."""

    order_step: int
    rank: int
    batch: int
    row: int


class SeenDocuments:
    """What the run of a loader sees; within ``with``, which closes its files.

    Raises UsageError for several sources in one run, and for one side of a validation split.
    """

    def __init__(self, loader: TokenLoader) -> None:
        samples = loader.chunks.samples
        if loader.run.is_ramped:
            raise UsageError(
                "this loader has a batch_size_schedule, and what its steps saw is told of runs without one"
            )
        if not isinstance(samples, (JoinedRows, WholeSamples)) or samples.shards.split is not None:
            raise UsageError(
                "this loader mixes sources, leaves out documents for validation or makes batches of "
                "batch_tokens, and what its steps saw can be told of one whole data set alone"
            )
        self._samples = samples
        self._order = loader.order
        self._shards = samples.shards
        self._reader = ShardReader(samples.shards)
        self._window_reader = samples.open()
        self._batch_size = loader.step_batches.batch_size
        self._of_rank = loader.order.global_batch_size // loader.process_rank.world_size
        self._idx: dict[int, npt.NDArray[np.void] | None] = {}
        self._names: dict[Path, list[str]] = {}

    def __enter__(self) -> SeenDocuments:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._window_reader.close()

    def of_step(self, order_step: int) -> list[SeenSample]:
        """The samples of a step of the order, counted through all epochs, of all ranks."""
        epoch, step = divmod(order_step, self._order.steps_per_epoch)
        samples = self._order.step_samples(epoch, step, self._window_reader.num_tokens)
        return [
            SeenSample(**self._place(number), parts=self._parts(epoch, sample))
            for number, sample in enumerate(samples.tolist())
        ]

    def steps_of(self, stored: npt.NDArray[np.int64], epochs: range) -> list[Sighting]:
        """The steps in which stored samples are seen, counted through all shards: int64[n] of them."""
        found: list[Sighting] = []
        for epoch in epochs:
            wanted = self._wanted(stored, epoch)
            for start, end in self._order.windows(0):
                lanes = range(self._order.num_lanes)
                samples = self._order.samples_of(epoch, lanes, start, end, self._window_reader.num_tokens)
                for number, column in zip(*np.nonzero(np.isin(samples, wanted)), strict=True):
                    step = epoch * self._order.steps_per_epoch + start + int(column)
                    found.append(Sighting(order_step=step, **self._place(int(number))))
        return sorted(found, key=lambda sighting: (sighting.order_step, sighting.rank, sighting.batch))

    def _place(self, number: int) -> dict[str, int]:
        """Where the n-th sample of a global batch stands."""
        rank, of_rank = divmod(number, self._of_rank)
        batch, row = divmod(of_rank, self._batch_size)
        return {"rank": rank, "batch": batch, "row": row}

    def _wanted(self, stored: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        """The samples of an epoch's order that hold a part of some stored ones."""
        if isinstance(self._samples, JoinedRows):
            rows = self._samples
            offset = self._order.offset(epoch, rows.offsets)
            parts = []
            for begin, end in (rows.stream_place(self._reader, sample) for sample in stored.tolist()):
                tokens = np.arange(begin - offset, end - offset, rows.seq_len)
                parts.append(np.append(tokens, end - offset - 1)[: None if end > begin else 0])
            return np.unique(np.concatenate(parts) % rows.offsets // rows.seq_len)
        if self._samples.pieces is not None:
            return self._samples.pieces.of_documents(self._reader, stored)
        return stored

    def _parts(self, epoch: int, sample: int) -> list[DocumentPart]:
        if isinstance(self._samples, JoinedRows):
            offset = self._order.offset(epoch, self._samples.offsets)
            found = self._samples.documents_of(self._reader, sample, offset)
            return [self._part(*document) for document in found]
        longest = self._samples.max_length
        if self._samples.pieces is None:
            return [self._part(sample, 0, longest)]
        documents, first = self._samples.pieces.locate(self._reader, np.array([sample]))
        return [self._part(int(documents[0]), int(first[0]), longest)]

    def _part(self, stored: int, first_token: int, most_tokens: int | None) -> DocumentPart:
        shard = int(self._shards.shard_of(np.array(stored)))
        source, row = self._shards.locate(shard)
        number = stored - int(self._shards.first_sample[shard])
        left = int(self._reader.num_tokens_of(shard)[number]) - first_token
        number = int(self._shards.rows_of(shard, np.array([stored]))[0])
        records = self._records(shard, source, row)
        place, num_documents = source.path_of(row).name, 1
        if records is not None and isinstance(source, DatasetShards):
            record = records[number]
            place = self._place_text(source, int(record["source"]), int(record["source_offset"]))
            num_documents = int(record["num_starts"]) if source.row_tokens else 1
        return DocumentPart(
            tar=source.path_of(row),
            number=number,
            is_row=source.row_tokens > 0,
            place=place,
            num_documents=num_documents,
            first_token=first_token,
            num_tokens=left if most_tokens is None else min(left, most_tokens),
        )

    def _records(self, shard: int, source: DatasetShards | ExternalTar, row: int) -> Any:
        """The idx of a shard; None for tars of others, and where it is missing."""
        if shard not in self._idx:
            self._idx[shard] = None
            if isinstance(source, DatasetShards):
                with contextlib.suppress(NotFound):
                    self._idx[shard] = read_idx(source.folder, source.spec, int(source.shard_ids[row]))
        return self._idx[shard]

    def _place_text(self, source: DatasetShards, input_number: int, offset: int) -> str:
        names = self._input_names(source)
        known = names[input_number] if input_number < len(names) else f"input {input_number}"
        return place_text(known, offset)

    def _input_names(self, source: DatasetShards) -> list[str]:
        if source.folder not in self._names:
            try:
                self._names[source.folder] = read_input_names(source.folder)
            except NOT_THERE:  # a copy without its plan: inputs have numbers alone
                self._names[source.folder] = []
        return self._names[source.folder]

    def stored_at(self, name: str, offset: int) -> npt.NDArray[np.int64]:
        """The stored samples that hold the document at a byte of an input: documents, or rows that may.

        Raises NotFound for an unknown input, UsageError where rows are in no order of the input.
        """
        found: list[int] = []
        known = False
        for number, source in enumerate(self._shards.sources):
            if isinstance(source, DatasetShards) and name in (names := self._input_names(source)):
                known = True
                first = int(self._shards.source_first[number])
                found += self._in_source(source, first, (names.index(name), offset))
        if not known:
            raise NotFound(f"no data set here has an input {name}; the inputs are named as in its plan.json")
        return np.array(found, np.int64)

    def _in_source(self, source: DatasetShards, first: int, place: tuple[int, int]) -> list[int]:
        """Shards are parts of the inputs in order, so the one that may hold a place is found by halves."""
        low, high = 0, len(source.shard_ids)
        while low < high:
            middle = (low + high) // 2
            begins = self._first_place(source, first, middle)
            low, high = (middle + 1, high) if begins is None or begins <= place else (low, middle)
        for row in range(low - 1, -1, -1):
            if (begins := self._first_place(source, first, row)) is not None:
                if begins > place:
                    continue
                records = self._records(first + row, source, row)
                return [int(self._shards.first_sample[first + row]) + n for n in _holding(records, place)]
        return []

    def _first_place(self, source: DatasetShards, first: int, row: int) -> tuple[int, int] | None:
        records = self._records(first + row, source, row)
        if records is None or not len(records):
            return None
        return min(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))


def _holding(records: npt.NDArray[np.void], place: tuple[int, int]) -> list[int]:
    """The samples of a shard that hold the document at a place, the last one that begins there or before."""
    places = list(zip(records["source"].tolist(), records["source_offset"].tolist(), strict=True))
    if places != sorted(places):
        raise UsageError(
            "rows of --pack best_fit hold documents of anywhere in their shard; look for a text of it instead"
        )
    nearest = max(item for item in places if item <= place)
    if nearest[0] != place[0]:
        return []
    rows = [number for number, item in enumerate(places) if item == nearest]
    if "num_starts" in (records.dtype.names or ()) and rows[0] and places[rows[0]] == nearest:
        rows.insert(0, rows[0] - 1)  # the document may begin in the row before
    return rows
