"""Batches split over ranks of context parallelism: which places, and what attention makes of them."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from loader import UsageError, get_llama3_dataloader
from loader.context_parallel import split_for_context_parallel
from tests.checkout import ROOT
from tests.children import Command, run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

FIELDS = ("position_ids", "segment_ids", "cu_seqlens")
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text in packed rows of 240 places and the target of the last, of both kinds."""
    packed = {"record": "packed", "seq_len": 241}
    forms = {"concat": packed, "best_fit": {**packed, "pack": "best_fit"}}
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("made"), forms, num_shards=1)


def batch_of(data: Path, batch_size: int, **options: Any) -> Batch:
    """The batch of the first ten that has the row with the most documents."""
    options = {"num_workers": 0, "targets": "shifted", "boundaries": FIELDS, **options}
    with get_llama3_dataloader(data, batch_size, **options) as loader:
        return dict(max(islice(loader, 10), key=lambda batch: int(batch["segment_ids"].max())))


@pytest.mark.slow
@pytest.mark.processes
def test_logits_and_gradients_of_two_and_four_ranks_are_those_of_each_document_alone(
    made: Path, site: Path, tmp_path: Path
) -> None:
    cases = {
        f"{packing}, batch {size}": batch_of(made / packing, size, seq_len=240)
        for packing in ("concat", "best_fit")
        for size in (1, 4)
    }
    for batch in cases.values():
        batch.pop("max_seqlen")  # torch.load refuses classes
    torch.save(cases, tmp_path / "cases.pt")
    files = [tmp_path / "cases.pt", tmp_path / "store"]
    command: Command = [sys.executable, "-m", "tests.context_parallel_ranks", *files]
    ended = run_child(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"})
    assert ended.stdout.splitlines() == [f"{name} is equal" for name in cases]


def rows_of(*rows: list[int], width: int = 24) -> Batch:
    """A batch of rows with documents of these lengths, padded; ids count from 1."""
    segments = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, lengths in enumerate(rows):
        numbers = np.repeat(np.arange(len(lengths)) + 1, lengths)
        segments[row, : len(numbers)] = torch.from_numpy(numbers)
    ids = torch.arange(1, segments.numel() + 1).view(segments.shape)
    return {"input_ids": ids, "labels": ids + 1, "segment_ids": segments, "origins": ids * 10}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("pad", [True, False])
def test_each_token_is_on_one_rank_and_all_ranks_have_equally_many(size: int, pad: bool) -> None:
    batch = rows_of([1, 2, 3, 15], [24], [23], [7, 7, 7])
    parts = [
        split_for_context_parallel(batch, rank, size, by="document", pad_documents=pad)
        for rank in range(size)
    ]
    assert len({part["place_ids"].shape for part in parts}) == 1
    places = torch.cat([part["place_ids"] for part in parts])
    real = places >= 0
    assert sorted(places[real].tolist()) == batch["segment_ids"].flatten().nonzero().flatten().tolist()
    for name, padding in (("input_ids", 0), ("labels", -100), ("origins", 0)):
        values = torch.cat([part[name][0] for part in parts])
        assert torch.equal(values[real], batch[name].flatten()[places[real]]), name
        assert (values[~real] == padding).all()
    lengths = parts[0]["cu_seqlens"].diff().tolist()
    assert lengths == [1, 2, 3, 15, 24, 23, 7, 7, 7]
    padded = parts[0]["cu_seqlens_padded"].diff()
    assert len(places) == parts[0]["cu_seqlens_padded"][-1]
    assert int(parts[0]["max_seqlen"]) == padded.max()
    if pad:
        assert padded.tolist() == [-(-length // (2 * size)) * 2 * size for length in lengths]
    else:
        assert (~real).sum() == -sum(lengths) % size


@pytest.mark.parametrize("pad", [True, False])
def test_each_document_is_even_work_for_all_ranks(pad: bool) -> None:
    """A token sees all before it in its document; whole rows cut in parts would be uneven here."""
    batch = rows_of([8000, 40000, 17, 3, 16001], width=64024)

    def spread(**form: Any) -> float:
        work = []
        for rank in range(4):
            part = split_for_context_parallel(batch, rank, 4, **form)
            segments = batch["segment_ids"].flatten()[part["place_ids"].clamp_min(0)]
            first = torch.searchsorted(batch["segment_ids"].flatten()[:64021], segments)
            work.append(
                float((part["place_ids"] - first + 1)[(part["place_ids"] >= 0) & (segments > 0)].sum())
            )
        return max(work) / min(work)

    assert spread(by="document", pad_documents=pad) < 1.002
    assert spread() > 1.2


def test_a_loaders_batch_keeps_its_positions(made: Path) -> None:
    batch = batch_of(made / "best_fit", 4, seq_len=240)
    parts = [split_for_context_parallel(batch, rank, 2, by="document") for rank in range(2)]
    for part in parts:
        real = part["place_ids"] >= 0
        positions = batch["position_ids"].flatten()[part["place_ids"][real]]
        assert torch.equal(part["position_ids"][0, real], positions)
        assert torch.equal(part["segment_ids"][0] > 0, real)
        assert torch.equal(part["attention_mask"][0] > 0, real)


def test_padded_documents_are_split_without_their_padding(made: Path) -> None:
    batch = batch_of(made / "best_fit", 4, seq_len=240)
    without_segments = {name: value for name, value in batch.items() if name in ("input_ids", "labels")}
    by_edges = {
        **without_segments,
        "cu_seqlens": batch["cu_seqlens"],
        "attention_mask": batch["attention_mask"],
    }
    one, other = (split_for_context_parallel(each, 1, 2, by="document") for each in (batch, by_edges))
    assert torch.equal(one["place_ids"], other["place_ids"])


@pytest.mark.parametrize("form", [{}, {"by": "document"}])
def test_labels_that_are_not_shifted_are_refused(made: Path, form: Any) -> None:
    batch = batch_of(made / "concat", 4, targets="same")
    with pytest.raises(UsageError, match='targets="shifted"'):
        split_for_context_parallel(batch, 0, 2, **form)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"by": "token"}, "by is 'token'"),
        ({"by": "document"}, "expected segment_ids, position_ids or cu_seqlens"),
    ],
)
def test_what_says_no_documents_is_refused(form: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_for_context_parallel({"input_ids": torch.zeros(2, 8)}, 0, 2, **form)
