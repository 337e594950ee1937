"""Properties of the order: samples are mixed about as well as by a full shuffle, and reads are bounded.

tests/oracle/test_law.py shows that the loader follows tests/oracle/law.py, so statistical properties are
tested on the law. A validation loader delivers each sample once, in a fixed order.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from loader import OtherRun, TokenLoader, UsageError
from tests.checkout import ROOT
from tests.children import run_child
from tests.external_tars import write_numbered_tars
from tests.forged import rewrite_json
from tests.oracle.forms import DataSets
from tests.oracle.law import Order, Run, Source
from tests.word_tokenizers import save_word_tokenizer
from tests.world import EOS, open_loader, refuses, samples_of


@pytest.mark.processes
def test_the_worked_example_of_the_order_holds() -> None:
    ended = run_child([sys.executable, "-m", "doctest", "-v", ROOT / "loader/order/order.py"])
    assert "4 passed and 0 failed." in ended.stdout


@pytest.mark.slow
def test_shards_sorted_by_source_are_mixed_nearly_as_by_a_full_permutation() -> None:
    """By the variance of a source's share over 1 step and over 64 steps, relative to a full permutation."""
    num_samples, size, num_sources = 20 * 25_600, 64, 20
    order = Order(Source([1] * num_samples, num_samples * 8192), size, 1, 1)
    steps = [Counter(n * num_sources // num_samples for n in order.samples(0, tick)) for tick in range(512)]
    for span, most in ((1, 1.2), (64, 6.0)):
        shares = [sum(steps[first : first + span], Counter()) for first in range(0, 512, span)]
        expected = span * size / num_sources
        deviations = [(share[source] - expected) ** 2 for share in shares for source in range(num_sources)]
        assert sum(deviations) / len(deviations) <= most * expected * (1 - 1 / num_sources)


@pytest.mark.slow
def test_a_sources_share_of_a_tick_varies_as_in_a_full_shuffle() -> None:
    sources = {name: Source([1] * 30_000, 30_000) for name in ("a", "b")}
    run = Run(sources, sizes=[(0, 16)], weights=[(0, {"a": 0.7, "b": 0.3})], seed=5)
    counts = [sum(sample.source == "b" for sample in run.tick(tick)) for tick in range(30 * 64)]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(0.3 * 16, rel=0.02)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert 0.8 < variance / (16 * 0.7 * 0.3) < 1.1


# Samples of 4 KiB, global batch, group; samples per block and per window of a slot.
WINDOWS = [
    (10**7, 8, 1, 128, 16 * 128),
    (10**7, 64, 1, 32, 16 * 32),
    (10**7, 256, 1, 32, 4 * 32),
    (10**9, 32_768, 1, 256, 4 * 256),
    (16 * 64 * 3, 64, 1, 3, 48),
    (100, 10, 1, 1, 16),
    (10**7, 64, 32, 128, 8192),
]


@pytest.mark.parametrize(("num_samples", "size", "group", "block", "window"), WINDOWS)
def test_sizes_of_blocks_and_windows_follow_from_the_memory_for_all_slots(
    sets: DataSets, tmp_path: Path, num_samples: int, size: int, group: int, block: int, window: int
) -> None:
    """A loader at first opens only index.json, so other numbers there simulate a large data set."""
    folder = Path(shutil.copytree(sets["documents"], tmp_path / "huge"))
    idx_bytes = 64 + 28 * num_samples + 4 * -(-num_samples // 512)
    tar_bytes = num_samples * 4096 - 2 * 10240
    (*_, of_first), *rest = json.loads((folder / "index.json").read_bytes())["shards"]
    shards = [[num_samples, num_samples, 100 * num_samples, tar_bytes, idx_bytes, 0, of_first]]
    shards += [[0, 0, 0, 10240, 64, 0, each[-1]] for each in rest]
    rewrite_json(folder / "index.json", shards=shards)
    with open_loader(folder, size, rank=0, world_size=1, group_by_length=group if group > 1 else 0) as loader:
        assert loader.state_dict()["sources"][0][3:5] == [block, window]


# Documents that a plan reserves for validation


def load(data: Any, batch_size: int = 4, rank: int = 0, world: int = 1, **more: Any) -> TokenLoader:
    options = {"split": "validation", "seed": 3, **more}
    return open_loader(data, batch_size, rank=rank, world_size=world, **options)


def labelled(batch: Any) -> list[list[int]]:
    """Return the samples of a batch that have labels."""
    return [each["input_ids"] for each in samples_of(batch) if any(label != -100 for label in each["labels"])]


def all_of(loader: TokenLoader) -> list[list[int]]:
    with loader:
        return [*chain.from_iterable(map(labelled, loader))]


def test_packed_at_load_the_validation_side_keeps_the_last_short_row(sets: DataSets) -> None:
    """The training side drops it. Both have all other tokens of their documents."""
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
def test_validation_delivers_each_sample_once_in_one_order_and_spreads_the_last_ones_over_all_batches(
    tmp_path: Path, world: int, batch_size: int, accumulated: int, workers: int
) -> None:
    """With 53 samples, the last global batch of 16 has 5 for up to 4 batches, and that of 15 has 8 for 15."""
    save_word_tokenizer(tmp_path, 100)
    write_numbered_tars(tmp_path, 53, 1, ids_of=lambda number: [number, 99])
    size = world * batch_size * accumulated
    of_ranks: list[list[Any]] = []
    for rank in range(world):
        options = {"global_batch_size": size, "model_id": tmp_path, "num_workers": workers}
        with load(tmp_path, batch_size, rank, world, **options) as loader:
            of_ranks.append([labelled(batch) for batch in loader])
            assert labelled(loader.peek()) == of_ranks[rank][0], "the next epoch is equal"
            assert len(of_ranks[rank]) == len(of_ranks[0]), "all ranks get equally many batches"
    steps = range(0, len(of_ranks[0]), accumulated)
    batches = [batch for step in steps for part in of_ranks for batch in part[step : step + accumulated]]
    assert [ids[0] for batch in batches for ids in batch] == [*range(53)]
    num_last = 53 % size or size
    assert sum(not batch for batch in batches) == max(world * accumulated - num_last, 0)
    of_last = [len(batch) for batch in batches[-world * accumulated :]]
    assert min(of_last) >= num_last // (world * accumulated)


def test_a_state_of_one_side_is_refused_by_the_other(sets: DataSets) -> None:
    with load(sets["split"], split="train") as loader:
        state = loader.state_at(2)
        loader.load_state_dict(state)
    for split in ("validation", None):
        with load(sets["split"], split=split) as loader, refuses(OtherRun, found="split"):
            loader.load_state_dict(state)


@pytest.mark.processes
def test_a_custom_collate_fn_must_make_labels_if_the_last_batch_is_filled_up(sets: DataSets) -> None:
    with load(sets["split"], 8, collate_fn=list, num_workers=1) as loader, refuses(UsageError):
        list(loader)
    with load(sets["split"], 1, collate_fn=list) as loader:
        assert [*loader]
