"""The torch DataLoader that a training loop sees."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.batches import Batch, LoaderMetrics, StepBatches
from loader.chunks import IGNORED
from loader.order import share
from loader.ranks import ProcessRank, check_process_rank
from loader.run import Position, Run
from loader.samples import whole_number
from loader.shards import Origin
from loader.state import Progress, go_on, state_of
from loader.stream import BatchStream
from loader.tokenizer import LoaderTokenizer
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """This rank's part of the newest global batch."""

    num_batches: int
    labels: list[Any]  # of each batch
    labels_per_rank: torch.Tensor | None = None  # once it was asked for


def _refuse(*_: Any) -> NoReturn:
    raise UsageError(
        "a TokenLoader is no data set of samples, as StatefulDataLoader, Trainer(train_dataset=loader) and "
        "accelerate's skip_first_batches take it; iterate the TokenLoader itself, which shares samples out "
        "among the ranks (loader.peek() is the next batch), and keep its state with loader.state_dict() and "
        "load_state_dict(). Under transformers' Trainer write class LlamaTrainer(LoaderMixin, Trainer), with "
        "LoaderMixin of loader.trainer, and pass train_loader=loader"
    )


class _RefusedDataset(IterableDataset[Any]):
    """The ``dataset`` of a TokenLoader. It refuses to be read by another DataLoader."""

    __iter__ = __getitem__ = _refuse


class TokenLoader(DataLoader[Batch]):
    """Gives an epoch, or the rest of one, at each ``iter()``. Epochs have different orders.

    Every rank gets ``len(loader)`` batches, and no sample comes twice in an epoch. An epoch leaves out fewer
    samples than a global batch, others each time. After a ``break`` or Ctrl-C the next ``iter()`` goes on
    with the next batch, and ``set_epoch`` leaves the epoch. A loader with ``split="validation"`` begins anew
    at each ``iter()``. Only the newest iterator may be used. ``close()``, or leaving ``with``, ends the
    workers.

    ``state_dict()`` says what was delivered, whatever was read ahead. ``load_state_dict()`` makes the next
    ``iter()`` the rest of that epoch, on any number of ranks and workers. accelerate counts batches: set
    ``accelerator.step = 0`` after a ``load_state`` that changes how many a step accumulates. A copy
    (``copy.deepcopy``, pickle) stands where the original stood, with workers and files of its own.
    """

    # accelerate looks for these. It then neither shares samples out itself nor skips batches by reading them.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    __getitem__ = _refuse

    def __init__(
        self,
        run: Run,
        *,
        step_batches: StepBatches,
        loader_tokenizer: LoaderTokenizer,
        process_rank: ProcessRank,
        pin_memory: bool = False,
        amend: bool = False,
        **workers: Any,
    ) -> None:
        if "sampler" in workers:
            raise UsageError(
                found="a sampler, as Lightning gives it for overfit_batches and predict",
                expected="none, as a TokenLoader has an order of its own: to overfit train_dataloaders="
                "list(itertools.islice(loader, 2)), to predict dataloaders=(batch for batch in loader)",
            )
        # What torch shows of a loader; batches come from self._stream, in which workers send chunks.
        super().__init__(
            _RefusedDataset(),
            batch_size=step_batches.batch_size,
            drop_last=True,
            pin_memory=pin_memory,
            **workers,
        )
        del self.collate_fn  # torch's; ours is worked out when it is looked at
        self.step_batches = step_batches
        self.loader_tokenizer = loader_tokenizer
        self.process_rank = process_rank
        self.can_amend = amend
        self.metrics = LoaderMetrics()
        self.progress = Progress()
        self._given = run  # by the arguments; an amended state may replace it
        self._worker_options = workers
        self._layout = {"world_size": process_rank.world_size, "batch_size": step_batches.batch_size}
        self._newest = 0  # number of the iterator that may be used
        self._step = _Step(run.batches_in_step(0), [])
        self._go_by(run)

    def _go_by(self, run: Run) -> None:
        """Deliver a run from now on."""
        self.run = run
        self._stream = self._stream_of(self.metrics, self.num_workers)

    def _stream_of(self, metrics: LoaderMetrics, num_workers: int) -> BatchStream:
        """Return the batches of this rank, which nobody reads yet."""
        run, who = self.run, self.process_rank
        slots = share(range(run.order.num_slots), who.rank, who.world_size)
        workers = {**self._worker_options, "num_workers": min(num_workers, len(slots))}
        endless = self.persistent_workers or not num_workers
        return BatchStream(run, slots, self.step_batches, metrics, endless=endless, workers=workers)

    def __len__(self) -> int:
        """Return the batches of the next epoch, on every rank. See ``first_batch`` for a resumed one."""
        return self.run.ticks_in(self.run.epoch_of(self._next.step)) * self.run.batches_per_tick

    @property
    def _next(self) -> Position:
        """Return where the next ``iter()`` begins: for validation at the beginning of the epoch."""
        at = self.progress.delivered
        if self.run.is_validation and not self.progress.is_loaded:
            return Position(self.run.first_step(self.run.epoch_of(at.step)))
        return at

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, the same object each time.

        Loading it takes 3 s for Llama 3's. Raises OtherTokenizer where transformers makes another one of its
        files, ReadWriteError, or NotFound.
        """
        return self.loader_tokenizer.loaded

    @cached_property
    def collate_fn(self) -> Any:  # type: ignore[override]
        """Return the user's function, or a DataCollatorForLanguageModeling that makes the same batches."""
        if self.step_batches.collate_fn is not None:
            return self.step_batches.collate_fn
        from loader.collator import CausalLMCollator  # imports transformers, which the loader does without

        padded = self.step_batches.padded
        return CausalLMCollator(
            self.tokenizer, pad_to_multiple_of=padded.pad_to_multiple_of, pad_to_length=padded.pad_to_length
        )

    @property
    def first_batch(self) -> int:
        """Return how many batches of its epoch the next ``iter()`` leaves out: 0 unless it resumes.

        A bar of the whole epoch is ``tqdm(loader, initial=loader.first_batch)``.
        """
        return self.run.batches_before(self._next)

    @property
    def num_accumulated(self) -> int:
        """Return how many batches of this rank the newest global batch has."""
        return self._step.num_batches

    def labels_per_rank(self, device: torch.device | str = "cpu", group: Any = None) -> torch.Tensor:
        """Return the labels in the newest global batch, divided by the number of ranks.

        A sum of losses divided by it is the mean over all labels of the global batch, on any number of ranks
        and accumulated batches, since DDP and FSDP average gradients over ranks. transformers takes it:

            loss = model(**batch.to(device), num_items_in_batch=loader.labels_per_rank(device)).loss

        All ranks must call it: once in a step they add up one number, without a wait for the device. After a
        resume inside of a step only the rest of the step counts. ``device``: where the group's backend sends
        from. ``group``: default: all processes. Raises UsageError before the first batch, where batches have
        no labels, or without a process group.
        """
        step = self._step
        if step.labels_per_rank is not None:
            return step.labels_per_rank
        if not step.labels or any(labels is None for labels in step.labels):
            raise UsageError(found="labels_per_rank without a batch", expected="one that has labels")
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.process_rank.world_size > 1 and not is_distributed:
            raise UsageError(
                found=f"labels_per_rank of {self.process_rank.world_size} ranks without a process group",
                expected="torch.distributed.init_process_group before it",
            )
        first = 0 if self.step_batches.shifts_targets else 1  # a model that shifts never looks at the first
        num_labels = sum((labels[:, first:] != IGNORED).sum() for labels in step.labels).to(device)
        num_ranks = 1
        if is_distributed:
            torch.distributed.all_reduce(num_labels, group=group)
            num_ranks = torch.distributed.get_world_size(group)
        step.labels_per_rank = num_labels / num_ranks
        return step.labels_per_rank

    @property
    def ends_step(self) -> bool:
        """Return whether the newest batch ends its global batch: call the optimizer now."""
        return self.progress.delivered.num_micro == 0

    @property
    def num_steps_delivered(self) -> int:
        """Return how many global batches the loop got, through all epochs."""
        return self.progress.delivered.step - self.progress.num_left

    @property
    def epoch(self) -> float:
        """Return how many epochs the loop got: 1.5 is the middle of the second."""
        step, num_micro = self.progress.delivered
        epoch = self.run.epoch_of(step)
        within = step - self.run.first_step(epoch) + num_micro / self.run.batches_in_step(step)
        return epoch + within / self.run.steps_in(epoch)

    def describe(self) -> str:
        """Return the sources with their shares and fingerprints, and all stages, as text."""
        run, now = self.run, self.progress.delivered
        epochs, weights = run.source_epochs(now), run.held_from(now.step)[0].weights
        tokens_of = {  # in a sample of the mixture
            source.name: weights.get(source.name, 0) * source.samples.mean_tokens
            for source in run.sources
            if source.samples is not None
        }
        sample = f"a document, of at most {run.settings['max_length'] or 'any number of'} tokens"
        if run.row_tokens:
            fields = ", ".join(self.step_batches.boundaries)
            apart = f"boundaries {fields}" if fields else "attention crosses documents (no boundaries)"
            sample = f"a row of {run.row_tokens} tokens; {apart}"
        order = f"shuffled with seed {run.seed}" if run.order.shuffle else "as the shards stand, not shuffled"
        if run.order.group > 1:
            order += f", samples of similar length in groups of {run.order.group}"
        num_left_out = sum(source.order.num_left_out for source in run.sources)
        num_steps = run.steps_in(run.epoch_of(now.step))
        lines = [
            f"{self!r}, at step {now.step}",
            f"sample: {sample}",
            f"order: {order}",
            f"epoch: {num_steps:,} steps; {num_left_out:,} samples are left out, others each epoch",
        ]
        for source in run.sources:
            name, share_text, num_tokens = source.name, "dropped", ""
            if source.samples is not None:
                of_tokens = tokens_of[name] / (sum(tokens_of.values()) or 1)
                share_text = f"{weights.get(name, 0):.1%} of samples, {of_tokens:.1%} of tokens"
                num_tokens = f" of about {source.samples.mean_tokens:.3g} tokens"
            lines.append(
                f"source {name}: {share_text}; {epochs[name]:.2f} epochs so far; "
                f"{source.order.num_samples:,} samples{num_tokens}, data {source.data}"
            )
        amended = {stage.step for stage in run.stages if stage.is_amended}
        lines += [f"{held}{' (amended)' if held.step in amended else ''}" for held in run.held_from(0)]
        lines += filter(None, dict.fromkeys(samples.shards.split_words for samples in run.samples))
        return "\n  ".join(lines)

    @property
    def source_samples(self) -> dict[str, int]:
        """Return how many samples of each source were delivered, on all ranks together."""
        return self.run.source_samples(self.progress.delivered)

    @property
    def source_epochs(self) -> dict[str, float]:
        """Return how many epochs of each source were delivered, as in ``epoch``."""
        return self.run.source_epochs(self.progress.delivered)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of the sources in ``batch["origins"]``: ``("all",)`` without a mixture."""
        return tuple(source.name for source in self.run.sources)

    def origin(self, source: int, shard: int, sample: int, document: int = 0) -> Origin:
        """Return where a document of ``batch["origins"]`` lies: tar, and file and byte of the input.

        ``loader.origin(*batch["origins"][0, 2:].tolist())``. Raises UsageError.
        """
        sources = self.run.sources
        samples = sources[source].samples if 0 <= source < len(sources) else None
        if samples is None:
            raise UsageError(found=f"source {source}", expected=f"a number of {list(self.source_names)}")
        return samples.shards.origin(sources[source].name, shard, sample, document)

    @property
    def has_loaded_state(self) -> bool:
        """Return whether a state was loaded and no ``iter()`` began since."""
        return self.progress.is_loaded

    def __repr__(self) -> str:
        who, run, step = self.process_rank, self.run, self.progress.delivered.step
        epoch = run.epoch_of(step)
        return (
            f"TokenLoader(rank {who.rank} of {who.world_size}, batch_size {self.step_batches.batch_size}, "
            f"global_batch_size {run.tick_samples * run.ticks_in_step(step)}, epoch {epoch}, "
            f"step {step - run.first_step(epoch)} of {run.steps_in(epoch)}, {self.num_workers} workers)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(
            type(self),
            self._given,
            step_batches=self.step_batches,
            loader_tokenizer=self.loader_tokenizer,
            process_rank=self.process_rank,
            pin_memory=self.pin_memory,
            amend=self.can_amend,
            **self._worker_options,
        )
        return make, (), (self.progress, self.run)

    def __setstate__(self, now: tuple[Progress, Run]) -> None:
        """Stand where the original stood."""
        progress, run = now
        self.progress = replace(progress, trained=None)  # of an optimizer that the copy does not follow
        self._go_by(run)

    def state_dict(self) -> dict[str, Any]:
        """Return what the loop got, as a few integers and the fingerprint of data and order.

        Save it after the optimizer's step: the batch that the loop holds counts as delivered, unless the
        loader was told to ``follow`` the optimizer.
        """
        return self._state_of(self.progress.to_save)

    def follow(self, optimizer: Any) -> None:
        """Let ``state_dict()`` be of the optimizer's last step, also inside of the next one.

        For frameworks that save when a signal or an error comes. ``optimizer``: torch's, or accelerate's
        around it. A step that a gradient scaler leaves out counts with the next one.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        optimizer.register_step_post_hook(lambda *_: self.mark_trained())
        self.mark_trained()

    def mark_trained(self) -> None:
        """Let ``state_dict()`` be of what was delivered by now.

        For an optimizer that ``follow`` does not take: call it after each of its steps. Between two calls
        the state stays.
        """
        self.progress.trained = self.progress.delivered

    def _state_of(self, at: Position) -> dict[str, Any]:
        return state_of(self.run, at, self._layout, self.progress.num_left)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` global batches, as ``num_steps_delivered`` counts them.

        For loops that prefetch batches, and to leave steps out, as after a spike of the loss:
        ``load_state_dict(state_at(step + 200))`` on all ranks. Raises UsageError for a step of an epoch that
        was left by ``set_epoch``.
        """
        if step < (least := self.progress.left_at):
            expected = f"at least {least}, where set_epoch left an epoch"
            raise UsageError(found=f"step={step}", expected=expected)
        return self._state_of(Position(step + self.progress.num_left))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on behind a state. Reads nothing.

        A loader that was made with ``amend=True`` takes a state of other weights, sources or sizes, and logs
        the step from which on its own hold. Raises OtherRun, OtherTokenizer, UnknownVersion, UsageError or
        BrokenShard.
        """
        run, position, num_left, amended_at = go_on(self._given, state, self._layout, amend=self.can_amend)
        self._newest += 1
        # Compared as a state tells them, in which weights are rounded.
        if state_of(run, position, {}, 0) == state_of(self.run, position, {}, 0):
            self._end_unless_persistent()
        else:
            self._stream.end()  # its workers have the run of before
            self._go_by(run)
        self.progress.load(position, num_left)
        self._step = _Step(self.run.batches_in_step(position.step), [])
        if self.process_rank.rank == 0 and amended_at is not None:
            said = f"the run is amended from step {amended_at} on, and stands at step {position.step}"
            logger.warning("%s:\n%s", said, self.describe())

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` this epoch, on all ranks.

        If the loop stands inside of this epoch, ``iter()`` still gives the rest of it. Another epoch begins
        with its first step, also where this one was not over, and a loop that is still running is refused its
        next batch. Raises UsageError where that would discard a state that was just loaded.
        """
        if whole_number("epoch", epoch, least=0) != self.run.epoch_of(self.progress.delivered.step):
            self._leave_for(int(epoch))

    def _leave_for(self, epoch: int) -> None:
        self.progress.leave_for(epoch, self.run)
        self._newest += 1  # an older iterator would count its batches for the new epoch
        self._end_unless_persistent()

    def peek(self) -> Batch:
        """Return the batch that the next ``iter()`` begins with. Changes nothing.

        Reads its windows in this process, besides those that workers read: up to a second on a slow disk.
        """
        stream = self._stream_of(LoaderMetrics(), num_workers=0)
        try:
            (batch, _), *_ = next(stream.steps(self._next))
        finally:
            stream.end()
        return batch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        check_process_rank(self.process_rank)
        if len({stage.global_batch_size for stage in self.run.stages}) == 1:
            _warn_of_accumulation(self.run.batches_in_step(0))
        if self._next != self.progress.delivered:
            self._leave_for(self.run.epoch_of(self._next.step))  # a validation set begins anew
        self._newest += 1
        self.progress.is_loaded = False
        return self._epoch_batches(self.progress.delivered, self._newest)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files. The next ``iter()`` starts them again."""
        self._newest += 1
        self._stream.end()

    def _end_unless_persistent(self) -> None:
        if self.num_workers and not self.persistent_workers:
            self._stream.end()

    def _epoch_batches(self, start: Position, number: int) -> Iterator[Any]:
        self._check_newest(number)
        position, progress = start, self.progress
        pins = self.pin_memory and torch.cuda.is_available()
        try:
            # A whole step is there before its first batch, at which the loop may ask for the step's labels.
            for batches in self._stream.steps(start):
                num_batches = position.num_micro + len(batches)
                # A dict is known at once; a look whether another type is a Mapping takes 0.4 us.
                labels = [
                    batch.get("labels") if isinstance(batch, (dict, Mapping)) else None
                    for batch, _ in batches
                ]
                self._step = _Step(num_batches, labels)
                while batches:  # each is let go when it was delivered
                    batch, counts = batches.pop(0)
                    position = progress.delivered = position.after(num_batches)
                    self.metrics.count(*counts)
                    yield pinned(batch) if pins else batch
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
            found = "an old loop: its loader was closed, iterated, given a state or sent to another epoch"
            raise UsageError(found=found, expected="a new loop: for batch in loader")


def _warn_of_accumulation(num_batches: int) -> None:
    """Log a warning where accelerate accumulates another number of batches than a step has."""
    accelerate = sys.modules.get("accelerate.state")  # never imported here: not in use then
    if accelerate is None or not accelerate.GradientState._shared_state:  # noqa: SLF001  asking would start it
        return
    num_steps = accelerate.GradientState().num_steps
    if num_steps not in (1, num_batches):
        logger.warning(
            f"accelerate accumulates {num_steps} batches, but a global batch is {num_batches} of each rank; "
            f"pass global_batch_size=batch_size x ranks x {num_steps}, so that a step is the same samples on "
            "any number of ranks, and set accelerator.step = 0 after a load_state that changes the number"
        )
