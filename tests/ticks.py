"""The samples of one tick, as all ranks together get them."""

from __future__ import annotations

from typing import Any

from loader.order import Order


def samples_of_tick(order: Order, epoch: int, tick: int, num_tokens: Any = None) -> list[int]:
    """Return the samples of a tick of an epoch, by place. ``num_tokens`` as for ``Order.samples_of``."""
    first, end = next(order.windows(tick))
    samples = order.samples_of(epoch, range(order.num_slots), first, end, num_tokens)[:, tick - first]
    return samples.tolist()  # type: ignore[no-any-return]
