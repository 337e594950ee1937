"""The batches of a rank from any position on: chunks that worker processes send, cut into steps and collated.

The stream reads ahead and does not know what the loop took; ``token_loader.py`` does.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from loader.batches import LoaderMetrics, StepBatches, Uncollated, blank_labels
from loader.chunks import Chunk
from loader.collate_workers import CollateWorkers, can_be_sent
from loader.dataset import ChunkDataset
from loader.shards.shard_set import SizeCheck
from loader.state import Position
from loader.worker_processes import follow_main_process, iter_with_workers
from shardprep.errors import UsageError

_MOST_PATH_BYTES = 107  # of a Unix socket
_SOCKET_BYTES = len("/pymp-12345678/listener-12345678")
_END = object()


class BatchStream:
    """Batches with the samples that they were made of; with workers a few chunks are read ahead.

    ``workers``: the options of torch's DataLoader that concern worker processes. The waits for them are
    counted in ``metrics``. Raises UsageError where TMPDIR is too long for workers.
    """

    def __init__(
        self,
        chunks: ChunkDataset,
        step_batches: StepBatches,
        metrics: LoaderMetrics,
        size_check: SizeCheck | None,
        workers: Mapping[str, Any],
    ) -> None:
        self._chunks = chunks
        self._order = chunks.order
        self._run = chunks.run
        self._row_tokens = chunks.samples.row_tokens
        self._step_batches = step_batches
        self._metrics = metrics
        self._size_check = size_check
        self._num_workers: int = workers.get("num_workers", 0)
        if self._num_workers:
            check_worker_sockets()
            chunks.position.share_memory_()
        self._chunk_loader = DataLoader(
            chunks,
            batch_size=None,
            collate_fn=_as_it_is,
            pin_memory=False,
            worker_init_fn=follow_main_process,
            **workers,
        )
        self._collate_workers: CollateWorkers | None = None
        if self._num_workers and not step_batches.is_own:
            self._collate_workers = _collate_workers(step_batches, workers)
        self._arriving: Any = None  # iterator over self._chunk_loader
        self._stands_at: Position | None = None  # if that is the beginning of an epoch

    def rest_of_epoch(self, start: Position) -> Iterator[tuple[Uncollated, Any]]:
        """The batches of an epoch from a position on: the samples of each, and the batch."""
        if self._has_dead_workers():
            self.end()
        if self._stands_at != start or start.num_micro:
            self._seek(start)
        self._stands_at = None
        yield from self._batches(start)
        self._stands_at = Position(epoch=start.epoch + 1, step=0)

    def first_batch(self, chunks: ChunkDataset, start: Position) -> Any:
        """The batch at a position, of a copy of the chunks; the stream stays where it stands."""
        run = self._run
        chunks.position[0], chunks.position[1] = start.epoch, run.order_step(start)
        within, width = start.num_micro % run.num_batches, run.row_length(run.step_of(start))
        chunk = cast(Chunk, next(iter(chunks)))  # no end of an epoch: a position is before it
        fillers = self._order.is_filler(start.step, self._chunks.lanes)
        parts = self._step_batches.cut([chunk], 0, within, fillers, width)
        return self._step_batches.collate(next(parts))

    def end(self) -> None:
        """End the workers and close the files; the next batches start them again."""
        arriving, self._arriving, self._stands_at = self._arriving, None, None
        self._chunk_loader._iterator = None  # noqa: SLF001  torch has no public way to end persistent workers
        if hasattr(arriving, "_shutdown_workers"):
            arriving._shutdown_workers()  # noqa: SLF001
        if self._collate_workers is not None:
            self._collate_workers.close()
        self._chunks.close()

    def _seek(self, position: Position) -> None:
        """Deliver from a position on; persistent workers are sent there."""
        shared = self._chunks.position
        shared[0], shared[1] = position.epoch, self._run.order_step(position)
        self._arriving = iter_with_workers(self._chunk_loader)

    def _has_dead_workers(self) -> bool:
        if self._collate_workers is not None and self._collate_workers.is_broken:
            return True
        return any(not worker.is_alive() for worker in getattr(self._arriving, "_workers", ()))

    def _batches(self, start: Position) -> Iterator[tuple[Uncollated, Any]]:
        if self._collate_workers is None:
            for part in self._uncollated(start):
                yield part, self._step_batches.collate(part)
            return
        sent: deque[Uncollated] = deque()  # what is being collated

        def samples() -> Iterator[list[Any]]:
            for part in self._uncollated(start):
                sent.append(part)
                yield self._step_batches.samples_of(part)

        batches = self._collate_workers.batches(samples())
        while True:
            began, waited = time.perf_counter(), self._metrics.wait_s  # also for chunks, while it waits
            batch = next(batches, _END)
            if batch is _END:
                return
            self._metrics.wait_s = waited + time.perf_counter() - began
            part = sent.popleft()
            if part.is_filler is not None:
                blank_labels(batch, part.is_filler)
            yield part, batch

    def _uncollated(self, start: Position) -> Iterator[Uncollated]:
        run, step = self._run, start.step
        number, num_steps = run.step_of(start), run.steps_in(start.epoch)
        num_done, within = divmod(start.num_micro, run.num_batches)
        left = run.order_steps_in(number) - num_done  # steps of the order in this step of training
        while step < num_steps:
            chunks = self._next_chunks()
            for place in range(chunks[0].lengths.shape[1]):
                fillers = self._order.is_filler(step, self._chunks.lanes)
                yield from self._step_batches.cut(chunks, place, within, fillers, run.row_length(number))
                left, within = left - 1, 0
                if not left:
                    step, number = step + 1, number + 1
                    left = run.order_steps_in(number)
            del chunks  # they may hold their window; the next one is read now

    def _next_chunks(self) -> list[Chunk]:
        """The next chunk of every worker, in the order of their lanes."""
        if self._size_check is not None and self._size_check.error is not None:
            raise self._size_check.error
        began = time.perf_counter()
        chunks = [next(self._arriving) for _ in range(max(self._num_workers, 1))]
        self._metrics.wait_s += time.perf_counter() - began
        if self._num_workers:
            chunks = [Chunk.unpack(chunk, self._row_tokens) for chunk in chunks]
        self._metrics.num_cut_tokens += sum(chunk.num_cut for chunk in chunks)
        return chunks


def check_worker_sockets() -> None:
    """Raise UsageError where TMPDIR is too long for a socket below it.

    A worker would say so on standard error, lose its batches, and the loop would wait for them for ever.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    folder, most = tempfile.gettempdir(), _MOST_PATH_BYTES - _SOCKET_BYTES
    if len(os.fsencode(folder)) > most:
        raise UsageError(
            f"the folder for temporary files, {folder}, has a path of {len(os.fsencode(folder))} bytes, and "
            f"workers can hand over their batches below one of {most} at most; set TMPDIR to a shorter one "
            "(export TMPDIR=/tmp), or num_workers to 0"
        )


def _collate_workers(step_batches: StepBatches, workers: Mapping[str, Any]) -> CollateWorkers | None:
    if not can_be_sent(step_batches.collate_fn, workers.get("multiprocessing_context")):
        return None
    return CollateWorkers(
        step_batches.collate_fn,
        has_masks=step_batches.has_masks,
        **workers,
    )


def _as_it_is(chunk: Any) -> Any:
    """Without it, torch would turn what the workers send into something else."""
    return chunk
