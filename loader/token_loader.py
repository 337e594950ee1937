"""A torch DataLoader whose workers send runs and whose consumer cuts batches and epochs from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.collate import CausalLMCollator
from loader.dataset import Run, RunDataset
from loader.process_rank import ProcessRank
from preprocess.shard_format import UsageError

Collate = Callable[[list[Any]], Any]


class TokenLoader(DataLoader[Any]):
    """One ``iter()`` is one epoch; the next ``iter()`` is the next epoch, in another order.

    Every rank gets ``len(loader)`` batches, and no sample comes twice in an epoch; the samples left
    out are fewer than a global batch, others each epoch. ``set_epoch(n)`` makes the next ``iter()``
    epoch n. After a ``break``, too, the next ``iter()`` is the next epoch, from its beginning; only the
    newest iterator may be used. ``close()``, or leaving ``with``, ends the workers.

    Do not hand it to accelerate's ``prepare``: it shares the samples out among the ranks itself.
    """

    def __init__(
        self,
        runs: RunDataset,
        *,
        tokenizer: Any,
        batch_size: int,
        process_rank: ProcessRank,
        collate_fn: Collate,
        num_workers: int,
        prefetch_factor: int | None,
        pin_memory: bool,
        persistent_workers: bool,
        multiprocessing_context: Any,
    ) -> None:
        workers: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
        # What torch shows of a loader; batches come from self._runs, in which workers send runs.
        super().__init__(
            runs,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            **workers,
        )
        self.tokenizer = tokenizer
        self.process_rank = process_rank
        self.order = runs.order
        self.num_epochs_begun = 0  # so the next iter() is the epoch of this number
        self._lanes = runs.lanes
        self._row_tokens = runs.row_tokens
        if num_workers:
            runs.position.share_memory_()  # type: ignore[no-untyped-call]
        self._runs = DataLoader(runs, batch_size=None, collate_fn=_as_it_is, pin_memory=False, **workers)
        self._stream: Any = None  # iterator over self._runs
        self._stream_epoch: int | None = None  # the epoch it stands at the beginning of
        self._newest = 0
        self._pins = pin_memory and torch.cuda.is_available()

    def __len__(self) -> int:
        """Batches an epoch, on every rank."""
        return self.order.steps_per_epoch * self._micro_batches

    @property
    def _micro_batches(self) -> int:
        return len(self._lanes) // int(self.batch_size or 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` this epoch; all ranks must."""
        self.num_epochs_begun = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self.num_epochs_begun
        self.num_epochs_begun += 1
        self._newest += 1
        return self._epoch_batches(epoch, self._newest)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files. The next ``iter()`` would start them again."""
        self._newest += 1
        self._end_stream()

    def _end_stream(self) -> None:
        stream, self._stream, self._stream_epoch = self._stream, None, None
        self._runs._iterator = None  # noqa: SLF001  torch has no public way to end persistent workers
        if hasattr(stream, "_shutdown_workers"):
            stream._shutdown_workers()  # noqa: SLF001

    def _seek(self, epoch: int, step: int) -> None:
        """Make the stream deliver from a position on; persistent workers are sent there."""
        position = self._runs.dataset.position  # type: ignore[attr-defined]
        position[0], position[1] = epoch, step
        self._stream = iter(self._runs)

    def _epoch_batches(self, epoch: int, turn: int) -> Iterator[Any]:
        self._check_newest(turn)
        if self._stream_epoch != epoch:
            self._seek(epoch, 0)
        self._stream_epoch = None
        step, last_step = 0, self.order.steps_per_epoch
        try:
            while step < last_step:
                runs = self._next_runs()
                for number in range(runs[0].num_steps):
                    step += 1
                    for batch in self._step_batches(runs, number):
                        yield batch
                        self._check_newest(turn)
            self._stream_epoch = epoch + 1
        except Exception:
            if turn == self._newest:
                self._end_stream()
            raise
        finally:
            if turn == self._newest and not self.persistent_workers:
                self._end_stream()

    def _check_newest(self, turn: int) -> None:
        if turn != self._newest:
            raise UsageError(
                "this iterator ended when the loader was closed or iterated anew; use the newest one"
            )

    def _next_runs(self) -> list[Run]:
        """The next run of every worker, in the order of their lanes."""
        if not self.num_workers:
            return [next(self._stream)]
        return [Run.unpack(next(self._stream), self._row_tokens) for _ in range(self.num_workers)]

    def _step_batches(self, runs: list[Run], number: int) -> Iterator[Any]:
        """The rank's part of a global batch, cut into micro-batches."""
        size = int(self.batch_size or 1)
        rows: Any
        lengths: npt.NDArray[Any] | None = None
        if not self._row_tokens:
            rows = [row for run in runs for row in run.rows(number)]
        else:
            rows = _widened([run.ids[:, number] for run in runs])
            if not all(run.is_full(self._row_tokens) for run in runs):
                lengths = np.concatenate([run.lengths[:, number] for run in runs])
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            yield self._pinned(self._collated(rows[part], None if lengths is None else lengths[part]))

    def _collated(self, rows: Any, lengths: npt.NDArray[Any] | None) -> Any:
        if isinstance(self.collate_fn, CausalLMCollator):
            pad = self.collate_fn
            return pad.mask_rows(rows, lengths) if self._row_tokens else pad.pad_rows(rows)
        if lengths is not None:
            rows = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
        return self.collate_fn([{"input_ids": row.tolist()} for row in rows])

    def _pinned(self, batch: Any) -> Any:
        return pinned(batch) if self._pins else batch  # type: ignore[no-untyped-call]


def _widened(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int64]:
    """Parts of a batch -> int64[batch, row_tokens], a fresh array."""
    rows = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.int64)
    first = 0
    for part in parts:
        rows[first : first + len(part)] = part
        first += len(part)
    return rows


def _as_it_is(run: Any) -> Any:
    """Without it, torch would turn what the workers send into something else."""
    return run
