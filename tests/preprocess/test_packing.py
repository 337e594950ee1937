"""Rows: concat loses nothing, best_fit cuts no document that fits, and neither depends on batches."""

from __future__ import annotations

import itertools
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


@given(documents, st.integers(1, 20))
def test_concat_rows_joined_are_the_documents_joined(lengths: list[int], seq_len: int) -> None:
    packer = ConcatRows(spec(seq_len))
    rows = rows_of(pack(packer, lengths, 7))
    joined = [1000 * (d + 1) + t for d, n in enumerate(lengths) for t in range(n)]
    assert [token for ids, _, _ in rows for token in ids] == joined
    assert all(len(ids) == seq_len for ids, _, _ in rows[:-1]), "only the last row is short"
    crossing = {
        token // 1000
        for (a, _, _), (b, _, _) in itertools.pairwise(rows)
        for token in a
        if token // 1000 == b[0] // 1000
    }
    assert packer.num_split == len(crossing)


@given(documents, st.integers(1, 20))
def test_best_fit_keeps_every_token_once_and_cuts_only_what_is_longer_than_a_row(
    lengths: list[int], seq_len: int
) -> None:
    packer = BestFitRows(spec(seq_len))
    rows = rows_of(pack(packer, lengths, 7))
    found = sorted(token for ids, _, _ in rows for token in ids)
    assert found == [1000 * (d + 1) + t for d, n in enumerate(lengths) for t in range(n)]
    rows_with: dict[int, set[int]] = {}
    for number, (ids, _, _) in enumerate(rows):
        for token in ids:
            rows_with.setdefault(token // 1000 - 1, set()).add(number)
    assert all(len(rows_with[d]) == 1 for d, n in enumerate(lengths) if 0 < n <= seq_len)
    assert packer.num_split == sum(n > seq_len for n in lengths)


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


def test_best_fit_closes_the_fullest_row_when_too_many_are_open() -> None:
    seq_len = 1 << 20  # 16 rows may be open
    packer = BestFitRows(spec(seq_len))
    sizes = [seq_len // 2 + 1 + number for number in range(20)]  # no two fit into one row
    groups: list[RowGroup] = []
    for number, size in enumerate(sizes):
        tokens = TokenBatch(ids=np.zeros(size, np.uint32), offsets=np.array([0, size]))
        groups += packer.append(tokens, np.array([(0, 0, number, b"")], START))
    closed_early = [int(group.firsts["source_offset"][0]) for group in groups]
    assert closed_early == [15, 16, 17, 18], "each time the fullest of sixteen"
    assert len(groups) + len(list(packer.finish())) == 20


def test_best_fit_pads_little_on_short_documents() -> None:
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(3.3, 0.9, 4000).astype(int) + 2, 900).tolist()
    groups = pack(BestFitRows(spec(512)), lengths, 500)
    used, size = sum(int(g.row_tokens.sum()) for g in groups), sum(g.rows.size for g in groups)
    assert used == sum(lengths)
    assert used / size > 0.97
