"""The fields of a batch, in one table: shape, how it is made, what moves with rows, what a model takes.

A new field of document boundaries is a line here, a function that makes it, and its name in ``Boundary``.
Other fields are made in batches.py. Functions that rearrange batches ask this table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from loader.order.hashes import Int64s
from loader.read.chunks import IGNORED, Integers

# The argument ``boundaries=`` for type checkers. The table says which fields each name gives.
Boundary = Literal["transformers", "position_ids", "segment_ids", "cu_seqlens"]


class HostNumber(int):
    """A number in a batch. ``to`` returns it unchanged, since kernels need it on the CPU as an int."""

    def to(self, *_: object, **__: object) -> HostNumber:
        return self


class BatchEdges(NamedTuple):
    """Where documents begin in a batch: fields of boundaries are made from it."""

    begins: Int64s  # int64[edges]: where rows, documents and padding begin in the flattened batch
    sizes: Int64s  # int64[edges]: places up to the next edge
    shape: tuple[int, int]  # of the batch
    lengths: Integers | None  # [batch]: tokens of each row; None: all rows are full


@lru_cache(maxsize=4)
def _places(number: int) -> Int64s:
    """Return 0, 1, ..., ``number`` - 1. The array is cached: do not write to it."""
    return np.arange(number)


def _position_ids(at: BatchEdges) -> torch.Tensor:
    """Count from 0 in each document."""
    num_places = at.shape[0] * at.shape[1]
    # positions: int64[batch * seq], first the place where the document begins
    positions = np.repeat(at.begins, at.sizes)
    np.subtract(_places(num_places), positions, out=positions)
    return torch.from_numpy(positions.reshape(at.shape))


def _segment_ids(at: BatchEdges) -> torch.Tensor:
    """Number the documents of each row from 1, and padding as 0."""
    # rows, within, numbers: int64[edges]
    rows, within = np.divmod(at.begins, at.shape[1])
    numbers = np.arange(len(rows))
    numbers -= np.maximum.accumulate(np.where(within == 0, numbers, 0)) - 1
    if at.lengths is not None:
        numbers[within >= at.lengths[rows]] = 0
    return torch.from_numpy(np.repeat(numbers, at.sizes).reshape(at.shape))


def _bounds(at: BatchEdges) -> torch.Tensor:
    """Return the edges of documents and of padding in the flattened batch, int32[edges + 1]."""
    bounds = np.empty(len(at.begins) + 1, np.int32)
    bounds[:-1] = at.begins
    bounds[-1] = at.shape[0] * at.shape[1]
    return torch.from_numpy(bounds)


def _longest(at: BatchEdges) -> HostNumber:
    """Return the greatest length of a document, or of padding."""
    return HostNumber(at.sizes.max())


def _no_cache(_: BatchEdges) -> HostNumber:
    """Return a false value: with a cache, transformers' models ignore ``position_ids``."""
    return HostNumber(0)


Maker = Callable[[BatchEdges], "torch.Tensor | HostNumber"]


class Field(NamedTuple):
    """What is known of a field."""

    shape: str  # with its type; "int": a number on the host
    boundaries: tuple[str, ...] = ()  # the values of ``boundaries=`` that give the field
    make: Maker | None = None  # makes a field of boundaries; StepBatches makes the others
    # "tokens": a value per token, which moves with rows and places; "whole": it describes whole documents, so
    # it stays as it is where rows are split; "no": it holds for this batch as it is, and cannot be moved.
    moves: Literal["tokens", "whole", "no"] = "tokens"
    padding: int = 0  # the value of places in padding
    is_input: bool = True  # whether logits depend on it
    is_record: bool = False  # whether it is for the training loop alone; no model takes it


_EDGES = "int32[documents + 1]"
_OF_TRANSFORMERS = ("transformers",)  # its models take the edges under names of their own
FIELDS = {
    "input_ids": Field("int64[batch, seq]"),
    "attention_mask": Field("int64[batch, seq]"),
    "labels": Field("int64[batch, seq]", padding=IGNORED, is_input=False),
    "position_ids": Field("int64[batch, seq]", ("transformers", "position_ids"), _position_ids),
    "segment_ids": Field("int64[batch, seq]", ("segment_ids",), _segment_ids),
    "cu_seqlens": Field(_EDGES, ("cu_seqlens",), _bounds, moves="whole"),
    "max_seqlen": Field("int", ("cu_seqlens",), _longest, moves="whole"),
    "cu_seq_lens_q": Field(_EDGES, _OF_TRANSFORMERS, _bounds, moves="no"),
    "cu_seq_lens_k": Field(_EDGES, _OF_TRANSFORMERS, _bounds, moves="no"),
    "max_length_q": Field("int", _OF_TRANSFORMERS, _longest, moves="no"),
    "max_length_k": Field("int", _OF_TRANSFORMERS, _longest, moves="no"),
    "use_cache": Field("int", _OF_TRANSFORMERS, _no_cache, moves="no"),
    "origins": Field("int64[documents, 6]", moves="no", is_input=False, is_record=True),
}
_OF_THE_USER = Field("int64[batch, seq]")  # a field that a loop has added moves if it has this shape


def known_boundaries() -> list[str]:
    """Return the values that ``boundaries=`` takes."""
    names: dict[str, None] = {}
    for field in FIELDS.values():
        names |= dict.fromkeys(field.boundaries)
    return [*names]


def makers_of(boundaries: Collection[str]) -> dict[Maker, list[str]]:
    """Return the functions for these values of ``boundaries=``, each with the fields that it makes.

    Fields of one function share their value: a batch computes it once.
    """
    makers: dict[Maker, list[str]] = {}
    for name, field in FIELDS.items():
        if field.make is not None and not set(field.boundaries).isdisjoint(boundaries):
            makers.setdefault(field.make, []).append(name)
    return makers


def field_of(name: str) -> Field:
    """Return what is known of a field, by its name."""
    return FIELDS.get(name, _OF_THE_USER)


def moves_by_token(name: str, value: object, shape: torch.Size) -> bool:
    """Return whether a field has a value per token of a batch of this shape, which can move with it."""
    return field_of(name).moves == "tokens" and isinstance(value, torch.Tensor) and value.shape == shape


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on which logits depend."""
    return {name: value for name, value in batch.items() if field_of(name).is_input}


def pop_records(batch: MutableMapping[str, Any]) -> dict[str, Any]:
    """Remove the fields that no model takes from a batch, and return them."""
    records = [name for name in batch if field_of(name).is_record]
    return {name: batch.pop(name) for name in records}
