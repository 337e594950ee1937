"""What a ``collate_fn`` of the user's gets of each sample: its ids, its labels, and the fields asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from loader.chunks import ID_BITS
from loader.padding import IGNORED, Ids
from shardprep.errors import UsageError

Collate = Callable[[list[Any]], Any]
SampleField = Literal["num_tokens", "doc_starts", "lengths"]
Sample = Ids | tuple[Ids, dict[str, Any]]  # the ids of one, and its fields where they were asked for


def check_sample_fields(fields: Sequence[str], *, has_collate_fn: bool, cuts_rows: bool) -> tuple[str, ...]:
    """The names as a tuple. Raises UsageError for an unknown one, or where nobody would get them."""
    unknown = sorted(set(fields) - set(get_args(SampleField)))
    if unknown or isinstance(fields, str):
        raise UsageError(
            f"sample_fields is {fields!r}, expected a list of some of {', '.join(get_args(SampleField))}"
        )
    if fields and (cuts_rows or not has_collate_fn):
        raise UsageError(
            "sample_fields are what a collate_fn of your own gets of whole samples; pass collate_fn, without "
            "seq_len_schedule, or leave them out"
        )
    return tuple(fields)


def with_fields(
    samples: Sequence[Ids], starts: Sequence[Ids] | None, fields: tuple[str, ...]
) -> list[Sample]:
    """Samples, each with its fields; ``starts``: where documents begin in each row, None for documents.

    ``num_tokens``; ``doc_starts``, places in the sample where a document begins; ``lengths`` of the documents
    in it, the first of which may go on from another row.
    """
    found: list[Sample] = []
    for number, ids in enumerate(samples):
        of_row = [0] if starts is None else starts[number].tolist()
        begins = [start for start in of_row if start < len(ids)]
        parts = begins if begins[:1] == [0] or not len(ids) else [0, *begins]
        known: dict[str, Any] = {
            "num_tokens": len(ids),
            "doc_starts": begins,
            "lengths": np.diff([*parts, len(ids)]).tolist(),
        }
        found.append((ids, {name: known[name] for name in fields}))
    return found


def collate_lists(collate_fn: Collate, samples: Sequence[Sample], *, has_masks: bool = False) -> Any:
    """What a ``collate_fn`` of the user's makes of some samples; with masks, they have labels, too."""
    return collate_fn([_as_lists(sample, has_masks=has_masks) for sample in samples])


def _as_lists(sample: Sample, *, has_masks: bool) -> dict[str, Any]:
    ids, fields = sample if isinstance(sample, tuple) else (sample, {})
    if has_masks:
        return {**_with_labels(ids), **fields}
    return {"input_ids": ids.tolist(), **fields}


def _with_labels(ids: Ids) -> dict[str, list[int]]:
    labels = np.where(ids < 0, IGNORED, ids)
    return {"input_ids": (ids & ID_BITS).tolist(), "labels": labels.tolist()}
