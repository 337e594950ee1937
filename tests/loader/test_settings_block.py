"""What a loader says of its settings when it is made: one INFO record, by rank 0."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from loader import get_llama3_dataloader

if TYPE_CHECKING:
    from tests.conftest import Prep


def said(
    caplog: pytest.LogCaptureFixture, made_dir: Path, level: int = logging.INFO, **options: Any
) -> list[str]:
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="loader.dataloader"),
        get_llama3_dataloader(made_dir, **{"batch_size": 4, "num_workers": 0, **options}) as loader,
    ):
        assert len(loader) > 0
    return [
        record.message
        for record in caplog.records
        if record.name == "loader.dataloader" and record.levelno == level
    ]


def test_settings_and_steps_of_an_epoch_stand_in_one_record(
    caplog: pytest.LogCaptureFixture, made_dir: Path
) -> None:
    (block,) = said(caplog, made_dir, global_batch_size=16, rank=0, world_size=2, max_length=64, seed=7)
    with get_llama3_dataloader(
        made_dir, 4, global_batch_size=16, rank=0, world_size=2, num_workers=0
    ) as loader:
        steps, samples = loader.run.steps_in(0), loader.run.sources[0].order.num_samples
    for words in (
        "rank 0 of 2, batch_size 4, global_batch_size 16",
        "of at most 64 tokens",
        "seed 7",
        f"{steps:,} steps",
        f"{samples % 16:,} samples are left out",
        f"{samples:,} samples of about",
    ):
        assert words in block


@pytest.mark.parametrize(
    ("options", "num_warnings"),
    [
        ({}, 1),
        ({"max_length": 64}, 1),
        ({"seq_len": 128}, 0),
        ({"rank": 1, "world_size": 2}, 0),
        ({"split": "validation"}, 0),
    ],
)
def test_rank_0_warns_once_of_training_documents_without_eos(
    caplog: pytest.LogCaptureFixture, made_dir: Path, options: dict[str, Any], num_warnings: int
) -> None:
    warnings = said(caplog, made_dir, logging.WARNING, **options)
    assert sum("never learns to stop" in warning for warning in warnings) == num_warnings


@pytest.mark.parametrize(
    ("append_eos", "template", "num_warnings"),
    [(False, None, 1), (False, "$A </s>", 0), (False, "</s> $A", 1), (True, None, 0)],
)
def test_plan_and_loader_warn_of_documents_that_get_no_eos(
    caplog: pytest.LogCaptureFixture,
    prep: Prep,
    tmp_path: Path,
    raw: Path,
    append_eos: bool,
    template: str | None,
    num_warnings: int,
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, "a"))
    if template is not None:
        words.post_processor = processors.TemplateProcessing(template, special_tokens=[("</s>", 1)])
    model, data = tmp_path / "model", tmp_path / "data"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>").save_pretrained(
        model
    )
    (raw / "a.txt").write_text("a\n" * 8)
    flags = ("--input_dir", raw, "--output_dir", data, "--model_id", model)
    planned = prep.command("plan", *flags, *(["--append_eos"] if append_eos else []))
    assert planned.code == 0, planned.text
    assert planned.text.count("never learns to stop") == num_warnings
    prep.make(data)
    assert prep.command("verify", data).code == 0
    warnings = said(caplog, data, logging.WARNING)
    assert sum("never learns to stop" in warning for warning in warnings) == num_warnings


def test_only_rank_0_says_it(caplog: pytest.LogCaptureFixture, made_dir: Path) -> None:
    assert said(caplog, made_dir, rank=1, world_size=2) == []


def test_a_block_tells_rows_and_their_boundaries(caplog: pytest.LogCaptureFixture, made_dir: Path) -> None:
    (crossing,) = said(caplog, made_dir, seq_len=128)
    assert "a row of 128 tokens; attention crosses documents (no boundaries)" in crossing
    (apart,) = said(caplog, made_dir, seq_len=128, boundaries="transformers", shuffle=False)
    assert "a row of 128 tokens; boundaries: transformers" in apart
    assert "not shuffled" in apart


def test_fewer_workers_than_asked_for_are_told_with_the_reason(
    caplog: pytest.LogCaptureFixture, made_dir: Path
) -> None:
    (block,) = said(caplog, made_dir, batch_size=2, num_workers=3)
    assert "num_workers is 3, but a rank's part of a global batch is 2" in caplog.text
    assert "2 workers" in block
