"""The DataLoader of a rank: epochs, steps, positions, states.

The file is one class, as all of these are answers about the same position, which only the loader may move.
From top to bottom: its parts, answers about the position, states, moves to another epoch, the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.accelerate_calls import batch_size_of_accelerate, warn_of_accumulation
from loader.batch.batches import Batch, LoaderMetrics, StepBatches
from loader.batch.stream import BatchStream
from loader.description import describe
from loader.newest_step import NewestStep
from loader.order.checks import whole_number
from loader.order.forecast import Forecast, RunForecast
from loader.order.mixture import Position, Run
from loader.order.order import share
from loader.order.resume import Resumed, resume_run, run_as_saved
from loader.order.state import MAX_EPOCH, Skips, is_same_run, state_of
from loader.ranks import ProcessRank, check_process_rank
from loader.read.reading import ShardReader
from loader.read.samples import Samples
from loader.read.shards import Origin
from loader.read.tokenizer import LoaderTokenizer
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """How far the training loop has got."""

    delivered: Position = Position()  # noqa: RUF009  immutable
    trained: Position | None = None  # after the optimizer's last step; None: not tracked
    skips: Skips = Skips()  # noqa: RUF009  immutable
    is_loaded: bool = False  # a state was loaded, and no iter() has started since

    @property
    def to_save(self) -> Position:
        """Return the position for a state: after the last tracked step, else after the last batch."""
        return self.delivered if self.trained is None else self.trained


def _refuse(*_: object) -> NoReturn:
    found = "a TokenLoader used as a data set (StatefulDataLoader, Trainer, accelerate's skip_first_batches)"
    expected = "a loop over the loader and its state_dict(), or loader.trainer.LoaderMixin for Trainer"
    raise UsageError(found=found, expected=expected)


class _RefusedDataset(IterableDataset[Any]):
    """The ``dataset`` attribute of a TokenLoader. Raises UsageError if another DataLoader reads it."""

    __iter__ = __getitem__ = _refuse


class TokenLoader(DataLoader[Batch]):
    """Yields an epoch, or the rest of one, at each ``iter()``. Each epoch has another order.

    Every rank gets ``len(loader)`` batches. An epoch (in a mixture: an epoch of a source) repeats no sample,
    and leaves out fewer samples than a global batch, different ones each time. After a ``break`` or Ctrl-C
    the next ``iter()`` continues with the next batch; ``set_epoch`` moves to another epoch. A loader with
    ``split="validation"`` restarts at each ``iter()``. Only the newest iterator may be used. ``close()``, or
    a ``with`` block, stops the workers.

    ``state_dict()`` counts delivered batches, not those that workers read ahead. ``load_state_dict()`` makes
    the next ``iter()`` yield the rest of that epoch, also on other numbers of ranks and workers. accelerate
    counts batches: set ``accelerator.step = 0`` after a ``load_state`` that changes the accumulated ones.
    A copy (``copy.deepcopy``, pickle) continues at the original's position, with its own workers and files.
    """

    # accelerate checks these. It then neither distributes samples itself nor skips batches by reading them.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    __getitem__ = _refuse

    def __init__(
        self,
        run: Run,
        *,
        samples: Mapping[str, Samples],
        step_batches: StepBatches,
        loader_tokenizer: LoaderTokenizer,
        process_rank: ProcessRank,
        pin_memory: bool = False,
        amend: bool = False,
        **workers: Any,
    ) -> None:
        if "sampler" in workers:
            found = "a sampler, which Lightning passes for overfit_batches and predict"
            expected = "none: pass list(itertools.islice(loader, 2)) or (batch for batch in loader)"
            raise UsageError(found=found, expected=expected)
        # This sets torch's attributes only. Batches come from self._stream, to which workers send chunks.
        batch_size = step_batches.batch_size
        super().__init__(_RefusedDataset(), batch_size, drop_last=True, pin_memory=pin_memory, **workers)
        del self.collate_fn  # torch's, which would hide the property below
        self.samples = samples  # of each source that was named; a dropped source may have none
        self.step_batches = step_batches
        self.loader_tokenizer = loader_tokenizer
        self.process_rank = process_rank
        self.can_amend = amend
        self.metrics = LoaderMetrics()
        self.progress = Progress()
        self._asked = run  # from the arguments; self.run may come from a state
        self._worker_options = workers
        self._layout = {"world_size": process_rank.world_size, "batch_size": batch_size}
        self._targets = "shifted" if step_batches.shifts_targets else "same"
        self._newest_iterator_id = 0  # older iterators may not be used
        # Whether the newest iterator has delivered a batch, but not the last one of its epoch.
        self._is_inside_loop = False
        self._step = NewestStep(run.batches_in_step(0), [])
        self.run = run
        self._stream = self._new_stream(self.metrics, self.num_workers)

    def _new_stream(self, metrics: LoaderMetrics, num_workers: int) -> BatchStream:
        """Return a new stream of this rank's batches in the current run."""
        run = self.run
        process_rank = self.process_rank
        slots = share(range(run.order.num_slots), process_rank.rank, process_rank.world_size)
        workers = {**self._worker_options, "num_workers": min(num_workers, len(slots))}
        endless = self.persistent_workers or not num_workers  # without workers nothing is read ahead
        return BatchStream(run, self.samples, slots, self.step_batches, metrics, endless, workers)

    def __len__(self) -> int:
        """Return each rank's number of batches in the next epoch. A resumed one has ``first_batch`` fewer."""
        epoch = self.run.epoch_of(self._next_position.step)
        return self.run.ticks_in(epoch) * self.run.batches_per_tick

    @property
    def _next_position(self) -> Position:
        """Return the position at which the next ``iter()`` starts. A validation loader restarts its epoch."""
        delivered = self.progress.delivered
        run = self.run
        if run.is_validation and not self.progress.is_loaded:
            epoch = run.epoch_of(delivered.step)
            return Position(run.first_step(epoch))
        return delivered

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, the same object each time. Loading Llama 3's takes 3 s.

        Raises OtherTokenizer if it differs from the manifests' tokenizer, NotFound or ReadWriteError.
        """
        return self.loader_tokenizer.loaded

    @cached_property
    def collate_fn(self) -> Any:  # type: ignore[override]
        """Return the user's function, or a DataCollatorForLanguageModeling that makes the same batches."""
        if self.step_batches.collate_fn is not None:
            return self.step_batches.collate_fn
        # It imports transformers, which the loader does not need.
        from loader.batch.collator import CausalLMCollator

        multiple = self.step_batches.padder.pad_to_multiple_of
        width = self.step_batches.padder.pad_to_length
        return CausalLMCollator(self.tokenizer, pad_to_multiple_of=multiple, pad_to_length=width)

    @property
    def first_batch(self) -> int:
        """Return how many batches of its epoch the next ``iter()`` skips: 0 unless it resumes.

        A progress bar of the whole epoch: ``tqdm(loader, initial=loader.first_batch)``.
        """
        return self.run.batches_before(self._next_position)

    @property
    def num_accumulated(self) -> int:
        """Return the number of this rank's batches in the newest global batch."""
        return self._step.num_batches

    def labels_per_rank(
        self, device: torch.device | str = "cpu", group: torch.distributed.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Return the number of labels in the newest global batch, divided by the number of ranks: float32[].

        A sum of losses divided by it is the mean over all labels of the global batch, on any number of ranks
        and accumulated batches, since DDP and FSDP average gradients over ranks. transformers takes it:

            loss = model(**batch.to(device), num_items_in_batch=loader.labels_per_rank(device)).loss

        All ranks must call it. The first call in a step all-reduces one number, without waiting for the
        device. After a resume inside a step it counts only the rest of the step. ``device``: of the result,
        supported by the backend of ``group``, which defaults to all processes. Raises UsageError without
        labels, or for several ranks without a process group.
        """
        return self._step.labels_per_rank(
            device,
            group,
            world_size=self.process_rank.world_size,
            shifts_targets=self.step_batches.shifts_targets,
        )

    @property
    def ends_step(self) -> bool:
        """Return whether the newest batch is the last of its global batch: step the optimizer now."""
        return self.progress.delivered.num_micro == 0

    @property
    def num_steps_delivered(self) -> int:
        """Return how many global batches were delivered, over all epochs."""
        return self.progress.delivered.step - self.progress.skips.num_steps

    @property
    def epoch(self) -> float:
        """Return how many epochs were delivered: 1.5 is the middle of the second."""
        step, num_micro = self.progress.delivered
        epoch = self.run.epoch_of(step)
        within = step - self.run.first_step(epoch) + num_micro / self.run.batches_in_step(step)
        return epoch + within / self.run.steps_in(epoch)

    def describe(self) -> str:
        """Return a text with the sources, their shares and fingerprints, the order and all stages."""
        now = self.progress.delivered
        headline = f"{self!r}, at step {now.step} of the run"
        return describe(headline, self.run, now, self.samples, self.step_batches.boundaries)

    @property
    def source_samples(self) -> dict[str, int]:
        """Return how many samples of each source were delivered, on all ranks together."""
        skips = self.progress.skips
        since = self.run.source_samples(self.progress.delivered, skips.since)
        return {name: skips.samples_before.get(name, 0) + count for name, count in since.items()}

    def forecast(self, num_steps: int) -> RunForecast:
        """Return what the run delivers in its first ``num_steps`` steps, by source and by stage.

        Of a source: samples, epochs, and how many of its samples are seen 0, 1, 2, ... times. Of a stage: the
        shares asked and given. ``shardprep forecast`` prints it. Reads lengths alone, if samples are grouped.
        """
        number = whole_number("num_steps", num_steps, least=1, most=self.run.first_step(MAX_EPOCH + 1))
        readers = {name: ShardReader(samples.shards) for name, samples in self.samples.items()}
        lengths = {name: partial(self.samples[name].num_tokens, reader) for name, reader in readers.items()}
        means = {name: samples.mean_tokens for name, samples in self.samples.items()}
        try:
            return Forecast(self.run, number, means, lengths).forecast()
        finally:
            for reader in readers.values():
                reader.close()

    @property
    def source_epochs(self) -> dict[str, float]:
        """Return how many epochs of each source were delivered, counted like ``epoch``."""
        return self.run.source_epochs(self.progress.delivered)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the source names by number, as in ``batch["origins"]``: ``("all",)`` without a mixture."""
        return tuple(source.name for source in self.run.sources)

    def origin(self, source: int, shard: int, sample: int, document: int = 0) -> Origin:
        """Return where a document of ``batch["origins"]`` comes from: its tar, and its input and byte or row.

        Example: ``loader.origin(*batch["origins"][0, 2:].tolist())``. Raises UsageError for unknown numbers.
        """
        names = self.source_names
        if not 0 <= source < len(names) or names[source] not in self.samples:
            raise UsageError(found=f"source {source}", expected=f"a number of {list(names)}")
        name = names[source]
        return self.samples[name].shards.origin(name, shard, sample, document)

    @property
    def has_loaded_state(self) -> bool:
        """Return whether a state was loaded and no ``iter()`` has started since."""
        return self.progress.is_loaded

    def __repr__(self) -> str:
        run = self.run
        step = self.progress.delivered.step
        epoch = run.epoch_of(step)
        rank = self.process_rank.rank
        world_size = self.process_rank.world_size
        return (
            f"TokenLoader(rank {rank} of {world_size}, batch_size {self.step_batches.batch_size}, "
            f"global_batch_size {run.tick_samples * run.ticks_in_step(step)}, epoch {epoch}, "
            f"step {step - run.first_step(epoch)} of {run.steps_in(epoch)}, {self.num_workers} workers)"
        )

    def __reduce__(self) -> tuple[object, ...]:
        names = ("samples", "step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        options = {name: getattr(self, name) for name in names} | self._worker_options
        make = partial(type(self), self._asked, amend=self.can_amend, **options)
        return make, (), (self.progress, self.run)

    def __setstate__(self, state: tuple[Progress, Run]) -> None:
        """Continue at the position of the original."""
        progress, self.run = state
        self.progress = replace(progress, trained=None)  # the copy does not follow the optimizer
        self._stream = self._new_stream(self.metrics, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a few integers, with the fingerprint of data and order, equal on all ranks.

        Save it after the optimizer's step: the newest batch counts as trained, unless you called ``follow``.
        """
        return self._state_at(self.progress.to_save)

    def _state_at(self, position: Position) -> dict[str, Any]:
        return state_of(self.run, position, self._layout, self.progress.skips, self._targets)

    def follow(self, optimizer: Any) -> None:
        """Make ``state_dict()`` return the state after the optimizer's last step, also within the next step.

        For frameworks that save on a signal or an error. ``optimizer``: torch's, or accelerate's wrapper of
        it. A step that a gradient scaler skips counts together with the next one.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer.register_step_post_hook(lambda *_: self.mark_trained())
        self.begin_tracking()

    def begin_tracking(self) -> None:
        """Count the batches delivered so far as trained, unless an optimizer was followed before."""
        if self.progress.trained is None:
            self.mark_trained()

    def mark_trained(self) -> None:
        """Make ``state_dict()`` return the state after the batches delivered so far.

        Call it after each step of an optimizer that ``follow`` does not support.
        """
        self.progress.trained = self.progress.delivered

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` global batches, as ``num_steps_delivered`` counts them.

        For loops that prefetch batches, and to skip steps, for example after a loss spike:
        ``load_state_dict(state_at(step + 200))`` on all ranks. Raises UsageError for a step of an epoch that
        ``set_epoch`` left.
        """
        num_skipped, since, _ = self.progress.skips
        most = self.run.first_step(MAX_EPOCH + 1) - 1 - num_skipped
        number = whole_number("step", step, least=0, most=most)
        least = since - num_skipped
        if number < least:
            raise UsageError.of_value("step", number, f"at least {least}, where set_epoch left an epoch")
        return self._state_at(Position(number + num_skipped))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next ``iter()`` continue after a saved state. Reads no data.

        All later steps have the same samples if you pass the run's ``global_batch_size``, batch_size x ranks
        divides it, and the ranks divide its groups of ``group_by_length`` (a state from within a step needs
        the same ranks and ``batch_size``): a step is a set of samples by arithmetic, and ranks only share it.

        A loader made with ``amend=True`` accepts a state with other weights, sources or sizes, and logs the
        step at which its own take effect. Raises Refused (OtherRun, OtherTokenizer, UnknownVersion),
        UsageError or BrokenShard.
        """
        resumed = resume_run(
            self._asked, state, self._layout, self._targets, current=self.run, amend=self.can_amend
        )
        self._continue(resumed)
        if self.process_rank.rank == 0 and resumed.border is not None:
            logger.warning(f"the run is amended from step {resumed.border} on:\n{self.describe()}")

    def load_run(self, state: Mapping[str, object]) -> None:
        """Continue the run of a state, whatever weights and sizes this loader was given.

        To look at a run, as ``shardprep where`` does: nothing is amended. The next ``iter()`` begins with the
        state's step. Raises the errors of ``load_state_dict``.
        """
        self._continue(run_as_saved(self._asked, state, self._layout, self._targets))

    def _continue(self, resumed: Resumed) -> None:
        run = resumed.run
        position = resumed.position
        self._newest_iterator_id += 1
        if is_same_run(run, self.run):
            self._end_unless_persistent()
        else:
            self._stream.end()  # its workers read the previous run
            self.run = run
            self._stream = self._new_stream(self.metrics, self.num_workers)
        self._move_to(position, skips=resumed.skips, is_loaded=True)
        self._step = NewestStep(self.run.batches_in_step(position.step), [])

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` yield this epoch. Call it on all ranks.

        If the loop is inside this epoch, ``iter()`` yields the rest. Another epoch starts at its first step,
        even if the current one is not over, and a loop that is still running raises UsageError at its next
        batch. Raises UsageError if it would discard a state that was just loaded.
        """
        if whole_number("epoch", epoch, least=0) != self.run.epoch_of(self.progress.delivered.step):
            self._start_epoch(int(epoch))

    def _start_epoch(self, epoch: int) -> None:
        if epoch > MAX_EPOCH:
            raise UsageError.of_value("epoch", epoch, f"at most {MAX_EPOCH}")
        now = self.progress
        if now.is_loaded:
            found = f"set_epoch({epoch}), which would discard a loaded state of another epoch"
            expected = 'range(loader.state_dict()["epoch"], num_epochs), or a loader without the state'
            raise UsageError(found=found, expected=expected)
        if now.delivered == Position():
            problem = f"set_epoch({epoch}) before the first batch starts at the first step of that epoch"
            logger.warning(f"{problem}. To resume inside the epoch, call load_state_dict first")
        first = self.run.first_step(epoch)
        num_skipped = now.skips.num_steps + first - now.delivered.step
        self._move_to(Position(first), skips=Skips(num_skipped, first, self.source_samples))
        self._newest_iterator_id += 1  # an older iterator would count its batches for the new epoch
        self._end_unless_persistent()

    def _move_to(self, position: Position, **changes: Any) -> None:
        self._is_inside_loop = False
        trained = None if self.progress.trained is None else position
        self.progress = replace(self.progress, delivered=position, trained=trained, **changes)

    def peek(self) -> Batch:
        """Return the first batch of the next ``iter()`` without moving to it.

        This process reads its windows in addition to the workers: up to a second on a slow disk.
        """
        stream = self._new_stream(LoaderMetrics(), num_workers=0)
        try:
            batch: Batch = next(stream.steps(self._next_position))[0].batch
        finally:
            stream.end()
        return batch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        check_process_rank(self.process_rank)
        self._refuse_another_batch_size()
        self.return_to_trained()
        if len({stage.global_batch_size for stage in self.run.stages}) == 1:
            warn_of_accumulation(self.run.batches_in_step(0))
        start = self._next_position
        if start != self.progress.delivered:  # validation restarts its epoch
            self._start_epoch(self.run.epoch_of(start.step))
        self._newest_iterator_id += 1
        self.progress.is_loaded = False
        return self._epoch_batches(self.progress.delivered, self._newest_iterator_id)

    def _refuse_another_batch_size(self) -> None:
        """Raise UsageError if accelerate calls the training loop again with another batch size.

        It does so after an out-of-memory error. A loader that was made before keeps its batch size, and the
        batch that did not fit is delivered, but not trained.
        """
        given = batch_size_of_accelerate()
        if given is not None and given != self.step_batches.batch_size:
            size = self.step_batches.batch_size
            found = f"find_executable_batch_size with a batch size of {given}, for a loader with {size}"
            expected = (
                "a loader that is made inside that function, with its batch size, the same global_batch_size "
                "and load_state_dict; or no auto_find_batch_size"
            )
            raise UsageError(found=found, expected=expected)

    def return_to_trained(self) -> None:
        """Go back to the optimizer's last step if it is followed and the last loop ended inside an epoch.

        Batches that were delivered since then are not trained, for example as memory ran out. ``iter()``
        calls this itself.
        """
        trained = self.progress.trained
        delivered = self.progress.delivered
        if self._is_inside_loop and trained is not None and trained != delivered:
            logger.warning(
                f"the loop ended after batches that were not trained: going back to step {trained.step}"
            )
            self._move_to(trained)
            self._end_unless_persistent()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers and close the files. The next ``iter()`` starts and opens them again."""
        self._newest_iterator_id += 1
        self._stream.end()

    def _end_unless_persistent(self) -> None:
        if self.num_workers and not self.persistent_workers:
            self._stream.end()

    def _epoch_batches(self, start: Position, iterator_id: int) -> Iterator[Any]:
        self._check_is_newest(iterator_id)
        position = start
        progress = self.progress
        pins = self.pin_memory and torch.cuda.is_available()
        try:
            # The stream yields whole steps, as the loop may ask for a step's labels at its first batch.
            for batches in self._stream.steps(start):
                num_batches = position.num_micro + len(batches)  # a resumed step yields its rest
                # A collate_fn may return any type, with or without labels.
                labels = [
                    each.batch.get("labels") if hasattr(each.batch, "get") else None for each in batches
                ]
                self._step = NewestStep(num_batches, labels)
                while batches:  # pop, so that a delivered batch is released
                    batch, num_tokens, num_padding = batches.pop(0)
                    position = progress.delivered = position.after(num_batches)
                    self._is_inside_loop = True
                    self.metrics.count(num_tokens, num_padding)
                    yield pinned(batch) if pins else batch
                    self._check_is_newest(iterator_id)
            self._is_inside_loop = False
        except GeneratorExit:
            raise
        except BaseException:  # also Ctrl-C: a message may be half read, so the workers must end
            if iterator_id == self._newest_iterator_id:
                self._stream.end()
            raise
        finally:
            if iterator_id == self._newest_iterator_id:
                self._end_unless_persistent()

    def _check_is_newest(self, iterator_id: int) -> None:
        if iterator_id != self._newest_iterator_id:
            found = "an old iterator: its loader was closed, iterated again, or given a state or an epoch"
            raise UsageError(found=found, expected="a new loop: for batch in loader")
