"""``loader.skip``: a range of steps is left out, the state has it, and it is elastic as everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader.state import SkippedSteps
from shardprep.errors import BrokenShard, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def load(made_dir: Path, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    options = {"num_workers": 0, "global_batch_size": 48, "rank": rank, "world_size": world, **options}
    return get_llama3_dataloader(made_dir, 48 // world // 2, **options)


def steps_of(loader: TokenLoader, epochs: int) -> Iterator[list[Any]]:
    """What each step of this rank got, epoch after epoch."""
    for _ in range(epochs):
        batches = list(loader)
        for first in range(0, len(batches), 2):
            yield [batch["input_ids"].tolist() for batch in batches[first : first + 2]]


@pytest.mark.slow
def test_a_range_is_left_out_and_all_else_comes_as_it_would(made_dir: Path) -> None:
    with load(made_dir) as loader:
        whole = list(steps_of(loader, 2))
        num_steps = loader.order.steps_per_epoch
    for trained, skipped in ((0, 3), (4, 2), (num_steps - 1, 3)):
        with load(made_dir) as loader:
            loader.load_state_dict(loader.state_at(trained))
            loader.skip(skipped)
            left = 1 if trained + skipped >= num_steps else 2
            assert list(steps_of(loader, left)) == whole[trained + skipped :]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_may_skip_inside_of_an_epoch_and_again(made_dir: Path, workers: int) -> None:
    with load(made_dir) as loader:
        whole = list(steps_of(loader, 1))
    with load(made_dir, num_workers=workers) as loader:
        seen = []
        for _ in range(3):
            for number, batch in enumerate(loader, start=1):
                seen.append(batch["input_ids"].tolist())
                if number == 2:
                    break
            loader.skip(2)
        expected = [whole[step] for step in (0, 3, 6)]
        assert [seen[n : n + 2] for n in range(0, 6, 2)] == expected
        assert loader.state_dict()["skipped"] == "1-2,4-5,7-8"
        assert loader.state_at(2) == {**loader.state_dict(), "step": 6, "skipped": "1-2,4-5"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_state_with_skipped_steps_resumes_on_any_number_of_ranks(made_dir: Path, world: int) -> None:
    with load(made_dir) as loader:
        loader.load_state_dict(loader.state_at(2))
        loader.skip(3)
        state = json.loads(json.dumps(loader.state_at(4)))
        assert (state["step"], state["skipped"]) == (7, "2-4")
        loader.load_state_dict(state)
        expected = next(steps_of(loader, 1))
    found: list[Any] = []
    for rank in range(world):
        with load(made_dir, world, rank) as loader:
            loader.load_state_dict(state)
            assert loader.state_at(1)["step"] == 1
            assert loader.state_at(5)["step"] == 8
            batches = next(steps_of(loader, 1))
            found += [row for batch in batches for row in batch]
    ids = [[token for token in row if token != loader.tokenizer.pad_token_id] for row in found]
    of_one = [[t for t in row if t != loader.tokenizer.pad_token_id] for batch in expected for row in batch]
    assert ids == of_one


def test_inside_of_a_step_nothing_can_be_skipped_and_no_steps_are_refused(made_dir: Path) -> None:
    with load(made_dir) as loader:
        next(iter(loader))
        with pytest.raises(UsageError, match="1 batches of a step are delivered"):
            loader.skip(1)
        with pytest.raises(UsageError, match="steps is 0, expected at least 1"):
            loader.skip(0)


def test_ranges_are_joined_counted_and_written_as_text() -> None:
    ranges = SkippedSteps().and_from(10, 5).and_from(20, 1).and_from(21, 2)
    assert ranges.text() == "10-14,20-22"
    assert SkippedSteps.of_text(ranges.text()) == ranges
    assert [ranges.order_step(trained) for trained in (0, 9, 10, 14, 15, 16)] == [0, 9, 15, 19, 23, 24]
    assert ranges.up_to(20).text() == "10-14"
    assert SkippedSteps.of_text("").ranges == ()


@pytest.mark.parametrize("text", ["5-4", "1-3,2-5", "x", "1,,2", 7, None])
def test_a_text_that_is_no_ranges_is_refused(text: Any) -> None:
    with pytest.raises(BrokenShard, match="its skipped is"):
        SkippedSteps.of_text(text)
