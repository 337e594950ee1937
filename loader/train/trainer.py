"""A TokenLoader in transformers' Trainer.

    class LlamaTrainer(LoaderMixin, Trainer): ...
    trainer = LlamaTrainer(model=model, args=args, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)

The loader's state is saved in trainer_state.json of each checkpoint, so it belongs to the same step as the
weights. ``train(resume_from_checkpoint=...)`` continues after that step, on any number of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from loader.batch.batches import Batch
from loader.batch.fields import pop_records
from loader.token_loader import TokenLoader
from loader.train.boundary_check import why_unchecked
from loader.train.losses import LossMean, SourceLosses
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # the base class after the mixin
    from transformers import TrainerControl, TrainingArguments
else:
    _Trainer = object


logger = logging.getLogger(__name__)


class LoaderMixin(_Trainer):
    """Makes Trainer, or a subclass of it, train on a TokenLoader.

    Create the TrainingArguments before the loader: they start the process group. ``max_steps`` are trained
    over as many epochs as needed; ``num_train_epochs`` are epochs of the loader, also if it starts inside
    one. With ``origins=True`` the mean loss of each source is logged: ``loss/NAME`` and ``eval_loss/NAME``.

    Args:
        train_loader: a loader whose global batches are the steps of the TrainingArguments.
        eval_loader: a loader with ``split="validation"``, or several by name. ``eval_loss``, or
            ``eval_NAME_loss``, is the mean over all labels, equal on every number of ranks.
        check_boundaries: if the loader has ``boundaries``, run ``loader.check_boundaries`` in the first step.

    Raises UsageError if sizes differ, or for ``targets="shifted"``, since Trainer's loss shifts labels.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(LoaderMixin)]
        if any(base.__module__ == "transformers.trainer" for base in before):
            found = f"class {cls.__name__} has LoaderMixin after Trainer, which overrides its methods"
            raise UsageError(found=found, expected=f"class {cls.__name__}(LoaderMixin, Trainer)")

    def __init__(
        self,
        *args: Any,
        train_loader: TokenLoader,
        eval_loader: TokenLoader | Mapping[str, TokenLoader] | None = None,
        check_boundaries: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_loader = train_loader
        self.eval_loader = eval_loader
        self._eval_loaders: dict[str | None, TokenLoader] = {}
        if isinstance(eval_loader, Mapping):
            self._eval_loaders.update(eval_loader)
        elif eval_loader is not None:
            self._eval_loaders[None] = eval_loader
        loaders = [train_loader, *self._eval_loaders.values()]
        for loader in loaders:
            if not isinstance(loader, TokenLoader):
                found = f"train_loader or eval_loader is a {type(loader).__name__}"
                raise UsageError(found=found, expected="a TokenLoader, which get_llama3_dataloader returns")
        # Trainer requires data sets. They are never iterated.
        self._placeholder: Any = train_loader.dataset
        if any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            from datasets import Dataset

            config = kwargs.get("args")
            if config is None:
                raise UsageError("TRL's trainers need args=SFTConfig(...), passed by name")
            # TRL's trainers inspect the data set and would tokenize it.
            config.dataset_kwargs = {**(config.dataset_kwargs or {}), "skip_prepare_dataset": True}
            self._placeholder = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
            kwargs["train_dataset"] = self._placeholder
        if self._eval_loaders:
            placeholders = dict.fromkeys(self._eval_loaders, self._placeholder)
            kwargs["eval_dataset"] = placeholders.get(None, placeholders)
        super().__init__(*args, **kwargs)
        if type(self).compute_loss is LoaderMixin.compute_loss:
            for loader in loaders:
                self._refuse_shifted(loader)
        _warn_of_ignored_arguments(
            self.args, train_loader, has_collator=kwargs.get("data_collator") is not None
        )
        self._epochs = LoaderEpochs(train_loader)
        self._losses = _Losses.for_loader(train_loader)
        fields = train_loader.step_batches.boundaries
        self._is_unchecked = bool(check_boundaries and fields and train_loader.run.row_tokens)
        _refuse_auto_find_batch_size(self.args)
        if len(train_loader.run.stages) == 1 and not train_loader.can_amend:  # else sizes depend on the state
            check_trainer_arguments(self.args, train_loader)
        self.args.ignore_data_skip = True  # the loader resumes at its position itself
        self.callback_handler.callbacks.insert(0, LoaderStateCallback())  # before others, which may save

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. The loader's state is loaded first, because the number of steps depends on it."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        # If there is no checkpoint, Trainer raises the error.
        global_step = load_checkpoint(self.train_loader, Path(folder)) if folder else 0
        max_steps = self.args.max_steps
        self.args.max_steps = self._epochs.begin(self.args, global_step)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.max_steps = max_steps

    def get_train_dataloader(self) -> LoaderEpochs:  # type: ignore[override]  # all that Trainer asks of one
        """Return the epochs of ``train_loader``, which Trainer iterates instead of a ``train_dataset``."""
        return self._epochs

    def _refuse_shifted(self, loader: TokenLoader) -> None:
        if loader.step_batches.shifts_targets and self.compute_loss_func is None:
            found = 'a loader with targets="shifted" for Trainer\'s loss, which shifts labels itself'
            expected = 'targets="same", or a compute_loss_func that does not shift'
            raise UsageError(found=found, expected=expected)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the ``eval_loader`` of this name, else Trainer's DataLoader for the data set."""
        if isinstance(eval_dataset, TokenLoader):
            return self._checked_eval_loader(eval_dataset)
        name = None if eval_dataset is self._placeholder else eval_dataset
        if (name is None or isinstance(name, str)) and name in self._eval_loaders:
            return self._eval_loaders[name]
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a TokenLoader as it is, else Trainer's DataLoader for the data set."""
        if isinstance(test_dataset, TokenLoader):
            return self._checked_eval_loader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _checked_eval_loader(self, loader: TokenLoader) -> TokenLoader:
        """Return a loader to evaluate. Raises UsageError for one whose epochs differ."""
        if not loader.run.is_validation:
            found = "evaluate() or predict() with a loader of training batches, which would go on in its run"
            expected = 'a loader with split="validation", here or as eval_loader= of the trainer'
            raise UsageError(found=found, expected=expected)
        if type(self).compute_loss is LoaderMixin.compute_loss:
            self._refuse_shifted(loader)
        return loader

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Train a step. The first steps check the model's boundaries, until a batch allows the check."""
        if self._is_unchecked:
            # A hook sees the batch as compute_loss of a subclass changed it. prepend: before FSDP's hooks.
            def check(module: torch.nn.Module, _: object, fields: dict[str, Any]) -> None:
                handle.remove()
                # With TRL's fused_lm_head the model would return no logits.
                fields = {name: each for name, each in fields.items() if name != "fused_lm_head"}
                self._is_unchecked = bool(why_unchecked(module, fields, documents=inputs))

            handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. The loss is the mean over all labels instead of Trainer's mean over batches."""
        if not isinstance(dataloader, TokenLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        mean = LossMean.of_loader(dataloader)
        losses = _Losses.for_loader(dataloader, mean)
        training_losses = self._losses
        self._losses = losses  # for compute_loss
        try:
            output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._losses = training_losses
        prefix = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        loss = mean.mean()
        if not math.isnan(loss):  # NaN if the user's own compute_loss counts no labels
            output.metrics[prefix] = loss
        output.metrics.update(losses.source_means(prefix))
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, adding to ``loss`` the mean of each source since the last log."""
        if "loss" in logs:
            logs |= self._losses.source_means("loss")
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss, and add it to the sums by source and, in evaluation, to the mean over labels."""
        loader, mean, by_source = self._losses
        self._refuse_shifted(loader)
        origins = pop_records(inputs).get("origins")
        labels: Any = inputs.get("labels")
        with_outputs = return_outputs or origins is not None
        num_items = num_items_in_batch if mean is None else None
        options: Any = {"return_outputs": with_outputs, "num_items_in_batch": num_items}
        computed: Any = super().compute_loss(model, inputs, **options)
        loss, outputs = computed if with_outputs else (computed, {})
        if mean is not None:
            mean.add(loss, labels)
        if origins is not None and by_source is not None:
            by_source.add(outputs["logits"], labels, origins)
        return (loss, outputs) if return_outputs else loss


class _Losses(NamedTuple):
    """The loader in use, for training or evaluation, and the sums of its losses."""

    loader: TokenLoader
    mean: LossMean | None  # over all labels; None in training
    by_source: SourceLosses | None  # None without origins

    @staticmethod
    def for_loader(loader: TokenLoader, mean: LossMean | None = None) -> _Losses:
        by_source = SourceLosses.of_loader(loader) if loader.step_batches.origins else None
        return _Losses(loader, mean, by_source)

    def source_means(self, prefix: str) -> dict[str, float]:
        """Return the means by ``PREFIX/SOURCE`` for sources that have labels, and reset the sums."""
        means = self.by_source.means(reset=True) if self.by_source else {}
        return {f"{prefix}/{name}": mean for name, mean in means.items() if not math.isnan(mean)}


class LoaderEpochs:
    """The train_dataloader for Trainer. Each ``iter()`` yields an epoch of the loader, or its rest.

    It has no ``__len__``. With a length Trainer would compute epochs of equal size from the beginning, which
    is wrong after an amendment or if the loader starts inside an epoch. Without one it iterates epochs until
    ``max_steps``.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.global_step = 0  # Trainer's at the start
        self._is_finished = False

    def begin(self, args: TrainingArguments, global_step: int) -> int:
        """Start at ``global_step``, and return Trainer's ``max_steps``. Raises UsageError if none is left."""
        self.loader.return_to_trained()
        run = self.loader.run
        first = self.loader.progress.delivered.step
        max_steps: int = args.max_steps
        if max_steps <= 0:
            part, num_epochs = math.modf(args.num_train_epochs)
            end = run.first_step(int(num_epochs)) + math.ceil(part * run.steps_in(int(num_epochs)))
            if end <= first and not global_step:
                found = f"num_train_epochs={args.num_train_epochs:g} for a loader at {self.loader.epoch:g}"
                raise UsageError(found=found, expected="more epochs, or max_steps")
            max_steps = global_step + max(end - first, 0)
        self.global_step = global_step
        self._is_finished = max_steps <= global_step
        check_trainer_arguments(args, self.loader, max_steps - global_step)
        return max_steps

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while not self._is_finished and (batch := next(batches, None)) is not None:
            if self.ends_epoch:
                next(batches, None)  # ends the loader's iterator: Trainer stops after this batch
            yield batch

    @property
    def ends_epoch(self) -> bool:
        """Return whether the newest batch is the last of its epoch."""
        return self.loader.ends_step and self.loader.epoch.is_integer()


def check_trainer_arguments(args: TrainingArguments, loader: TokenLoader, num_steps: int = 1) -> None:
    """Raise UsageError unless the TrainingArguments make the loader's next global batches."""
    run = loader.run
    step, num_micro = loader.progress.delivered
    if num_micro:
        again = f"train_loader.load_state_dict(train_loader.state_at({step}))"
        expected = f"a state that was saved after the optimizer's step, or {again}"
        raise UsageError(found=f"a loader inside a step, after {num_micro} of its batches", expected=expected)
    _refuse_auto_find_batch_size(args)
    global_batch_size = run.stages_from(step)[0].global_batch_size
    for stage in run.stages_from(step):
        if stage.step < step + num_steps and stage.global_batch_size != global_batch_size:
            found = f"a global batch size that changes at step {stage.step}, which Trainer cannot do"
            expected = "max_steps to that step, or a loop of your own, see docs/training_own_loop.md"
            raise UsageError(found=found, expected=expected)
    num_batches = args.gradient_accumulation_steps * loader.process_rank.world_size
    given = f"batches of {args.train_batch_size} samples, steps of {args.train_batch_size * num_batches}"
    wanted = f"batches of {loader.step_batches.batch_size} samples, steps of {global_batch_size}"
    if given != wanted:
        raise UsageError(found=f"TrainingArguments with {given}", expected=f"the loader's {wanted}")


def _warn_of_ignored_arguments(args: TrainingArguments, loader: TokenLoader, *, has_collator: bool) -> None:
    """Log a warning for arguments of Trainer's own DataLoader, which TokenLoaders do not use."""
    ignored = ["data_collator, pass collate_fn="] if has_collator else []
    if args.dataloader_num_workers and args.dataloader_num_workers != loader.num_workers:
        ignored.append(f"dataloader_num_workers={args.dataloader_num_workers}, pass num_workers=")
    if args.dataloader_prefetch_factor is not None:
        ignored.append(f"dataloader_prefetch_factor={args.dataloader_prefetch_factor}, pass prefetch_factor=")
    if ignored and loader.process_rank.rank == 0:
        text = "; ".join(ignored)
        logger.warning(
            f"the loader ignores these arguments of Trainer: {text} to get_llama3_dataloader instead"
        )


def _refuse_auto_find_batch_size(args: TrainingArguments) -> None:
    """Raise UsageError: a loader keeps its batch size, and a retry would lose the batch that failed."""
    if args.auto_find_batch_size:
        found = "TrainingArguments(auto_find_batch_size=True), which the loader's batch size cannot follow"
        expected = "auto_find_batch_size=False, with a smaller batch_size and more accumulated batches"
        raise UsageError(found=found, expected=expected)


def load_checkpoint(loader: TokenLoader, folder: Path) -> int:
    """Load the loader's state from a Trainer checkpoint, and return the global step. Raises UsageError."""
    path = folder / "trainer_state.json"
    if not path.is_file():
        return 0  # Trainer, too, then loads the weights only
    state = TrainerState.load_from_json(str(path))
    saved = (state.stateful_callbacks or {}).get(LoaderStateCallback.__name__, {})
    # Trainer saves a list if it had several of these callbacks.
    attributes = (saved[-1] if isinstance(saved, list) else saved).get("attributes", {})
    if attributes.get("saved") is not None:
        loader.load_state_dict(attributes["saved"])
    elif state.global_step and not loader.has_loaded_state:
        found = f"a checkpoint of step {state.global_step} without the loader's state"
        at = f"train_loader.state_at({state.global_step})"
        expected = f"train_loader.load_state_dict({at}) before train(), if its steps were global batches"
        raise UsageError(path=path, found=found, expected=expected)
    return int(attributes.get("num_trained") or state.global_step)


class LoaderStateCallback(TrainerCallback, ExportableState):
    """Saves the loader's state after the optimizer's last step in trainer_state.json.

    Trainer and other callbacks may save inside a step. After each step this callback sets ``epoch``, which
    Trainer would count from 0 after a resume inside an epoch, and ends Trainer's epoch with the loader's.
    """

    def __init__(self) -> None:
        self._epochs: Any = None  # LoaderEpochs, from on_train_begin on
        self._num_trained = 0
        self._followed: object = None

    def state(self) -> dict[str, Any]:
        """Return the values that Trainer saves in each checkpoint, under the name of this class."""
        state = None if self._epochs is None else self._epochs.loader.state_dict()
        return {"args": {}, "attributes": {"saved": state, "num_trained": self._num_trained}}

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **objects: Any,
    ) -> None:
        """Take the global step of the checkpoint, and follow the optimizer."""
        self._epochs = objects["train_dataloader"]
        self._state = state
        if state.global_step < self._epochs.global_step:  # saved before Trainer had counted the last step
            state.global_step = self._epochs.global_step
            objects["lr_scheduler"].step()
        self._num_trained = state.global_step
        self._epochs.loader.begin_tracking()
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        if optimizer is not self._followed and hasattr(optimizer, "register_step_post_hook"):
            optimizer.register_step_post_hook(lambda *_: self.on_optimizer_step())
            self._followed = optimizer

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        """Mark delivered batches as trained. Trainer also calls this after a step that a scaler skipped."""
        self._epochs.loader.mark_trained()
        self._num_trained = self._state.global_step + 1

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Set Trainer's ``epoch`` to the loader's, and end Trainer's epoch with it."""
        state.epoch = self._epochs.loader.epoch
        control.should_epoch_stop |= self._epochs.ends_epoch
