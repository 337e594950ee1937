"""A TokenLoader in Lightning's Trainer.

trainer = lightning.Trainer(max_steps=1000, use_distributed_sampler=False, callbacks=[LoaderCallback()])
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from loader.token_loader import TokenLoader
from shardprep.errors import UsageError

# The library can be installed under two names.
_library: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


class LoaderCallback(_library.Callback):
    """Makes each checkpoint belong to the optimizer's last step, even if it is saved inside the next one.

    Lightning saves inside a step when Slurm requeues the job, when an exception ends the training, and by
    ``train_time_interval`` of ModelCheckpoint. It saves no gradients, so a resumed run repeats that step.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Follow the optimizers."""
        loader = _loader_of(trainer)
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                loader.follow(optimizer)
        loader.begin_tracking()
        self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        """Mark the step of an optimizer without hooks, such as DeepSpeed's, as trained."""
        if trainer.global_step != self._global_step:
            _loader_of(trainer).mark_trained()
            self._global_step = trainer.global_step

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Set Lightning's counts of batches to the step of the loader's state."""
        if not trainer.training:
            return
        loader = _loader_of(trainer)
        loops = checkpoint["loops"]["fit_loop"]
        batches = loops["epoch_loop.batch_progress"]
        current = batches["current"]
        total = batches["total"]
        trained = loader.progress.to_save
        if trained == loader.progress.delivered:
            # The optimizer's step is done, but Lightning may not have counted it: count it as completed.
            step = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
            for counts in (step["total"], step["current"]):
                counts["completed"] = counts["ready"]
            for counts in (current, total):
                counts["processed"] = counts["ready"]
            return
        # The next batch is the first of a step. Lightning computes from its number where the step ends.
        difference = loader.run.batches_before(trained) - current["completed"]
        if difference:
            for counts in (current, total):
                counts.update(dict.fromkeys(counts, counts["completed"] + difference))
            batches["is_last_batch"] = False


def _loader_of(trainer: Any) -> TokenLoader:
    loader = trainer.train_dataloader
    if not isinstance(loader, TokenLoader):
        found = f"a train_dataloader of {type(loader).__name__}"
        raise UsageError(found=found, expected="a TokenLoader; leave LoaderCallback out of callbacks")
    return loader
