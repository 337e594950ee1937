"""A TokenLoader inside of transformers' Trainer.

    class LlamaTrainer(LoaderMixin, Trainer): ...
    trainer = LlamaTrainer(model=model, args=args, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)

The loader's state stands in trainer_state.json of each checkpoint, so it is of the same step as the rest, and
``train(resume_from_checkpoint=...)`` goes on behind it, on any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from loader.boundaries import why_unchecked
from loader.evaluation import LossMean
from loader.origins import SourceLosses
from loader.state import Position
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError


class LoaderMixin:
    """Write it before Trainer, or a subclass, among the bases, and pass ``train_loader=``.

    ``eval_loader=``: a loader with ``split="validation"``. ``eval_loss`` is then the mean over all labels,
    equal on every number of ranks. Of loaders with ``origins=True`` the mean of each source is logged, too:
    ``loss/NAME``, and ``eval_loss/NAME``. Make the TrainingArguments before the loader: they start the
    process group. Raises UsageError where Trainer's numbers would not make a step of one global batch. With
    ``boundaries`` the first step runs ``loader.check_boundaries`` on what the model gets, unless
    ``check_boundaries=False``.
    """

    _eval_losses: LossMean | None = None  # while eval_loader is evaluated
    _source_losses: SourceLosses | None = None  # of what is trained or evaluated now, with origins

    def __init__(
        self,
        *args: Any,
        train_loader: TokenLoader,
        eval_loader: TokenLoader | None = None,
        check_boundaries: bool = True,
        **kwargs: Any,
    ) -> None:
        if not isinstance(train_loader, TokenLoader):
            raise UsageError(
                f"train_loader is a {type(train_loader).__name__}, expected a TokenLoader, as "
                "get_llama3_dataloader makes it"
            )
        placeholder: Any = train_loader.dataset  # Trainer asks for data sets, and these are never iterated
        if any(base.__module__.startswith("trl.") for base in type(self).__mro__):
            placeholder = _trl_data_set(kwargs.get("args"))
            kwargs["train_dataset"] = placeholder
        if eval_loader is not None:
            kwargs["eval_dataset"] = placeholder
        super().__init__(*args, **kwargs)
        self.train_loader, self.eval_loader = train_loader, eval_loader
        self._placeholder = placeholder
        step_batches = train_loader.step_batches
        self._source_losses = _losses_of(train_loader)
        self._is_unchecked = bool(check_boundaries and step_batches.boundaries and step_batches.row_tokens)
        check_trainer_arguments(self.args, train_loader)  # type: ignore[attr-defined]  # Trainer's
        # The loader finds its place itself.
        self.args.ignore_data_skip = True  # type: ignore[attr-defined]  # Trainer's
        self.add_callback(LoaderStateCallback())  # type: ignore[attr-defined]  # Trainer's

    def get_train_dataloader(self) -> TokenLoader:
        """What Trainer asks for, instead of a ``train_dataset``."""
        return self.train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The same for ``evaluate()``; what else is evaluated is Trainer's."""
        if self.eval_loader is not None and (eval_dataset is None or eval_dataset is self._placeholder):
            return self.eval_loader
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]  # Trainer's

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Trainer's step; the first ones look at what the model gets, until its boundaries are checked."""
        if self._is_unchecked:
            # Before the hooks of FSDP, and with what compute_loss of a subclass makes of the batch.
            def look(module: Any, _: Any, fields: dict[str, Any]) -> None:
                handle.remove()
                fields = {
                    name: each for name, each in fields.items() if name != "fused_lm_head"
                }  # TRL's: no logits
                self._is_unchecked = bool(why_unchecked(module, fields, documents=inputs))

            handle = model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]  # Trainer's

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with the mean over all labels in place of its mean over batches."""
        if self.eval_loader is None or dataloader is not self.eval_loader:
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]  # Trainer's
        losses = self._eval_losses = LossMean.of_loader(self.eval_loader)
        training, of_sources = self._source_losses, _losses_of(self.eval_loader)
        self._source_losses = of_sources
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]  # Trainer's
        finally:
            self._eval_losses, self._source_losses = None, training
        prefix = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if not math.isnan(mean := losses.mean()):  # NaN where a compute_loss of the user's counts no labels
            output.metrics[prefix] = mean
        output.metrics.update(_named_means(prefix, of_sources))
        return output

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Trainer's; with the mean of each source since the last time beside ``loss``."""
        if "loss" in logs:
            logs |= _named_means("loss", self._source_losses)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # Trainer's

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's; while ``eval_loader`` is evaluated, the mean over the labels of a batch, and counted."""
        losses, origins, labels = self._eval_losses, inputs.pop("origins", None), inputs.get("labels")
        if losses is not None:
            num_items_in_batch = None
        with_outputs = return_outputs or origins is not None
        found = super().compute_loss(  # type: ignore[misc]  # Trainer's
            model, inputs, return_outputs=with_outputs, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = found if with_outputs else (found, {})
        if losses is not None:
            losses.add(loss, labels)
        if origins is not None and self._source_losses is not None:
            self._source_losses.add(outputs["logits"], labels, origins)
        return (loss, outputs) if return_outputs else loss


def _losses_of(loader: TokenLoader) -> SourceLosses | None:
    """What counts the losses of a loader's sources; None where its batches do not tell them."""
    return SourceLosses.of_loader(loader) if loader.step_batches.origins else None


def _named_means(prefix: str, losses: SourceLosses | None) -> dict[str, float]:
    """``loss/web`` and the like, of those that have labels; counts from 0 again."""
    means = {} if losses is None else losses.means(reset=True)
    return {f"{prefix}/{name}": mean for name, mean in means.items() if not math.isnan(mean)}


def _trl_data_set(args: Any) -> Any:
    """A data set that TRL's trainers look at when they are made, and do not tokenize."""
    from datasets import Dataset

    if args is None:
        raise UsageError("TRL's trainers need args=SFTConfig(...), by name")
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})


def check_trainer_arguments(args: Any, loader: TokenLoader) -> None:
    """Raises UsageError unless batch x accumulation x ranks of TrainingArguments is a global batch."""
    run, at = loader.run, loader.state_dict()
    step = run.step_of(Position(epoch=at["epoch"], step=at["step"]))
    if step < run.sizes[-1][0]:
        raise UsageError(
            "batch_size_schedule, or a later amendment, changes how many batches a step accumulates, and "
            "Trainer accumulates equally many through a run; write the loop yourself, see "
            "docs/training_own_loop.md, or leave it out"
        )
    batch_size, accumulated = args.train_batch_size, args.gradient_accumulation_steps
    world_size = loader.process_rank.world_size
    global_batch_size = loader.order.global_batch_size * run.order_steps_in(step)
    if batch_size != loader.step_batches.batch_size:
        raise UsageError(
            f"per_device_train_batch_size of TrainingArguments makes batches of {batch_size} samples, those "
            f"of the loader have {loader.step_batches.batch_size}; pass the same number to both"
        )
    found = batch_size * accumulated * world_size
    if found != global_batch_size:
        raise UsageError(
            f"an optimizer's step of Trainer is {batch_size} samples x {accumulated} accumulated x "
            f"{world_size} ranks = {found}, the loader's global batch is {global_batch_size}; pass "
            f"global_batch_size={found} to get_llama3_dataloader, or, to keep the global batch, other "
            "numbers to TrainingArguments"
        )


class LoaderStateCallback(TrainerCallback, ExportableState):
    """Puts the loader's state into trainer_state.json, and takes it from there before the first step. After
    each step it sets ``epoch``, which Trainer counts from 0 again after a resume inside of an epoch."""

    def __init__(self) -> None:
        self._loader: TokenLoader | None = None

    def state(self) -> dict[str, Any]:
        """What Trainer writes with each checkpoint, under the name of this class."""
        state = None if self._loader is None else self._loader.state_dict()
        return {"args": {}, "attributes": {"saved": state}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Say which part of which epoch was trained."""
        if self._loader is not None:
            state.epoch = self._loader.epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Give the loader the state of the checkpoint that Trainer resumes from."""
        train_dataloader: TokenLoader = objects["train_dataloader"]
        self._loader = train_dataloader
        if not state.global_step:  # nothing is resumed
            return
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        saved = (saved[-1] if isinstance(saved, list) else saved).get("attributes", {}).get("saved")
        if saved is not None:
            train_dataloader.load_state_dict(saved)
            check_trainer_arguments(args, train_dataloader)  # its global batches may be others
        elif not train_dataloader.has_loaded_state:
            raise UsageError(
                f"the checkpoint of step {state.global_step} has no state of the loader, so the run would "
                "see its first samples again; call train_loader.load_state_dict(...) before train(), with "
                f"the state that was saved, or train_loader.state_at({state.global_step}) where every "
                "step of it was a global batch of this loader"
            )
