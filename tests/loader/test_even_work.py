"""Rows of a step, dealt to ranks so that attention costs all of them about the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from loader import UsageError
from loader.even_work import attention_work, deal_rows_evenly, even_owners
from tests.checkout import ROOT
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_keeps_its_rows_on_every_world_and_its_work_is_more_even(
    prep: Prep, sample_dir: Path, site: Path, tmp_path: Path
) -> None:
    forms = {"made": {"record": "packed", "seq_len": 512}}
    prep.make_forms(sample_dir, tmp_path, forms, num_shards=2)
    steps_of: dict[int, Any] = {}
    for world in (2, 4):
        ranks_of = ("-m", "tests.even_work_ranks", str(tmp_path / "made"), str(tmp_path), str(world))
        run_child(
            [sys.executable, *ranks_of], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}
        )
        ranks = [torch.load(tmp_path / f"{world}-{rank}.pt") for rank in range(world)]
        steps_of[world] = list(zip(*ranks, strict=True))
    for step, same_step in zip(steps_of[2], steps_of[4], strict=True):
        expected = rows_of(step, "read")
        assert len(set(expected)) == 16
        for ranks in (step, same_step):
            assert rows_of(ranks, "got") == rows_of(ranks, "read") == expected
            before, after = (
                np.array([rank[form]["work"].sum(1).numpy() for rank in ranks]) for form in ("read", "got")
            )
            assert after.max(0).sum() < before.max(0).sum()  # each batch waits for the slowest rank
            assert np.ptp(after.sum(1)) < np.ptp(before.sum(1))
            assert all((np.diff(works) <= 0).all() for works in after)


def rows_of(ranks: Any, form: str) -> list[Any]:
    """All fields of all rows of a step, in one order."""
    fields = [torch.cat([rank[form][name] for rank in ranks]) for name in ranks[0][form] if name != "work"]
    return sorted(map(str, torch.stack(fields, 1).tolist()))


def test_the_work_of_a_row_is_the_sum_of_its_documents_squared_lengths() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [1] * 8, [0] * 8])
    batch = {"input_ids": torch.zeros_like(segments), "segment_ids": segments}
    assert attention_work(batch).tolist() == [9 + 4, 8, 64, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_rank_gets_equally_many_rows_and_the_longest_is_alone_with_short_ones(size: int) -> None:
    work = np.array([5, 900, 1, 7, 3, 8, 6, 2] * 3)
    owners = even_owners(work, size)
    assert np.bincount(owners, minlength=size).tolist() == [len(work) // size] * size
    if size == 3:
        assert sorted(owners[work == 900].tolist()) == [0, 1, 2]


def test_fields_that_are_no_rows_are_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match="cu_seqlens is no int64 tensor"):
        deal_rows_evenly([{"input_ids": ids, "cu_seqlens": torch.zeros(3, dtype=torch.int32)}])
