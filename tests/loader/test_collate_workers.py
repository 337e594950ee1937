"""A collate_fn of one's own is called in processes beside those that read; batches do not change by it."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from tests.external_tars import write_numbered_tars
from tests.waiting import HANG_S
from tests.word_tokenizers import save_word_tokenizer

pytestmark = pytest.mark.processes

NUM_SAMPLES = 107


def with_process(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"samples": [sample["input_ids"] for sample in samples], "process": os.getpid()}


def failing(samples: list[dict[str, Any]]) -> Any:
    if any(sample["input_ids"][0] == 7 for sample in samples):
        raise ValueError("sample 7 is not wanted")
    return with_process(samples)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 200)
    write_numbered_tars(folder, NUM_SAMPLES, 3, ids_of=lambda number: [number, *range(number % 5)])
    return folder


def load(data: Path, **options: Any) -> TokenLoader:
    made: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": with_process, "seed": 3}
    return get_llama3_dataloader(data, model_id=data, **{**made, **options})


def test_workers_call_a_collate_fn_and_this_process_does_not(data: Path) -> None:
    with load(data) as loader:
        processes = {batch["process"] for batch in loader}
        assert os.getpid() not in processes
        assert len(processes) == 2
        assert {batch["process"] for batch in loader} == processes, "they stay for the next epoch"
    with load(data, num_workers=0) as loader:
        assert {batch["process"] for batch in loader} == {os.getpid()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "global_batch_size": 8, "num_workers": 3},
        {"persistent_workers": False},
        {"seq_len": 16},
        {"group_by_length": 2, "global_batch_size": 8},
    ],
)
def test_batches_states_and_counts_are_those_of_a_collate_fn_in_this_process(
    data: Path, options: dict[str, Any]
) -> None:
    seen = []
    for workers in (0, options.get("num_workers", 2)):
        with load(data, **{**options, "num_workers": workers}) as loader:
            batches = [(batch["samples"], loader.state_dict()) for _ in range(2) for batch in loader]
            loader.load_state_dict(batches[5][1])
            rest = [batch["samples"] for batch in loader]
            metrics = loader.metrics
            seen.append((batches, rest, metrics.num_batches, metrics.num_tokens, metrics.num_cut_tokens))
    assert seen[0] == seen[1]
    assert seen[0][1]


def test_a_loop_that_was_left_begins_the_next_epoch_with_its_own_batches(data: Path) -> None:
    with load(data, num_workers=0) as loader:
        epochs = [[batch["samples"] for batch in loader] for _ in range(3)]
    with load(data) as loader:
        assert next(iter(loader))["samples"] == epochs[0][0]
        for number, batch in enumerate(loader):
            assert batch["samples"] == epochs[1][number]
            if number == 4:
                break
        assert [batch["samples"] for batch in loader] == epochs[2]


def test_what_a_collate_fn_raises_reaches_the_loop_and_the_next_epoch_begins(data: Path) -> None:
    with load(data, collate_fn=failing) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="sample 7 is not wanted"):
                list(loader)


def test_a_collate_fn_that_cannot_be_sent_is_called_here_and_the_log_says_so(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "loader.token_loader"),
        load(
            data,
            num_workers=1,
            multiprocessing_context="spawn",
            collate_fn=lambda samples: with_process(samples),
        ) as loader,
    ):
        assert loader._stream._collate_workers is None
    (record,) = caplog.records
    assert "so this process calls it" in record.getMessage()


def test_a_loader_that_is_left_behind_ends_its_collating_processes(data: Path) -> None:
    others = {*multiprocessing.active_children()}
    loader = load(data)
    next(iter(loader))
    workers = {*multiprocessing.active_children()} - others
    assert len(workers) == 4
    dead = weakref.ref(loader)
    del loader
    gc.collect()
    assert dead() is None
    for worker in workers:
        worker.join(HANG_S)
        assert not worker.is_alive()
