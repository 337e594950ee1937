"""Splitting batches over ranks of context parallelism, and dealing rows so that all ranks have equal work."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from loader import UsageError, deal_rows_evenly, split_for_context_parallel
from tests.ranks import work_of
from tests.world import open_loader, refuses

FIELDS = ("position_ids", "segment_ids", "cu_seqlens")
FORMS: list[dict[str, Any]] = [{}, {"by": "document"}, {"by": "document", "pad_documents": False}]
ROW = 96
Batch = dict[str, Any]


@pytest.fixture
def batch(rows: Path) -> Batch:
    """Four rows, one of them with many documents."""
    with open_loader(rows, 4, targets="shifted", boundaries=FIELDS) as loader:
        return dict(max(islice(loader, 10), key=lambda batch: int(batch["segment_ids"].max())))


# Placement of tokens


def kernel_places(padded: Tensor, size: int) -> Tensor:
    """Return (sequence, position) of all ranks' tokens as a ring kernel computes them from padded edges."""
    local = padded // size
    assert torch.equal(local * size, padded)
    places = []
    for rank in range(size):
        for number, tokens in enumerate(local.diff().tolist()):
            half = tokens // 2
            assert tokens == 2 * half
            head, tail = rank * half, (2 * size - 1 - rank) * half
            at = torch.cat([torch.arange(head, head + half), torch.arange(tail, tail + half)])
            places.append(torch.stack([torch.full_like(at, number), at]))
    return torch.cat(places, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_each_token_is_on_exactly_one_rank_unchanged(batch: Batch, form: dict[str, Any], size: int) -> None:
    """It is also where a ring kernel expects it, given only the edges of sequences.

    A token attends to its sequence up to itself, so logits and gradients equal those of each document (or
    row) alone.
    """
    parts = [split_for_context_parallel(batch, rank, size, **form) for rank in range(size)]
    # The result does not depend on the field that gives the boundaries.
    by_edges = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "attention_mask")}
    for rank, part in enumerate(parts):
        other = split_for_context_parallel(by_edges, rank, size, **form)
        assert torch.equal(other["place_ids"], part["place_ids"])
    assert len({part["place_ids"].shape for part in parts}) == 1
    places = torch.cat([part["place_ids"] for part in parts])
    real = places >= 0
    for name, padding in (("input_ids", 0), ("labels", -100), ("position_ids", 0), ("attention_mask", 0)):
        values = torch.cat([part[name] for part in parts], 1)
        if not form:
            assert torch.equal(values, batch[name][:, places]), name
        else:
            assert torch.equal(values[0, real], batch[name].flatten()[places[real]]), name
            assert name == "position_ids" or (values[0, ~real] == padding).all()
    if not form:
        assert torch.equal(kernel_places(torch.tensor([0, ROW]), size)[1], places)
        assert sorted(places.tolist()) == [*range(ROW)]
        assert {int(part["place_ids"].sum()) * size for part in parts} == {sum(range(ROW))}, "even attention"
        return
    assert sorted(places[real].tolist()) == batch["segment_ids"].flatten().nonzero().flatten().tolist()
    edges, padded = parts[0]["cu_seqlens"], parts[0]["cu_seqlens_padded"]
    numbers = batch["segment_ids"] + ROW * torch.arange(4)[:, None]
    is_token = batch["segment_ids"] > 0
    _, document, lengths = numbers[is_token].unique(return_inverse=True, return_counts=True)
    numbers[is_token] = document + 1  # in the batch
    segments = torch.cat([part["segment_ids"][0] for part in parts])
    assert torch.equal(segments[real], numbers.flatten()[places[real]])
    assert not segments[~real].any()
    assert torch.equal(edges.diff(), lengths)
    assert (len(places), int(parts[0]["max_seqlen"])) == (padded[-1], padded.diff().max())
    if "pad_documents" in form:
        assert (~real).sum() == -lengths.sum() % size
        return
    assert torch.equal(padded.diff(), -(-lengths // (2 * size)) * 2 * size)
    sequence, position = kernel_places(padded, size)
    assert torch.equal(sequence[real] + 1, segments[real])
    assert torch.equal(position[real], batch["position_ids"].flatten()[places[real]])
    assert (position[~real] >= lengths[sequence[~real]]).all(), "padding comes after its document"


@pytest.mark.parametrize("form", FORMS[1:])
def test_splitting_by_document_gives_all_ranks_equal_work(form: dict[str, Any]) -> None:
    """The work of a token is its position in its document. Splitting whole rows is uneven here."""
    lengths = torch.tensor([8000, 40000, 17, 3, 16001, 3])  # the last is padding
    segments = torch.tensor([1, 2, 3, 4, 5, 0]).repeat_interleave(lengths)[None]
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    batch = {
        "input_ids": segments,
        "labels": segments + 1,
        "segment_ids": segments,
        "position_ids": positions,
    }

    def spread(**form: Any) -> float:
        parts = [split_for_context_parallel(batch, rank, 4, **form) for rank in range(4)]
        work = [float((part["position_ids"] + 1)[part["segment_ids"] > 0].sum()) for part in parts]
        return max(work) / min(work)

    assert spread(**form) < 1.002
    assert spread() > 1.2


SAME = torch.arange(16).view(2, 8)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of a batch, and arguments
    "labels that are not shifted": ({"labels": SAME}, {}),
    "labels that are not shifted, by document": ({"labels": SAME, "segment_ids": SAME}, {"by": "document"}),
    "another form": ({}, {"by": "token"}),
    "nothing that says documents": ({}, {"by": "document"}),
    "rows of another length": ({"input_ids": SAME[:, :6]}, {}),
    "another rank": ({}, {"rank": 2}),
    "numbers": ({"use_cache": False}, {}),
    "lists": ({"input_ids": [1]}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_cannot_be_split_is_refused(name: str) -> None:
    fields, form = REFUSED[name]
    assert split_for_context_parallel({"input_ids": SAME, "labels": SAME + 1}, 0, 2)
    with refuses(UsageError):
        split_for_context_parallel({"input_ids": SAME, **fields}, **{"rank": 0, "size": 2, **form})


# Even work


def test_rows_are_dealt_by_the_squared_lengths_of_their_documents() -> None:
    """A single rank keeps its rows, sorted by decreasing work."""
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [1] * 8, [0] * 8])
    assert work_of(segments).tolist() == [9 + 4, 8, 64, 0]
    batch = {"input_ids": torch.arange(32).view(4, 8), "segment_ids": segments}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        (dealt,) = deal_rows_evenly([batch])
    finally:
        dist.destroy_process_group()
    assert dealt["input_ids"][:, 0].tolist() == [16, 0, 8, 24]
    for fields in ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, {}):
        with refuses(UsageError):
            deal_rows_evenly([{"input_ids": batch["input_ids"][:, :4], "labels": SAME, **fields}])
