"""A torch DataLoader whose workers send runs and whose consumer cuts batches and epochs from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.dataset import RunDataset
from loader.loader_metrics import LoaderMetrics
from loader.loader_state import Position, position_of, state_of
from loader.process_rank import ProcessRank
from loader.run import Run
from loader.shards.size_check import SizeCheck
from loader.step_batches import StepBatches
from loader.worker_sockets import check_worker_sockets
from preprocess.shard_format import UsageError


class TokenLoader(DataLoader[Any]):
    """One ``iter()`` is one epoch; the next ``iter()`` is the next epoch, in another order.

    Every rank gets ``len(loader)`` batches, and no sample comes twice in an epoch; the samples left
    out are fewer than a global batch, others each epoch. ``set_epoch(n)`` makes the next ``iter()``
    epoch n. After a ``break``, too, the next ``iter()`` is the next epoch, from its beginning; only the
    newest iterator may be used. ``close()``, or leaving ``with``, ends the workers. ``metrics`` counts.

    ``state_dict()`` says what was delivered, whatever was read ahead; ``load_state_dict()`` makes the
    next ``iter()`` the rest of that epoch, on any number of ranks and workers.

    Do not hand it to accelerate's ``prepare``: it shares the samples out among the ranks itself. Its
    ``dataset`` refuses to be iterated, as what takes it out would read the runs of workers for samples.
    """

    def __init__(
        self,
        runs: RunDataset,
        *,
        step_batches: StepBatches,
        tokenizer: Any,
        process_rank: ProcessRank,
        fingerprint: Mapping[str, Any],
        pin_memory: bool,
        size_check: SizeCheck | None = None,
        **workers: Any,
    ) -> None:
        # What torch shows of a loader; batches come from self._runs, in which workers send runs.
        super().__init__(
            _RefusedDataset(),
            batch_size=step_batches.batch_size,
            drop_last=True,
            collate_fn=step_batches.collate_fn,
            pin_memory=pin_memory,
            **workers,
        )
        self.tokenizer = tokenizer
        self.process_rank = process_rank
        self.order = runs.order
        self.metrics = LoaderMetrics()
        self.fingerprint = dict(fingerprint)
        self._size_check = size_check
        self._batches = step_batches
        self._row_tokens = runs.samples.row_tokens
        self._micro_batches = len(runs.lanes) * runs.order.group // step_batches.batch_size
        if self.num_workers:
            check_worker_sockets()
            runs.position.share_memory_()  # type: ignore[no-untyped-call]
        self._runs = DataLoader(runs, batch_size=None, collate_fn=_as_it_is, pin_memory=False, **workers)
        self._stream: Any = None  # iterator over self._runs
        self._stream_at: Position | None = None  # where it stands, if that is the beginning of an epoch
        self._newest = 0
        self._pins = pin_memory and torch.cuda.is_available()
        self._delivered = Position()
        self._next = Position()  # where the next iter() begins

    def __len__(self) -> int:
        """Batches an epoch, on every rank; a resumed epoch gives the rest of them."""
        return self.order.steps_per_epoch * self._micro_batches

    @property
    def _layout(self) -> dict[str, int]:
        return {"world_size": self.process_rank.world_size, "batch_size": self._batches.batch_size}

    def state_dict(self) -> dict[str, Any]:
        """What the loop got so far: a few integers and the fingerprint of data and order.

        Save it with the optimizer's step: the batch that the loop holds counts as delivered.
        """
        return state_of(self._delivered, self.fingerprint, self._layout)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state after ``step`` global batches, counted through all epochs from 0. Changes nothing.

        For loops that something fetches ahead for: their own step says what was trained.
        """
        if step < 0:
            raise UsageError(f"step is {step}, expected the number of global batches trained, 0 or more")
        epoch, in_epoch = divmod(step, self.order.steps_per_epoch)
        return state_of(Position(epoch=epoch, step=in_epoch), self.fingerprint, self._layout)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on behind what ``state`` says was delivered. Reads nothing.

        Raises OtherRun, OtherTokenizer, UsageError or BrokenShard; see loader_state.py.
        """
        position = position_of(state, self.fingerprint, self._layout, self.order.steps_per_epoch)
        if position.num_micro >= self._micro_batches:
            raise UsageError(f"the state has {position.num_micro} batches of a step of {self._micro_batches}")
        self._newest += 1
        self._end_unless_persistent()
        self._delivered = self._next = position

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` this epoch; all ranks must.

        Of the epoch that a state was just loaded for it gives the rest, so that a loop which calls
        ``set_epoch`` before each epoch resumes rightly.
        """
        if epoch != self._next.epoch:
            self._delivered = self._next = Position(epoch=epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start, self._next = self._next, Position(epoch=self._next.epoch + 1)
        self._newest += 1
        self._delivered = start
        return self._epoch_batches(start, self._newest)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files. The next ``iter()`` would start them again."""
        self._newest += 1
        self._end_stream()

    def _end_stream(self) -> None:
        stream, self._stream, self._stream_at = self._stream, None, None
        self._runs._iterator = None  # noqa: SLF001  torch has no public way to end persistent workers
        if hasattr(stream, "_shutdown_workers"):
            stream._shutdown_workers()  # noqa: SLF001
        self._runs.dataset.close()  # type: ignore[attr-defined]

    def _end_unless_persistent(self) -> None:
        if self.num_workers and not self.persistent_workers:
            self._end_stream()

    def _seek(self, position: Position) -> None:
        """Make the stream deliver from a position on; persistent workers are sent there."""
        shared = self._runs.dataset.position  # type: ignore[attr-defined]
        shared[0], shared[1] = position.epoch, position.step
        self._stream = iter(self._runs)

    def _epoch_batches(self, start: Position, turn: int) -> Iterator[Any]:
        self._check_newest(turn)
        if self._stream_at != start or start.num_micro:
            self._seek(start)
        self._stream_at = None
        position = start
        try:
            while position.epoch == start.epoch:
                runs = self._next_runs()
                for number in range(runs[0].num_steps):
                    for batch in self._batches.cut(runs, number, position.num_micro, self.metrics):
                        position = position.after(self._micro_batches, self.order.steps_per_epoch)
                        self._delivered = position
                        yield pinned(batch) if self._pins else batch  # type: ignore[no-untyped-call]
                        self._check_newest(turn)
                del runs  # they may hold their window; the next one is read now
            self._stream_at = position
        except Exception:
            if turn == self._newest:
                self._end_stream()
            raise
        finally:
            if turn == self._newest:
                self._end_unless_persistent()

    def _check_newest(self, turn: int) -> None:
        if turn != self._newest:
            raise UsageError(
                "this iterator ended when the loader was closed or iterated anew; use the newest one"
            )

    def _next_runs(self) -> list[Run]:
        """The next run of every worker, in the order of their lanes."""
        if self._size_check is not None:
            self._size_check.raise_found()
        began = time.perf_counter()
        runs = [next(self._stream) for _ in range(max(self.num_workers, 1))]
        self.metrics.wait_s += time.perf_counter() - began
        if self.num_workers:
            runs = [Run.unpack(run, self._row_tokens) for run in runs]
        self.metrics.num_cut_tokens += sum(run.num_cut for run in runs)
        return runs


class _RefusedDataset(IterableDataset[Any]):
    """What a TokenLoader shows as its ``dataset`` to those who would make a DataLoader of their own of it."""

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "the dataset of a TokenLoader was iterated by another loader, as those that accelerate's prepare "
            "and skip_first_batches make; iterate the TokenLoader itself, which shares samples out among the "
            "ranks, and resume with load_state_dict"
        )


def _as_it_is(run: Any) -> Any:
    """Without it, torch would turn what the workers send into something else."""
    return run
