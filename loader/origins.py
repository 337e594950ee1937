"""Where the documents of a batch come from: ``origins=True`` of ``get_llama3_dataloader``.

``batch["origins"]`` is int64[documents, 6]: row and place in the batch, source, shard, sample, document.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from loader.batches import Targets
from loader.chunks import IGNORED
from loader.shards import ShardSet
from shardprep.errors import NotFound, UsageError
from shardprep.files import NOT_THERE
from shardprep.format.idx import read_idx
from shardprep.format.input_formats import name_of_input, place_text
from shardprep.format.plan import read_input_names


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document lies."""

    source: str  # its name; "all" where one set is read
    tar: Path
    sample: int  # its number in the tar, from 0
    document: int  # its number in a packed row, from 0; 0 for a document that is a sample
    place: str  # file and byte of the input; of a packed row, of its first token; "": unknown
    address: str  # for ``shardprep peek DATA``, as "3:17:2"; "" in tars of other tools


def find_origin(name: str, shards: ShardSet, shard: int, sample: int, document: int) -> Origin:
    """The origin that these numbers of a batch stand for. Raises UsageError for numbers that are none."""
    if not 0 <= shard < shards.num_shards or not 0 <= sample < shards.num_records[shard]:
        raise UsageError(
            f"shard {shard}, sample {sample}: {name} has {shards.num_shards:,} shards, and "
            "samples are numbered in each from 0; pass columns 2 to 5 of origins"
        )
    data, row = shards.locate(shard)
    place, address = "", ""
    if data.records is None:
        shard_id = int(data.shard_ids[row])
        address = f"{shard_id}:{sample}:{document}" if data.row_tokens else f"{shard_id}:{sample}"
        with contextlib.suppress(NotFound, *NOT_THERE):  # a copy without its idx or its plan
            record = _records(data.folder, data.spec, shard_id)[sample]
            name_of = name_of_input(_input_names(data.folder), int(record["source"]))
            place = place_text(name_of, int(record["source_offset"]))
    return Origin(
        source=name,
        tar=data.path_of(row),
        sample=sample,
        document=document,
        place=place,
        address=address,
    )


# A loop may ask for each document of each batch.
_input_names = lru_cache(maxsize=4)(read_input_names)
_records = lru_cache(maxsize=16)(read_idx)


class SourceLosses:
    """Adds up the losses of this rank's batches by source; ``means()`` are those of all ranks.

        losses = SourceLosses.of_loader(loader)
        losses.add(model(**batch).logits, labels, origins)

    ``targets``: as for the loader. A label counts for the document whose token it is predicted at.
    """

    def __init__(self, names: tuple[str, ...], targets: Targets = "same") -> None:
        self.names = names
        self._first = int(targets == "same")
        self._sums = torch.zeros(2, len(names), dtype=torch.float64)  # of losses, and labels

    @staticmethod
    def of_loader(loader: Any) -> SourceLosses:
        """One for the batches of a TokenLoader."""
        shifts = loader.step_batches.shifts_targets
        return SourceLosses(loader.source_names, "shifted" if shifts else "same")

    def add(self, logits: torch.Tensor, labels: torch.Tensor, origins: torch.Tensor) -> None:
        """Count a batch: logits[batch, seq, vocabulary], int64[batch, seq] and int64[documents, 6]."""
        logits, labels = logits[:, : logits.shape[1] - self._first], labels[:, self._first :]
        with torch.no_grad():  # a row at a time: float32 of all logits may not fit beside the step's own
            losses = torch.stack(
                [
                    cross_entropy(of_row.float(), wanted.to(of_row.device), reduction="none")
                    for of_row, wanted in zip(logits, labels, strict=True)
                ]
            )
        self.add_losses(losses, labels, source_ids(origins, labels.shape))

    def add_losses(self, losses: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor) -> None:
        """The same of losses, labels and ``source_ids``, all [batch, seq], at the places where they are
        predicted."""
        source = sources.to(losses.device)
        counts = (labels != IGNORED).to(losses.device)
        sums = torch.zeros_like(self._sums, device=losses.device)
        for row, values in enumerate((losses.detach().double(), counts.double())):
            sums[row].index_add_(0, source.flatten(), (values * counts).flatten())
        self._sums = self._sums.to(losses.device) + sums

    def means(self, *, reset: bool = False) -> dict[str, float]:
        """The mean loss of each source over the labels of all ranks, which must all call it; NaN where there
        are none. ``reset``: count from 0 again."""
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        if reset:
            self._sums.zero_()
        losses, counts = sums.tolist()
        found = zip(self.names, losses, counts, strict=True)
        return {name: loss / count if count else math.nan for name, loss, count in found}


def source_ids(origins: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the source of each place of a batch, int64[batch, seq], of its ``origins``; of padding any one.

    Put into the batch, it goes along where rows or places are dealt to ranks.
    """
    width = shape[1]
    kept = origins[origins[:, 1] < width]
    first = kept[:, 0] * width + kept[:, 1]
    ends = torch.cat([first[1:], first.new_tensor([shape[0] * width])])
    return kept[:, 2].repeat_interleave(ends - first).reshape(shape)
