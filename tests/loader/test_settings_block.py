"""What a loader says of its settings when it is made: one INFO record, by rank 0."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import get_llama3_dataloader

if TYPE_CHECKING:
    pass


def said(caplog: pytest.LogCaptureFixture, made_dir: Path, **options: Any) -> list[str]:
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="loader.dataloader"),
        get_llama3_dataloader(made_dir, **{"batch_size": 4, "num_workers": 0, **options}) as loader,
    ):
        assert loader.order.num_samples > 0
    return [record.message for record in caplog.records if record.name == "loader.dataloader"]


def test_settings_and_steps_of_an_epoch_stand_in_one_record(
    caplog: pytest.LogCaptureFixture, made_dir: Path
) -> None:
    (block,) = said(caplog, made_dir, global_batch_size=16, rank=0, world_size=2, max_length=64, seed=7)
    with get_llama3_dataloader(
        made_dir, 4, global_batch_size=16, rank=0, world_size=2, num_workers=0
    ) as loader:
        steps, samples = loader.order.steps_per_epoch, loader.order.num_samples
    lines = block.splitlines()
    assert lines[0].startswith(f"loader of 3 shards, {samples:,} samples, about ")
    pad = f"with {loader.tokenizer.pad_token} (id {loader.tokenizer.pad_token_id})"
    batch = "4 per batch x 2 batches per step x 2 ranks; padding to the longest of a batch"
    left_out = f"{samples % 16:,} samples left out, others each epoch"
    assert lines[1:5] == [
        "  sample: a document of up to 64 tokens, longer ones: truncate",
        f"  global batch: 16 samples = {batch}, {pad}",
        f"  epoch: {steps:,} steps, {2 * steps:,} batches per rank; {left_out}",
        "  order: shuffled anew each epoch, seed 7",
    ]
    assert lines[5] == "  readers: this process, no workers"


def test_only_rank_0_says_it(caplog: pytest.LogCaptureFixture, made_dir: Path) -> None:
    assert said(caplog, made_dir, rank=1, world_size=2) == []


def test_a_block_tells_rows_their_boundaries_and_groups(
    caplog: pytest.LogCaptureFixture, made_dir: Path
) -> None:
    (crossing,) = said(caplog, made_dir, seq_len=128)
    assert "a row of 128 tokens; attention crosses documents (no boundaries)" in crossing
    (apart,) = said(caplog, made_dir, seq_len=128, boundaries="transformers", shuffle=False)
    assert "a row of 128 tokens; boundaries transformers" in apart
    assert "order: as the shards stand, not shuffled" in apart
    (grouped,) = said(caplog, made_dir, group_by_length=True, padding="max_length", max_length=32)
    assert "samples of like length in groups of 4" in grouped
    assert "padding to 32 tokens, with " in grouped


def test_fewer_workers_than_asked_for_are_told_with_the_reason(
    caplog: pytest.LogCaptureFixture, made_dir: Path
) -> None:
    warning, block = said(caplog, made_dir, batch_size=2, num_workers=3)
    assert "num_workers is 3, but a rank's part of a global batch is 2" in warning
    assert "readers: 2 workers per rank, 2 chunks ahead each, kept between epochs" in block
