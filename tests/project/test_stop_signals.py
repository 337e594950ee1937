"""A stop signal that comes at an unlucky moment leaves nothing behind, and ends with 75."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.errors import Stopped
from tests.world import Ended, World


def stop_after(monkeypatch: pytest.MonkeyPatch, name: str, error: Callable[[], None]) -> list[str]:
    """Have a function of ``os`` call ``error`` after it created a temporary, whose name is returned."""
    original = getattr(os, name)
    created: list[str] = []

    def create(path: Any, *args: Any, **how: Any) -> Any:
        result = original(path, *args, **how)
        if str(path).endswith(".tmp") and not created:
            created.append(str(path))
            error()
        return result

    monkeypatch.setattr(os, name, create)
    return created


def stopped() -> None:
    raise Stopped("stopped by SIGTERM")


def stopped_in_a_lock() -> None:
    """Raise what a lock of Python's library makes of a Stopped that comes before it is held."""
    try:
        stopped()
    finally:
        raise RuntimeError("cannot release un-acquired lock")


def plan(world: World) -> Ended:
    return world.try_plan(num_shards=1)


def train_tokenizer(world: World) -> Ended:
    return world.main(
        "train_tokenizer", input_dir=world.raw_dir, output_dir=world.raw_dir.with_name("trained")
    )


@pytest.mark.parametrize("error", [stopped, stopped_in_a_lock])
@pytest.mark.parametrize(
    ("command", "name"),
    [(plan, "mkdir"), (plan, "open"), (train_tokenizer, "mkdir"), (train_tokenizer, "open")],
)
def test_a_signal_while_a_temporary_is_created_ends_with_75_and_leaves_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[World], Ended],
    name: str,
    error: Callable[[], None],
) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"})
    created = stop_after(monkeypatch, name, error)
    command(world).ends(75, "stopped by SIGTERM")
    assert created
    assert list(tmp_path.rglob(".*.tmp")) == []
