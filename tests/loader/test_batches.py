"""Batches: widths, padding, labels, packed rows, targets, collators and metrics."""

from __future__ import annotations

import copy
import logging
import operator
import pickle
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

from loader import CausalLMCollator, UsageError
from tests.attention_families import small_model
from tests.external_tars import write_numbered_tars
from tests.oracle.forms import DataSets
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, epoch_of, ids_of, open_loader, refuses

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from typing_extensions import assert_type

FIELDS = ("position_ids", "segment_ids", "cu_seqlens")


# Padding and collators


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(1, 6), st.sampled_from([None, 8]), st.sampled_from([None, 2]), st.integers(0, 3))
def test_batches_equal_those_of_transformers_collator_for_the_same_samples(
    numbered: Path, batch_size: int, multiple: int | None, max_length: int | None, seed: int
) -> None:
    options: dict[str, Any] = {"model_id": numbered, "seed": seed, "max_length": max_length}
    made = open_loader(numbered, batch_size, pad_to_multiple_of=multiple, **options)
    raw: Any = open_loader(numbered, batch_size, collate_fn=list, **options)
    assert isinstance(made.collate_fn, DataCollatorForLanguageModeling)
    own = DataCollatorForLanguageModeling(made.tokenizer, mlm=False, pad_to_multiple_of=multiple)
    for batch, samples in zip(made, raw, strict=True):
        lists = [sample["input_ids"] for sample in samples]
        for expected in (own(samples), made.collate_fn(samples), made.collate_fn(lists)):
            assert list(batch) == list(expected)
            assert all(torch.equal(batch[name], expected[name]) for name in batch)
            assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert raw.collate_fn is list
    assert type(made.collate_fn([[1]])) is BatchEncoding
    arrays = made.collate_fn([[1], [2, 3]], return_tensors="np")
    assert {type(array) for array in arrays.values()} == {np.ndarray}


def tokenizer(pad: str | None = "w98", eos: str | None = "w99", special: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer of 100 words, with special tokens from id 100 on."""
    model = Tokenizer(models.WordLevel({f"w{number}": number for number in range(100)}, "w0"))
    model.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=pad, eos_token=eos)


def test_a_real_eos_keeps_its_label_if_pad_is_eos_and_masked_tokens_have_none() -> None:
    names = tokenizer(pad="w99")
    names.padding_side = "left"  # ignored: padding is always on the right
    examples: list[Any] = [{"input_ids": [1, 99, 2, 99]}, {"input_ids": [3, 99], "attention_mask": [0, 1]}]
    found = CausalLMCollator(names)(examples)
    assert found["input_ids"].tolist() == [[1, 99, 2, 99], [3, 99, 99, 99]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert found["labels"].tolist() == [[1, 99, 2, 99], [-100, 99, -100, -100]]


RIGHT_PAD, RESERVED = "<|finetune_right_pad_id|>", "<|reserved_special_token_3|>"


@pytest.mark.parametrize(
    ("names", "token", "token_id", "level"),
    [
        (tokenizer(special=(RIGHT_PAD,)), "w98", 98, logging.INFO),
        (tokenizer(pad=None, special=(RESERVED, RIGHT_PAD)), RIGHT_PAD, 101, logging.INFO),
        (tokenizer(pad=None, special=("<|x|>", RESERVED)), RESERVED, 101, logging.INFO),
        (tokenizer(pad=None), "w99", 99, logging.WARNING),
        (tokenizer(pad="w99"), "w99", 99, logging.WARNING),
    ],
)
def test_the_pad_token_is_one_that_the_tokenizer_has_and_is_logged(
    names: Any, token: str, token_id: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    size, own = len(names), names.pad_token
    with caplog.at_level(logging.INFO, "loader"):
        collator = CausalLMCollator(names)
        assert collator([[1, 2], [3]])["input_ids"].tolist() == [[1, 2], [3, token_id]]
    assert (len(names), names.pad_token) == (size, own)
    assert [(record.levelno, token in record.getMessage()) for record in caplog.records] == [(level, True)]


def test_a_collator_refuses_a_missing_pad_token_mlm_and_unknown_fields() -> None:
    with refuses(UsageError):
        CausalLMCollator(tokenizer(pad=None, eos=None))
    names = tokenizer()
    names.mask_token = "w97"
    with refuses(UsageError):
        CausalLMCollator(names, mlm=True)
    with refuses(UsageError):
        CausalLMCollator(tokenizer())([{"input_ids": [1], "token_type_ids": [1]}])


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["documents", "chat"])
def test_a_collate_fn_gets_lists_in_the_training_process(sets: DataSets, name: str, workers: int) -> None:
    expected = epoch_of(sets[name])
    seen: list[Any] = []  # filled in this process

    def collate(samples: list[Any]) -> Any:
        seen.append(samples)
        return tuple(samples)

    with open_loader(sets[name], collate_fn=collate, num_workers=workers) as loader:
        batches: list[Any] = [*loader]
    assert batches == [tuple(samples) for samples in seen]
    for samples, made in zip(seen, expected, strict=True):
        for sample, fields in zip(samples, made, strict=True):
            assert sample.keys() == {"input_ids", *(["labels"] if name == "chat" else [])}
            assert all(sample[field] == fields[field] for field in sample)


def test_a_batch_is_a_dict_that_can_be_moved_copied_and_pickled(numbered: Path) -> None:
    options: dict[str, Any] = {"model_id": numbered, "seq_len": 16}
    for boundaries in ("transformers", FIELDS):
        with open_loader(numbered, boundaries=boundaries, **options) as loader:
            batch: Any = next(iter(loader))
        assert batch.labels is batch["labels"]
        for again in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
            assert type(again) is type(batch)
            assert list(again) == list(batch)
            assert torch.equal(again.labels, batch.labels)
        moved = {name: value.to("meta", non_blocking=True) for name, value in batch.items()}
        tensors = {name for name, value in batch.items() if isinstance(value, torch.Tensor)}
        assert {str(moved[name].device) for name in tensors} == {"meta"}
        assert all(int(moved[name]) == int(batch[name]) for name in batch.keys() - tensors)
        assert batch.to("meta") is batch


@pytest.mark.slow
def test_numbers_of_a_batch_work_as_ints_and_bools_in_a_model_also_compiled(numbered: Path) -> None:
    model = small_model("llama", "sdpa")
    with open_loader(numbered, model_id=numbered, seq_len=16, boundaries="transformers") as loader:
        batch = next(iter(loader))
    assert {batch[name].dtype for name in batch if name.startswith("cu_")} == {torch.int32}, "as kernels ask"
    plain = {name: value if isinstance(value, torch.Tensor) else int(value) for name, value in batch.items()}
    expected = model(**{**plain, "use_cache": False})
    moved = {name: value.to("cpu") for name, value in batch.items()}
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for found in (model(**moved), compiled(**moved)):
        assert torch.equal(found.logits, expected.logits)
        assert found.past_key_values is None


def test_pinned_batches_are_batches_in_pinned_memory(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so the call that pins is recorded."""
    with open_loader(numbered, model_id=numbered, pin_memory=True) as loader:  # no GPU: ignored
        expected = [ids_of(batch) for batch in loader]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: recorded.append(1) or self.clone())
    with open_loader(numbered, model_id=numbered) as loader:
        assert loader.pin_memory
        found = [*loader]
    assert [ids_of(batch) for batch in found] == expected
    assert {callable(getattr(batch, "to", None)) for batch in found} == {True}
    assert len(recorded) == 3 * len(expected)


# Widths and counts


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_metrics_count_tokens_padding_waits_and_cut_tokens(sets: DataSets, workers: int) -> None:
    lengths = [len(each["input_ids"]) for batch in epoch_of(sets["documents"]) for each in batch]
    with open_loader(sets["documents"], max_length=20, shuffle=False, num_workers=workers) as loader:
        masks = [batch["attention_mask"] for batch in loader]
        metrics = loader.metrics
        assert (metrics.num_batches, metrics.wait_s > 0) == (len(masks), True)
        assert metrics.num_tokens == sum(int(mask.sum()) for mask in masks)
        assert metrics.num_padding == sum(int((mask == 0).sum()) for mask in masks) > 0
        assert metrics.padding_share == metrics.num_padding / (metrics.num_padding + metrics.num_tokens)
        assert metrics.num_cut_tokens == sum(max(length - 20, 0) for length in lengths) > 0
        metrics.reset()
        assert (metrics.num_tokens, metrics.wait_s, metrics.padding_share) == (0, 0, 0)


def test_grouping_reduces_padding_and_mixes_batches_of_all_lengths(tmp_path: Path) -> None:
    """With external tars, whose lengths are counted first."""
    save_word_tokenizer(tmp_path, 200)
    write_numbered_tars(tmp_path, 640, 2, ids_of=lambda number: [5] * (1 + number * 29 % 64))
    shares = []
    for group in (False, True):
        with open_loader(tmp_path, 8, model_id=tmp_path, group_by_length=group) as loader:
            widths = [batch["input_ids"].shape[1] for batch in loader]
            shares.append(loader.metrics.padding_share)
    assert shares[1] < shares[0] / 3
    assert 20 < sum(map(operator.lt, widths, widths[1:])) < 60, "batches are not sorted by length"


def test_batches_without_targets_are_warned_of_once(
    numbered: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents of one token have no target."""
    write_numbered_tars(tmp_path, 40, 1, ids_of=lambda number: [number])

    def num_warnings(data: Path, **options: Any) -> int:
        with open_loader(data, 2, model_id=numbered, **options) as loader:
            caplog.clear()
            batches: list[Any] = [*loader]
        assert all((batch["labels"] != -100).any() for batch in batches)
        return sum(record.name == "loader.batch.batches" for record in caplog.records)

    collator = CausalLMCollator(AutoTokenizer.from_pretrained(numbered))
    for options in ({}, {"collate_fn": collator}, {"collate_fn": lambda rows: {**collator(rows)}}):
        assert num_warnings(tmp_path, **options) == 1
    assert num_warnings(numbered, shuffle=False, seq_len=8) == 0


# Rows, labels and shifted targets


def test_a_shifted_row_that_is_blank_but_for_its_last_token_keeps_an_attended_place(tmp_path: Path) -> None:
    """Its last token, the BOS of the next document, is cut off from the inputs."""
    world = World(tmp_path).raw({"a.txt": "the\nkettle\n" * 2}).make(record="packed", seq_len=4, num_shards=1)
    (tmp_path / "ids").write_text("at:a.txt:0\n")
    new = world.blanked(tmp_path / "ids", tmp_path / "new")
    with open_loader(new.data_dir, 1, shuffle=False) as whole:
        assert next(iter(whole))["attention_mask"].tolist() == [[0, 0, 0, 1]]
    with open_loader(new.data_dir, 1, shuffle=False, targets="shifted") as shifted:
        batch = next(iter(shifted))
    assert batch["attention_mask"].tolist() == [[1, 0, 0]]
    assert batch["input_ids"].shape == batch["labels"].shape == (1, 3)


def test_boundaries_of_padded_documents_exclude_the_padding(sets: DataSets) -> None:
    with open_loader(sets["documents"], boundaries=FIELDS) as loader:
        batch = next(iter(loader))
    if TYPE_CHECKING:
        assert_type(batch["segment_ids"], torch.Tensor)
    assert torch.equal(batch["segment_ids"], batch["attention_mask"])
    assert len(batch["cu_seqlens"]) == 1 + 4 + int((batch["attention_mask"][:, -1] == 0).sum())


@pytest.mark.processes
def test_mixing_conversations_and_plain_text_changes_no_label(sets: DataSets) -> None:
    """tests/preprocess/test_chat.py compares the masks on disk with those of transformers."""

    def rows(data: Any, **options: Any) -> list[Any]:
        return [*chain(*epoch_of(data, 1, model_id=sets["chat"] / "tokenizer", **options))]

    chat, text = (rows(sets[name], shuffle=False) for name in ("chat", "best_fit"))
    assert any(-100 in row["labels"] for row in chat)
    assert not any(-100 in row["labels"] for row in text)
    assert rows([sets["best_fit"], sets["chat"]], shuffle=False) == [*text, *chat]
    mixed = rows({"chat": sets["chat"], "text": sets["best_fit"]}, weights={"chat": 0.5, "text": 0.5})
    assert all((row in chat) != (row in text) for row in mixed)
    assert 0 < sum(row in chat for row in mixed) < len(mixed)


def test_padded_documents_keep_all_targets_and_have_the_requested_width(numbered: Path) -> None:
    options: dict[str, Any] = {"model_id": numbered, "shuffle": False, "targets": "shifted"}
    found: list[list[int]] = []
    with open_loader(numbered, pad_to_multiple_of=4, **options) as loader:
        for batch in loader:
            assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
            assert batch["input_ids"].shape[1] % 4 == 0
            for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
                found.append([ids[0], *(label for label in labels if label != -100)])
                assert found[-1][:-1] == ids[: len(found[-1]) - 1]
    assert found == [[number, *range(number % 5)] for number in range(104)]
    for multiple, width in ((None, 3), (8, 8)):
        form: dict[str, Any] = {"max_length": 3, "padding": "max_length", "pad_to_multiple_of": multiple}
        with open_loader(numbered, **form, **options) as loader:
            assert {batch["input_ids"].shape for batch in loader} == {(4, width)}
