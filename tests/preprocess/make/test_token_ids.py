"""preprocess/make/token_ids.py: ids of consecutive documents in one array."""

from __future__ import annotations

import numpy as np

from preprocess.make.token_ids import TokenBatch

DOCUMENTS = [[1, 2, 3], [], [4]]


def batch() -> TokenBatch:
    return TokenBatch.of([np.array(ids, np.uint32) for ids in DOCUMENTS])


def lists_of(tokens: TokenBatch) -> list[list[int]]:
    return [ids.tolist() for ids in tokens.documents()]


def test_a_batch_has_its_documents_in_order_empty_ones_too() -> None:
    assert batch().ids.tolist() == [1, 2, 3, 4]
    assert batch().offsets.tolist() == [0, 3, 3, 4]
    assert lists_of(batch()) == DOCUMENTS
    assert lists_of(TokenBatch.of([])) == []


def test_batches_are_joined_and_documents_chosen() -> None:
    assert lists_of(TokenBatch.joined([batch(), batch()])) == DOCUMENTS + DOCUMENTS
    assert lists_of(batch().only(np.array([True, True, False]))) == DOCUMENTS[:2]


def test_a_batch_of_another_process_comes_as_bytes() -> None:
    sent = TokenBatch.of_buffers(batch().ids.tobytes(), batch().offsets.tobytes())
    assert lists_of(sent) == DOCUMENTS
