"""loader/batch/fields.py: the table of a batch's fields, which everything asks that moves rows."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from loader import split_for_context_parallel
from loader.batch.fields import FIELDS, Field, inputs_of, pop_records
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


def test_a_new_field_is_a_line_of_the_table() -> None:
    """It then moves with the places of its row, and has its own value in padding."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 9]])
    batch = {
        "input_ids": ids,
        "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 0]]),
        "quality": 10 * ids,
    }
    with mock.patch.dict(FIELDS, {"quality": Field("int64[batch, seq]", padding=-7)}):
        parts = [split_for_context_parallel(batch, rank, 2, by="document") for rank in range(2)]
    for part in parts:
        is_padding = part["place_ids"] < 0
        assert (part["quality"][0][is_padding] == -7).all()
        assert (part["quality"][0] == 10 * part["input_ids"][0])[~is_padding].all()
    assert any((part["place_ids"] < 0).any() for part in parts)
