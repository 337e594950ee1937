"""Documents that a plan holds out for validation; a validation loader gives each of them once."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from loader import OtherRun, TokenLoader, UsageError
from tests.external_tars import write_numbered_tars
from tests.oracle.forms import DataSets
from tests.word_tokenizers import save_word_tokenizer
from tests.world import EOS, open_loader, refuses, samples_of


def load(data: Any, batch_size: int = 4, rank: int = 0, world: int = 1, **more: Any) -> TokenLoader:
    options = {"split": "validation", "seed": 3, **more}
    return open_loader(data, batch_size, rank=rank, world_size=world, **options)


def labelled(batch: Any) -> list[list[int]]:
    """The samples of a batch that count for a loss."""
    return [each["input_ids"] for each in samples_of(batch) if any(label != -100 for label in each["labels"])]


def all_of(loader: TokenLoader) -> list[list[int]]:
    with loader:
        return [*chain.from_iterable(map(labelled, loader))]


def test_packed_at_load_the_two_sides_have_all_tokens_and_the_tail_is_kept(sets: DataSets) -> None:
    with load(sets["split"], 1) as documents:
        eos = documents.tokenizer.convert_tokens_to_ids(EOS)
        stream = [token for batch in documents for token in (*samples_of(batch)[0]["input_ids"], eos)]
    found = all_of(load(sets["split"], 4, seq_len=16))
    assert [*chain.from_iterable(found)] == stream
    ranks = [[*map(labelled, load(sets["split"], 2, rank, 2, seq_len=16))] for rank in range(2)]
    assert [*chain(*chain(*zip(*ranks, strict=True)))] == found
    assert {len(ids) for ids in found[:-1]} == {16}
    assert 0 < len(found[-1]) == len(stream) % 16
    with load(sets["split"], 1, split="train", shuffle=False) as documents:
        trained = [token for batch in documents for token in (*samples_of(batch)[0]["input_ids"], eos)]
    rows = all_of(load(sets["split"], 1, split="train", seq_len=16, shuffle=False))
    assert [*chain.from_iterable(rows)] == trained[: len(trained) // 16 * 16]


@pytest.mark.parametrize(
    ("world", "batch_size", "accumulated", "workers"),
    [
        *((2, 8, 1, 0), (4, 4, 1, 0), (2, 4, 2, 0), (5, 1, 3, 0), (1, 1, 1, 0), (3, 5, 2, 0), (4, 16, 1, 0)),
        pytest.param(2, 4, 2, 2, marks=pytest.mark.processes),
    ],
)
def test_each_sample_comes_once_in_one_order_and_each_batch_has_labels_where_there_are_samples_for_all(
    tmp_path: Path, world: int, batch_size: int, accumulated: int, workers: int
) -> None:
    """53 samples: the last global batch of 16 has 5 of them for up to 4 batches, that of 15 has 8 for 15."""
    save_word_tokenizer(tmp_path, 100)
    write_numbered_tars(tmp_path, 53, 1, ids_of=lambda number: [number, 99])
    size = world * batch_size * accumulated
    of_ranks: list[list[Any]] = []
    for rank in range(world):
        options = {"global_batch_size": size, "model_id": tmp_path, "num_workers": workers}
        with load(tmp_path, batch_size, rank, world, **options) as loader:
            of_ranks.append([labelled(batch) for batch in loader])
            assert labelled(loader.peek()) == of_ranks[rank][0], "the next epoch is the same"
            assert len(of_ranks[rank]) == len(of_ranks[0]), "each rank gets equally many batches"
    steps = range(0, len(of_ranks[0]), accumulated)
    batches = [batch for step in steps for part in of_ranks for batch in part[step : step + accumulated]]
    assert [ids[0] for batch in batches for ids in batch] == [*range(53)]
    num_last = 53 % size or size
    assert sum(not batch for batch in batches) == max(world * accumulated - num_last, 0)
    of_last = [len(batch) for batch in batches[-world * accumulated :]]
    assert min(of_last) >= num_last // (world * accumulated)


def test_a_state_is_of_its_side(sets: DataSets) -> None:
    with load(sets["split"], split="train") as loader:
        state = loader.state_at(2)
        loader.load_state_dict(state)
    for split in ("validation", None):
        with load(sets["split"], split=split) as loader, refuses(OtherRun, found="split"):
            loader.load_state_dict(state)


@pytest.mark.processes
def test_a_collate_fn_of_ones_own_must_make_labels_where_a_last_batch_is_filled_up(sets: DataSets) -> None:
    with load(sets["split"], 8, collate_fn=list, num_workers=1) as loader, refuses(UsageError):
        list(loader)
    with load(sets["split"], 1, collate_fn=list) as loader:
        assert [*loader]
