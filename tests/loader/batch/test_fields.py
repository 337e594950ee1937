"""loader/batch/fields.py: the table of a batch's fields, which everything asks that moves rows."""

from __future__ import annotations

from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch

from loader import split_for_context_parallel
from loader.batch.fields import FIELDS, BatchEdges, Boundary, Field, inputs_of, known_boundaries, pop_records
from tests.world import open_loader

BOUNDARIES = ["segment_ids", "position_ids", "cu_seqlens", "transformers"]


@pytest.mark.parametrize("boundaries", [(), *BOUNDARIES])
def test_each_field_of_a_batch_has_the_type_and_dimensions_of_its_line(
    rows: Path, boundaries: str | tuple[str, ...]
) -> None:
    with open_loader(rows, batch_size=2, boundaries=boundaries, origins=True) as loader:
        batch = loader.peek()
    assert "origins" in batch
    for name, value in batch.items():
        if isinstance(value, int):
            assert FIELDS[name].shape == "int"
            continue
        dtype, dimensions = FIELDS[name].shape.rstrip("]").split("[")
        assert str(value.dtype) == f"torch.{dtype}"
        assert value.dim() == len(dimensions.split(","))


def test_records_are_for_the_loop_and_labels_no_input() -> None:
    ids = torch.zeros(1, 4)
    batch = {"input_ids": ids, "labels": ids, "origins": ids, "of_the_user": ids}
    assert [*inputs_of(batch)] == ["input_ids", "of_the_user"]
    assert [*pop_records(batch)] == ["origins"]
    assert [*batch] == ["input_ids", "labels", "of_the_user"]


def tokens_left(at: BatchEdges) -> torch.Tensor:
    """Count down to the last token of each document, as the field of the recipe."""
    ends = np.repeat(at.begins + at.sizes, at.sizes)
    return torch.from_numpy((ends - np.arange(len(ends)) - 1).reshape(at.shape))


def test_the_recipe_adds_a_field_by_a_line_and_a_function(rows: Path) -> None:
    """Batches have it, and it moves with the places of its row, without a change in any other module."""
    line = Field("int64[batch, seq]", ("left",), tokens_left, padding=-7)
    names = ("left", "segment_ids")
    with mock.patch.dict(FIELDS, {"tokens_left": line}):
        with open_loader(rows, batch_size=2, boundaries=names, targets="shifted") as loader:
            batch = loader.peek()
        parts = [split_for_context_parallel(batch, rank, 2, by="document") for rank in range(2)]
    is_last = batch["tokens_left"][:, :-1] == 0
    assert is_last.any()
    assert is_last.equal(batch["segment_ids"].diff() != 0)
    for part in parts:
        places = part["place_ids"]
        expected = batch["tokens_left"].flatten()[places].where(places >= 0, -7)
        assert part["tokens_left"][0].equal(expected)


def test_the_type_of_the_argument_names_the_values_of_the_table() -> None:
    assert sorted(known_boundaries()) == sorted(get_args(Boundary))
