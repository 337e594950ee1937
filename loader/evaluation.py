"""The mean loss of a validation set, counted by labels.

A mean of the losses of batches would depend on how samples are batched.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from loader.batches import Targets
from loader.chunks import IGNORED
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError


class LossMean:
    """Adds up the losses of this rank's batches by their labels; ``mean()`` is that of all ranks.

    ``targets``: as for the loader. With ``"same"`` the model shifts labels, so the first of a row counts not.
    """

    def __init__(self, targets: Targets = "same") -> None:
        self._first = int(targets == "same")
        self._loss_sum, self._num_labels = 0.0, 0
        self._device = torch.device("cpu")

    @staticmethod
    def of_loader(loader: TokenLoader) -> LossMean:
        """Return one for the batches of a loader."""
        return LossMean("shifted" if loader.step_batches.shifts_targets else "same")

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: ``loss`` is the mean over those of its labels int64[batch, seq] that are not -100. A
        batch without such labels, whose loss is NaN in transformers, counts nothing."""
        num_labels = int((labels[:, self._first :] != IGNORED).sum())
        self._device = loss.device
        if num_labels:
            self._loss_sum += float(loss.detach().mean()) * num_labels
            self._num_labels += num_labels

    def mean(self) -> float:
        """Return the mean over all labels of all ranks, which must all call it; NaN where there are none."""
        loss_sum, num_labels = self._loss_sum, self._num_labels
        if dist.is_available() and dist.is_initialized():
            sums = torch.tensor([loss_sum, num_labels], dtype=torch.float64, device=self._device)
            dist.all_reduce(sums)
            loss_sum, num_labels = sums.tolist()
        return loss_sum / num_labels if num_labels else math.nan


def evaluation_loss(model: Any, loader: TokenLoader) -> float:
    """Return the mean loss over all labels of a validation loader; all ranks must call it.

    ``model(**batch).loss`` must be the mean over the labels of a batch. Takes one epoch of ``loader``.
    Raises UsageError for ``targets="shifted"`` and a model of transformers, which shifts labels itself.
    """
    inner = getattr(model, "module", model)  # of DDP
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of PEFT
    if loader.step_batches.shifts_targets and type(inner).__module__.startswith("transformers."):
        raise UsageError(
            f'the loader has targets="shifted", and {type(inner).__name__} shifts labels by one place '
            'itself, so its loss would be of the token after the next one; pass targets="same"'
        )
    losses = LossMean.of_loader(loader)
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                batch.pop("origins", None)
                losses.add(model(**batch.to(device)).loss, batch["labels"])
    finally:
        model.train(was_training)
    return losses.mean()
