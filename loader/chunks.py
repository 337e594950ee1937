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

from loader.withdrawn import WithdrawnTokens

IGNORED = -100  # a label that cross_entropy leaves out
NO_LABEL = np.int32(-(2**31))  # set in an id that is seen and not learnt: no id is below 0 else
ID_BITS = 2**31 - 1  # the id without it
WITHDRAWN = np.int32(-1)  # in place of an id that nobody may see any more; no id with NO_LABEL is it


ORIGIN = ("row", "place", "source", "shard", "sample", "document")  # what a batch tells of a document
_HEAD = 5  # samples per step, steps, tokens cut, document starts and origins (-1: none were asked for)


@dataclass(frozen=True, kw_only=True)
class ScatteredRows:
    """Rows of one length anywhere in a flat array, gathered when their step is asked for. So a step's 64 KiB
    stay in the cache, which the 1 MiB of a whole chunk would not."""

    flat: npt.NDArray[np.integer[Any]]
    at: npt.NDArray[np.int64]  # int64[samples per step, steps]: where in flat each row begins
    row_tokens: int
    mask: npt.NDArray[np.uint8] | None = None  # 1 where a token has a label; None: all have
    mask_at: npt.NDArray[np.int64] | None = None  # likewise: where in mask each row begins; -1: all have
    withdrawn: WithdrawnTokens | None = None  # None: none of any data set of the loader
    sample: npt.NDArray[np.int64] | None = None  # likewise: which stored sample each row is

    @property
    def is_plain(self) -> bool:
        """Whether the ids in ``flat`` are what is given."""
        return self.mask is None and self.withdrawn is None

    @cached_property
    def _view(self) -> npt.NDArray[np.integer[Any]]:
        return sliding_window_view(self.flat, self.row_tokens)

    def __getitem__(self, places: Any) -> npt.NDArray[np.integer[Any]]:
        """As of an array ``[samples per step, steps, row_tokens]``; always a copy. With a mask int32,
        NO_LABEL in the tokens that have none, and WITHDRAWN in place of those that are."""
        rows = self._labeled(places)
        if self.withdrawn is None or self.sample is None:
            return rows
        samples = self.sample[places].reshape(-1)
        gone = self.withdrawn.places(samples, np.full(len(samples), self.row_tokens))
        if len(gone):
            rows = np.ascontiguousarray(rows, np.int32)  # a gathered array may lie in another order
            rows.reshape(-1)[gone] = WITHDRAWN
        return rows

    def _labeled(self, places: Any) -> npt.NDArray[np.integer[Any]]:
        rows: npt.NDArray[np.integer[Any]] = self._view[self.at[places]]
        if self.mask is None or self.mask_at is None:
            return rows
        at = self.mask_at[places]
        without = sliding_window_view(self.mask, self.row_tokens)[at] == 0
        without[at < 0] = False
        return np.where(without, rows.astype(np.int32) | NO_LABEL, rows.astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class ScatteredParts:
    """Parts of several flat arrays, one for each sample: those of a mixture lie in their sources' windows."""

    flats: list[npt.NDArray[np.integer[Any]]]
    number: npt.NDArray[np.intp]  # intp[samples per step, steps]: which flat each part lies in
    at: npt.NDArray[np.int64]  # int64[samples per step, steps]: where in it the part begins
    row_tokens: int = 0  # of each part where all are rows

    @staticmethod
    def of_shape(shape: tuple[int, int], row_tokens: int = 0) -> ScatteredParts:
        number, at = np.empty(shape, np.intp), np.empty(shape, np.int64)
        return ScatteredParts(flats=[], number=number, at=at, row_tokens=row_tokens)

    def put(self, places: Any, flat: Any, at: npt.NDArray[np.int64]) -> None:
        """Let the parts of some samples lie in one array."""
        self.number[places], self.at[places] = len(self.flats), at
        self.flats.append(flat)

    def steps(self, first: int, end: int) -> ScatteredParts:
        """Those of the steps from ``first`` up to ``end``."""
        return replace(self, number=self.number[:, first:end], at=self.at[:, first:end])

    @property
    def by_step(self) -> ScatteredParts:
        """The same with one step after another."""
        return replace(self, number=self.number.T, at=self.at.T)

    def __getitem__(self, places: Any) -> npt.NDArray[np.int32]:
        """Of rows, as of an array ``[samples per step, steps, row_tokens]``; always a copy."""
        at = self.at[places]
        row_places = zip(self.number[places].reshape(-1).tolist(), at.reshape(-1).tolist(), strict=True)
        rows = [self.flats[number][begin : begin + self.row_tokens] for number, begin in row_places]
        return np.concatenate(rows).astype(np.int32, copy=False).reshape(*at.shape, self.row_tokens)

    def joined(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The parts of these lengths, one after another."""
        places = zip(*(each.reshape(-1).tolist() for each in (self.number, self.at, lengths)), strict=True)
        parts = [self.flats[number][begin : begin + length] for number, begin, length in places]
        joined: npt.NDArray[np.int32] = np.concatenate(parts).astype(np.int32, copy=False)
        return joined


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Where documents, and the padding of rows, begin in the flattened batch; each row begins one."""

    begins: npt.NDArray[np.int64]  # int64[edges], ascending
    sizes: npt.NDArray[np.int64]  # int64[edges]: places up to the next one
    longest: int  # of the sizes
    shape: tuple[int, int]  # rows and width of the batch

    @staticmethod
    def of(begins: npt.NDArray[np.int64], shape: tuple[int, int]) -> Edges:
        sizes = np.diff(begins, append=shape[0] * shape[1])
        return Edges(begins=begins, sizes=sizes, longest=int(sizes.max()), shape=shape)


@dataclass(frozen=True, kw_only=True)
class RowEdges:
    """The edges of many rows of one width, found at once: 15 ns each, where a batch alone costs 30 us."""

    width: int
    _begins: npt.NDArray[np.int64]
    _sizes: npt.NDArray[np.int64]
    _bounds: list[int]  # of each row's edges, and the end
    _longest: list[int]  # size in each row

    @staticmethod
    def of_rows(
        starts: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[Any],
        width: int,
    ) -> RowEdges:
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

    lengths: npt.NDArray[np.int32]  # int32[samples per step, steps], tokens of each sample
    # int32[samples per step, steps, row_tokens]; or of samples of any length flat, one step after another
    ids: npt.NDArray[np.int32] | ScatteredRows | ScatteredParts
    row_tokens: int = 0  # of every sample where all are rows
    num_cut: int = 0  # tokens left out behind max_length
    num_starts: npt.NDArray[np.int32] | None = None  # int32[samples per step, steps]
    starts: npt.NDArray[np.int32] | None = None  # flat: places in each row where a document begins
    num_origins: npt.NDArray[np.int32] | None = None  # int32[samples per step, steps]: documents of each
    origins: npt.NDArray[np.int32] | None = None  # int32[documents, ORIGIN], step after step

    def is_full(self, step: int) -> bool:
        """Whether no row of a step holds padding."""
        return self._shortest[step] == self.row_tokens

    @cached_property
    def _shortest(self) -> list[int]:
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def ids_of(self, step: int) -> npt.NDArray[np.int32]:
        """The ids of one step's samples, one after another, where ``ids`` is flat."""
        assert isinstance(self.ids, np.ndarray)
        first, end = self._step_bounds[step : step + 2]
        return self.ids[first:end]

    @cached_property
    def _step_bounds(self) -> list[int]:
        bounds: list[int] = np.cumsum([0, *self.lengths.sum(axis=0, dtype=np.int64).tolist()]).tolist()
        return bounds

    def starts_of(self, step: int) -> list[npt.NDArray[np.int32]]:
        """Where documents begin in each row of one step, of a chunk that says it."""
        assert self.starts is not None
        first, end = self._start_bounds[0][step], self._start_bounds[1][step]
        return [self.starts[start:stop] for start, stop in zip(first, end, strict=True)]

    @cached_property
    def _start_bounds(self) -> tuple[list[list[int]], list[list[int]]]:
        """Where each row's part of ``starts`` begins, and where it ends: of each step a list. Two lists per
        step, not one per row: thousands would bring on full garbage collections, of 0.1 s each."""
        assert self.num_starts is not None
        ends = np.cumsum(self.num_starts.reshape(-1), dtype=np.int64).reshape(self.num_starts.shape)
        first, end = np.stack([ends - self.num_starts, ends]).swapaxes(1, 2).tolist()
        return first, end

    def edges(self, step: int, first: int, end: int) -> Edges:
        """Where documents begin in some rows of one step, of a chunk of rows."""
        begin = step * len(self.lengths)
        return self._row_edges.part(begin + first, begin + end)

    @cached_property
    def _row_edges(self) -> RowEdges:
        """Of all rows, step after step."""
        assert self.starts is not None
        assert self.num_starts is not None
        row_of = np.arange(self.lengths.size).reshape(self.lengths.shape[::-1]).T
        rows = np.repeat(row_of.reshape(-1), self.num_starts.reshape(-1))
        return RowEdges.of_rows(self.starts, rows, self.lengths.T.reshape(-1), self.row_tokens)

    def origins_of(self, step: int, first: int, end: int) -> npt.NDArray[np.int64]:
        """int64[documents, ORIGIN] of some samples of one step; their rows count from 0 at ``first``."""
        assert self.origins is not None
        begin = step * len(self.lengths)
        bounds = self._origin_bounds
        found = self.origins[bounds[begin + first] : bounds[begin + end]].astype(np.int64)
        if first:
            found[:, 0] -= first
        return found

    @cached_property
    def _origin_bounds(self) -> list[int]:
        assert self.num_origins is not None
        bounds: list[int] = np.cumsum([0, *self.num_origins.T.reshape(-1).tolist()]).tolist()
        return bounds

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        num_starts = -1 if self.starts is None else len(self.starts)
        num_origins = -1 if self.origins is None else len(self.origins)
        head = np.array([*self.lengths.shape, self.num_cut, num_starts, num_origins], np.int32)
        parts = [head, self.lengths.reshape(-1)]
        if self.starts is not None and self.num_starts is not None:
            parts += [self.num_starts.reshape(-1), self.starts]
        if self.origins is not None and self.num_origins is not None:
            parts += [self.num_origins.reshape(-1), self.origins.reshape(-1)]
        ids = self.ids[:].reshape(-1).astype(np.int32, copy=False)
        return torch.from_numpy(np.concatenate([*parts, ids]))

    @staticmethod
    def unpack(packed: torch.Tensor, row_tokens: int) -> Chunk:
        """What ``pack`` packed; ``row_tokens`` is 0 where samples have lengths of their own."""
        flat = packed.numpy()
        slots, steps, num_cut, num_starts, num_origins = flat[:_HEAD].tolist()
        size = slots * steps
        lengths, rest = flat[_HEAD : _HEAD + size].reshape(slots, steps), flat[_HEAD + size :]
        counts = starts = documents = origins = None
        if num_starts >= 0:
            counts, starts = rest[:size].reshape(slots, steps), rest[size : size + num_starts]
            rest = rest[size + num_starts :]
        if num_origins >= 0:
            end = size + num_origins * len(ORIGIN)
            documents, origins = rest[:size].reshape(slots, steps), rest[size:end].reshape(-1, len(ORIGIN))
            rest = rest[end:]
        return Chunk(
            lengths=lengths,
            ids=rest.reshape(slots, steps, row_tokens) if row_tokens else rest,
            row_tokens=row_tokens,
            num_cut=num_cut,
            num_starts=counts,
            starts=starts,
            num_origins=documents,
            origins=origins,
        )


def with_origins(chunk: Chunk, num_origins: npt.NDArray[Any], origins: npt.NDArray[np.int32]) -> Chunk:
    """A chunk with the origins of its documents, step after step; their rows are put in here.
    ``num_origins``: int[samples per step, steps]."""
    slots, steps = num_origins.shape
    origins[:, 0] = np.repeat(np.tile(np.arange(slots, dtype=np.int32), steps), num_origins.T.reshape(-1))
    return replace(chunk, num_origins=num_origins.astype(np.int32), origins=origins)


def step_origins(chunks: list[Chunk], step: int, part: slice) -> npt.NDArray[np.int64]:
    """Of some of a step's samples; rows count from 0."""
    parts, row = [], 0
    for chunk, first, end in _parts_of(chunks, part):
        parts.append(chunk.origins_of(step, first, end))
        if row:
            parts[-1][:, 0] += row
        row += end - first
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def step_edges(chunks: list[Chunk], step: int, part: slice) -> Edges:
    """Of some of a step's rows."""
    return joined_edges([chunk.edges(step, first, end) for chunk, first, end in _parts_of(chunks, part)])


def _parts_of(chunks: list[Chunk], part: slice) -> Iterator[tuple[Chunk, int, int]]:
    """Some of a step's samples, which lie in one chunk under another: of each chunk which ones."""
    row = 0
    for chunk in chunks:
        num_rows = len(chunk.lengths)
        first, end = max(part.start - row, 0), min(part.stop - row, num_rows)
        if first < end:
            yield chunk, first, end
        row += num_rows
