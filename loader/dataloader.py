"""``get_llama3_dataloader``, and the DataLoader that it returns.

The function builds the parts one after another, and each part checks its own arguments.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.batch.batches import Batch, Collate, LoaderMetrics, StepBatches, Targets, padded_batches
from loader.batch.boundaries import Boundary, boundary_names
from loader.batch.stream import BatchStream
from loader.order.checks import whole_number
from loader.order.mixture import Position, Run
from loader.order.order import share
from loader.order.planned import Sizes, Weights, WeightsIn, choose_sizes, make_run
from loader.order.resume import Resumed, resume_run, run_as_saved
from loader.order.state import MAX_EPOCH, Skips, is_same_run, state_of
from loader.ranks import ProcessRank, check_process_rank, find_process_rank
from loader.read.chunks import IGNORED
from loader.read.finding import InputShards, find_sources, is_named_validation
from loader.read.samples import Samples, facts_of, make_samples
from loader.read.shards import Origin, ShardSet, SplitName
from loader.read.tokenizer import LoaderTokenizer, choose_tokenizer
from shardprep.errors import UsageError
from shardprep.meanings import ARGUMENTS

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """This rank's part of the newest global batch."""

    num_batches: int
    labels: list[Any]  # of each batch
    labels_per_rank: torch.Tensor | None = None  # computed by the first call


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


def _refuse(*_: Any) -> NoReturn:
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
    the next ``iter()`` yield the rest of that epoch, on any number of ranks and workers. accelerate counts
    batches: set ``accelerator.step = 0`` after a ``load_state`` that changes the number of accumulated ones.
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
        self._plan = run  # from the arguments; self.run may come from a state
        self._worker_options = workers
        self._layout = {"world_size": process_rank.world_size, "batch_size": batch_size}
        self._newest_iterator_id = 0  # older iterators may not be used
        self._is_inside_loop = (
            False  # the newest iterator has delivered a batch, but not the last of its epoch
        )
        self._step = _Step(run.batches_in_step(0), [])
        self.run = run
        self._stream = self._new_stream(self.metrics, self.num_workers)

    def _new_stream(self, metrics: LoaderMetrics, num_workers: int) -> BatchStream:
        """Return a new stream of this rank's batches in the current run."""
        run, process_rank = self.run, self.process_rank
        slots = share(range(run.order.num_slots), process_rank.rank, process_rank.world_size)
        workers = {**self._worker_options, "num_workers": min(num_workers, len(slots))}
        endless = self.persistent_workers or not num_workers  # without workers nothing is read ahead
        return BatchStream(run, self.samples, slots, self.step_batches, metrics, endless, workers)

    def __len__(self) -> int:
        """Return each rank's number of batches in the next epoch. A resumed one has ``first_batch`` fewer."""
        return self.run.ticks_in(self.run.epoch_of(self._next_position.step)) * self.run.batches_per_tick

    @property
    def _next_position(self) -> Position:
        """Return the position at which the next ``iter()`` starts. A validation loader restarts its epoch."""
        at, run = self.progress.delivered, self.run
        restarts = run.is_validation and not self.progress.is_loaded
        return Position(run.first_step(run.epoch_of(at.step))) if restarts else at

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
        from loader.batch.collator import (
            CausalLMCollator,  # imports transformers, which the loader does not need
        )

        multiple, width = self.step_batches.padded.pad_to_multiple_of, self.step_batches.padded.pad_to_length
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

    def labels_per_rank(self, device: torch.device | str = "cpu", group: Any = None) -> torch.Tensor:
        """Return the number of labels in the newest global batch, divided by the number of ranks: float32[].

        A sum of losses divided by it is the mean over all labels of the global batch, on any number of ranks
        and accumulated batches, since DDP and FSDP average gradients over ranks. transformers takes it:

            loss = model(**batch.to(device), num_items_in_batch=loader.labels_per_rank(device)).loss

        All ranks must call it. The first call in a step all-reduces one number, without waiting for the
        device. After a resume inside a step it counts only the rest of the step. ``device``: of the result,
        supported by the backend of ``group``, which defaults to all processes. Raises UsageError without
        labels, or for several ranks without a process group.
        """
        step = self._step
        if step.labels_per_rank is not None:
            return step.labels_per_rank
        if not step.labels or any(labels is None for labels in step.labels):
            raise UsageError(found="labels_per_rank without a batch", expected="a newest batch with labels")
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (world_size := self.process_rank.world_size) > 1 and not is_distributed:
            found = f"labels_per_rank on {world_size} ranks without a process group"
            raise UsageError(found=found, expected="torch.distributed.init_process_group before it")
        first = 0 if self.step_batches.shifts_targets else 1  # a model that shifts labels ignores the first
        num_labels = sum((labels[:, first:] != IGNORED).sum() for labels in step.labels).to(device)
        num_ranks = 1
        if is_distributed:
            torch.distributed.all_reduce(num_labels, group=group)
            num_ranks = torch.distributed.get_world_size(group)
        step.labels_per_rank = num_labels / num_ranks
        return step.labels_per_rank

    @property
    def ends_step(self) -> bool:
        """Return whether the newest batch is the last of its global batch: step the optimizer now."""
        return self.progress.delivered.num_micro == 0

    @property
    def num_steps_delivered(self) -> int:
        """Return how many global batches were delivered, over all epochs."""
        return self.progress.delivered.step - self.progress.skips.num_left

    @property
    def epoch(self) -> float:
        """Return how many epochs were delivered: 1.5 is the middle of the second."""
        step, num_micro = self.progress.delivered
        epoch = self.run.epoch_of(step)
        within = step - self.run.first_step(epoch) + num_micro / self.run.batches_in_step(step)
        return epoch + within / self.run.steps_in(epoch)

    def describe(self) -> str:
        """Return a text with the sources, their shares and fingerprints, the order and all stages."""
        run, now = self.run, self.progress.delivered
        epochs, weights = run.source_epochs(now), run.stages_from(now.step)[0].weights
        names = [source.name for source in run.sources]
        samples_of = {name: self.samples[name] for name in names if name in self.samples}
        tokens = {name: weights.get(name, 0) * samples.mean_tokens for name, samples in samples_of.items()}
        max_length = run.settings["max_length"]
        sample = f"a document, of at most {max_length} tokens" if max_length else "a document of any length"
        if run.row_tokens:
            fields = ", ".join(self.step_batches.boundaries)
            attention = f"boundaries {fields}" if fields else "attention crosses documents (no boundaries)"
            sample = f"a row of {run.row_tokens} tokens; {attention}"
        order = f"shuffled with seed {run.seed}" if run.order.shuffle else "that of the shards, not shuffled"
        if run.order.group > 1:
            order += f", samples of similar length in groups of {run.order.group}"
        num_left_out = sum(source.order.num_left_out for source in run.sources)
        num_steps = run.steps_in(run.epoch_of(now.step))
        lines = [
            f"{self!r}, at step {now.step}",
            f"sample: {sample}",
            f"order: {order}",
            f"epoch: {num_steps:,} steps, {num_left_out:,} samples left out, different ones each epoch",
        ]
        for source in run.sources:
            name, share_text, num_tokens = source.name, "dropped", ""
            if name in samples_of:
                token_share = tokens[name] / (sum(tokens.values()) or 1)
                share_text = f"{weights.get(name, 0):.1%} of samples, {token_share:.1%} of tokens"
                num_tokens = f" of about {samples_of[name].mean_tokens:.3g} tokens"
            lines.append(
                f"source {name}: {share_text}; {epochs[name]:.2f} epochs so far; "
                f"{source.order.num_samples:,} samples{num_tokens}, data {source.data}"
            )
        amended = {stage.step for stage in run.stages if stage.is_amended}
        lines += [f"{stage}{', amended' if stage.step in amended else ''}" for stage in run.stages_from(0)]
        lines += sorted({samples.shards.split_text for samples in samples_of.values()} - {""})
        return "\n  ".join(lines)

    @property
    def source_samples(self) -> dict[str, int]:
        """Return how many samples of each source were delivered, on all ranks together."""
        skips = self.progress.skips
        since = self.run.source_samples(self.progress.delivered, skips.since)
        return {name: skips.delivered.get(name, 0) + count for name, count in since.items()}

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
        run, step = self.run, self.progress.delivered.step
        epoch, rank, world_size = run.epoch_of(step), self.process_rank.rank, self.process_rank.world_size
        return (
            f"TokenLoader(rank {rank} of {world_size}, batch_size {self.step_batches.batch_size}, "
            f"global_batch_size {run.tick_samples * run.ticks_in_step(step)}, epoch {epoch}, "
            f"step {step - run.first_step(epoch)} of {run.steps_in(epoch)}, {self.num_workers} workers)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("samples", "step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        options = {name: getattr(self, name) for name in names} | self._worker_options
        make = partial(type(self), self._plan, amend=self.can_amend, **options)
        return make, (), (self.progress, self.run)

    def __setstate__(self, state: tuple[Progress, Run]) -> None:
        """Continue at the position of the original."""
        progress, self.run = state
        self.progress = replace(progress, trained=None)  # the copy does not follow the optimizer
        self._stream = self._new_stream(self.metrics, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a few integers, with the fingerprint of data and order; equal on all ranks.

        Save it after the optimizer's step: the newest batch counts as trained, unless you called ``follow``.
        """
        return self._state_at(self.progress.to_save)

    def _state_at(self, position: Position) -> dict[str, Any]:
        targets = "shifted" if self.step_batches.shifts_targets else "same"
        return state_of(self.run, position, self._layout, self.progress.skips, targets)

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
        num_left, since, _ = self.progress.skips
        number = whole_number("step", step, least=0, most=self.run.first_step(MAX_EPOCH + 1) - 1 - num_left)
        least = since - num_left
        if number < least:
            raise UsageError.of_value("step", number, f"at least {least}, where set_epoch left an epoch")
        return self._state_at(Position(number + num_left))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` continue after a saved state. Reads no data.

        A loader made with ``amend=True`` accepts a state with other weights, sources or sizes, and logs the
        step at which its own take effect. Raises Refused (OtherRun, OtherTokenizer, UnknownVersion),
        UsageError or BrokenShard.
        """
        resumed = resume_run(self._plan, state, self._layout, current=self.run, amend=self.can_amend)
        self._continue(resumed)
        if self.process_rank.rank == 0 and resumed.border is not None:
            logger.warning(f"the run is amended from step {resumed.border} on:\n{self.describe()}")

    def load_run(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a state, whatever weights and sizes this loader was given.

        To look at a run, as ``shardprep where`` does: nothing is amended. The next ``iter()`` begins with the
        state's step. Raises the errors of ``load_state_dict``.
        """
        self._continue(run_as_saved(self._plan, state, self._layout))

    def _continue(self, resumed: Resumed) -> None:
        run, position = resumed.run, resumed.position
        self._newest_iterator_id += 1
        if is_same_run(run, self.run):
            self._end_unless_persistent()
        else:
            self._stream.end()  # its workers read the previous run
            self.run = run
            self._stream = self._new_stream(self.metrics, self.num_workers)
        self._move_to(position, skips=resumed.skips, is_loaded=True)
        self._step = _Step(self.run.batches_in_step(position.step), [])

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
        num_left = now.skips.num_left + first - now.delivered.step
        self._move_to(Position(first), skips=Skips(num_left, first, self.source_samples))
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
            (batch, _), *_ = next(stream.steps(self._next_position))
        finally:
            stream.end()
        return batch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        check_process_rank(self.process_rank)
        self._refuse_another_batch_size()
        self.return_to_trained()
        if len({stage.global_batch_size for stage in self.run.stages}) == 1:
            _warn_of_accumulation(self.run.batches_in_step(0))
        if (start := self._next_position) != self.progress.delivered:  # validation restarts its epoch
            self._start_epoch(self.run.epoch_of(start.step))
        self._newest_iterator_id += 1
        self.progress.is_loaded = False
        return self._epoch_batches(self.progress.delivered, self._newest_iterator_id)

    def _refuse_another_batch_size(self) -> None:
        """Raise UsageError if accelerate calls the training loop again with another batch size.

        It does so after an out-of-memory error. A loader that was made before keeps its batch size, and the
        batch that did not fit is delivered, but not trained.
        """
        given = _batch_size_of_accelerate()
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
        trained, delivered = self.progress.trained, self.progress.delivered
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
        position, progress = start, self.progress
        pins = self.pin_memory and torch.cuda.is_available()
        try:
            # The stream yields whole steps, as the loop may ask for a step's labels at its first batch.
            for batches in self._stream.steps(start):
                num_batches = position.num_micro + len(batches)  # a resumed step yields its rest
                # A collate_fn may return any type, with or without labels.
                labels = [batch.get("labels") if hasattr(batch, "get") else None for batch, _ in batches]
                self._step = _Step(num_batches, labels)
                while batches:  # pop, so that a delivered batch is released
                    batch, counts = batches.pop(0)
                    position = progress.delivered = position.after(num_batches)
                    self._is_inside_loop = True
                    self.metrics.count(*counts)
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


def _batch_size_of_accelerate() -> int | None:
    """Return the batch size of accelerate's find_executable_batch_size, if it has called this loop."""
    memory = sys.modules.get("accelerate.utils.memory")  # not imported: not in use
    if memory is None:
        return None
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals is vars(memory) and isinstance(frame.f_locals.get("batch_size"), int):
            batch_size: int = frame.f_locals["batch_size"]
            return batch_size
    return None


def _warn_of_accumulation(num_batches: int) -> None:
    """Log a warning if accelerate accumulates another number of batches than a step has."""
    accelerate = sys.modules.get("accelerate.state")  # not imported: not in use
    # GradientState() would create the state.
    if accelerate is None or not accelerate.GradientState._shared_state:  # noqa: SLF001
        return
    num_steps = accelerate.GradientState().num_steps
    if num_steps not in (1, num_batches):
        problem = f"accelerate accumulates {num_steps} batches, but a global batch has {num_batches} per rank"
        logger.warning(f"{problem}; pass global_batch_size=batch_size x ranks x {num_steps}")


Padding = Literal["longest", "max_length"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MINIMUM = {"num_workers": 0, "rank": 0, "seed": -(1 << 63)}  # others: 1
_CHOICES = {"SplitName": SplitName, "Padding": Padding, "WeightsIn": WeightsIn, "Targets": Targets}
_PATHS = {"model_id": "a model's folder or its name on the hub", "cache_dir": "a folder"}


def _with_checks(make: _Function) -> _Function:
    """Decorate a function to check its arguments. numpy's integers become int, since states are JSON."""
    signature = inspect.signature(make)
    known = signature.parameters

    @wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known.keys():
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "its arguments:"
            if name in ARGUMENTS:
                hint = f"{ARGUMENTS[name]}."
            message = f"get_llama3_dataloader has no argument {name!r}: {hint}"
            raise TypeError(f"{message} It has {', '.join(known)}")
        bound = signature.bind(*args, **options)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(name, value, known[name].annotation)
        return make(*bound.args, **bound.kwargs)

    return cast(_Function, call)


def _checked(name: str, value: Any, annotation: str) -> Any:
    """Return an argument as its declared type. Raises UsageError for a value of another type."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind == "int":
        return whole_number(name, value, least=_MINIMUM.get(name, 1))
    choices = (True, False) if kind == "bool" else get_args(_CHOICES.get(kind))
    if choices:
        is_valid, expected = value in choices, " or ".join(map(repr, choices))
    elif name in _PATHS:
        is_valid, expected = isinstance(value, (str, os.PathLike)), _PATHS[name]
    elif name == "collate_fn":
        is_valid, expected = callable(value), "a function of a list of samples"
    else:
        return value  # checked where it is used
    if not is_valid:
        raise UsageError.of_value(name, value, expected)
    return bool(value) if kind == "bool" else value


@_with_checks
def get_llama3_dataloader(
    input_shards: InputShards | Mapping[str, InputShards],
    batch_size: int,
    model_id: str | os.PathLike[str] | None = None,
    *,
    split: SplitName | None = None,
    global_batch_size: Sizes | None = None,
    group_by_length: bool | int = False,
    padding: Padding = "longest",
    pad_to_multiple_of: int | None = None,
    collate_fn: Collate | None = None,
    origins: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    weights: Weights | None = None,
    weights_in: WeightsIn = "tokens",
    amend: bool = False,
    seq_len: int | None = None,
    boundaries: Boundary | Sequence[Boundary] = (),
    targets: Targets = "same",
    max_length: int | None = None,
    num_workers: int = 4,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenLoader:
    """Return a loader of this rank's batches of token ids, with another order in each epoch.

    Packed rows, with attention inside each document (``model`` is a transformers model on ``device``):

        loader = get_llama3_dataloader("DATA", batch_size=8, seq_len=4096, boundaries="transformers")
        for batch in loader:
            num_labels = loader.labels_per_rank(device)
            loss = model(**batch.to(device), num_items_in_batch=num_labels).loss

    Whole documents, padded. A global batch of 512 on any number of ranks, resumed from a checkpoint:

        loader = get_llama3_dataloader("DATA", batch_size=8, global_batch_size=512, max_length=2048)
        loader.load_state_dict(checkpoint["loader"])  # saved as {"loader": loader.state_dict(), ...}

    Args:
        What data:
            input_shards: a data set's folder, an index.json, a tar or its URL, a pattern
                (``shard-{00000..00009}.tar``, ``*``), or a list of these. A mixture is a dict of them by
                source name, ``{"web": ..., "code": ...}``. An incomplete folder is refused.
            model_id: folder or hub name of the model whose tokenizer made tars that shardprep did not write.
                Default for these: meta-llama/Meta-Llama-3-8B. A data set has its own tokenizer, and another
                one is refused.
            cache_dir: folder for copies of the tars that URLs name. URLs need it.
            split: ``"validation"`` selects the documents that ``plan --validation_fraction`` held out,
                ``"train"`` the others. A data set that is for validation as a whole is named so,
                ``input_shards={"validation": ...}``, by its folder or by ``plan --split validation``. A
                validation loader yields each document once, in the same order each epoch. Samples whose
                labels are all -100 fill its last global batch.

        What a batch is:
            batch_size: samples per batch on each rank.
            global_batch_size: samples per optimizer step, over all ranks and accumulated batches; or sizes by
                step, ``[(0, 256), (1000, 512)]``, which change ``loader.num_accumulated``. It determines the
                order: keep it when the number of ranks changes. Default: batch_size x world_size.
            group_by_length: put documents of similar length next to each other, in groups of this many
                samples; True: of ``batch_size``. Keep the number when you change ``batch_size``.
            padding: ``"longest"`` pads to the longest sample of a batch, ``"max_length"`` to ``max_length``.
            pad_to_multiple_of: round the width of padded batches up to a multiple of this.
            collate_fn: called with a list of ``{"input_ids": list[int]}``, in the training process. The
                default makes the same batches as transformers' DataCollatorForLanguageModeling.
            origins: add ``origins``, int64[documents, 6], to batches: row, place, source, shard, sample and
                document, which ``loader.origin`` resolves. Remove it before ``model(**batch)``.

        Order and mixing:
            seed: equal seeds give equal global batches, on any number of ranks and workers.
            shuffle: if False, global batch k is samples ``[k L, (k + 1) L)``, L being ``global_batch_size``.
            weights: share of each source, ``{"web": 0.7, "code": 0.3}``, or shares by step, ``[(0, {...}),
                (80_000, {...})]``. Each source has its own epochs, see ``loader.source_epochs``.
            weights_in: unit of the weights: ``"samples"`` or ``"tokens"``, by each source's mean length.
            amend: accept a state of other weights, sources or global batch sizes, which is otherwise refused.
                The loader's own take effect at the next border, at most 64 steps later. Until then keep a
                dropped source in ``input_shards``, without a weight. Sizes: multiples of the run's first.

        Packing and labels:
            seq_len: pack documents into full rows of this many tokens, with EOS between documents.
            boundaries: keep attention inside each document of packed rows. ``"transformers"`` gives the
                fields that ``model(**batch)`` of a transformers model needs for it, without
                ``attention_mask``; ``check_boundaries(model, batch)`` checks that your model uses them. For
                other models pass one or several of ``"position_ids"``, ``"segment_ids"``, ``"cu_seqlens"``.
                The first label of each document is -100. Default: attention crosses documents.
            targets: with ``"same"`` labels equal the ids, for models that shift them, like transformers'.
                With ``"shifted"`` ``labels[:, t]`` is the token after ``input_ids[:, t]``, for loops like
                those of Megatron, nanoGPT and torchtitan; plan packed rows with a ``--seq_len`` one larger.
            max_length: truncate unpacked documents to this many tokens; ``loader.metrics`` counts the rest.

        Processes and workers:
            num_workers: reading processes per rank; 0: the training process reads. At most
                ``global_batch_size / (world_size x group_by_length)`` have work.
            prefetch_factor: chunks of up to 1 MiB that each worker reads ahead. Default: 2.
            pin_memory: copy batches into pinned memory. Default: True if CUDA is available.
            persistent_workers: keep workers between epochs; they read ahead into the next one.
            rank: data-parallel rank, with ``world_size``. Default: torch.distributed's or the launcher's. For
                a DeviceMesh: ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.
            world_size: number of data-parallel ranks.

    Returns:
        A TokenLoader. Its batches have ``input_ids``, ``labels`` (-100 in padding) and ``attention_mask``
        (not with ``boundaries="transformers"``), each int64[batch_size, seq]; see Batch for other fields. A
        ``collate_fn`` may return anything.

    Raises:
        TypeError: an argument is unknown.
        ShardprepError: UsageError for a wrong value; NotFound, MissingShard, BrokenShard or UnknownVersion
            for the data; OtherTokenizer for ``model_id``; ReadWriteError or CannotWrite for the disk.
    """
    is_validation = split == "validation"
    process_rank = find_process_rank(rank, world_size)
    fields = boundary_names(boundaries)
    shifts = targets == "shifted"
    if shifts and "transformers" in fields:
        found = "targets='shifted' with boundaries='transformers', whose models shift labels themselves"
        expected = "other boundaries than 'transformers', or targets='same'"
        raise UsageError(found=found, expected=expected)
    if shifts and collate_fn is not None:
        raise UsageError("targets='shifted' does not work with a collate_fn; leave out one of the two")
    if shifts:  # input_ids and labels are one token shorter than the samples
        seq_len = None if seq_len is None else seq_len + 1
        max_length = None if max_length is None else max_length + 1
    tick_samples, group, sizes = choose_sizes(
        global_batch_size, group_by_length, batch_size=batch_size, world_size=process_rank.world_size
    )
    if is_validation and len(sizes) > 1:
        raise UsageError(found=f"global_batch_size={global_batch_size}", expected="one size for validation")
    _check_mixing(input_shards, weights, is_validation=is_validation)
    if padding == "max_length" and max_length is None:
        raise UsageError(found=f"padding={padding!r}", expected="max_length=, the length to pad to")
    shards_by_source = find_sources(
        input_shards if isinstance(input_shards, Mapping) else {"all": input_shards},
        cache_dir=cache_dir,
        count_tokens=seq_len is not None or group > 1 or (weights is not None and weights_in == "tokens"),
        split=split,
    )
    parts = [part for each in shards_by_source.values() for part in each.parts]
    shards = ShardSet(parts, split, is_for_validation=True)  # checked above
    tokenizer = choose_tokenizer(shards, model_id)
    samples = {
        name: make_samples(
            source_shards,
            seq_len=seq_len,
            max_length=max_length,
            group=group,
            eos_token_id=tokenizer.eos_token_id,
            vocab_size=tokenizer.vocab_size if source_shards.has_external else None,
            starts=bool(fields) or origins,
            keeps_tail=is_validation,
            origins=origins,
        )
        for name, source_shards in shards_by_source.items()
    }
    counts_tokens = weights is not None and weights_in == "tokens"
    facts = {name: facts_of(each, counts_tokens=counts_tokens) for name, each in samples.items()}
    run = make_run(
        facts,
        sizes,
        weights,
        tick_samples=tick_samples,
        batches_per_tick=tick_samples // (batch_size * process_rank.world_size),
        group=group,
        seed=seed,
        shuffle=shuffle and not is_validation,
        keeps_tail=is_validation,
        settings={
            "tokenizer": tokenizer.fingerprint,
            "seq_len": shards.row_tokens or seq_len or 0,
            "max_length": max_length or 0,
            "split": shards.split,
        },
    )
    if prefetch_factor is not None and not num_workers:
        found = f"prefetch_factor={prefetch_factor}, but no workers that could read ahead"
        raise UsageError(found=found, expected="num_workers of at least 1", remedy="num_workers")
    if num_workers > (num_slots := run.order.num_slots // process_rank.world_size):
        problem = f"num_workers={num_workers}, but only {num_slots} can share a rank's part of a global batch"
        logger.warning(f"{problem}, so {num_slots} are started. A larger global_batch_size can use more")
        num_workers = num_slots
    padded = padded_batches(
        collate_fn,
        tokenizer,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_to_length=max_length if padding == "max_length" else None,
        num_cut_columns=int(shifts),
        has_masks=shards.has_masks,
        has_blanks=shards.blank_id is not None,
    )
    if padded.pad.token:
        tokenizer.pads_with = padded.pad.token
    step_batches = StepBatches(
        batch_size=batch_size,
        padded=padded,
        collate_fn=collate_fn,
        boundaries=fields,
        shifts_targets=shifts,
        origins=origins,
    )
    loader = TokenLoader(
        run,
        samples=samples,
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=process_rank,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        amend=amend,
        num_workers=num_workers,
        prefetch_factor=(prefetch_factor or 2) if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
    )
    if process_rank.rank == 0:
        logger.info(loader.describe())
        has_eos = all(data.spec.append_eos or data.spec.has_rows for data in shards.datasets)
        if not has_eos and seq_len is None and not is_validation and tokenizer.eos_token_id is not None:
            problem = "documents end without EOS, so a model fine-tuned on them never learns to stop"
            logger.warning(f"{problem}; pass seq_len=, or plan the data with --append_eos")
    return loader


def _check_mixing(input_shards: object, weights: Weights | None, *, is_validation: bool) -> None:
    """Raise UsageError unless named sources have weights, and a source without a name has none."""
    if not isinstance(input_shards, Mapping):
        if weights is not None:
            remedy = 'input_shards={"web": ..., "code": ...}'
            raise UsageError(found="weights without named sources", expected=remedy, remedy=remedy)
    elif is_validation and not (is_named_validation(input_shards) and weights is None):
        raise UsageError(found='split="validation" with named sources', expected="one loader for each source")
    elif weights is None and not is_validation:
        raise UsageError(found="named sources without weights", expected="weights= with a weight for each")
