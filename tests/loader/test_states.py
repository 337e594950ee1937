"""A loop that stops anywhere, looks ahead, jumps or is copied: the state, and what the loader does with it.

That a run resumes on any number of ranks and workers with the same batches is tried by tests/oracle.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import OtherRun, OtherTokenizer, TokenLoader, UsageError
from tests.world import ids_of, open_loader, refuses

STEPS, MICRO = 13, 4  # of an epoch of 107 samples in global batches of 8; batches of 2 in one
WORKERS: list[Any] = [
    {},
    pytest.param({"num_workers": 2}, marks=pytest.mark.processes),
    pytest.param({"num_workers": 2, "persistent_workers": False}, marks=pytest.mark.processes),
]


def load(data: Path, batch_size: int = 8, **options: Any) -> TokenLoader:
    return open_loader(data, batch_size, **{"model_id": data, "global_batch_size": 8, "seed": 3, **options})


def numbers(batch: Any) -> list[int]:
    """Which samples a batch has."""
    return [ids[0] for ids in ids_of(batch)]


@pytest.fixture(scope="module")
def parts(numbered: Path) -> list[list[int]]:
    """The samples of each batch of 2, of five epochs."""
    with load(numbered, 2) as loader:
        return [numbers(batch) for batch in chain(*5 * [loader])]


@pytest.fixture(scope="module")
def whole(parts: list[list[int]]) -> list[list[int]]:
    """The samples of each step."""
    return [[*chain(*parts[first : first + MICRO])] for first in range(0, len(parts), MICRO)]


@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_that_stopped_jumped_was_copied_or_refused_a_state_goes_on_with_the_next_batch(
    numbered: Path, parts: list[list[int]], options: dict[str, Any]
) -> None:
    """Also inside of a step, and through the end of an epoch; what was only begun is not counted."""
    chance, at = random.Random(3), 0
    with load(numbered, seed=4) as loader:
        of_another_run = loader.state_at(3)
    with load(numbered, 2, **options) as loader:
        for number in range(16):
            if number % 4 == 3:
                at = MICRO * chance.randrange(2 * STEPS)
                loader.load_state_dict(loader.state_at(at // MICRO))
            iter(loader)
            before, num_batches = loader.state_dict(), loader.metrics.num_batches
            assert numbers(loader.peek()) == numbers(loader.peek()) == parts[at]
            assert (loader.state_dict(), loader.metrics.num_batches) == (before, num_batches)
            batches = iter(loader)
            for most in (chance.choice([1, 3, 10, 60]), 2):
                for batch in islice(batches, most):
                    assert numbers(batch) == parts[at]
                    at += 1
                assert (loader.num_steps_delivered, loader.state_dict()["num_micro"]) == divmod(at, MICRO)
                if number % 2:
                    with refuses(OtherRun):
                        loader.load_state_dict(of_another_run)
                else:
                    copied = pickle.loads(pickle.dumps(loader)) if number % 4 else copy.deepcopy(loader)
                    with copied as other:
                        assert other.state_dict() == loader.state_dict()
                        assert numbers(next(iter(other))) == parts[at]


@pytest.mark.parametrize("options", WORKERS)
def test_set_epoch_stays_in_an_epoch_or_leaves_it_with_a_warning_also_for_who_resumes(
    numbered: Path, whole: list[list[int]], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """How steps are counted then is tried by tests/oracle/test_states.py."""
    with load(numbered, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        caplog.clear()
        loader.set_epoch(0)  # in which it stands
        assert numbers(next(batches)) == whole[3]
        assert not caplog.records
        loader.set_epoch(2)
        with refuses(UsageError):
            next(batches)
        with refuses(UsageError):
            loader.state_at(3)  # of an epoch that was left
        assert numbers(next(iter(loader))) == whole[2 * STEPS]
        assert loader.num_steps_delivered == 5
        wrong: Any
        for wrong in (-1, "1", 1.5, 2**70):
            with refuses(UsageError):
                loader.set_epoch(wrong)
        state = loader.state_dict()
    with load(numbered, **options) as loader:
        loader.load_state_dict(state)
        assert numbers(next(iter(loader))) == whole[2 * STEPS + 1]
    with load(numbered) as loader:
        loader.set_epoch(2)  # as if nobody had loaded a state
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_states_are_few_numbers_and_no_path(numbered: Path, whole: list[list[int]], tmp_path: Path) -> None:
    """torch.distributed.checkpoint fills in the keys that it is given, and reads no others."""
    with load(numbered, 2) as loader:
        fresh = loader.state_dict()
        next(iter(loader))
        inside = loader.state_dict()
        state = loader.state_at(3)
        with refuses(OtherTokenizer):
            loader.load_state_dict({**state, "fingerprint": {**state["fingerprint"], "tokenizer": "0" * 64}})
    assert inside["num_micro"] == 1
    assert fresh.keys() == inside.keys()
    for name in ("fingerprint", "layout"):
        assert fresh[name].keys() == inside[name].keys()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert len(json.dumps(state)) < 800
    assert str(numbered) not in json.dumps(state)
    with load(Path(shutil.copytree(numbered, tmp_path / "moved"))) as loader:
        loader.load_state_dict(state)
        assert numbers(loader.peek()) == whole[3]
        assert (loader.first_batch, len(loader), len([*loader])) == (3, STEPS, STEPS - 3), "as a bar shows it"


def test_the_batches_before_a_state_are_never_read(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(real(*args)) or reads[-1])
    with load(numbered) as loader:
        num_bytes = []
        for step in range(STEPS):
            reads.clear()
            loader.load_state_dict(loader.state_at(step))
            next(iter(loader))
            num_bytes.append(sum(reads))
    assert 0 < max(num_bytes) <= 1.2 * num_bytes[0]
