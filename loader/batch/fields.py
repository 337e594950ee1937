"""The fields of a batch, in one table: shape, what moves with rows, and what a model takes.

A new field is a line here, and the code that makes it. Functions that rearrange batches ask this table.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, NamedTuple

import torch

from loader.read.chunks import IGNORED


class Field(NamedTuple):
    """What is known of a field."""

    shape: str  # with its type; "int": a number on the host
    # "tokens": a value per token, which moves with rows and places; "whole": it describes whole documents, so
    # it stays as it is where rows are split; "no": it holds for this batch as it is, and cannot be moved.
    moves: Literal["tokens", "whole", "no"] = "tokens"
    padding: int = 0  # the value of places in padding
    is_input: bool = True  # whether logits depend on it
    is_record: bool = False  # whether it is for the training loop alone; no model takes it


_EDGES = "int32[documents + 1]"
FIELDS = {
    "input_ids": Field("int64[batch, seq]"),
    "attention_mask": Field("int64[batch, seq]"),
    "labels": Field("int64[batch, seq]", padding=IGNORED, is_input=False),
    "position_ids": Field("int64[batch, seq]"),
    "segment_ids": Field("int64[batch, seq]"),
    "cu_seqlens": Field(_EDGES, moves="whole"),
    "max_seqlen": Field("int", moves="whole"),
    "cu_seq_lens_q": Field(_EDGES, moves="no"),
    "cu_seq_lens_k": Field(_EDGES, moves="no"),
    "max_length_q": Field("int", moves="no"),
    "max_length_k": Field("int", moves="no"),
    "use_cache": Field("int", moves="no"),
    "origins": Field("int64[documents, 6]", moves="no", is_input=False, is_record=True),
}
_OF_THE_USER = Field("int64[batch, seq]")  # a field that a loop has added moves if it has this shape


def field_of(name: str) -> Field:
    """Return what is known of a field, by its name."""
    return FIELDS.get(name, _OF_THE_USER)


def moves_by_token(name: str, value: Any, shape: torch.Size) -> bool:
    """Return whether a field has a value per token of a batch of this shape, which can move with it."""
    return field_of(name).moves == "tokens" and isinstance(value, torch.Tensor) and value.shape == shape


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on which logits depend."""
    return {name: value for name, value in batch.items() if field_of(name).is_input}


def pop_records(batch: MutableMapping[str, Any]) -> dict[str, Any]:
    """Remove the fields that no model takes from a batch, and return them."""
    records = [name for name in batch if field_of(name).is_record]
    return {name: batch.pop(name) for name in records}
