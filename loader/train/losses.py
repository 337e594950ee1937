"""Mean losses per label, over all ranks, also by source.

Losses are weighted by labels, since a mean of batch means depends on how samples are batched.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from loader.batch.batches import Targets
from loader.batch.fields import pop_records
from loader.read.chunks import IGNORED
from loader.token_loader import TokenLoader
from shardprep.errors import UsageError


class _LossSums:
    """Sums of losses and counts of labels on this rank."""

    def __init__(self, num_means: int, targets: Targets) -> None:
        self._first = int(targets == "same")  # a model that shifts labels ignores the first one of a row
        self._sums = torch.zeros(2, num_means, dtype=torch.float64)

    def _all_means(self) -> list[float]:
        """Return the means over the labels of all ranks, or NaN without labels."""
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return [loss / count if count else math.nan for loss, count in sums.T.tolist()]


def source_ids(origins: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the source number of each token of a batch: int64[batch, seq].

    ``origins`` is ``batch["origins"]``, int64[documents, 6], and ``shape`` that of the labels. Values in
    padding have no meaning. In the batch, it is moved with the tokens by the functions of this module.
    """
    width = shape[1]
    kept = origins[origins[:, 1] < width]  # without the first label, a row is one place shorter
    first = kept[:, 0] * width + kept[:, 1]
    ends = torch.cat([first[1:], first.new_tensor([shape[0] * width])])
    return kept[:, 2].repeat_interleave(ends - first).reshape(shape)


class LossMean(_LossSums):
    """Sums this rank's batch losses, weighted by their labels; ``mean()`` covers all ranks."""

    def __init__(self, targets: Targets = "same") -> None:
        super().__init__(1, targets)

    @staticmethod
    def of_loader(loader: TokenLoader) -> LossMean:
        """Return a LossMean for the batches of a loader."""
        return LossMean(_targets_of(loader))

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch. ``loss`` is the mean over the labels, int64[batch, seq], that are not -100.
        Without such labels, where transformers returns NaN, it adds nothing."""
        num_labels = int((labels[:, self._first :] != IGNORED).sum())
        if num_labels:
            sums = [loss.detach().mean().double() * num_labels, loss.new_tensor(num_labels).double()]
            self._sums = self._sums.to(loss.device) + torch.stack(sums)[:, None]

    def mean(self) -> float:
        """Return the mean over the labels of all ranks, NaN without labels. All ranks must call it."""
        return self._all_means()[0]


class SourceLosses(_LossSums):
    """Sums this rank's losses by source; ``means()`` covers all ranks.

        losses = SourceLosses.of_loader(loader)  # made with origins=True
        origins = batch.pop("origins")
        losses.add(model(**batch).logits, batch["labels"], origins)

    ``targets``: as for the loader. A label counts for the document of the token that predicts it.
    """

    def __init__(self, names: tuple[str, ...], targets: Targets = "same") -> None:
        super().__init__(len(names), targets)
        self.names = names

    @staticmethod
    def of_loader(loader: TokenLoader) -> SourceLosses:
        """Return a SourceLosses for the batches of a loader."""
        return SourceLosses(loader.source_names, _targets_of(loader))

    def add(self, logits: torch.Tensor, labels: torch.Tensor, origins: torch.Tensor) -> None:
        """Add a batch: logits[batch, seq, vocabulary], int64[batch, seq] and int64[documents, 6]."""
        logits = logits[:, : logits.shape[1] - self._first]
        labels = labels[:, self._first :]
        with torch.no_grad():  # row by row: a float32 copy of all logits may not fit into memory
            losses = [
                cross_entropy(row_logits.float(), row_labels.to(row_logits.device), reduction="none")
                for row_logits, row_labels in zip(logits, labels, strict=True)
            ]
        self.add_losses(torch.stack(losses), labels, source_ids(origins, labels.shape))

    def add_losses(self, losses: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor) -> None:
        """Add losses, labels and ``source_ids``, [batch, seq], at the places that predict the labels."""
        counts = (labels != IGNORED).to(losses.device)
        values = torch.stack([losses.detach().double() * counts, counts.double()]).flatten(1)
        self._sums = self._sums.to(losses.device).index_add(1, sources.to(losses.device).flatten(), values)

    def means(self, *, reset: bool = False) -> dict[str, float]:
        """Return each source's mean loss over the labels of all ranks, NaN without labels. All ranks must
        call it. ``reset``: count from 0 again."""
        means = self._all_means()
        if reset:
            self._sums.zero_()
        return dict(zip(self.names, means, strict=True))


def _targets_of(loader: TokenLoader) -> Targets:
    return "shifted" if loader.step_batches.shifts_targets else "same"


def evaluation_loss(model: torch.nn.Module, loader: TokenLoader) -> float:
    """Return the mean loss over all labels of a validation loader, on all ranks.

    All ranks must call it. It iterates one epoch of ``loader`` in evaluation mode without gradients.
    ``model(**batch).loss`` must be the mean over the labels of a batch. Raises UsageError if the loader has
    ``targets="shifted"`` and the model is of transformers.
    """
    inner: Any = getattr(model, "module", model)  # inside DDP
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # inside PEFT
    if loader.step_batches.shifts_targets and type(inner).__module__.startswith("transformers."):
        found = f'a loader with targets="shifted" for {type(inner).__name__}, which shifts labels itself'
        raise UsageError(found=found, expected='targets="same"')
    losses = LossMean.of_loader(loader)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                pop_records(batch)
                losses.add(model(**batch.to(device)).loss, batch["labels"])
    finally:
        model.train(was_training)
    return losses.mean()
