"""preprocess/make/packing.py: documents become rows. The oracle compares many more with a plain packer."""

from __future__ import annotations

import numpy as np
import pytest

from preprocess.make.packing import START, RowGroup, packer_of
from preprocess.make.token_ids import TokenBatch
from shardprep.format.spec import DatasetSpec, TokenizerSpec

TOKENIZER = TokenizerSpec(
    model_id="small",
    fingerprint="0" * 64,
    vocab_size=100,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=99,
)
SPEC = DatasetSpec(
    plan_id="0" * 64,
    num_shards=1,
    record="packed",
    token_format="npy",
    seq_len=4,
    append_eos=False,
    tokenizer=TOKENIZER,
)


def packed(pack: str, lengths: list[int], batch: int) -> tuple[list[list[int]], list[int], int]:
    """Pack documents; all ids of the n-th are n. Return the rows, tokens per row, and split documents."""
    packer = packer_of(SPEC, pack)
    groups: list[RowGroup] = []
    for first in range(0, len(lengths), batch):
        some = [np.full(size, first + n, np.uint32) for n, size in enumerate(lengths[first : first + batch])]
        groups += packer.append(TokenBatch.of(some), np.zeros(len(some), START))
    groups += packer.finish()
    rows = [row for group in groups for row in group.rows.tolist()]
    return rows, [size for group in groups for size in group.row_tokens.tolist()], packer.num_split


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_concat_joins_documents_and_cuts_them_at_row_ends(batch: int) -> None:
    rows, sizes, num_split = packed("concat", [3, 2, 4], batch)
    assert rows == [[0, 0, 0, 1], [1, 2, 2, 2], [2, 99, 99, 99]]
    assert sizes == [4, 4, 1]
    assert num_split == 2


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_best_fit_keeps_documents_whole_where_they_leave_the_least_space(batch: int) -> None:
    rows, sizes, num_split = packed("best_fit", [2, 3, 1, 2], batch)
    assert rows == [[1, 1, 1, 2], [0, 0, 3, 3]]
    assert sizes == [4, 4]
    assert num_split == 0


def test_best_fit_cuts_a_document_that_is_longer_than_a_row() -> None:
    rows, sizes, num_split = packed("best_fit", [6, 2], 2)
    assert rows == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert sizes == [4, 4]
    assert num_split == 1
