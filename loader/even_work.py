"""Deals the rows of a step to the ranks so that attention costs all of them about the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from loader.batches import Batch
from loader.boundaries import document_numbers
from shardprep.errors import UsageError


def deal_rows_evenly(batches: Sequence[Mapping[str, Any]], group: Any = None) -> list[Batch]:
    """Exchange rows with the other ranks, and return as many batches of the same shape.

    Attention inside documents costs the sum of their squared lengths. The ranks deal the rows of a step so
    that the sums are about even; the step's rows stay the same set. A rank's most expensive rows come first,
    so that the n-th batches of all ranks cost about the same, too.

    Args:
        batches: of this rank in one step, with tensors int64[batch, seq] alone, ``segment_ids`` or
            ``position_ids`` among them; on the device that the group's backend sends from.
        group: the data-parallel process group. All of its ranks call this with equally many batches.

    Raises:
        UsageError: a field is no such tensor, or nothing says where documents begin.
    """
    shape, names = batches[0]["input_ids"].shape, list(batches[0])
    for name in names:
        value = batches[0][name]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, torch.int64):
            raise UsageError(
                f"the batch's {name} is no int64 tensor of {list(shape)}, and cannot be dealt by rows; of "
                "boundaries take 'position_ids' or 'segment_ids'"
            )
    group = group or dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = torch.cat([torch.stack([batch[name] for name in names], 1) for batch in batches])
    own_work = []
    for batch in batches:
        numbers = document_numbers(batch) + 1
        lengths = torch.bincount(numbers.flatten())
        lengths[0] = 0  # padding
        own_work.append(lengths[numbers].sum(1))  # each token counts the length of its document
    works = [torch.empty(len(rows), dtype=torch.int64, device=rows.device) for _ in range(size)]
    dist.all_gather(works, torch.cat(own_work), group=group)
    work = torch.cat(works).cpu().numpy()
    # From the most work on, the next rows go to a rank each, the largest to the one with the least.
    owners, totals = np.empty(len(work), np.int64), np.zeros(size, np.int64)
    for of_each_rank in np.argsort(-work, kind="stable").reshape(-1, size):
        ranks = np.argsort(totals, kind="stable")
        owners[of_each_rank] = ranks
        totals[ranks] += work[of_each_rank]
    own = np.flatnonzero(owners == rank)
    place_of = {row: place for place, row in enumerate(own[np.argsort(-work[own], kind="stable")].tolist())}
    dealt, messages = torch.empty_like(rows), []
    for row, to in enumerate(owners.tolist()):
        sender, local = divmod(row, len(rows))
        if sender == to == rank:
            dealt[place_of[row]] = rows[local]
        elif sender == rank:
            peer = dist.get_global_rank(group, to)
            messages.append(dist.P2POp(dist.isend, rows[local], peer, group))
        elif to == rank:
            peer = dist.get_global_rank(group, sender)
            messages.append(dist.P2POp(dist.irecv, dealt[place_of[row]], peer, group))
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
    parts = dealt.split(shape[0])
    return [
        Batch(zip(names, (field.contiguous() for field in part.unbind(1)), strict=True)) for part in parts
    ]
