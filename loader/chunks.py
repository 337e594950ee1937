"""A chunk: some steps of some slots, as a worker sends them, and where documents begin in its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from loader.order import Int32s, Int64s
from shardprep.format.dataset_spec import BLANK

IGNORED = -100  # a label that cross_entropy leaves out
NO_LABEL = np.int32(-(2**31))  # set in an id that is seen and not learnt: no id is below 0 else
ID_BITS = 2**31 - 1  # the id without it


ORIGIN = ("row", "place", "source", "shard", "sample", "document")  # what a batch tells of a document
_HEAD = 5  # samples per step, steps, tokens cut, document starts and origins (-1: none were asked for)


@dataclass(frozen=True, kw_only=True)
class ScatteredRows:
    """Rows of one length anywhere in a flat array, gathered when their step is asked for. So a step's 64 KiB
    stay in the cache, which the 1 MiB of a whole chunk would not."""

    flat: npt.NDArray[np.integer[Any]]
    at: Int64s  # int64[samples per step, steps]: where in flat each row begins
    row_tokens: int
    mask: npt.NDArray[np.uint8] | None = None  # 1 where a token has a label; None: all have
    mask_at: Int64s | None = None  # likewise: where in mask each row begins; -1: all have
    blank_id: int = BLANK  # what stands for BLANK in flat: ids of two bytes cannot say it

    @property
    def is_plain(self) -> bool:
        """Whether the ids in ``flat`` are what is given."""
        return self.mask is None and self.blank_id == BLANK

    @cached_property
    def _view(self) -> npt.NDArray[np.integer[Any]]:
        return sliding_window_view(self.flat, self.row_tokens)

    def __getitem__(self, places: Any) -> npt.NDArray[np.integer[Any]]:
        """As of an array ``[samples per step, steps, row_tokens]``; always a copy. With a mask int32, and
        NO_LABEL in the tokens that have none."""
        rows: npt.NDArray[np.integer[Any]] = self._view[self.at[places]]
        if self.blank_id != BLANK:
            rows = np.where(rows == self.blank_id, np.int32(BLANK), rows.astype(np.int32))
        if self.mask is not None and self.mask_at is not None:
            at = self.mask_at[places]
            without = sliding_window_view(self.mask, self.row_tokens)[at] == 0
            without[at < 0] = False
            rows = np.where(without, rows.astype(np.int32) | NO_LABEL, rows.astype(np.int32))
        return rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Some numbers of each sample, in one array, one step after another."""

    counts: Int32s  # int32[samples per step, steps]
    flat: Int32s

    @cached_property
    def begins(self) -> Int64s:
        """Where the part of each sample begins: int64[samples per step, steps]."""
        by_step = self.counts.T
        return np.cumsum(by_step, dtype=np.int64).reshape(by_step.shape).T - self.counts

    @cached_property
    def _bounds(self) -> list[int]:
        """The same of all, and the end: one list, for thousands would bring on full garbage collections, of
        0.1 s each."""
        bounds: list[int] = [*self.begins.T.reshape(-1).tolist(), len(self.flat)]
        return bounds

    def of(self, step: int, first: int, end: int) -> Int32s:
        """Those of some samples of a step, one after another."""
        begin = step * len(self.counts)
        return self.flat[self._bounds[begin + first] : self._bounds[begin + end]]


@dataclass(frozen=True, kw_only=True)
class ScatteredParts:
    """Parts of several flat arrays, one for each sample: those of a mixture lie in their sources' windows."""

    flats: list[npt.NDArray[np.integer[Any]]]
    number: npt.NDArray[np.intp]  # intp[samples per step, steps]: which flat each part lies in
    at: Int64s  # int64[samples per step, steps]: where in it the part begins
    counts: Int32s  # int32[samples per step, steps]: how much of it; of rows a whole row

    @staticmethod
    def of_shape(shape: tuple[int, int]) -> ScatteredParts:
        number, at, counts = np.empty(shape, np.intp), np.empty(shape, np.int64), np.empty(shape, np.int32)
        return ScatteredParts(flats=[], number=number, at=at, counts=counts)

    def put(self, places: Any, flat: npt.NDArray[np.integer[Any]], at: Any, counts: Any) -> None:
        """Let the parts of some samples lie in one array."""
        self.number[places], self.at[places], self.counts[places] = len(self.flats), at, counts
        self.flats.append(flat)

    def steps(self, first: int, end: int) -> ScatteredParts:
        """Those of the steps from ``first`` up to ``end``."""
        columns = {name: getattr(self, name)[:, first:end] for name in ("number", "at", "counts")}
        return replace(self, **columns)

    def __getitem__(self, places: Any) -> Int32s:
        """Of rows, as of an array ``[samples per step, steps, row_tokens]``; always a copy."""
        at = self.at[places]
        return _joined(self.flats, self.number[places], at, self.counts[places]).reshape(*at.shape, -1)

    def joined(self) -> Parts:
        """Copies of the parts, one step after another."""
        return Parts(counts=self.counts, flat=_joined(self.flats, self.number.T, self.at.T, self.counts.T))


def _joined(flats: list[npt.NDArray[np.integer[Any]]], *places: npt.NDArray[Any]) -> Int32s:
    """Parts one after another; ``places``: number of the flat, place in it, and size of each."""
    each = zip(*(column.reshape(-1).tolist() for column in places), strict=True)
    parts = [flats[number][begin : begin + size] for number, begin, size in each]
    joined: Int32s = np.concatenate(parts).astype(np.int32, copy=False)
    return joined


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Where documents, and the padding of rows, begin in the flattened batch; each row begins one."""

    begins: Int64s  # int64[edges], ascending
    sizes: Int64s  # int64[edges]: places up to the next one
    longest: int  # of the sizes
    shape: tuple[int, int]  # rows and width of the batch

    @staticmethod
    def of(begins: Int64s, shape: tuple[int, int]) -> Edges:
        sizes = np.diff(begins, append=shape[0] * shape[1])
        return Edges(begins=begins, sizes=sizes, longest=int(sizes.max()), shape=shape)


@dataclass(frozen=True, kw_only=True)
class RowEdges:
    """The edges of many rows of one width, found at once: 15 ns each, where a batch alone costs 30 us."""

    width: int
    _begins: Int64s
    _sizes: Int64s
    _bounds: list[int]  # of each row's edges, and the end
    _longest: list[int]  # size in each row

    @staticmethod
    def of_rows(starts: Int32s, rows: Int64s, lengths: npt.NDArray[Any], width: int) -> RowEdges:
        """Documents begin at the places ``starts[i]`` of ``rows[i]``; ``lengths``: tokens of each row."""
        row_begins = np.arange(len(lengths), dtype=np.int64) * width
        short = np.flatnonzero(lengths < width)
        begins = np.concatenate([row_begins, rows * width + starts, row_begins[short] + lengths[short]])
        begins.sort()
        begins = begins[np.diff(begins, prepend=-1) > 0]
        sizes = np.diff(begins, append=len(lengths) * width)
        first = np.searchsorted(begins, row_begins)
        return RowEdges(
            width=width,
            _begins=begins,
            _sizes=sizes,
            _bounds=[*first.tolist(), len(begins)],
            _longest=np.maximum.reduceat(sizes, first).tolist(),
        )

    def part(self, first: int, end: int) -> Edges:
        """Those of some consecutive rows, as a batch of their own."""
        edges = slice(self._bounds[first], self._bounds[end])
        return Edges(
            begins=self._begins[edges] - first * self.width,
            sizes=self._sizes[edges],
            longest=max(self._longest[first:end]),
            shape=(end - first, self.width),
        )


def joined_edges(parts: Sequence[Edges]) -> Edges:
    """Those of the batch that has the parts' rows one under another; all have one width."""
    if len(parts) == 1:
        return parts[0]
    width = parts[0].shape[1]
    num_rows = np.cumsum([0, *(part.shape[0] for part in parts)]).tolist()
    begins = [part.begins + row * width for part, row in zip(parts, num_rows, strict=False)]
    return Edges(
        begins=np.concatenate(begins),
        sizes=np.concatenate([part.sizes for part in parts]),
        longest=max(part.longest for part in parts),
        shape=(num_rows[-1], width),
    )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive steps of some slots."""

    lengths: Int32s  # int32[samples per step, steps], tokens of each sample
    # int32[samples per step, steps, row_tokens]; or of samples of any length flat, one step after another
    ids: Int32s | ScatteredRows | ScatteredParts
    row_tokens: int = 0  # of every sample where all are rows
    num_cut: int = 0  # tokens left out behind max_length
    starts: Parts | None = None  # places in each row where a document begins
    origins: Parts | None = None  # ORIGIN numbers for each document

    def is_full(self, step: int) -> bool:
        """Whether no row of a step holds padding."""
        return self._shortest[step] == self.row_tokens

    @cached_property
    def _shortest(self) -> list[int]:
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def ids_of(self, step: int) -> Int32s:
        """The ids of one step's samples, one after another, where ``ids`` is flat."""
        assert isinstance(self.ids, np.ndarray)
        first, end = self._step_bounds[step : step + 2]
        return self.ids[first:end]

    @cached_property
    def _step_bounds(self) -> list[int]:
        bounds: list[int] = np.cumsum([0, *self.lengths.sum(axis=0, dtype=np.int64).tolist()]).tolist()
        return bounds

    @cached_property
    def row_edges(self) -> RowEdges:
        """Where documents begin in all rows, step after step, of a chunk of rows that says it."""
        assert self.starts is not None
        rows = np.repeat(np.arange(self.lengths.size), self.starts.counts.T.reshape(-1))
        return RowEdges.of_rows(self.starts.flat, rows, self.lengths.T.reshape(-1), self.row_tokens)

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        told = (self.starts, self.origins)
        sizes = [-1 if parts is None else len(parts.flat) for parts in told]
        arrays = [np.array([*self.lengths.shape, self.num_cut, *sizes], np.int32), self.lengths.reshape(-1)]
        for parts in told:
            if parts is not None:
                arrays += [parts.counts.reshape(-1), parts.flat]
        arrays.append(self.ids[:].reshape(-1).astype(np.int32, copy=False))
        return torch.from_numpy(np.concatenate(arrays))

    @staticmethod
    def unpack(packed: torch.Tensor, row_tokens: int) -> Chunk:
        """What ``pack`` packed; ``row_tokens`` is 0 where samples have lengths of their own."""
        flat = packed.numpy()
        slots, steps, num_cut, *sizes = flat[:_HEAD].tolist()
        lengths, rest = np.split(flat[_HEAD:], [slots * steps])
        told: list[Parts | None] = []
        for size in sizes:
            if size < 0:
                told.append(None)
                continue
            counts, part, rest = np.split(rest, [slots * steps, slots * steps + size])
            told.append(Parts(counts=counts.reshape(slots, steps), flat=part))
        return Chunk(
            lengths=lengths.reshape(slots, steps),
            ids=rest.reshape(slots, steps, row_tokens) if row_tokens else rest,
            row_tokens=row_tokens,
            num_cut=num_cut,
            starts=told[0],
            origins=told[1],
        )


def with_origins(chunk: Chunk, num_origins: npt.NDArray[Any], origins: Int32s) -> Chunk:
    """A chunk with the origins of its documents, step after step; their rows are put in here.
    ``num_origins``: int[samples per step, steps]."""
    slots, steps = num_origins.shape
    origins[:, 0] = np.repeat(np.tile(np.arange(slots, dtype=np.int32), steps), num_origins.T.reshape(-1))
    counts = num_origins.astype(np.int32) * len(ORIGIN)
    return replace(chunk, origins=Parts(counts=counts, flat=origins.reshape(-1)))


def step_origins(chunks: list[Chunk], step: int, part: slice) -> Int64s:
    """Of some of a step's samples: int64[documents, ORIGIN], whose rows count from 0."""
    found, row = [], 0
    for chunk, first, end in _parts_of(chunks, part):
        assert chunk.origins is not None
        found.append(chunk.origins.of(step, first, end).reshape(-1, len(ORIGIN)).astype(np.int64))
        if row != first:
            found[-1][:, 0] += row - first
        row += end - first
    return found[0] if len(found) == 1 else np.concatenate(found)


def step_edges(chunks: list[Chunk], step: int, part: slice) -> Edges:
    """Of some of a step's rows."""
    return joined_edges(
        [
            chunk.row_edges.part(step * len(chunk.lengths) + first, step * len(chunk.lengths) + end)
            for chunk, first, end in _parts_of(chunks, part)
        ]
    )


def _parts_of(chunks: list[Chunk], part: slice) -> Iterator[tuple[Chunk, int, int]]:
    """Some of a step's samples, which lie in one chunk under another: of each chunk which ones."""
    row = 0
    for chunk in chunks:
        num_rows = len(chunk.lengths)
        first, end = max(part.start - row, 0), min(part.stop - row, num_rows)
        if first < end:
            yield chunk, first, end
        row += num_rows
