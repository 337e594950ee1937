"""Some steps of some lanes, decoded; a worker sends them as one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

_HEAD = 4  # samples a step, steps, tokens cut, document starts (-1: none were asked for)


@dataclass(frozen=True, kw_only=True)
class ScatteredRows:
    """Rows of one length anywhere in a flat array, gathered when their step is asked for.

    A process that reads for itself never lays a whole run out: the 64 KiB of a step stay in its cache,
    the 1 MiB of a run would not.
    """

    flat: npt.NDArray[np.integer[Any]]
    at: npt.NDArray[np.int64]  # int64[samples a step, steps]: where in flat each row begins
    row_tokens: int

    @cached_property
    def _view(self) -> npt.NDArray[np.integer[Any]]:
        return sliding_window_view(self.flat, self.row_tokens)

    def __getitem__(self, places: Any) -> npt.NDArray[np.integer[Any]]:
        """As of an array ``[samples a step, steps, row_tokens]``; always a copy."""
        rows: npt.NDArray[np.integer[Any]] = self._view[self.at[places]]
        return rows


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some consecutive steps of some lanes."""

    lengths: npt.NDArray[np.int32]  # int32[samples a step, steps], tokens of each sample
    # int32[samples a step, steps, row_tokens], or flat, sample by sample
    ids: npt.NDArray[np.int32] | ScatteredRows
    num_cut: int = 0  # tokens left out behind max_length
    num_starts: npt.NDArray[np.int32] | None = None  # int32[samples a step, steps]
    starts: npt.NDArray[np.int32] | None = None  # flat: places in each row where a document begins

    @property
    def num_steps(self) -> int:
        return int(self.lengths.shape[1])

    def is_full(self, step: int, row_tokens: int) -> bool:
        """Whether no row of a step holds padding."""
        return self._shortest[step] == row_tokens

    @cached_property
    def _shortest(self) -> list[int]:
        shortest: list[int] = self.lengths.min(axis=0).tolist()
        return shortest

    def rows(self, step: int) -> list[npt.NDArray[np.int32]]:
        """The ids of one step's samples where ``ids`` is flat."""
        assert isinstance(self.ids, np.ndarray)
        return _cut(self.ids, self._bounds, step)

    def starts_of(self, step: int) -> list[npt.NDArray[np.int32]]:
        """The document starts of one step's samples; nothing where there are none."""
        if self.starts is None:
            return [np.empty(0, np.int32)] * len(self.lengths)
        return _cut(self.starts, self._start_bounds, step)

    @cached_property
    def _bounds(self) -> tuple[list[list[int]], list[list[int]]]:
        return _bounds(self.lengths)

    @cached_property
    def _start_bounds(self) -> tuple[list[list[int]], list[list[int]]]:
        assert self.num_starts is not None
        return _bounds(self.num_starts)

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        num_starts = -1 if self.starts is None else len(self.starts)
        head = np.array([*self.lengths.shape, self.num_cut, num_starts], np.int32)
        parts = [head, self.lengths.reshape(-1)]
        if self.starts is not None and self.num_starts is not None:
            parts += [self.num_starts.reshape(-1), self.starts]
        ids = self.ids[:].reshape(-1).astype(np.int32, copy=False)
        return torch.from_numpy(np.concatenate([*parts, ids]))

    @staticmethod
    def unpack(packed: torch.Tensor, row_tokens: int) -> Run:
        """What ``pack`` packed; ``row_tokens`` is 0 where samples have lengths of their own."""
        flat = packed.numpy()
        lanes, steps, num_cut, num_starts = flat[:_HEAD].tolist()
        size = lanes * steps
        lengths, rest = flat[_HEAD : _HEAD + size].reshape(lanes, steps), flat[_HEAD + size :]
        counts = starts = None
        if num_starts >= 0:
            counts, starts = rest[:size].reshape(lanes, steps), rest[size : size + num_starts]
            rest = rest[size + num_starts :]
        return Run(
            lengths=lengths,
            ids=rest.reshape(lanes, steps, row_tokens) if row_tokens else rest,
            num_cut=num_cut,
            num_starts=counts,
            starts=starts,
        )


def _bounds(sizes: npt.NDArray[np.int32]) -> tuple[list[list[int]], list[list[int]]]:
    """Where each sample's part of a flat array begins, and where it ends: of each step a list.

    Two lists a step, not one a sample: thousands would bring on full garbage collections, of 0.1 s each.
    """
    ends = np.cumsum(sizes.reshape(-1), dtype=np.int64).reshape(sizes.shape)
    first, end = np.stack([ends - sizes, ends]).swapaxes(1, 2).tolist()
    return first, end


def _cut(
    flat: npt.NDArray[np.int32], bounds: tuple[list[list[int]], list[list[int]]], step: int
) -> list[npt.NDArray[np.int32]]:
    """The parts of one step's samples."""
    first, end = bounds[0][step], bounds[1][step]
    return [flat[start:stop] for start, stop in zip(first, end, strict=True)]
