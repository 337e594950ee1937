"""Mean losses, counted by labels: of a validation set, and of each source.

A mean of the losses of batches would depend on how samples are batched.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from loader.batches import Targets
from loader.chunks import IGNORED
from loader.origins import source_ids
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError


class _LossSums:
    """Sums of losses, and counts of labels, of this rank."""

    def __init__(self, num_means: int, targets: Targets) -> None:
        self._first = int(targets == "same")  # the model shifts labels, so the first of a row does not count
        self._sums = torch.zeros(2, num_means, dtype=torch.float64)

    def _all_means(self) -> list[float]:
        """Return the means over the labels of all ranks, NaN where there are none."""
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return [loss / count if count else math.nan for loss, count in sums.T.tolist()]


class LossMean(_LossSums):
    """Adds up this rank's losses by their labels. ``mean()`` is of all ranks.

    ``targets``: as for the loader.
    """

    def __init__(self, targets: Targets = "same") -> None:
        super().__init__(1, targets)

    @staticmethod
    def of_loader(loader: TokenLoader) -> LossMean:
        """Return one for the batches of a loader."""
        return LossMean(_targets_of(loader))

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: ``loss`` is the mean over the labels int64[batch, seq] that are not -100. A batch
        without such labels, whose loss is NaN in transformers, counts nothing."""
        num_labels = int((labels[:, self._first :] != IGNORED).sum())
        if num_labels:
            sums = [loss.detach().mean().double() * num_labels, loss.new_tensor(num_labels).double()]
            self._sums = self._sums.to(loss.device) + torch.stack(sums)[:, None]

    def mean(self) -> float:
        """Return the mean over all labels of all ranks, which must all call it. It is NaN without labels."""
        return self._all_means()[0]


class SourceLosses(_LossSums):
    """Adds up this rank's losses by source. ``means()`` are of all ranks.

        losses = SourceLosses.of_loader(loader)
        losses.add(model(**batch).logits, labels, origins)

    ``targets``: as for the loader. A label counts for the document that holds the predicting token.
    """

    def __init__(self, names: tuple[str, ...], targets: Targets = "same") -> None:
        super().__init__(len(names), targets)
        self.names = names

    @staticmethod
    def of_loader(loader: TokenLoader) -> SourceLosses:
        """Return one for the batches of a loader."""
        return SourceLosses(loader.source_names, _targets_of(loader))

    def add(self, logits: torch.Tensor, labels: torch.Tensor, origins: torch.Tensor) -> None:
        """Count a batch: logits[batch, seq, vocabulary], int64[batch, seq] and int64[documents, 6]."""
        logits, labels = logits[:, : logits.shape[1] - self._first], labels[:, self._first :]
        with torch.no_grad():  # a row at a time: float32 of all logits may not fit beside the step's own
            losses = [
                cross_entropy(of_row.float(), wanted.to(of_row.device), reduction="none")
                for of_row, wanted in zip(logits, labels, strict=True)
            ]
        self.add_losses(torch.stack(losses), labels, source_ids(origins, labels.shape))

    def add_losses(self, losses: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor) -> None:
        """Count losses by labels and ``source_ids``, [batch, seq], at the places where they are predicted."""
        counts = (labels != IGNORED).to(losses.device)
        values = torch.stack([losses.detach().double() * counts, counts.double()]).flatten(1)
        self._sums = self._sums.to(losses.device).index_add(1, sources.to(losses.device).flatten(), values)

    def means(self, *, reset: bool = False) -> dict[str, float]:
        """Return the mean loss of each source over the labels of all ranks, which must all call it: NaN where
        there are none. ``reset``: count from 0 again."""
        means = self._all_means()
        if reset:
            self._sums.zero_()
        return dict(zip(self.names, means, strict=True))


def _targets_of(loader: TokenLoader) -> Targets:
    return "shifted" if loader.step_batches.shifts_targets else "same"


def evaluation_loss(model: Any, loader: TokenLoader) -> float:
    """Return the mean loss over all labels of a validation loader, on all ranks.

    All of them must call it, and it takes one epoch of ``loader``. ``model(**batch).loss`` must be the mean
    over the labels of a batch. Raises UsageError for ``targets="shifted"`` and a model of transformers, which
    shifts labels itself.
    """
    inner = getattr(model, "module", model)  # of DDP
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of PEFT
    if loader.step_batches.shifts_targets and type(inner).__module__.startswith("transformers."):
        raise UsageError(
            found=f'targets="shifted" of the loader, and {type(inner).__name__}, which shifts labels itself',
            expected='targets="same"',
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
