"""The torch DataLoader that a training loop sees: epochs, and the state of what the loop got.

``batch_stream.py`` makes the batches.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.batch_stream import BatchStream
from loader.batches import LoaderMetrics, StepBatches
from loader.dataset import ChunkDataset, whole_number
from loader.mixture import Mixture
from loader.process_rank import ProcessRank, check_process_rank
from loader.shards.shard_set import SizeCheck
from loader.state import Position, RunProgress, SkippedSteps, position_of, state_of
from loader.tokenizer import LoaderTokenizer
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


def warn_of_accumulation(micro_batches: int) -> None:
    """Log a warning where accelerate is in use with another number of batches an optimizer's step.

    ``micro_batches`` is that of a global batch on each rank. HF's Trainer counts for itself, and hides its
    number from accelerate.
    """
    accelerate = sys.modules.get("accelerate.state")  # never imported here: not in use then
    if accelerate is None or not accelerate.GradientState._shared_state:  # noqa: SLF001  asking would start it
        return
    num_steps = accelerate.GradientState().num_steps
    if num_steps not in (1, micro_batches):
        logger.warning(
            "accelerate accumulates %d batches, but a global batch is %d of each rank; pass "
            "global_batch_size=batch_size x ranks x %d, so that a step is the same samples on any number of "
            "ranks, and set accelerator.step = 0 after a load_state that changes the number",
            num_steps,
            micro_batches,
            num_steps,
        )


class TokenLoader(DataLoader[Any]):
    """One ``iter()`` is one epoch; the next ``iter()`` is the next epoch, in another order.

    Every rank gets ``len(loader)`` batches, and no sample comes twice in an epoch; the samples left
    out are fewer than a global batch, others each epoch. ``set_epoch(n)`` makes the next ``iter()``
    epoch n. After a ``break`` or Ctrl-C, too, the next ``iter()`` is the next epoch, from its beginning;
    only the newest iterator may be used. ``peek()`` looks at a batch and takes none. ``close()``, or leaving
    ``with``, ends the workers. ``metrics`` counts.

    ``state_dict()`` says what was delivered, whatever was read ahead; ``load_state_dict()`` makes the
    next ``iter()`` the rest of that epoch, on any number of ranks and workers.

    ``tokenizer`` is the data set's, as transformers loads it when it is first asked for; its pad token is
    the one that the batches use.

    accelerate's ``prepare`` leaves it as it is, and ``save_state`` and ``load_state`` hold its state; batches
    stay on the CPU until the loop moves them. With accumulation pass ``global_batch_size``; where a resumed
    run accumulates another number of batches, set ``accelerator.step = 0`` after ``load_state``, since it
    counts batches, not steps (Lightning's ``batch_idx`` does, too: resume at the end of an epoch there).
    HF's Trainer takes it through ``loader.trainer.LoaderMixin``. Its ``dataset`` refuses to be iterated, as
    what takes it out would read the chunks of workers for samples.

    A copy (``copy.deepcopy``, pickle) stands where the original stood, with workers and files of its own.
    """

    # accelerate looks for these. It then neither shares samples out itself nor skips batches by reading them.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        chunks: ChunkDataset,
        *,
        step_batches: StepBatches,
        loader_tokenizer: LoaderTokenizer,
        process_rank: ProcessRank,
        fingerprint: Mapping[str, Any],
        pin_memory: bool = False,
        size_check: SizeCheck | None = None,
        **workers: Any,
    ) -> None:
        if "sampler" in workers:
            raise UsageError(_NO_SAMPLER)
        # What torch shows of a loader; batches come from self._stream, in which workers send chunks.
        super().__init__(
            _RefusedDataset(),
            batch_size=step_batches.batch_size,
            drop_last=True,
            collate_fn=step_batches.collate_fn,
            pin_memory=pin_memory,
            **workers,
        )
        self._made_with = {
            "step_batches": step_batches,
            "loader_tokenizer": loader_tokenizer,
            "process_rank": process_rank,
            "fingerprint": dict(fingerprint),
            "pin_memory": pin_memory,
            **workers,
        }
        self.loader_tokenizer = loader_tokenizer
        self.process_rank = process_rank
        self.order = chunks.order
        self.metrics = LoaderMetrics()
        self.fingerprint = dict(fingerprint)
        self.step_batches = step_batches
        self.run = chunks.run
        self.chunks = chunks
        self._stream = BatchStream(chunks, step_batches, self.metrics, size_check, workers)
        self._newest = 0
        self._pins = pin_memory and torch.cuda.is_available()
        self._progress = RunProgress()
        self._num_accumulated = chunks.run.batches_in(0)

    def __len__(self) -> int:
        """Batches an epoch, on every rank; a resumed epoch gives the rest of them, from ``first_batch``.

        With ``batch_size_schedule`` those of the epoch that the next ``iter()`` gives.
        """
        return self.run.order_steps_of(self._progress.next.epoch) * self.run.num_batches

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, the same object each time. Loading it takes 3 s for Llama 3's.

        Raises OtherTokenizer where transformers makes another one of its files, ReadWriteError, or NotFound.
        """
        return self.loader_tokenizer.load()

    @property
    def first_batch(self) -> int:
        """Batches of its epoch that the next ``iter()`` leaves out: 0, but for a resumed epoch.

        A bar of the whole epoch is ``tqdm(loader, initial=loader.first_batch)``.
        """
        start = self._progress.next
        within = start.num_micro % self.run.num_batches
        return self.run.order_step(start) * self.run.num_batches + within

    @property
    def num_accumulated(self) -> int:
        """Batches of this rank in the global batch that the newest batch is of; it grows with
        ``batch_size_schedule``. Divide the loss by it."""
        return self._num_accumulated

    @property
    def ends_step(self) -> bool:
        """Whether the newest batch was the last of its global batch: time for the optimizer's step."""
        return self._progress.delivered.num_micro == 0

    @property
    def num_steps_delivered(self) -> int:
        """Global batches that the loop got, counted through all epochs from 0, without those it skipped."""
        skipped = self._progress.skipped.up_to(self._order_step)
        return self._order_step - sum(end - first for first, end in skipped.ranges)

    @property
    def _order_step(self) -> int:
        return self.run.step_of(self._progress.delivered)

    @property
    def _delivered_of_order(self) -> int:
        """Steps of the order so far; what epochs leave out at their end counts."""
        at = self._progress.delivered
        return at.epoch * self.order.steps_per_epoch + self.run.order_step(at)

    @property
    def source_samples(self) -> dict[str, int]:
        """Samples of each named source so far, all ranks together; none where one set is read."""
        order = self.order
        return order.num_delivered(self._delivered_of_order) if isinstance(order, Mixture) else {}

    @property
    def source_epochs(self) -> dict[str, float]:
        """The same in epochs of each source: 1.5 is the middle of its second."""
        order = self.order
        return order.epochs(self._delivered_of_order) if isinstance(order, Mixture) else {}

    @property
    def has_loaded_state(self) -> bool:
        """Whether a state was loaded, and not iterated since."""
        return self._progress.is_loaded

    def __repr__(self) -> str:
        who, at = self.process_rank, self._progress.delivered
        return (
            f"TokenLoader(rank {who.rank} of {who.world_size}, batch_size {self.step_batches.batch_size}, "
            f"global_batch_size {self.order.global_batch_size}, epoch {at.epoch}, step {at.step} of "
            f"{self.run.steps_in(at.epoch)}, {self.num_workers} workers)"
        )

    def __reduce__(self) -> tuple[Callable[..., TokenLoader], tuple[Any, ...]]:
        chunks = (type(self.chunks), self._chunks_options)
        return _made_again, (type(self), chunks, self._made_with, self._progress)

    @property
    def _chunks_options(self) -> dict[str, Any]:
        made = self.chunks
        return {
            "samples": made.samples, "order": made.order, "run": made.run, "lanes": made.lanes,
            "endless": made.endless,
        }  # fmt: skip

    def __getitem__(self, _: Any) -> Any:
        """Refuse what takes a loader for a data set."""
        raise UsageError(
            "a TokenLoader is no data set of samples, but was indexed like one, as "
            f"Trainer(train_dataset=loader) does; {_OVERRIDE}"
        )

    @property
    def _layout(self) -> dict[str, int]:
        return {"world_size": self.process_rank.world_size, "batch_size": self.step_batches.batch_size}

    def state_dict(self) -> dict[str, Any]:
        """What the loop got so far: a few integers and the fingerprint of data and order.

        Save it with the optimizer's step: the batch that the loop holds counts as delivered.
        """
        return state_of(self._progress.delivered, self.fingerprint, self._layout, self._progress.skipped)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state after ``step`` global batches, counted through all epochs from 0. Changes nothing.

        For loops that something fetches ahead for: their own step says what was trained. Raises UsageError
        where it does not: after the run left an epoch before its end, as one ``next(iter(loader))`` does.
        """
        if step < 0:
            raise UsageError(f"step is {step}, expected the number of global batches trained, 0 or more")
        self._progress.check_unbroken()
        at = self._progress.skipped.order_step(step)
        skipped = self._progress.skipped.up_to(at)
        return state_of(self.run.position(at), self.fingerprint, self._layout, skipped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on behind what ``state`` says was delivered. Reads nothing.

        Raises OtherRun, OtherTokenizer, UsageError or BrokenShard; see loader/state.py.
        """
        position = position_of(state, self.fingerprint, self._layout, self.run)
        self._newest += 1
        self._end_unless_persistent()
        self._progress.load(position, SkippedSteps.of_text(state.get("skipped", "")))

    def skip(self, steps: int) -> None:
        """Leave out the next global batches, as after a spike of the loss; the next ``iter()`` begins behind.

        They are counted from what was delivered, a loaded state included, and go on in the next epoch where
        one ends. The state has them: ``state_at`` goes on counting the steps that are trained, and a job
        resumes on any number of ranks. All ranks must skip alike. Raises UsageError inside of a step.
        """
        whole_number("steps", steps, least=1)
        self._progress.skip(steps, self.run)
        self._newest += 1
        self._end_unless_persistent()

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` this epoch; all ranks must.

        Of the epoch that a state was just loaded for it gives the rest, so that a loop which calls
        ``set_epoch`` before each epoch resumes rightly. Raises UsageError for another epoch then, which would
        throw the state away, and for what is no number from 0 on.
        """
        self._progress.set_epoch(whole_number("epoch", epoch, least=0))

    def peek(self) -> Any:
        """The batch that the next ``iter()`` begins with, collated; changes nothing, nor is it counted.

        Reads its windows in this process, besides those that workers read: up to a second on a slow disk.
        """
        start, chunks = self._progress.next, type(self.chunks)(**self._chunks_options)
        try:
            return self._stream.first_batch(chunks, start)
        finally:
            chunks.close()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        check_process_rank(self.process_rank)
        if not self.run.is_ramped:
            warn_of_accumulation(self.run.num_batches)
        self._newest += 1
        return self._epoch_batches(self._progress.begin_epoch(), self._newest)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files. The next ``iter()`` would start them again."""
        self._newest += 1
        self._stream.end()

    def _end_unless_persistent(self) -> None:
        if self.num_workers and not self.persistent_workers:
            self._stream.end()

    def _epoch_batches(self, start: Position, number: int) -> Iterator[Any]:
        self._check_newest(number)
        position, run = start, self.run
        num_steps, is_ramped = run.steps_in(start.epoch), run.is_ramped
        accumulated = self._num_accumulated = run.batches_in(run.step_of(start))
        try:
            for part, batch in self._stream.rest_of_epoch(start):
                if is_ramped and not position.num_micro:
                    accumulated = self._num_accumulated = run.batches_in(run.step_of(position))
                position = position.after(accumulated, num_steps)
                self._progress.delivered = position
                self.metrics.count(part, batch)
                yield pinned(batch) if self._pins else batch
                self._check_newest(number)
        except GeneratorExit:
            raise
        except BaseException:  # Ctrl-C, too: half a message may be read, so the workers are not kept
            if number == self._newest:
                self._stream.end()
            raise
        finally:
            if number == self._newest:
                self._end_unless_persistent()

    def _check_newest(self, number: int) -> None:
        if number != self._newest:
            raise UsageError(
                "this iterator ended when the loader was closed or iterated anew; use the newest one"
            )


_NO_SAMPLER = (
    "a TokenLoader has an order of its own and takes no sampler, as Lightning gives it for "
    "overfit_batches and predict; to overfit pass train_dataloaders=list(itertools.islice(loader, 2)), to "
    "predict dataloaders=(batch for batch in loader)"
)
_OVERRIDE = (
    "write class LlamaTrainer(LoaderMixin, Trainer) with LoaderMixin of loader.trainer, and pass "
    "train_loader=loader"
)


class _RefusedDataset(IterableDataset[Any]):
    """What a TokenLoader shows as its ``dataset`` to those who would make a DataLoader of their own of it."""

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "the dataset of a TokenLoader was iterated by another loader, as those that accelerate's "
            "skip_first_batches and Trainer(train_dataset=loader.dataset) make; iterate the "
            "TokenLoader itself, which shares samples out among the ranks, and resume with load_state_dict; "
            f"under HF's Trainer, {_OVERRIDE}"
        )


def _made_again(
    kind: type[TokenLoader],
    chunks: tuple[type[ChunkDataset], dict[str, Any]],
    made_with: dict[str, Any],
    progress: RunProgress,
) -> TokenLoader:
    """A copy of a loader; sizes were looked at when the original was made."""
    loader = kind(chunks[0](**chunks[1]), **made_with)
    loader._progress = replace(progress)  # noqa: SLF001  it is its own class's
    return loader
