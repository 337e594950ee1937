"""A TokenLoader inside of transformers' Trainer.

    class LlamaTrainer(LoaderMixin, Trainer): ...
    trainer = LlamaTrainer(model=model, args=args, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)

The loader's state stands in trainer_state.json of each checkpoint, so it is of the same step as the rest, and
``train(resume_from_checkpoint=...)`` goes on behind it, on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from loader.batches import Batch
from loader.boundaries import why_unchecked
from loader.dataloader import TokenLoader
from loader.training import LossMean, SourceLosses
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # which stands behind the mixin among the bases
else:
    _Trainer = object


class LoaderMixin(_Trainer):
    """Makes Trainer, or a subclass behind it among the bases, train on ``train_loader``.

    Make the TrainingArguments before the loader: they start the process group. ``max_steps`` are trained
    through as many epochs as it takes; ``num_train_epochs`` are epochs of the loader, also where it begins
    inside of one. ``eval_loader``: a loader with ``split="validation"``, or several by name; ``eval_loss``,
    or ``eval_NAME_loss``, is the mean over all labels, equal on every number of ranks. Of loaders with
    ``origins=True`` it logs the mean of each source: ``loss/NAME`` and ``eval_loss/NAME``. With
    ``boundaries`` the first step runs ``loader.check_boundaries`` on what the model gets, unless
    ``check_boundaries=False``. Raises UsageError where Trainer's numbers would not make a step of one global
    batch, and for ``targets="shifted"``, since Trainer's loss shifts labels itself.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(LoaderMixin)]
        if any(base.__module__ == "transformers.trainer" for base in before):
            found = f"class {cls.__name__} has LoaderMixin behind Trainer, which would hide its methods"
            raise UsageError(found=found, expected=f"class {cls.__name__}(LoaderMixin, Trainer)")

    def __init__(
        self,
        *args: Any,
        train_loader: TokenLoader,
        eval_loader: TokenLoader | Mapping[str, TokenLoader] | None = None,
        check_boundaries: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_loader, self.eval_loader = train_loader, eval_loader
        self._eval_loaders: Mapping[Any, Any] = {} if eval_loader is None else {None: eval_loader}
        if isinstance(eval_loader, Mapping):
            self._eval_loaders = eval_loader
        loaders: list[Any] = [train_loader, *self._eval_loaders.values()]
        for loader in loaders:
            if not isinstance(loader, TokenLoader):
                found = f"train_loader or eval_loader is a {type(loader).__name__}"
                raise UsageError(found=found, expected="a TokenLoader, as get_llama3_dataloader makes it")
        # Trainer asks for data sets, which are never iterated.
        self._placeholder: Any = train_loader.dataset
        if any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            from datasets import Dataset

            if (config := kwargs.get("args")) is None:
                raise UsageError("TRL's trainers need args=SFTConfig(...), by name")
            # They look at a data set, and would tokenize it.
            config.dataset_kwargs = {**(config.dataset_kwargs or {}), "skip_prepare_dataset": True}
            self._placeholder = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
            kwargs["train_dataset"] = self._placeholder
        if self._eval_loaders:
            of_names = dict.fromkeys(self._eval_loaders, self._placeholder)
            kwargs["eval_dataset"] = of_names.get(None, of_names)
        super().__init__(*args, **kwargs)
        if type(self).compute_loss is LoaderMixin.compute_loss:
            for loader in loaders:
                self._refuse_shifted(loader)
        self._steps = EpochsOfLoader(train_loader)
        self._losses = _Losses.of(train_loader)
        fields = train_loader.step_batches.boundaries
        self._is_unchecked = bool(check_boundaries and fields and train_loader.run.row_tokens)
        if len(train_loader.run.stages) == 1 and not train_loader.can_amend:  # else a state may tell
            check_trainer_arguments(self.args, train_loader)
        self.args.ignore_data_skip = True  # the loader finds its place itself
        self.callback_handler.callbacks.insert(0, LoaderStateCallback())  # before others, which may save

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train. The loader goes to its place before Trainer counts steps by it."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        # Where there is no checkpoint Trainer raises the error.
        global_step = load_checkpoint(self.train_loader, Path(folder)) if folder else 0
        given, self.args.max_steps = self.args.max_steps, self._steps.begin(self.args, global_step)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.max_steps = given

    def get_train_dataloader(self) -> Any:
        """Return what Trainer iterates, instead of a ``train_dataset``."""
        return self._steps

    def _refuse_shifted(self, loader: TokenLoader) -> None:
        if loader.step_batches.shifts_targets and self.compute_loss_func is None:
            found = 'a loader with targets="shifted", and Trainer\'s loss, which shifts labels itself'
            expected = 'targets="same", or a compute_loss_func that does not shift'
            raise UsageError(found=found, expected=expected)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return what ``evaluate()`` iterates. Whatever else is evaluated is Trainer's."""
        name = None if eval_dataset is self._placeholder else eval_dataset
        if (name is None or isinstance(name, str)) and name in self._eval_loaders:
            return self._eval_loaders[name]
        return super().get_eval_dataloader(eval_dataset)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Train a step. The first ones look at what the model gets, until its boundaries are checked."""
        if self._is_unchecked:
            # Before the hooks of FSDP, and with what compute_loss of a subclass makes of the batch.
            def look(module: Any, _: Any, fields: dict[str, Any]) -> None:
                handle.remove()
                # fused_lm_head is TRL's: the model would give no logits.
                fields = {name: each for name, each in fields.items() if name != "fused_lm_head"}
                self._is_unchecked = bool(why_unchecked(module, fields, documents=inputs))

            handle = model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with the mean over all labels in place of Trainer's mean over batches."""
        if not isinstance(dataloader, TokenLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        mean = LossMean.of_loader(dataloader)
        training, self._losses = self._losses, _Losses.of(dataloader, mean)
        losses = self._losses
        try:
            output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._losses = training
        prefix = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if not math.isnan(loss := mean.mean()):  # NaN where a compute_loss of the user's counts no labels
            output.metrics[prefix] = loss
        output.metrics.update(losses.source_means(prefix))
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean of each source since the last time beside ``loss``."""
        if "loss" in logs:
            logs |= self._losses.source_means("loss")
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss: while ``eval_loader`` is evaluated, a mean over labels, which is counted."""
        loader, mean, of_sources = self._losses
        self._refuse_shifted(loader)
        origins, labels = inputs.pop("origins", None), inputs.get("labels")
        with_outputs = return_outputs or origins is not None
        num_items = num_items_in_batch if mean is None else None
        options: Any = {"return_outputs": with_outputs, "num_items_in_batch": num_items}
        found: Any = super().compute_loss(model, inputs, **options)
        loss, outputs = found if with_outputs else (found, {})
        if mean is not None:
            mean.add(loss, labels)
        if origins is not None and of_sources is not None:
            of_sources.add(outputs["logits"], labels, origins)
        return (loss, outputs) if return_outputs else loss


class _Losses(NamedTuple):
    """The loader that is trained or evaluated now, and the sums of its losses."""

    loader: TokenLoader
    mean: LossMean | None  # over all labels, where it is evaluated
    of_sources: SourceLosses | None  # where batches tell their sources

    @staticmethod
    def of(loader: TokenLoader, mean: LossMean | None = None) -> _Losses:
        has_origins = loader.step_batches.origins
        return _Losses(loader, mean, SourceLosses.of_loader(loader) if has_origins else None)

    def source_means(self, prefix: str) -> dict[str, float]:
        """Return ``loss/web`` and the like, of sources that have labels, and count from 0 again."""
        means = self.of_sources.means(reset=True) if self.of_sources else {}
        return {f"{prefix}/{name}": mean for name, mean in means.items() if not math.isnan(mean)}


class EpochsOfLoader:
    """What Trainer iterates for a train_dataloader: an ``iter()`` is the rest of an epoch of the loader.

    It has no length. By a length Trainer would count epochs and steps itself, all alike and from the
    beginning, where an amendment or a loader that stands inside of an epoch has others. Without one it asks
    for epochs until ``max_steps`` are trained.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.global_step = 0  # Trainer's, where it begins
        self._is_finished = False

    def begin(self, args: Any, global_step: int) -> int:
        """Return ``max_steps`` of a training that begins now. Raises UsageError where it has no step."""
        run, first = self.loader.run, self.loader.progress.delivered.step
        max_steps: int = args.max_steps
        if max_steps <= 0:
            part, num_epochs = math.modf(args.num_train_epochs)
            end = run.first_step(int(num_epochs)) + math.ceil(part * run.steps_in(int(num_epochs)))
            if end <= first and not global_step:
                found = f"num_train_epochs={args.num_train_epochs:g} of a loader at {self.loader.epoch:g}"
                raise UsageError(found=found, expected="more epochs, or max_steps")
            max_steps = global_step + max(end - first, 0)
        self.global_step, self._is_finished = global_step, max_steps <= global_step
        check_trainer_arguments(args, self.loader, max_steps - global_step)
        return max_steps

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while not self._is_finished and (batch := next(batches, None)) is not None:
            if self.ends_epoch:
                next(batches, None)  # Trainer leaves the epoch here, and the loader should know its end
            yield batch

    @property
    def ends_epoch(self) -> bool:
        """Return whether the newest batch was the last of its epoch."""
        return self.loader.ends_step and self.loader.epoch.is_integer()


def check_trainer_arguments(args: Any, loader: TokenLoader, num_steps: int = 1) -> None:
    """Raise UsageError unless the next global batches are those of the TrainingArguments."""
    run, (step, num_micro) = loader.run, loader.progress.delivered
    if num_micro:
        again = f"train_loader.load_state_dict(train_loader.state_at({step}))"
        expected = f"a state that was saved after the optimizer's step, or {again}"
        raise UsageError(found=f"a loader inside of a step, behind {num_micro} batches", expected=expected)
    global_batch_size = run.held_from(step)[0].global_batch_size
    for held in run.held_from(step):
        if held.step < step + num_steps and held.global_batch_size != global_batch_size:
            found = f"a global batch that changes at step {held.step}, where Trainer's stay as they are"
            expected = "max_steps to that step, or a loop of your own, see docs/training_own_loop.md"
            raise UsageError(found=found, expected=expected)
    num_batches = args.gradient_accumulation_steps * loader.process_rank.world_size
    given = (args.train_batch_size, args.train_batch_size * num_batches)
    wanted = (loader.step_batches.batch_size, global_batch_size)
    if given != wanted:
        found, expected = (f"batches of {size} samples, steps of {step}" for size, step in (given, wanted))
        raise UsageError(found=f"TrainingArguments of {found}", expected=f"the loader's {expected}")


def load_checkpoint(loader: TokenLoader, folder: Path) -> int:
    """Give a loader the state in a checkpoint of Trainer, and return its global step. Raises UsageError."""
    path = folder / "trainer_state.json"
    if not path.is_file():
        return 0  # as Trainer takes it: weights alone
    state = TrainerState.load_from_json(str(path))
    saved = (state.stateful_callbacks or {}).get(LoaderStateCallback.__name__, {})
    attributes = (saved[-1] if isinstance(saved, list) else saved).get("attributes", {})
    if attributes.get("saved") is not None:
        loader.load_state_dict(attributes["saved"])
    elif state.global_step and not loader.has_loaded_state:
        found = f"a checkpoint of step {state.global_step} without a state of the loader"
        at = f"train_loader.state_at({state.global_step})"
        expected = f"train_loader.load_state_dict({at}) before train(), if its steps were global batches"
        raise UsageError(path=path, found=found, expected=expected)
    return int(attributes.get("num_trained") or state.global_step)


class LoaderStateCallback(TrainerCallback, ExportableState):
    """Puts the loader's state into trainer_state.json, of the optimizer's last step.

    Trainer and other callbacks may save inside of a step. After each step it sets ``epoch``, which Trainer
    counts from 0 again after a resume inside of an epoch, and ends Trainer's epoch with the loader's.
    """

    def __init__(self) -> None:
        self._steps: Any = None  # EpochsOfLoader, from on_train_begin on
        self._num_trained = 0
        self._followed: Any = None

    def state(self) -> dict[str, Any]:
        """Return what Trainer writes with each checkpoint, under the name of this class."""
        state = None if self._steps is None else self._steps.loader.state_dict()
        return {"args": {}, "attributes": {"saved": state, "num_trained": self._num_trained}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Stand where the training stands, and follow the optimizer."""
        self._steps, self._state = objects["train_dataloader"], state
        if state.global_step < self._steps.global_step:  # saved before Trainer had counted the last step
            state.global_step = self._steps.global_step
            objects["lr_scheduler"].step()
        self._num_trained = state.global_step
        self._steps.loader.mark_trained()
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        if optimizer is not self._followed and hasattr(optimizer, "register_step_post_hook"):
            optimizer.register_step_post_hook(lambda *_: self.on_optimizer_step())
            self._followed = optimizer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Count what was delivered as trained, also where a scaler left the step out, or no hook told it."""
        self._steps.loader.mark_trained()
        self._num_trained = self._state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Say which part of which epoch was trained."""
        state.epoch = self._steps.loader.epoch
        control.should_epoch_stop |= self._steps.ends_epoch
