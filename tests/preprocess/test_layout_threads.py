"""Batches of one shard are made by several threads at once, and stand in the tar in their order."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make import members
from preprocess.make.engines import TokenBatch
from preprocess.make.members import DocumentMembers
from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import Worker, load_worker
from shardprep.errors import BadInput, ReadWriteError
from shardprep.format.plan import need_plan

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_CPUS = 8


def worker_of(folder: Path, *, num_cpus: int = NUM_CPUS, **settings: Any) -> Worker:
    worker = load_worker(
        need_plan(folder), folder, WorkerSettings(), num_cpus=num_cpus, warn=lambda line: pytest.fail(line)
    )
    small = dataclasses.replace(worker.settings, **settings)
    return dataclasses.replace(worker, settings=small)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSettings, "batch_bytes", property(lambda _: 4_000))


@pytest.mark.usefixtures("small_batches")
def test_batches_that_are_laid_out_early_wait_for_those_before_them(
    prep: Prep, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch is ready only when three later ones are: so four were laid out at once."""
    expected = data_dir.parent / "expected"
    prep.plan(need_plan(data_dir).input_dir, expected, num_shards=5)
    worker = worker_of(expected, num_cpus=1)
    worker.run_shard(worker.plan.shard(0), lambda _: None)
    lay_out, three_later = DocumentMembers.lay_out, threading.Barrier(4)
    calls: list[int] = []

    def slow_first(self: DocumentMembers, *args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) <= 4:
            three_later.wait(60)
        return lay_out(self, *args)

    monkeypatch.setattr(DocumentMembers, "lay_out", slow_first)
    worker = worker_of(data_dir)
    worker.run_shard(worker.plan.shard(0), lambda _: None)
    assert len(calls) > 8
    assert prep.contents(data_dir) == prep.contents(expected)


@pytest.mark.usefixtures("small_batches")
def test_on_two_cores_two_batches_are_encoded_side_by_side(prep: Prep, data_dir: Path) -> None:
    """No encoding ends before another has begun: what waits for the interpreter's lock, or for the slowest of
    the engine's threads, leaves the core to the other batch."""
    expected = data_dir.parent / "expected"
    prep.plan(need_plan(data_dir).input_dir, expected, num_shards=5)
    alone = worker_of(expected, num_cpus=1)
    alone.run_shard(alone.plan.shard(0), lambda _: None)
    worker = worker_of(data_dir, num_cpus=2)
    encode, two, calls = worker.engine.encode, threading.Barrier(2), itertools.count()

    def together(texts: Sequence[bytes]) -> TokenBatch:
        if next(calls) < 4:
            two.wait(60)
        return encode(texts)

    engine = dataclasses.replace(worker.engine, encode_with=lambda texts, _: together(texts))
    dataclasses.replace(worker, engine=engine).run_shard(worker.plan.shard(0), lambda _: None)
    assert next(calls) > 4
    assert prep.contents(data_dir) == prep.contents(expected)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("num_cpus", [1, 2, NUM_CPUS])
def test_an_error_of_any_thread_ends_the_shard_and_leaves_nothing(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, num_cpus: int
) -> None:
    worker, calls = worker_of(data_dir, num_cpus=num_cpus), itertools.count()

    def failing(texts: Sequence[bytes]) -> TokenBatch:
        if next(calls) == 3:
            raise ReadWriteError("the engine is gone")
        return worker.engine.encode(texts)

    engine = dataclasses.replace(worker.engine, encode_with=lambda texts, _: failing(texts))
    with pytest.raises(ReadWriteError, match="the engine is gone"):
        dataclasses.replace(worker, engine=engine).run_shard(worker.plan.shard(0), lambda _: None)
    assert next(calls) > 3
    monkeypatch.setattr(members, "MAX_MEMBER_BYTES", 50)
    with pytest.raises(BadInput, match="makes a member of"):
        worker.run_shard(worker.plan.shard(0), lambda _: None)
    assert [path.name for path in data_dir.glob("*shard-*")] == []
    assert [path.name for path in data_dir.glob(".shard-*")] == []


def test_with_little_memory_one_batch_is_laid_out_at_a_time() -> None:
    given = (0.1, 0.4, 0.6, 1.0)
    assert [WorkerSettings(memory_gb=memory_gb).most_batches for memory_gb in given] == [1, 1, 3, 7]
    assert WorkerSettings().most_batches > 1_000
