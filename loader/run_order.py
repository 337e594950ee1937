"""The order of a run: from samples and batch sizes to the Order, and the lanes that a rank has in it."""

from __future__ import annotations

from operator import index

from loader.dataset import Samples
from loader.order import Order, choose_windows, share
from loader.shards.shard_set import ShardSet
from preprocess.shard_format import UsageError


def make_order(
    samples: Samples, shards: ShardSet, global_batch_size: int, group: int, *, seed: int, shuffle: bool
) -> Order:
    """The law for these samples. Raises UsageError where there are too few, or a group does not fit."""
    block_samples, window_samples = choose_windows(
        num_samples=samples.num_samples,
        num_bytes=shards.tar_bytes,
        global_batch_size=global_batch_size,
        group=group,
    )
    return Order(
        num_samples=samples.num_samples,
        global_batch_size=global_batch_size,
        block_samples=block_samples,
        window_samples=window_samples,
        group=group,
        seed=seed,
        shuffle=shuffle,
    )


def rank_lanes(order: Order, rank: int, world_size: int) -> range:
    """The lanes of one rank. Raises UsageError where the ranks cannot share them evenly."""
    if order.num_lanes % world_size:
        fitting = [n for n in range(1, order.num_lanes + 1) if order.num_lanes % n == 0]
        raise UsageError(
            f"a global batch of {order.global_batch_size} in groups of {order.group} makes {order.num_lanes} "
            f"lanes, which {world_size} ranks cannot share; the ranks can be {fitting}, "
            "or group_by_length less"
        )
    return share(range(order.num_lanes), rank, world_size)


def group_size(group_by_length: bool | int, batch_size: int) -> int:
    """Samples of a group: ``True`` stands for batch_size, ``False`` for groups of one."""
    return batch_size if group_by_length is True else int(group_by_length) or 1


def check_batch(batch_size: int, global_batch_size: int | None, world_size: int) -> int:
    """The global batch size, by default batch_size x world_size. Raises UsageError for no multiple of it."""
    batch_size = whole_number("batch_size", batch_size, least=1)
    step = batch_size * world_size
    if global_batch_size is None:
        return step
    global_batch_size = whole_number("global_batch_size", global_batch_size, least=1)
    if global_batch_size < step or global_batch_size % step:
        fitting = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * world_size) == 0]
        worlds = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * batch_size) == 0]
        raise UsageError(
            f"global_batch_size {global_batch_size} is no multiple of batch_size {batch_size} x "
            f"{world_size} ranks; with these ranks batch_size can be {fitting or 'nothing'}, with this "
            f"batch_size the ranks can be {worlds or 'nothing'}"
        )
    return global_batch_size


def whole_number(name: str, value: object, *, least: int) -> int:
    """The value as an int. Raises UsageError for what is none, or less than ``least``."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least {least}") from None
    if number < least:
        raise UsageError(f"{name} is {number}, expected at least {least}")
    return number
