"""Checks of the numbers that arguments and states give."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from shardprep.errors import UsageError


def whole_number(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return the value as an int. Raises UsageError unless it is whole, and from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError.of_value(name, value, f"a whole number of at least {least}")
    number = index(value)
    if number < least:
        raise UsageError.of_value(name, number, f"at least {least}")
    if most is not None and number > most:
        raise UsageError.of_value(name, number, f"at most {most}")
    return number


def check_batch(global_batch_size: int, group: int, *, batch_size: int, world_size: int) -> None:
    """Raise UsageError unless a global batch gives each rank equally many batches and slots."""
    step_samples = batch_size * world_size
    if global_batch_size % step_samples:
        expected = f"a multiple of batch_size {batch_size} x {world_size} ranks, {step_samples}"
        raise UsageError.of_value("global_batch_size", global_batch_size, expected)
    num_slots, rest = divmod(global_batch_size, group)
    if not rest and num_slots % world_size:  # Order refuses a group that leaves a rest
        found = f"{world_size} ranks, which cannot share {num_slots} groups of {group} samples evenly"
        raise UsageError(found=found, expected=[n for n in range(1, num_slots + 1) if num_slots % n == 0])
