"""Chunks: the decoded samples of a few ticks, which workers send.

Packed rows stay in the buffer into which they were read, until their tick is needed. Ticks are counted from
the chunk's first one, 0. Arrays have the shape [samples per tick, ticks], but what is joined, or made of a
whole chunk at once, is in the order of ticks: first all samples of tick 0, then those of tick 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from loader.order.hashes import Int32s, Int64s

IGNORED = -100  # the label that cross_entropy ignores
NO_LABEL = np.int32(-(2**31))  # a flag in ids that are inputs but not labels; other ids are never negative
ID_BITS = 2**31 - 1  # the bits of the id without this flag

ORIGIN = ("row", "place", "source", "shard", "sample", "document")  # columns of a batch's ``origins``

Ids = npt.NDArray[np.signedinteger[Any]]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(eq=False)
class Ragged:
    """The numbers, or records of numbers, of each sample of a chunk, as slices of one or more arrays.

    They are gathered when their tick is needed: a tick's 64 KiB stay in the cache, a chunk's 1 MiB do not.
    Only ``put`` changes it, while it is laid out from several chunks.
    """

    flats: list[Integers]
    flat_of: Integers  # [samples per tick, ticks]: index of the sample's array in flats
    begins: Int64s  # [samples per tick, ticks]: where the sample begins in this array
    counts: Integers  # [samples per tick, ticks]: how many numbers it has
    width: int = 0  # numbers per sample if all samples have equally many, else 0
    is_joined: bool = False  # whether there is one array, and only of these samples, tick by tick

    @staticmethod
    def of_joined(flat: Integers, counts: Integers, width: int = 0) -> Ragged:
        """Return samples that follow each other in one array, tick by tick."""
        by_tick = counts.T
        begins = np.cumsum(by_tick, dtype=np.int64).reshape(by_tick.shape).T - counts
        return Ragged([flat], np.zeros(counts.shape, np.int32), begins, counts, width, is_joined=True)

    @staticmethod
    def of_rows(flat: Integers, begins: Int64s, width: int) -> Ragged:
        """Return rows of one width from an array. ``begins``: int64[samples per tick, ticks]."""
        return Ragged([flat], np.zeros(begins.shape, np.int32), begins, np.full(begins.shape, width), width)

    @staticmethod
    def empty(shape: tuple[int, int], width: int = 0) -> Ragged:
        """Return a Ragged whose samples are ``put`` into it later."""
        flat_of, begins, counts = np.zeros((3, *shape), np.int64)
        return Ragged([], flat_of, begins, counts, width)

    @staticmethod
    def stacked(several: list[Ragged]) -> Ragged:
        """Concatenate the samples of each tick. All have equally many ticks."""
        ends = np.cumsum([len(each.counts) for each in several])
        stacked = Ragged.empty((int(ends[-1]), several[0].counts.shape[1]), several[0].width)
        for each, end in zip(several, ends, strict=True):
            stacked.put(slice(end - len(each.counts), end), each)
        return stacked

    def put(self, places: slice | tuple[Integers, Integers], other: Ragged) -> None:
        """Set the samples at some places to those of another chunk, without copying them."""
        self.flat_of[places] = len(self.flats) + other.flat_of
        self.begins[places] = other.begins
        self.counts[places] = other.counts
        self.flats.extend(other.flats)

    def ticks(self, here: slice) -> Ragged:
        """Return some ticks, without copying their samples."""
        flat_of = self.flat_of[:, here]
        begins = self.begins[:, here]
        counts = self.counts[:, here]
        return Ragged(self.flats, flat_of, begins, counts, self.width)

    def joined(self) -> Ragged:
        """Return an int32 copy in which samples follow each other, tick by tick."""
        if self.is_joined:
            return self
        flat = self._gathered((slice(None), slice(None))).astype(np.int32, copy=False)
        if self.width:
            flat = flat.reshape(-1)
        return Ragged.of_joined(flat, self.counts, self.width)

    def of(self, tick: int, first: int, end: int) -> Integers:
        """Return some samples of a tick, as rows or one after another: a copy or a view."""
        if self.is_joined:
            last = self.begins[end - 1, tick] + self.counts[end - 1, tick]
            found = self.flats[0][self.begins[first, tick] : last]
        elif self.width and len(self.flats) == 1:  # most batches of rows: only ``begins`` is read
            return self._rows_at[self.begins[first:end, tick]]
        else:
            found = self._gathered((slice(first, end), tick))
        return found.reshape(-1, self.width) if self.width else found

    def _gathered(self, places: tuple[slice, slice | int]) -> Integers:
        """Return the numbers of the samples at some places, one after another, tick by tick."""
        flat_of, begins, counts = (each[places].T for each in (self.flat_of, self.begins, self.counts))
        if self.width and len(self.flats) == 1:
            return self._rows_at[begins]
        slices = zip(*(each.reshape(-1).tolist() for each in (flat_of, begins, counts)), strict=True)
        return np.concatenate([self.flats[number][begin : begin + count] for number, begin, count in slices])

    @cached_property
    def _rows_at(self) -> Integers:
        return sliding_window_view(self.flats[0], self.width)


class Edges(NamedTuple):
    """The places in a flattened batch at which a row, a document or the padding of a row begins."""

    begins: Int64s  # int64[edges], ascending
    sizes: Int64s  # int64[edges]: places up to the next edge

    @staticmethod
    def of_rows(starts: Integers, num_starts: Integers, lengths: Integers, width: int) -> Edges:
        """Find the edges of rows. ``starts``: of documents in their rows. ``lengths``: tokens per row."""
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
    ids: Ragged  # rows of one width are whole, including their padding
    num_cut_tokens: int = 0  # that max_length cut off
    # A record per document: its place in its sample, or all of ORIGIN ("row" is filled in later).
    documents: Ragged | None = None
    has_origins: bool = False  # whether ``documents`` has the columns of ORIGIN

    @property
    def num_ticks(self) -> int:
        return self.lengths.shape[1]

    @property
    def num_samples(self) -> int:
        """Return the samples per tick."""
        return len(self.lengths)

    @cached_property
    def shortest(self) -> list[int]:
        """Return the tokens of the shortest sample of each tick."""
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def edges_of(self, tick: int, first: int, end: int, width: int) -> Edges:
        """Return the edges of some samples of a tick, in a batch of these samples with rows of ``width``."""
        if not self.ids.width:  # each sample is one document
            no_starts = np.zeros(0, np.int32), np.zeros(end - first, np.int64)
            return Edges.of_rows(*no_starts, self.lengths[first:end, tick], width)
        edges, bounds = self._edges
        sample = tick * self.num_samples + first
        here = slice(bounds[sample], bounds[sample + end - first])
        return Edges(edges.begins[here] - sample * self.ids.width, edges.sizes[here])

    @cached_property
    def _edges(self) -> tuple[Edges, list[int]]:
        """Return the edges of all rows, tick by tick, and each row's first edge. An edge takes 15 ns."""
        assert self.documents is not None
        documents = self.documents.joined()
        counts = documents.counts.T.reshape(-1)
        # numbers: int32[documents, 1 or len(ORIGIN)]
        (numbers,) = documents.flats
        places = numbers[:, ORIGIN.index("place") if self.has_origins else 0]
        lengths: Int32s = self.lengths.T.reshape(-1)
        edges = Edges.of_rows(places, counts, lengths, self.ids.width)
        bounds = np.searchsorted(edges.begins, np.arange(len(lengths) + 1) * self.ids.width)
        return edges, bounds.tolist()

    def joined(self) -> Chunk:
        """Return the chunk without references to its window, as a worker sends it."""
        return replace(self, ids=self.ids.joined(), documents=self.documents and self.documents.joined())

    @staticmethod
    def stacked(chunks: list[Chunk]) -> Chunk:
        """Concatenate the samples of chunks of the same ticks, without copying ids."""
        if len(chunks) == 1:
            return chunks[0]
        documents = [chunk.documents for chunk in chunks if chunk.documents is not None]  # all or none
        return replace(
            chunks[0],
            lengths=np.concatenate([chunk.lengths for chunk in chunks]),
            ids=Ragged.stacked([chunk.ids for chunk in chunks]),
            num_cut_tokens=sum(chunk.num_cut_tokens for chunk in chunks),
            documents=Ragged.stacked(documents) if documents else None,
        )


Window = Callable[[int, int], Chunk]  # (first, end) -> those ticks, decoded from the samples that were read


def window_of_lengths(lengths: Int32s) -> Window:
    """Return a window of samples without ids, for those who follow the order and read nothing.

    ``lengths``: int32[samples per tick, ticks].
    """

    def chunk_of(first: int, end: int) -> Chunk:
        here = lengths[:, first:end]
        return Chunk(lengths=here, ids=Ragged.of_joined(np.zeros(0, np.int32), np.zeros_like(here)))

    return chunk_of
