"""What a worker sends: some steps of its lanes, decoded, as one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

_HEAD = 4  # samples a step, steps, tokens cut, document starts (-1: none were asked for)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some consecutive steps of some lanes."""

    lengths: npt.NDArray[np.int32]  # int32[samples a step, steps], tokens of each sample
    ids: npt.NDArray[np.int32]  # int32[samples a step, steps, row_tokens], or flat, sample by sample
    num_cut: int = 0  # tokens left out behind max_length
    num_starts: npt.NDArray[np.int32] | None = None  # int32[samples a step, steps]
    starts: npt.NDArray[np.int32] | None = None  # flat: places in each row where a document begins

    @property
    def num_steps(self) -> int:
        return int(self.lengths.shape[1])

    def is_full(self, row_tokens: int) -> bool:
        """Whether no row holds padding."""
        return self._shortest == row_tokens

    @cached_property
    def _shortest(self) -> int:
        return int(self.lengths.min())

    def rows(self, step: int) -> list[npt.NDArray[np.int32]]:
        """The ids of one step's samples where ``ids`` is flat."""
        return [self.ids[start:end] for start, end in self._bounds[step]]

    def starts_of(self, step: int) -> list[npt.NDArray[np.int32]]:
        """The document starts of one step's samples; nothing where there are none."""
        if self.starts is None:
            return [np.empty(0, np.int32)] * len(self.lengths)
        return [self.starts[start:end] for start, end in self._start_bounds[step]]

    @cached_property
    def _bounds(self) -> list[list[list[int]]]:
        return _bounds(self.lengths)

    @cached_property
    def _start_bounds(self) -> list[list[list[int]]]:
        assert self.num_starts is not None
        return _bounds(self.num_starts)

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        num_starts = -1 if self.starts is None else len(self.starts)
        head = np.array([*self.lengths.shape, self.num_cut, num_starts], np.int32)
        parts = [head, self.lengths.reshape(-1)]
        if self.starts is not None and self.num_starts is not None:
            parts += [self.num_starts.reshape(-1), self.starts]
        return torch.from_numpy(np.concatenate([*parts, self.ids.reshape(-1)]))

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


def _bounds(sizes: npt.NDArray[np.int32]) -> list[list[list[int]]]:
    """Where each sample's part lies in a flat array, by step and sample: [start, end]."""
    ends = np.cumsum(sizes.reshape(-1), dtype=np.int64).reshape(sizes.shape)
    bounds: list[list[list[int]]] = np.stack([ends - sizes, ends], axis=-1).swapaxes(0, 1).tolist()
    return bounds
