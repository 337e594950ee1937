"""``get_llama3_dataloader``, and the DataLoader that a training loop sees.

The function makes the stages one after another, and each checks its own arguments.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from loader.batches import Batch, Collate, LoaderMetrics, StepBatches, Targets, padded_batches
from loader.boundaries import Boundary, boundary_names
from loader.chunks import IGNORED
from loader.order import share
from loader.ranks import ProcessRank, check_process_rank, find_process_rank
from loader.run import MAX_EPOCH, Position, Run, go_on, state_of, whole_number
from loader.samples import Sizes, Weights, WeightsIn, check_mixing, choose_sizes, make_run, make_samples
from loader.shards import InputShards, Origin, ShardSet, SplitName, find_sources
from loader.stream import BatchStream
from loader.tokenizer import LoaderTokenizer, choose_tokenizer
from shardprep.errors import UsageError
from shardprep.removed import ARGUMENTS

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """This rank's part of the newest global batch."""

    num_batches: int
    labels: list[Any]  # of each batch
    labels_per_rank: torch.Tensor | None = None  # once it was asked for


@dataclass(kw_only=True)
class Progress:
    """Where a loader's loop stands. Looking at the loader does not change it."""

    delivered: Position = Position()  # noqa: RUF009  immutable
    trained: Position | None = None  # of the optimizer's last step; None: the loop does not say it
    num_left: int = 0  # steps of the run that set_epoch left out, minus those that came again
    left_at: int = 0  # steps that the loop had when set_epoch last left an epoch
    is_loaded: bool = False  # a state was loaded, and no iter() began since

    @property
    def to_save(self) -> Position:
        """Return the position that a state has: what was trained, or else what was delivered."""
        return self.delivered if self.trained is None else self.trained


def _refuse(*_: Any) -> NoReturn:
    found = "a TokenLoader as a data set (for StatefulDataLoader, Trainer or accelerate's skip_first_batches)"
    expected = "a loop over it and its state_dict(), or in a Trainer LoaderMixin of loader.trainer"
    raise UsageError(found=found, expected=expected)


class _RefusedDataset(IterableDataset[Any]):
    """The ``dataset`` of a TokenLoader. It refuses to be read by another DataLoader."""

    __iter__ = __getitem__ = _refuse


class TokenLoader(DataLoader[Batch]):
    """Gives an epoch, or the rest of one, at each ``iter()``. Epochs have different orders.

    Every rank gets ``len(loader)`` batches, and no sample comes twice in an epoch. An epoch leaves out fewer
    samples than a global batch, others each time. After a ``break`` or Ctrl-C the next ``iter()`` goes on
    with the next batch, and ``set_epoch`` leaves the epoch. A loader with ``split="validation"`` begins anew
    at each ``iter()``. Only the newest iterator may be used. ``close()``, or ``with``, ends the workers.

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
            found = "a sampler, as Lightning gives it for overfit_batches and predict"
            expected = "none: pass list(itertools.islice(loader, 2)) or (batch for batch in loader)"
            raise UsageError(found=found, expected=expected)
        # What torch shows of a loader; batches come from self._stream, in which workers send chunks.
        batch_size = step_batches.batch_size
        super().__init__(_RefusedDataset(), batch_size, drop_last=True, pin_memory=pin_memory, **workers)
        del self.collate_fn  # torch's; ours is worked out when it is looked at
        self.step_batches = step_batches
        self.loader_tokenizer = loader_tokenizer
        self.process_rank = process_rank
        self.can_amend = amend
        self.metrics = LoaderMetrics()
        self.progress = Progress()
        self._given = run  # by the arguments; an amended state may replace it
        self._worker_options = workers
        self._layout = {"world_size": process_rank.world_size, "batch_size": batch_size}
        self._newest = 0  # number of the iterator that may be used
        self._step = _Step(run.batches_in_step(0), [])
        self.run = run
        self._stream = self._stream_of(self.metrics, self.num_workers)

    def _stream_of(self, metrics: LoaderMetrics, num_workers: int) -> BatchStream:
        """Return the batches of this rank in the run that holds, which nobody reads yet."""
        run, who = self.run, self.process_rank
        slots = share(range(run.order.num_slots), who.rank, who.world_size)
        workers = {**self._worker_options, "num_workers": min(num_workers, len(slots))}
        endless = self.persistent_workers or not num_workers
        return BatchStream(run, slots, self.step_batches, metrics, endless, workers)

    def __len__(self) -> int:
        """Return the batches of the next epoch, on every rank. See ``first_batch`` for a resumed one."""
        return self.run.ticks_in(self.run.epoch_of(self._next.step)) * self.run.batches_per_tick

    @property
    def _next(self) -> Position:
        """Return where the next ``iter()`` begins: for validation at the beginning of the epoch."""
        at, run = self.progress.delivered, self.run
        restarts = run.is_validation and not self.progress.is_loaded
        return Position(run.first_step(run.epoch_of(at.step))) if restarts else at

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, the same object each time. To load Llama 3's takes 3 s.

        Raises OtherTokenizer where transformers makes another one of its files, NotFound or ReadWriteError.
        """
        return self.loader_tokenizer.loaded

    @cached_property
    def collate_fn(self) -> Any:  # type: ignore[override]
        """Return the user's function, or a DataCollatorForLanguageModeling that makes the same batches."""
        if self.step_batches.collate_fn is not None:
            return self.step_batches.collate_fn
        from loader.collator import CausalLMCollator  # imports transformers, which the loader does without

        multiple, width = self.step_batches.padded.pad_to_multiple_of, self.step_batches.padded.pad_to_length
        return CausalLMCollator(self.tokenizer, pad_to_multiple_of=multiple, pad_to_length=width)

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
        from. ``group``: default: all processes. Raises UsageError without labels or a process group.
        """
        step = self._step
        if step.labels_per_rank is not None:
            return step.labels_per_rank
        if not step.labels or any(labels is None for labels in step.labels):
            raise UsageError(found="labels_per_rank without a batch", expected="one that has labels")
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (world_size := self.process_rank.world_size) > 1 and not is_distributed:
            found = f"labels_per_rank of {world_size} ranks without a process group"
            raise UsageError(found=found, expected="torch.distributed.init_process_group before it")
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
        read = {source.name: source.samples for source in run.sources if source.samples is not None}
        tokens_of = {name: weights.get(name, 0) * samples.mean_tokens for name, samples in read.items()}
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
            if name in read:
                of_tokens = tokens_of[name] / (sum(tokens_of.values()) or 1)
                share_text = f"{weights.get(name, 0):.1%} of samples, {of_tokens:.1%} of tokens"
                num_tokens = f" of about {read[name].mean_tokens:.3g} tokens"
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
        names = ("step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        options = {name: getattr(self, name) for name in names} | self._worker_options
        make = partial(type(self), self._given, amend=self.can_amend, **options)
        return make, (), (self.progress, self.run)

    def __setstate__(self, now: tuple[Progress, Run]) -> None:
        """Stand where the original stood."""
        progress, self.run = now
        self.progress = replace(progress, trained=None)  # of an optimizer that the copy does not follow
        self._stream = self._stream_of(self.metrics, self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return what the loop got, as a few integers and the fingerprint of data and order.

        Save it after the optimizer's step: the loop's batch counts, unless you called ``follow``.
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

        For an optimizer that ``follow`` does not take: call it after each of its steps.
        """
        self.progress.trained = self.progress.delivered

    def _state_of(self, at: Position) -> dict[str, Any]:
        return state_of(self.run, at, self._layout, self.progress.num_left)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` global batches, as ``num_steps_delivered`` counts them.

        For loops that prefetch batches, and to leave steps out, as after a spike of the loss:
        ``load_state_dict(state_at(step + 200))`` on all ranks. Raises UsageError for a step of an epoch that
        ``set_epoch`` left.
        """
        if step < (least := self.progress.left_at):
            raise UsageError.of_value("step", step, f"at least {least}, where set_epoch left an epoch")
        return self._state_of(Position(step + self.progress.num_left))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` go on behind a state. Reads nothing.

        A loader that was made with ``amend=True`` takes a state of other weights, sources or sizes, and logs
        the step from which on its own hold. Raises Refused, UsageError or BrokenShard.
        """
        run, position, num_left, amended_at = go_on(self._given, state, self._layout, amend=self.can_amend)
        self._newest += 1
        # Compared as a state tells them, in which weights are rounded.
        if state_of(run, position, {}, 0) == state_of(self.run, position, {}, 0):
            self._end_unless_persistent()
        else:
            self._stream.end()  # its workers have the run of before
            self.run = run
            self._stream = self._stream_of(self.metrics, self.num_workers)
        self._stand_at(position, num_left=num_left, left_at=0, is_loaded=True)
        self._step = _Step(self.run.batches_in_step(position.step), [])
        if self.process_rank.rank == 0 and amended_at is not None:
            logger.warning(f"the run is amended from step {amended_at} on:\n{self.describe()}")

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` this epoch, on all ranks.

        If the loop stands inside of this epoch, ``iter()`` still gives the rest of it. Another epoch begins
        with its first step, also where this one was not over, and a loop that is still running is refused its
        next batch. Raises UsageError where that would discard a state that was just loaded.
        """
        if whole_number("epoch", epoch, least=0) != self.run.epoch_of(self.progress.delivered.step):
            self._leave_for(int(epoch))

    def _leave_for(self, epoch: int) -> None:
        if epoch > MAX_EPOCH:
            raise UsageError.of_value("epoch", epoch, f"at most {MAX_EPOCH}")
        now = self.progress
        if now.is_loaded:
            found = f"set_epoch({epoch}), which would throw away a loaded state of another epoch"
            expected = 'range(loader.state_dict()["epoch"], num_epochs), or a loader without the state'
            raise UsageError(found=found, expected=expected)
        if now.delivered == Position():
            said = f"set_epoch({epoch}) on a loader that delivered nothing: the epoch is whole"
            logger.warning(f"{said}. A run that goes on inside of it needs load_state_dict before")
        first, before = self.run.first_step(epoch), now.delivered.step
        self._stand_at(Position(first), num_left=now.num_left + first - before, left_at=before - now.num_left)
        self._newest += 1  # an older iterator would count its batches for the new epoch
        self._end_unless_persistent()

    def _stand_at(self, position: Position, **changes: Any) -> None:
        trained = None if self.progress.trained is None else position
        self.progress = replace(self.progress, delivered=position, trained=trained, **changes)

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
                # A user's own batch may be anything that has, or has not, labels.
                labels = [batch.get("labels") if hasattr(batch, "get") else None for batch, _ in batches]
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
        said = f"accelerate accumulates {num_steps} batches, but a global batch is {num_batches} of each rank"
        logger.warning(f"{said}; pass global_batch_size=batch_size x ranks x {num_steps}")


# The function that makes it.

Padding = Literal["longest", "max_length"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_LEAST = {"pad_to_multiple_of": 0, "num_workers": 0, "rank": 0, "seed": -(1 << 63)}  # others: 1
_CHOICES = {"SplitName": SplitName, "Padding": Padding, "WeightsIn": WeightsIn, "Targets": Targets}
_PATHS = {"model_id": "a model's folder or its name on the hub", "cache_dir": "a folder"}


def _with_checks(make: _Function) -> _Function:
    """Check names and types of the arguments; numpy's numbers become Python's, as states are JSON."""
    signature = inspect.signature(make)
    known = signature.parameters

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> Any:
        for name in options.keys() - known.keys():
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? It has {', '.join(known)}" if near else "see help()"
            raise TypeError(f"get_llama3_dataloader has no argument {name!r}: {ARGUMENTS.get(name, hint)}")
        bound = signature.bind(*args, **options)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(name, value, known[name].annotation)
        return make(*bound.args, **bound.kwargs)

    return cast(_Function, call)


def _checked(name: str, value: Any, annotation: str) -> Any:
    """Return an argument as the type that it is declared with. Raises UsageError for another one."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return None
    if kind == "int":
        return whole_number(name, value, least=_LEAST.get(name, 1))
    choices = (True, False) if kind == "bool" else get_args(_CHOICES.get(kind))
    if choices:
        is_right, expected = value in choices, " or ".join(map(repr, choices))
    elif name in _PATHS:
        is_right, expected = isinstance(value, (str, os.PathLike)), _PATHS[name]
    else:
        is_right, expected = name != "collate_fn" or callable(value), "a function of a list of samples"
    if not is_right:
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
    """Return batches of a data set's token ids for this rank, shuffled anew each epoch.

    Packed rows, with attention inside each document (``model`` is one of transformers'):

        loader = get_llama3_dataloader("DATA", batch_size=8, seq_len=4096, boundaries="transformers")
        for batch in loader:
            num_labels = loader.labels_per_rank(device)
            loss = model(**batch.to(device), num_items_in_batch=num_labels).loss

    Whole documents, padded; a global batch of 512 on any number of ranks, resumed behind a checkpoint:

        loader = get_llama3_dataloader("DATA", batch_size=8, global_batch_size=512, max_length=2048)
        loader.load_state_dict(checkpoint["loader"])

    Args:
        What data:
            input_shards: a folder, an index.json, a tar, a pattern (``shard-{00000..00009}.tar``, ``*``), or
                a list of these; of a mixture each source by name, ``{"web": ..., "code": ...}``. An
                incomplete folder is refused.
            model_id: the model whose tokenizer made tars that shardprep did not write. A data set brings its
                own, and another one is refused.
            cache_dir: where webdataset copies tars that are no local files.
            split: ``"validation"`` gives the documents that ``plan --validation_fraction`` chose (all of a
                data set that was planned without it), ``"train"`` the others. A validation loader gives each
                document once, in one order. Samples whose labels are all -100 fill up its last global batch.

        What a batch is:
            batch_size: samples per batch on each rank.
            global_batch_size: samples per optimizer step, on all ranks, accumulation included; or sizes by
                step, ``[(0, 256), (1000, 512)]``, which change ``loader.num_accumulated``. It fixes the
                order: keep it when the number of ranks changes. Default: batch_size x world_size.
            group_by_length: put documents of similar length side by side, in groups of this many samples;
                True: of ``batch_size``. Keep the number when you change ``batch_size``.
            padding: ``"longest"`` pads to the longest sample of a batch, ``"max_length"`` to one width.
            pad_to_multiple_of: round the width of padded batches up to a multiple of this.
            collate_fn: called with a list of ``{"input_ids": list[int]}``, in the training process. The
                default makes the same batches as transformers' DataCollatorForLanguageModeling.
            origins: add ``origins`` int64[documents, 6] to batches: row, place, source, shard, sample and
                document, which ``loader.origin`` resolves. Take them out before ``model(**batch)``.

        Order and mixing:
            seed: of the shuffle. Equal seeds give equal global batches on any number of ranks and workers.
            shuffle: False: global batch k is samples ``[k L, (k + 1) L)``, L being ``global_batch_size``.
            weights: share of each source, ``{"web": 0.7, "code": 0.3}``, or the shares by step: ``[(0,
                {...}), (80_000, {...})]``. A source has its own epochs, see ``loader.source_epochs``.
            weights_in: unit of the weights: ``"tokens"``, by the mean of each source, or ``"samples"``.
            amend: go on from a state of other weights, sources or global batch sizes, which the default
                refuses. The new ones hold from the next border on, at most 64 steps later. A source that you
                drop must stay in ``input_shards`` until then, without a weight. Sizes must be multiples of
                the run's first.

        Packing and labels:
            seq_len: pack documents into full rows of this many tokens, with EOS between documents.
            boundaries: keep attention inside each document of packed rows. ``"transformers"``: the fields
                that ``model(**batch)`` of a transformers model needs, without ``attention_mask``;
                ``check_boundaries(model, batch)`` says whether yours heeds them. For other models one or
                several of ``"position_ids"``, ``"segment_ids"``, ``"cu_seqlens"``. The first label of each
                document is -100.
            targets: ``"same"``: labels are the ids, for models that shift them, as transformers' do.
                ``"shifted"``: ``labels[:, t]`` is what follows ``input_ids[:, t]``, for loops as in Megatron,
                nanoGPT and torchtitan. Plan packed rows with a ``--seq_len`` that is one larger.
            max_length: cut documents that are not packed to this many tokens; ``loader.metrics``
                counts the rest.

        Processes and workers:
            num_workers: processes that read, per rank. At most ``global_batch_size / (world_size x
                group_by_length)`` have work.
            prefetch_factor: chunks (up to 1 MiB) that each worker reads ahead. Default: 2.
            pin_memory: put batches into pinned memory. Default: where there is CUDA.
            persistent_workers: keep workers between epochs; they read on into the next one.
            rank: of data parallelism, with ``world_size``. Default: torch.distributed's or the launcher's. Of
                a DeviceMesh: ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.
            world_size: ranks of data parallelism.

    Returns:
        A TokenLoader; see there for epochs and for the state. Batches hold int64[batch_size, seq]
        ``input_ids``, ``labels``, -100 where there is padding, and ``attention_mask`` (not with
        ``boundaries="transformers"``).

    Raises:
        NotFound, MissingShard, BrokenShard, UnknownVersion, OtherTokenizer, UsageError: all are
        ShardprepErrors that say what was found and what to do. TypeError for an unknown argument.
    """
    is_validation = split == "validation"
    who = find_process_rank(rank, world_size)
    fields = boundary_names(boundaries)
    shifts = targets == "shifted"
    if shifts and "transformers" in fields:
        found = "targets='shifted', for a model that shifts labels itself"
        expected = "other boundaries than 'transformers', or targets='same'"
        raise UsageError(found=found, expected=expected)
    if shifts and collate_fn is not None:
        raise UsageError("targets='shifted' is for the loader's own batches; leave out collate_fn or it")
    seq_len = None if seq_len is None else seq_len + shifts
    max_length = None if max_length is None else max_length + shifts
    tick_samples, group, sizes = choose_sizes(
        global_batch_size, group_by_length, batch_size=batch_size, world_size=who.world_size
    )
    if is_validation and len(sizes) > 1:
        raise UsageError(found=f"global_batch_size={global_batch_size}", expected="one size for validation")
    check_mixing(input_shards, weights, is_validation=is_validation)
    if padding == "max_length" and max_length is None:
        raise UsageError(found=f"padding={padding!r}", expected="max_length beside it")
    shards_of = find_sources(
        input_shards if isinstance(input_shards, Mapping) else {"all": input_shards},
        cache_dir=cache_dir,
        count_tokens=seq_len is not None or group > 1 or (weights is not None and weights_in == "tokens"),
        split=split,
    )
    shards = ShardSet([part for of_source in shards_of.values() for part in of_source.sources], split)
    tokenizer = choose_tokenizer(shards, model_id)
    samples = {
        name: make_samples(
            of_source,
            seq_len=seq_len,
            max_length=max_length,
            group=group,
            eos_token_id=tokenizer.eos_token_id,
            vocab_size=tokenizer.vocab_size if of_source.has_external else None,
            starts=bool(fields) or origins,
            keeps_tail=is_validation,
            origins=origins,
        )
        for name, of_source in shards_of.items()
    }
    run = make_run(
        samples,
        sizes,
        weights,
        weights_in,
        tick_samples=tick_samples,
        batches_per_tick=tick_samples // (batch_size * who.world_size),
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
        found = f"prefetch_factor={prefetch_factor}, what workers read ahead, and none of them"
        raise UsageError(found=found, expected="num_workers of 1 at least", remedy="num_workers")
    if num_workers > (num_slots := run.order.num_slots // who.world_size):
        said = f"num_workers={num_workers}, but {num_slots} can share a rank's part of a global batch"
        logger.warning(f"{said}: no more are started. A larger global_batch_size gives work to more")
        num_workers = num_slots
    padded = padded_batches(
        collate_fn,
        tokenizer,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_to_length=max_length if padding == "max_length" else None,
        num_beyond=int(shifts),
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
        step_batches=step_batches,
        loader_tokenizer=tokenizer,
        process_rank=who,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        amend=amend,
        num_workers=num_workers,
        prefetch_factor=(prefetch_factor or 2) if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
    )
    if who.rank == 0:
        logger.info(loader.describe())
        has_end = all(data.spec.append_eos or data.spec.has_rows for data in shards.datasets)
        if not (has_end or seq_len is not None or is_validation or tokenizer.eos_token_id is None):
            said = "documents end without EOS, so a model fine-tuned on them never learns to stop"
            logger.warning(f"{said}; pass seq_len=, or plan the data with --append_eos")
    return loader
