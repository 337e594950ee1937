"""Targets that stand where the token before them stands, and their split over context-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import UsageError, get_llama3_dataloader
from loader.context_parallel import split_for_context_parallel
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

Batches = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 documents of 1 to 9 tokens, each of ids of its own."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 2000)
    write_numbered_tars(root, 90, 2, ids_of=lambda n: list(range(10 * n, 10 * n + 1 + n % 9)))
    return root


def load(data: Path, **options: Any) -> Batches:
    options = {"num_workers": 0, "shuffle": False, "batch_size": 4, **options}
    with get_llama3_dataloader(data, model_id=data, **options) as loader:
        return [dict(batch) for batch in loader]


def test_inputs_and_targets_are_the_same_rows_one_place_apart(data: Path) -> None:
    rows = load(data, seq_len=17)
    shifted = load(data, seq_len=16, targets="shifted")
    assert len(shifted) == len(rows) > 2
    for batch, row in zip(shifted, rows, strict=True):
        assert torch.equal(batch["input_ids"], row["input_ids"][:, :-1])
        assert torch.equal(batch["labels"], row["labels"][:, 1:])
        assert batch["attention_mask"].shape == batch["input_ids"].shape == (4, 16)
        assert all(value.is_contiguous() for value in batch.values())


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_no_target_is_the_first_token_of_another_document(data: Path, workers: int) -> None:
    fields = ("position_ids", "segment_ids", "cu_seqlens")
    batches = load(data, seq_len=16, targets="shifted", boundaries=fields, num_workers=workers, shuffle=True)
    num_targets = 0
    for batch in batches:
        ids, labels, segments = batch["input_ids"], batch["labels"], batch["segment_ids"]
        assert torch.equal((batch["position_ids"] == 0)[:, 1:], segments[:, 1:] != segments[:, :-1])
        same = segments[:, 1:] == segments[:, :-1]
        assert torch.equal(labels[:, :-1][same], ids[:, 1:][same])
        assert (labels[:, :-1][~same] == -100).all()
        edges = batch["cu_seqlens"].tolist()
        assert edges == [*(batch["position_ids"].flatten() == 0).nonzero().flatten().tolist(), ids.numel()]
        assert int(batch["max_seqlen"]) == max(np.diff(edges))
        num_targets += int(same.sum())
    assert num_targets > 100


def test_padded_documents_lose_no_target_and_keep_their_multiple(data: Path) -> None:
    found: list[list[int]] = []
    for batch in load(data, targets="shifted", pad_to_multiple_of=4):
        assert batch["input_ids"].shape[1] % 4 == 0
        assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            targets = [label for label in labels if label != -100]
            found.append([ids[0], *targets])
            assert [ids[0], *targets[:-1]] == ids[: max(len(targets), 1)]
    assert found == [list(range(10 * n, 10 * n + 1 + n % 9)) for n in range(88)]


def test_max_length_stays_the_width_of_batches(data: Path) -> None:
    for batch in load(data, targets="shifted", max_length=4, padding="max_length"):
        assert batch["input_ids"].shape == (4, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "next"}, "targets is 'next'"),
        ({"targets": "shifted", "boundaries": "transformers"}, "shift them twice"),
        ({"targets": "shifted", "collate_fn": list}, "leave out collate_fn"),
    ],
)
def test_what_does_not_go_with_shifted_targets_is_refused(
    data: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        load(data, seq_len=16, **options)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_all_context_parallel_ranks_are_the_batch(data: Path, size: int) -> None:
    fields = ("position_ids", "segment_ids", "cu_seqlens")
    (batch, *_) = load(data, seq_len=16, targets="shifted", boundaries=fields)
    parts = [split_for_context_parallel(batch, rank, size) for rank in range(size)]
    places = torch.cat([part["place_ids"] for part in parts])
    assert sorted(places.tolist()) == list(range(16))
    for name in ("input_ids", "labels", "attention_mask", "position_ids", "segment_ids"):
        joined = torch.cat([part[name] for part in parts], dim=1)
        assert torch.equal(joined[:, places.argsort()], batch[name]), name
    assert all(torch.equal(part["cu_seqlens"], batch["cu_seqlens"]) for part in parts)


@pytest.mark.parametrize("size", [2, 4])
def test_causal_attention_costs_each_rank_the_same(data: Path, size: int) -> None:
    (batch, *_) = load(data, seq_len=16, targets="shifted")
    parts = [split_for_context_parallel(batch, rank, size)["place_ids"] for rank in range(size)]
    assert len({int((places + 1).sum()) for places in parts}) == 1


def test_the_sum_of_the_ranks_losses_is_the_whole_batchs(data: Path) -> None:
    (batch, *_) = load(data, seq_len=16, targets="shifted", boundaries="segment_ids")
    table = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(1))

    def loss(part: dict[str, Any]) -> torch.Tensor:
        logits = table[part["input_ids"]].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, part["labels"].flatten(), reduction="sum")

    parts = [split_for_context_parallel(batch, rank, 2) for rank in range(2)]
    torch.testing.assert_close(sum(map(loss, parts)), loss(batch))


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        ({"input_ids": torch.zeros(2, 6)}, 0, "multiple of 4"),
        ({}, 2, "rank 2 of 2"),
        ({"use_cache": False}, 0, "use_cache is no tensor"),
        ({"input_ids": [1]}, 0, r"no input_ids of \[batch, seq\]"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(change: dict[str, Any], rank: int, words: str) -> None:
    batch = {"input_ids": torch.zeros(2, 8), **change}
    with pytest.raises(UsageError, match=words):
        split_for_context_parallel(batch, rank, 2)
