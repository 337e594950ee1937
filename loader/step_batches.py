"""Runs of the workers -> the batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loader.boundaries import boundary_fields, document_edges
from loader.collate import IGNORED, CausalLMCollator
from loader.loader_metrics import LoaderMetrics
from loader.run import Run
from preprocess.shard_format import UsageError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """Cuts a rank's part of a global batch into batches and collates them.

    CausalLMCollator itself gets arrays. Any other ``collate_fn``, also one that inherits from it, is
    called: ids as lists.
    """

    batch_size: int
    row_tokens: int  # of every sample where all are rows, else 0
    collate_fn: Collate
    boundaries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.boundaries and type(self.collate_fn) is not CausalLMCollator:
            raise UsageError(
                "boundaries are made by CausalLMCollator's batches; leave out collate_fn or them"
            )

    def cut(self, runs: list[Run], step: int, first_batch: int, metrics: LoaderMetrics) -> Iterator[Any]:
        """The batches of one step of some runs, from one of them on; counted as they are taken."""
        rows: Any
        lengths: npt.NDArray[Any] | None = None
        if not self.row_tokens:
            rows = [row for run in runs for row in run.rows(step)]
        else:
            parts: list[Any] = [run.ids[:, step] for run in runs]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if not all(run.is_full(step, self.row_tokens) for run in runs):
                lengths = np.concatenate([run.lengths[:, step] for run in runs])
        starts = [found for run in runs for found in run.starts_of(step)] if self.boundaries else []
        for first in range(first_batch * self.batch_size, len(rows), self.batch_size):
            part = slice(first, first + self.batch_size)
            batch = self._collated(rows[part], None if lengths is None else lengths[part], starts[part])
            _count(metrics, rows[part], None if lengths is None else lengths[part], batch)
            yield batch

    def _collated(
        self, rows: Any, lengths: npt.NDArray[Any] | None, starts: list[npt.NDArray[np.int32]]
    ) -> Any:
        if type(self.collate_fn) is not CausalLMCollator:
            if lengths is not None:
                rows = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
            return self.collate_fn([{"input_ids": row.tolist()} for row in rows])
        pad = self.collate_fn
        batch = pad.mask_rows(rows, lengths) if self.row_tokens else pad.pad_rows(rows)
        if self.boundaries:
            if not self.row_tokens:
                lengths = np.array([len(row) for row in rows])
            edges = document_edges(starts, lengths, batch["input_ids"].shape[1])
            batch["labels"].numpy()[edges] = IGNORED
            batch.update(boundary_fields(self.boundaries, edges, lengths))
            if "transformers" in self.boundaries:
                del batch["attention_mask"]  # where there is one, transformers looks for no documents
        return batch


def _count(metrics: LoaderMetrics, rows: Any, lengths: npt.NDArray[Any] | None, batch: Any) -> None:
    metrics.num_batches += 1
    if isinstance(rows, np.ndarray) and lengths is None:  # full rows
        metrics.num_tokens += rows.size
        return
    num_tokens = sum(map(len, rows)) if lengths is None else int(lengths.sum())
    metrics.num_tokens += num_tokens
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    # A user's own batch may be anything.
    places = ids.numel() if isinstance(ids, torch.Tensor) else num_tokens
    metrics.num_padding += max(places - num_tokens, 0)
