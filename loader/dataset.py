"""What a worker does: reads its lanes window by window and sends runs of steps.

A run is a few steps of a worker's lanes as one compact tensor, so that a worker sends 1 MiB at a
time, not a batch. Workers share the rank's lanes out; every worker taking each n-th step instead
would read everything n times. The memory of a rank is one window of its lanes: M blocks of
512 KiB a lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.order import Order, share
from loader.shard_reader import SampleBytes, ShardReader
from loader.shard_set import ShardSet
from loader.token_ids import CannotDecode, check_vocab, decode_rows, decode_samples
from preprocess.shard_format import BrokenShard

RUN_BYTES = 1 << 20  # of a run; a worker's message costs about 150 us whatever its size
MAX_RUN_STEPS = 256


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some consecutive steps of some lanes, decoded."""

    lengths: npt.NDArray[np.int32]  # int32[lanes, steps], tokens of each sample
    ids: npt.NDArray[np.int32]  # int32[lanes, steps, row_tokens], or flat, lane by lane

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
        """The ids of one step's samples, a lane each, where ``ids`` is flat."""
        return [self.ids[start:end] for start, end in self._bounds[step]]

    @cached_property
    def _bounds(self) -> list[list[list[int]]]:
        """Where each sample lies in ``ids``, by step and lane."""
        ends = np.cumsum(self.lengths.reshape(-1), dtype=np.int64).reshape(self.lengths.shape)
        bounds: list[list[list[int]]]
        bounds = np.stack([ends - self.lengths, ends], axis=-1).swapaxes(0, 1).tolist()
        return bounds

    def pack(self) -> torch.Tensor:
        """All of it as one int32 tensor: every tensor that is sent costs a file handle."""
        head = np.array(self.lengths.shape, np.int32)
        return torch.from_numpy(np.concatenate([head, self.lengths.reshape(-1), self.ids.reshape(-1)]))

    @staticmethod
    def unpack(packed: torch.Tensor, row_tokens: int) -> Run:
        """What ``pack`` packed; ``row_tokens`` is 0 where samples have lengths of their own."""
        flat = packed.numpy()
        lanes, steps = flat[:2].tolist()
        body = 2 + lanes * steps
        ids = flat[body:]
        return Run(
            lengths=flat[2:body].reshape(lanes, steps),
            ids=ids.reshape(lanes, steps, row_tokens) if row_tokens else ids,
        )


class RunDataset(IterableDataset[Any]):
    """Runs of this rank's lanes from a position on: of one epoch, or without end.

    ``position`` is int64[2], epoch and step; shared with the workers, so that the parent can send
    persistent ones elsewhere. Items are a run of each worker in turn, packed; unpacked without workers.
    """

    def __init__(
        self,
        *,
        shards: ShardSet,
        order: Order,
        lanes: range,
        endless: bool,
        max_length: int | None,
        vocab_size: int | None,
    ) -> None:
        self.shards = shards
        self.order = order
        self.lanes = lanes
        self.endless = endless
        self.max_length = max_length
        self.vocab_size = vocab_size  # checked where it is given: ids that others made
        self.row_tokens = shards.row_tokens
        self.position = torch.zeros(2, dtype=torch.int64)

    def __iter__(self) -> Iterator[torch.Tensor | Run]:
        worker = get_worker_info()
        lanes = self.lanes if worker is None else share(self.lanes, worker.id, worker.num_workers)
        reader = ShardReader(self.shards)
        epoch, step = self.position.tolist()
        try:
            for number in count(epoch) if self.endless else (epoch,):
                for run in self._epoch_runs(reader, number, step if number == epoch else 0, lanes):
                    yield run if worker is None else run.pack()
        finally:
            reader.close()

    def _epoch_runs(self, reader: ShardReader, epoch: int, step: int, lanes: range) -> Iterator[Run]:
        run_steps = self._run_steps()
        for start, end in self.order.windows(step):
            samples = self.order.window_samples(epoch, lanes, start, end)[:, max(step - start, 0) :]
            data = reader.read(samples.reshape(-1))
            rows = np.arange(samples.size).reshape(samples.shape)
            for first in range(0, samples.shape[1], run_steps):
                yield self._run(data, rows[:, first : first + run_steps])

    def _run_steps(self) -> int:
        """Steps a run, from what all workers know alike: their runs must agree."""
        worker = get_worker_info()
        lanes = -(-len(self.lanes) // (worker.num_workers if worker else 1))
        step_bytes = 4 * lanes * (self.row_tokens or self.shards.mean_tokens)
        return max(1, min(MAX_RUN_STEPS, int(RUN_BYTES // step_bytes)))

    def _run(self, data: SampleBytes, rows: npt.NDArray[np.int64]) -> Run:
        if self.row_tokens:
            ids = decode_rows(data, rows.reshape(-1), self.row_tokens)
            lengths = data.num_tokens[rows].astype(np.int32)
            return Run(lengths=lengths, ids=ids.reshape(*rows.shape, self.row_tokens))
        flat = rows.reshape(-1)
        try:
            lengths, ids = decode_samples(data, flat, self.max_length)
            if self.vocab_size is not None:
                check_vocab(ids, lengths, flat, self.vocab_size)
        except CannotDecode as error:
            where = self.shards.describe(int(data.sample[error.row]))
            raise BrokenShard(f"{where} holds {error}") from None
        return Run(lengths=lengths.reshape(rows.shape), ids=ids)
