"""A loop that stops anywhere, looks ahead, jumps or is copied: the state, and what the loader does with it.

That a run resumes on any number of ranks and workers with the same batches is tried by tests/oracle.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import OtherRun, OtherTokenizer, TokenLoader, UsageError
from tests.world import ids_of, open_loader, refuses

STEPS, MICRO = 13, 4  # of an epoch of 107 samples in global batches of 8; batches of 2 in one
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}]


def load(data: Path, batch_size: int = 8, **options: Any) -> TokenLoader:
    return open_loader(data, batch_size, **{"model_id": data, "global_batch_size": 8, "seed": 3, **options})


def numbers(batch: Any) -> list[int]:
    """Which samples a batch has."""
    return [ids[0] for ids in ids_of(batch)]


@pytest.fixture(scope="module")
def whole(numbered: Path) -> list[list[int]]:
    """The samples of each step of three epochs."""
    with load(numbered) as loader:
        return [numbers(batch) for batch in chain(loader, loader, loader)]


@pytest.fixture(scope="module")
def parts(numbered: Path) -> list[list[int]]:
    """Of each batch of 2, of two epochs."""
    with load(numbered, 2) as loader:
        return [numbers(batch) for batch in chain(loader, loader)]


@pytest.mark.processes
@pytest.mark.parametrize("options", WORKERS)
def test_one_loader_goes_back_and_forth_between_states(
    numbered: Path, whole: list[list[int]], options: dict[str, Any]
) -> None:
    with load(numbered, **options) as loader:
        for step in (5, 0, STEPS - 1, 2):
            loader.load_state_dict(loader.state_at(step))
            found = [numbers(batch) for batch in islice(loader, 4)]
            assert found == whole[step : min(step + 4, STEPS)]


@pytest.mark.processes
@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_that_stopped_goes_on_with_the_next_batch(
    numbered: Path, parts: list[list[int]], options: dict[str, Any]
) -> None:
    """Also inside of a step, and through the end of an epoch; what was only begun is not counted."""
    with load(numbered, 2, **options) as loader:
        found: list[Any] = []
        for pause in (10, 3, 1, 7, 500, 5):
            iter(loader)
            before = loader.state_dict()
            assert numbers(loader.peek()) == numbers(loader.peek()) == parts[len(found)]
            assert (loader.state_dict(), loader.metrics.num_batches) == (before, len(found))
            found += [numbers(batch) for batch in islice(loader, pause)]
            assert found == parts[: len(found)]
            assert loader.num_steps_delivered == len(found) // MICRO
            assert loader.state_dict()["num_micro"] == len(found) % MICRO
        assert len(found) > len(loader)


@pytest.mark.processes
@pytest.mark.parametrize("options", WORKERS)
def test_a_refused_state_changes_nothing_for_the_loop_that_is_running(
    numbered: Path, whole: list[list[int]], options: dict[str, Any]
) -> None:
    with load(numbered, seed=4) as loader:
        other = loader.state_at(3)
    with load(numbered, **options) as loader:
        batches = iter(loader)
        found = [numbers(next(batches)) for _ in range(3)]
        with refuses(OtherRun):
            loader.load_state_dict(other)
        assert loader.state_dict() == loader.state_at(3)
        assert found + [numbers(batch) for batch in batches] == whole[:STEPS]


@pytest.mark.processes
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_copy_of_a_loader_goes_on_where_the_original_stood_and_leaves_it_alone(
    numbered: Path, whole: list[list[int]], copied: Callable[[TokenLoader], TokenLoader], workers: int
) -> None:
    with load(numbered, num_workers=workers) as loader:
        loader.load_state_dict(loader.state_at(4))
        batches = iter(loader)
        found = [numbers(next(batches)) for _ in range(2)]
        with copied(loader) as other:
            assert other.state_dict() == loader.state_at(6)
            other.load_state_dict(other.state_dict())
            assert [numbers(batch) for batch in other] == whole[6:STEPS]
        assert found + [numbers(batch) for batch in batches] == whole[4:STEPS]


def test_set_epoch_stays_in_an_epoch_or_leaves_it_also_for_who_resumes(
    numbered: Path, whole: list[list[int]]
) -> None:
    """How steps are counted then is tried by tests/oracle/test_states.py."""
    with load(numbered) as loader:
        for _ in range(3):
            next(iter(loader))
        loader.set_epoch(0)  # in which it stands
        assert numbers(next(iter(loader))) == whole[3]
        loader.set_epoch(2)
        assert numbers(next(iter(loader))) == whole[2 * STEPS]
        with refuses(UsageError):
            loader.state_at(3)  # of an epoch that was left
        wrong: Any
        for wrong in (-1, "1", 1.5, 2**70):
            with refuses(UsageError):
                loader.set_epoch(wrong)
        state = loader.state_dict()
    with load(numbered) as loader:
        loader.load_state_dict(state)
        assert numbers(next(iter(loader))) == whole[2 * STEPS + 1]


@pytest.mark.processes
@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_whose_epoch_was_left_is_refused_its_next_batch_and_the_count_stays_right(
    numbered: Path, whole: list[list[int]], options: dict[str, Any]
) -> None:
    with load(numbered, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        loader.set_epoch(2)
        with pytest.raises(UsageError):
            next(batches)
        assert loader.num_steps_delivered == 3
        assert numbers(next(iter(loader))) == whole[2 * STEPS]
        assert loader.num_steps_delivered == 4


def test_a_run_begun_in_a_later_epoch_without_a_state_is_warned_of(
    numbered: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(numbered) as loader:
        caplog.clear()
        loader.set_epoch(0)
        assert not caplog.records
        loader.set_epoch(2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "load_state_dict" in caplog.text


def test_a_state_is_a_few_numbers_that_torch_saves_with_the_same_keys_everywhere_and_no_path(
    numbered: Path, whole: list[list[int]], tmp_path: Path
) -> None:
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
        assert numbers(next(iter(loader))) == whole[3]


def test_loading_a_state_reads_nothing_and_the_first_batch_no_more_than_at_the_start(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was delivered before is never read again to get to a step."""
    reads: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(real(*args)) or reads[-1])
    with load(numbered) as loader:
        reads.clear()  # the headers were read: these tars have no manifest
        next(iter(loader))
        at_the_start = sum(reads)
        assert at_the_start > 0
        for step in range(STEPS):
            reads.clear()
            loader.load_state_dict(loader.state_at(step))
            assert not reads
            next(iter(loader))
            assert sum(reads) <= 1.2 * at_the_start, step


@pytest.mark.slow  # torch.distributed.checkpoint takes 1.5 s to import
@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoint_resumes_inside_of_a_step(
    numbered: Path, parts: list[list[int]], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    with load(numbered, 2) as loader:
        for _ in islice(loader, 23):
            pass
        state_dict_saver.save({"loader": loader.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with load(numbered, 2) as loader:
        state = {"loader": loader.state_dict()}
        state_dict_loader.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
        loader.load_state_dict(state["loader"])
        assert loader.first_batch == 23
        assert [numbers(batch) for batch in loader] == parts[23 : STEPS * MICRO]


def test_a_bar_of_a_resumed_epoch_ends_at_its_total(numbered: Path) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    with load(numbered) as loader:
        loader.load_state_dict(loader.state_at(4))
        with tqdm(loader, initial=loader.first_batch, file=io.StringIO()) as bar:
            assert (bar.n, bar.total) == (4, len(loader))
            assert sum(1 for _ in bar) == STEPS - 4
        assert bar.n == bar.total
