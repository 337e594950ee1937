"""Padding, labels and masks."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

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

from loader import CausalLMCollator
from loader.batches import Batch
from loader.boundaries import HostNumber
from shardprep.errors import UsageError
from tests.checkout import SHARED

PAD, EOS = 98, 99
LLAMA3 = SHARED / "tokenizers" / "llama3"


def tokenizer(pad: str | None = "w98", eos: str | None = "w99", special: tuple[str, ...] = ()) -> Any:
    """100 words, and some special tokens from id 100 on."""
    model = Tokenizer(models.WordLevel({f"w{number}": number for number in range(100)}, "w0"))
    model.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=pad, eos_token=eos)


samples = st.lists(
    st.lists(st.integers(0, 97) | st.just(EOS), min_size=1, max_size=40), min_size=1, max_size=9
)


@pytest.mark.slow
@settings(max_examples=60)
@given(samples, st.sampled_from([None, 1, 8, 13]), st.booleans())
def test_batches_equal_transformers_own_bit_for_bit_where_pad_is_distinct(
    rows: list[list[int]], multiple: int | None, with_mask: bool
) -> None:
    names = tokenizer()
    examples = [
        {"input_ids": ids} | ({"attention_mask": [1] * len(ids)} if with_mask else {}) for ids in rows
    ]
    expected = DataCollatorForLanguageModeling(names, mlm=False, pad_to_multiple_of=multiple)(examples)
    collator = CausalLMCollator(names, pad_to_multiple_of=multiple)
    arrays = [np.array(ids, np.int32) for ids in rows]
    lengths = np.array([len(ids) for ids in rows])
    joined = collator.batches.of_documents(np.concatenate(arrays), lengths)
    assert [type(each) for each in (collator(examples), joined)] == [BatchEncoding, Batch]
    for found in (collator(examples), collator(rows), joined):
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype == torch.int64
            assert torch.equal(found[name], tensor)


@pytest.mark.slow  # transformers imports a lot for it
def test_numpy_batches_are_the_same_numbers() -> None:
    examples = [{"input_ids": [1, EOS]}, {"input_ids": [3]}]
    collator = CausalLMCollator(tokenizer(pad="w99"))
    tensors, arrays = collator(examples), collator(examples, return_tensors="np")
    assert all(isinstance(arrays[name], np.ndarray) for name in arrays)
    assert all(np.array_equal(arrays[name], tensors[name].numpy()) for name in tensors)


def test_labels_of_real_eos_survive_where_pad_is_eos_and_only_padding_is_masked() -> None:
    names = tokenizer(pad="w99")
    examples = [{"input_ids": [1, EOS, 2, EOS]}, {"input_ids": [3, EOS]}]
    found = CausalLMCollator(names)(examples)
    assert found["input_ids"].tolist() == [[1, EOS, 2, EOS], [3, EOS, EOS, EOS]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert found["labels"].tolist() == [[1, EOS, 2, EOS], [3, EOS, -100, -100]]
    original = DataCollatorForLanguageModeling(names, mlm=False)(examples)
    assert EOS not in original["labels"]  # the trap: a model that never learns to stop


def test_padding_is_to_the_right_whatever_the_tokenizer_says() -> None:
    names = tokenizer()
    names.padding_side = "left"
    assert CausalLMCollator(names)([[1, 2], [3]])["input_ids"].tolist() == [[1, 2], [3, PAD]]


def test_short_packed_rows_keep_their_width_and_lose_the_labels_of_their_padding() -> None:
    collator = CausalLMCollator(tokenizer())
    found = collator.batches.of_rows(np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1]))
    assert found["input_ids"].tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_what_the_attention_mask_of_a_sample_hides_has_no_label() -> None:
    found = CausalLMCollator(tokenizer())(
        [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}, {"input_ids": [4]}]
    )
    assert found["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert found["labels"].tolist() == [[1, 2, -100], [4, -100, -100]]


RIGHT_PAD, RESERVED = "<|finetune_right_pad_id|>", "<|reserved_special_token_3|>"


@pytest.mark.parametrize(
    ("names", "token", "token_id", "why"),
    [
        (tokenizer(special=(RIGHT_PAD,)), "w98", 98, "the tokenizer's own"),
        (tokenizer(pad=None, special=(RESERVED, RIGHT_PAD)), RIGHT_PAD, 101, "names none, and has this one"),
        (tokenizer(pad=None, special=("<|x|>", RESERVED)), RESERVED, 101, "the first reserved token"),
        (tokenizer(pad=None), "w99", 99, "EOS, for want of another"),
    ],
)
def test_the_pad_token_is_one_the_tokenizer_has_and_the_log_says_which_and_why(
    names: Any, token: str, token_id: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    size, own = len(names), names.pad_token
    with caplog.at_level(logging.INFO, "loader.batches"):
        collator = CausalLMCollator(names)
    assert collator([[1, 2], [3]])["input_ids"].tolist() == [[1, 2], [3, token_id]]
    assert (len(names), names.pad_token) == (size, own)
    (record,) = caplog.records
    assert token in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.parametrize(("pad", "level"), [("w98", logging.INFO), ("w99", logging.WARNING)])
def test_a_pad_token_that_is_eos_is_warned_of_once(
    pad: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "loader.batches"):
        collator = CausalLMCollator(tokenizer(pad=pad))
        collator([[1, 2], [3]])
    (record,) = caplog.records
    assert record.levelno == level
    assert ("never teach the model to end" in record.getMessage()) == (level == logging.WARNING)


def test_a_tokenizer_without_pad_and_eos_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a pad nor an EOS token"):
        CausalLMCollator(tokenizer(pad=None, eos=None))


def test_masked_language_modeling_and_unknown_fields_are_refused() -> None:
    with pytest.raises((UsageError, ValueError), match="mlm"):
        CausalLMCollator(tokenizer(), mlm=True)
    with pytest.raises(UsageError, match=r"samples have \['token_type_ids'\]"):
        CausalLMCollator(tokenizer())([{"input_ids": [1], "token_type_ids": [1]}])


def test_it_is_transformers_collator_and_can_be_pickled() -> None:
    collator = CausalLMCollator(tokenizer())
    assert isinstance(collator, DataCollatorForLanguageModeling)
    again = pickle.loads(pickle.dumps(collator))
    assert torch.equal(again([[1], [2, 3]])["labels"], collator([[1], [2, 3]])["labels"])


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA3.is_dir(), reason="no Llama 3 tokenizer: set SHARDPREP_TEST_SHARED")
def test_llama_3_is_padded_with_a_token_of_its_own_and_its_eos_keeps_its_label() -> None:
    names = AutoTokenizer.from_pretrained(LLAMA3)
    size = len(names)
    collator = CausalLMCollator(names)
    assert collator.pad.token_id not in (names.eos_token_id, names.bos_token_id)
    assert len(names) == size
    long, short = ([*names.encode(text), names.eos_token_id] for text in ("Hello there, world", "Hi"))
    found = collator([long, short])
    assert found["labels"][1].tolist() == [*short, *[-100] * (len(long) - len(short))]
    assert found["labels"][0, -1] == names.eos_token_id


def test_a_batch_is_a_dict_that_moves_and_is_copied_as_a_whole() -> None:
    batch = Batch(CausalLMCollator(tokenizer())([[1, 2], [3]]))
    batch["max_seqlen"] = HostNumber(2)  # type: ignore[assignment]  # it moves as tensors do
    assert batch.labels is batch["labels"]
    with pytest.raises(AttributeError, match="the batch has input_ids, attention_mask, labels, max_seqlen"):
        batch.pixel_values  # noqa: B018
    for again in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), Batch(batch)):
        assert type(again) is Batch
        assert list(again) == list(batch)
        assert torch.equal(again.labels, batch.labels)
    moved = Batch(batch).to("meta", non_blocking=True)
    assert type(moved) is Batch
    assert [str(moved[name].device) for name in ("input_ids", "attention_mask", "labels")] == ["meta"] * 3
    assert moved["max_seqlen"] == 2
