"""Rows: concat loses nothing, best_fit cuts no document that fits, and neither depends on batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.make.engines import TokenBatch
from preprocess.make.packing import START, BestFitRows, ConcatRows, Packer, RowGroup
from shardprep.format.dataset_spec import DatasetSpec, TokenizerSpec

pytestmark = pytest.mark.slow

PAD = 7


def spec(seq_len: int, vocab_size: int = 70_000) -> DatasetSpec:
    tokenizer = TokenizerSpec(
        model_id="m",
        fingerprint="f",
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return DatasetSpec(
        plan_id="0" * 64,
        num_shards=1,
        record="packed",
        token_format="npy",
        seq_len=seq_len,
        append_eos=False,
        tokenizer=tokenizer,
    )


def pack(packer: Packer, lengths: list[int], batch_size: int) -> list[RowGroup]:
    """Pack documents of these lengths; token t of document d is 1000 (d + 1) + t, its source offset is d."""
    groups: list[RowGroup] = []
    for first in range(0, len(lengths), batch_size):
        part = lengths[first : first + batch_size]
        ids = [np.arange(n, dtype=np.uint32) + 1000 * (first + d + 1) for d, n in enumerate(part)]
        starts = np.zeros(len(part), START)
        starts["source_offset"] = np.arange(first, first + len(part))
        offsets = np.concatenate(([0], np.cumsum(part))).astype(np.int64)
        groups += packer.append(TokenBatch(ids=np.concatenate(ids), offsets=offsets), starts)
    return [*groups, *packer.finish()]


def rows_of(groups: list[RowGroup]) -> list[tuple[list[int], list[int], int]]:
    """(tokens without padding, positions where documents begin, source offset of the first) a row."""
    rows = []
    for group in groups:
        seq_len = group.rows.shape[1]
        for number, (ids, num_tokens) in enumerate(zip(group.rows.tolist(), group.row_tokens, strict=True)):
            assert ids[num_tokens:] == [PAD] * (seq_len - num_tokens)
            positions = group.starts["position"] - number * seq_len
            begins = positions[(positions >= 0) & (positions < seq_len)].tolist()
            rows.append((ids[:num_tokens], begins, int(group.firsts["source_offset"][number])))
    return rows


documents = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@pytest.mark.parametrize("packing", [ConcatRows, BestFitRows])
@given(documents, st.integers(1, 20))
def test_starts_are_where_documents_begin_and_firsts_whose_the_first_token_is(
    packing: Any, lengths: list[int], seq_len: int
) -> None:
    rows = rows_of(pack(packing(spec(seq_len)), lengths, 5))
    for ids, begins, first in rows:
        assert begins == [position for position, token in enumerate(ids) if token % 1000 == 0]
        assert first == ids[0] // 1000 - 1
    assert sum(len(begins) for _, begins, _ in rows) == sum(n > 0 for n in lengths)


@pytest.mark.parametrize("packing", [ConcatRows, BestFitRows])
@given(documents, st.integers(1, 20), st.integers(1, 9))
def test_rows_do_not_depend_on_batches(
    packing: Any, lengths: list[int], seq_len: int, batch_size: int
) -> None:
    expected = rows_of(pack(packing(spec(seq_len)), lengths, len(lengths)))
    assert rows_of(pack(packing(spec(seq_len)), lengths, batch_size)) == expected
