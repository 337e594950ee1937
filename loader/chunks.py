"""A chunk: some ticks of some slots, as a worker sends them, and where documents begin in its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from loader.order import Int32s, Int64s

IGNORED = -100  # a label that cross_entropy leaves out
NO_LABEL = np.int32(-(2**31))  # set in an id that is seen and not learnt: no id is below 0 else
ID_BITS = 2**31 - 1  # the id without it

ORIGIN = ("row", "place", "source", "shard", "sample", "document")  # what a batch tells of a document

Ids = npt.NDArray[np.signedinteger[Any]]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Some numbers of each sample of a chunk, where they lie: one place in one of some flat arrays.

    They are gathered when their tick is asked for. So a tick's 64 KiB stay in the cache, which the 1 MiB of
    a whole chunk would not.
    """

    flats: list[Integers]
    flat_of: Int32s  # int32[samples per tick, ticks]: which of these arrays
    begins: Int64s  # [samples per tick, ticks]
    counts: Integers  # [samples per tick, ticks]: how many numbers
    width: int = 0  # numbers of each sample where all have equally many, else 0
    is_joined: bool = False  # samples stand one after another, one tick after another, and nothing else does

    @staticmethod
    def of_joined(flat: Integers, counts: Integers, width: int = 0) -> Ragged:
        """Return samples that stand one after another, one tick after another."""
        by_tick = counts.T
        begins = np.cumsum(by_tick, dtype=np.int64).reshape(by_tick.shape).T - counts
        flat_of = np.zeros(counts.shape, np.int32)
        return Ragged(
            flats=[flat], flat_of=flat_of, begins=begins, counts=counts, width=width, is_joined=True
        )

    @staticmethod
    def of_rows(flat: Integers, begins: Int64s, width: int) -> Ragged:
        """Return rows of one width that begin anywhere in an array: int64[samples per tick, ticks]."""
        flat_of, counts = np.zeros(begins.shape, np.int32), np.full(begins.shape, width)
        return Ragged(flats=[flat], flat_of=flat_of, begins=begins, counts=counts, width=width)

    @staticmethod
    def empty(shape: tuple[int, int], width: int = 0) -> Ragged:
        """Return one whose samples are ``put`` there later."""
        flat_of, begins, counts = (
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int32),
        )
        return Ragged(flats=[], flat_of=flat_of, begins=begins, counts=counts, width=width)

    @staticmethod
    def stacked(parts: list[Ragged]) -> Ragged:
        """Return the samples of some chunks of equally many ticks, one under another."""
        ends = np.cumsum([len(part.counts) for part in parts])
        stacked = Ragged.empty((int(ends[-1]), parts[0].counts.shape[1]), parts[0].width)
        for part, end in zip(parts, ends, strict=True):
            stacked.put(slice(end - len(part.counts), end), part)
        return stacked

    def put(self, places: Any, other: Ragged) -> None:
        """Let the samples at some places lie where those of another chunk lie."""
        self.flat_of[places] = len(self.flats) + other.flat_of
        self.begins[places] = other.begins
        self.counts[places] = other.counts
        self.flats.extend(other.flats)

    def ticks(self, first: int, end: int) -> Ragged:
        """Return the ticks from ``first`` up to ``end`` of one that was put together."""
        places = (slice(None), slice(first, end))
        return replace(
            self, flat_of=self.flat_of[places], begins=self.begins[places], counts=self.counts[places]
        )

    def joined(self) -> Ragged:
        """Return a copy, int32, whose samples stand one after another, one tick after another."""
        if self.is_joined:
            return self
        flat = self._gathered(self.flat_of.T, self.begins.T, self.counts.T).reshape(-1)
        return Ragged.of_joined(flat.astype(np.int32, copy=False), self.counts, self.width)

    def of(self, tick: int, first: int, end: int) -> Integers:
        """Return the numbers of some samples of a tick, one after another: a copy, or a part of the array.

        Where all have equally many they are rows, [samples, width].
        """
        if self.is_joined:
            last = self.begins[end - 1, tick] + self.counts[end - 1, tick]
            found = self.flats[0][self.begins[first, tick] : last]
        elif self.width and len(self.flats) == 1:
            return self._windows[self.begins[first:end, tick]]
        else:
            places = (slice(first, end), tick)
            found = self._gathered(self.flat_of[places], self.begins[places], self.counts[places])
        return found.reshape(-1, self.width) if self.width else found

    def _gathered(self, flat_of: Int32s, begins: Int64s, counts: Integers) -> Integers:
        if self.width and len(self.flats) == 1:
            return self._windows[begins]
        places = zip(*(each.reshape(-1).tolist() for each in (flat_of, begins, counts)), strict=True)
        return np.concatenate([self.flats[number][begin : begin + count] for number, begin, count in places])

    @cached_property
    def _windows(self) -> Integers:
        return sliding_window_view(self.flats[0], self.width)


class Edges(NamedTuple):
    """Where documents, and the padding of rows, begin in a flattened batch; each row begins one."""

    begins: Int64s  # int64[edges], ascending
    sizes: Int64s  # int64[edges]: places up to the next one

    @staticmethod
    def of_rows(starts: Integers, num_starts: Integers, lengths: Integers, width: int) -> Edges:
        """Find the edges of rows, whose documents begin at these places. ``lengths``: tokens of each row."""
        row_begins = np.arange(len(lengths), dtype=np.int64) * width
        short = np.flatnonzero(lengths < width)
        begins = np.repeat(row_begins, num_starts) + starts
        begins = np.concatenate([row_begins, begins, row_begins[short] + lengths[short]])
        begins.sort()
        begins = begins[np.diff(begins, prepend=-1) > 0]
        return Edges(begins, np.diff(begins, append=len(lengths) * width))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive ticks of some slots."""

    lengths: Int32s  # int32[samples per tick, ticks], tokens of each sample
    ids: Ragged  # of rows whole rows, their padding included
    row_tokens: int = 0  # of every sample where all are rows
    num_cut: int = 0  # tokens left out behind max_length
    starts: Ragged | None = None  # places in each row where a document begins
    origins: Ragged | None = None  # ORIGIN numbers for each document, whose rows are not known yet

    @property
    def num_ticks(self) -> int:
        return self.lengths.shape[1]

    @property
    def num_samples(self) -> int:
        """Return the samples of a tick."""
        return len(self.lengths)

    def is_full(self, tick: int) -> bool:
        """Return whether no row of a tick holds padding."""
        return self._shortest[tick] == self.row_tokens

    @cached_property
    def _shortest(self) -> list[int]:
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def edges_of(self, tick: int, first: int, end: int, width: int) -> Edges:
        """Return where documents begin in some samples of a tick, as a batch of their own of some width."""
        if self.starts is None:  # each sample is one document
            no_starts = np.zeros(0, np.int32), np.zeros(end - first, np.int64)
            return Edges.of_rows(*no_starts, self.lengths[first:end, tick], width)
        edges, bounds = self._edges
        row = tick * self.num_samples + first
        part = slice(bounds[row], bounds[row + end - first])
        return Edges(edges.begins[part] - row * self.row_tokens, edges.sizes[part])

    @cached_property
    def _edges(self) -> tuple[Edges, list[int]]:
        """Return the edges of all rows, tick after tick, and each row's first edge.

        Found at once they cost 15 ns each, where a batch alone costs 30 us.
        """
        assert self.starts is not None
        starts = self.starts.joined()
        lengths: Int32s = self.lengths.T.reshape(-1)
        edges = Edges.of_rows(starts.flats[0], starts.counts.T.reshape(-1), lengths, self.row_tokens)
        bounds = np.searchsorted(edges.begins, np.arange(len(lengths) + 1) * self.row_tokens)
        return edges, bounds.tolist()

    def joined(self) -> Chunk:
        """Return a chunk that lies in no window: what a worker sends."""
        return replace(
            self,
            ids=self.ids.joined(),
            starts=None if self.starts is None else self.starts.joined(),
            origins=None if self.origins is None else self.origins.joined(),
        )

    @staticmethod
    def stacked(chunks: list[Chunk]) -> Chunk:
        """Return chunks of the same ticks as one, with their samples one under another. Copies no ids."""
        if len(chunks) == 1:
            return chunks[0]
        starts = [chunk.starts for chunk in chunks if chunk.starts is not None]  # of all chunks, or of none
        origins = [chunk.origins for chunk in chunks if chunk.origins is not None]
        return Chunk(
            lengths=np.concatenate([chunk.lengths for chunk in chunks]),
            ids=Ragged.stacked([chunk.ids for chunk in chunks]),
            row_tokens=chunks[0].row_tokens,
            num_cut=sum(chunk.num_cut for chunk in chunks),
            starts=Ragged.stacked(starts) if starts else None,
            origins=Ragged.stacked(origins) if origins else None,
        )
