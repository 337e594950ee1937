"""Padded documents: widths, long documents, grouping by length, and what the metrics count."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import webdataset

from loader import TokenLoader, get_llama3_dataloader
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep


def load(shards: Any, batch_size: int = 8, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, **{"num_workers": 0, **options})


def shown(batch: Any) -> list[tuple[int, ...]]:
    return [
        tuple(ids[: int(mask.sum())].tolist())
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@pytest.fixture(scope="module")
def documents(made_dir: Path) -> list[tuple[int, ...]]:
    with load(made_dir, 1, shuffle=False) as loader:
        return [ids for batch in loader for ids in shown(batch)]


@pytest.mark.processes
def test_long_documents_are_truncated_and_what_is_cut_is_counted(
    made_dir: Path, documents: list[tuple[int, ...]]
) -> None:
    for workers in (0, 2):
        with load(made_dir, 1, max_length=20, num_workers=workers) as loader:
            found = [ids for batch in loader for ids in shown(batch)]
            assert Counter(found) == Counter(ids[:20] for ids in documents)
            assert loader.metrics.num_cut_tokens >= sum(len(ids[20:]) for ids in documents) > 0
            assert loader.metrics.num_tokens == sum(map(len, found))


def test_widths_are_the_longest_the_maximum_or_the_multiple_asked_for(made_dir: Path) -> None:
    def widths(**options: Any) -> set[int]:
        with load(made_dir, **options) as loader:
            return {batch["input_ids"].shape[1] for batch in loader}

    assert len(widths()) > 5
    assert widths(max_length=40, padding="max_length") == {40}
    assert widths(max_length=40, padding="max_length", pad_to_multiple_of=16) == {48}
    assert {width % 16 for width in widths(pad_to_multiple_of=16)} == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "max_length"}, "needs max_length"),
        ({"padding": "left"}, "padding is 'left', expected 'longest' or 'max_length'"),
        ({"group_by_length": 3}, "groups of 3 samples of like length do not divide the global batch of 8"),
        (
            {"group_by_length": 50, "batch_size": 4},
            "groups of 50 samples of like length do not divide the global batch of 4",
        ),
        ({"group_by_length": -4}, "group_by_length is -4, expected at least 0"),
        ({"group_by_length": 2.5}, "group_by_length is 2.5, expected a whole number"),
        ({"group_by_length": 4, "shuffle": False}, "shuffle=False forbids it"),
        (
            {"batch_size": 2, "group_by_length": 8, "global_batch_size": 8, "rank": 0, "world_size": 4},
            r"ranks can be \[1\]",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(made_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(made_dir, **options)


@pytest.mark.slow
def test_grouping_gives_each_sample_once_and_less_padding_in_batches_that_still_differ(
    made_dir: Path, documents: list[tuple[int, ...]]
) -> None:
    shares, orders = [], []
    for group in (False, True):
        with load(made_dir, 7, group_by_length=group) as loader:  # 840 = 7 * 120: none is left out
            batches = [shown(batch) for batch in loader]
            assert Counter(ids for batch in batches for ids in batch) == Counter(documents)
            shares.append(loader.metrics.padding_share)
            orders.append([max(map(len, batch)) for batch in batches])
            assert [shown(batch) for batch in loader] != batches
    assert shares[1] < shares[0] / 3
    ascents = sum(one < other for one, other in zip(orders[1], orders[1][1:], strict=False))
    assert 35 < ascents < 85, "batches of all lengths are mixed, not sorted"


@pytest.mark.processes
def test_grouped_global_batches_are_the_same_for_every_world_and_number_of_workers(
    made_dir: Path,
) -> None:
    options = {"group_by_length": 2, "global_batch_size": 16, "max_length": 50}
    with load(made_dir, 16, **options) as loader:
        whole = [shown(batch) for batch in loader]
    for world, batch_size, workers in ((2, 8, 0), (8, 2, 0), (4, 2, 2), (1, 16, 3)):
        parts = []
        for rank in range(world):
            with load(
                made_dir, batch_size, rank=rank, world_size=world, num_workers=workers, **options
            ) as loader:
                found = [shown(batch) for batch in loader]
            micro = 16 // world // batch_size
            parts.append([list(chain(*found[at : at + micro])) for at in range(0, len(found), micro)])
        assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole


def test_tars_of_others_are_grouped_by_lengths_counted_at_the_start(prep: Prep, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(64):
            writer.write({"__key__": f"d{number}", "token_ids.json": [number] * (number * 29 % 64)})
    with load(tmp_path / "a.tar", 8, group_by_length=True, model_id=prep.model_dir) as loader:
        lengths = [sorted(map(len, shown(batch))) for batch in loader]
    assert sorted(lengths) == [list(range(first, first + 8)) for first in range(0, 64, 8)]


@pytest.mark.processes
def test_metrics_count_tokens_padding_and_waiting_and_can_be_reset(made_dir: Path) -> None:
    for options in ({}, {"num_workers": 2}, {"collate_fn": lambda examples: examples}):
        with load(made_dir, **options) as loader:
            batches = list(loader)
            assert loader.metrics.num_batches == len(batches)
            assert loader.metrics.wait_s > 0
            if "collate_fn" not in options:
                assert loader.metrics.num_tokens == sum(int(each["attention_mask"].sum()) for each in batches)
                padding = sum(int((each["attention_mask"] == 0).sum()) for each in batches)
                assert loader.metrics.num_padding == padding
                total = loader.metrics.num_tokens + padding
                assert loader.metrics.padding_share == pytest.approx(padding / total)
            loader.metrics.reset()
            assert (loader.metrics.num_tokens, loader.metrics.wait_s, loader.metrics.padding_share) == (
                0,
                0,
                0,
            )
