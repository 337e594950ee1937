"""Rows of a step are dealt to the ranks so that attention costs about the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from loader.batch.batches import Batch
from loader.batch.boundaries import document_numbers
from loader.batch.fields import moves_by_token
from shardprep.errors import UsageError


def deal_rows_evenly(
    batches: Sequence[Mapping[str, torch.Tensor]], group: dist.ProcessGroup | None = None
) -> list[Batch]:
    """Exchange the rows of a step between ranks, so that attention costs about the same on all of them.

    Attention inside documents costs the sum of their squared lengths. The step keeps its rows; the ranks
    distribute them by this cost. Each rank puts its most expensive rows first, so that the n-th batches of
    all ranks cost about the same, too. Returns as many batches, with the same fields and shape.

    Args:
        batches: this rank's batches of one step. Every field is int64[batch, seq], one of them
            ``segment_ids`` or ``position_ids``, on a device that the group's backend can send from.
        group: the data-parallel process group. All its ranks must call this with equally many batches.

    Raises:
        UsageError: a field has another type or shape, or no field says where documents begin.
    """
    shape = batches[0]["input_ids"].shape
    names = list(batches[0])
    for name in names:
        value = batches[0][name]
        if not moves_by_token(name, value, shape) or value.dtype != torch.int64:
            expected = f"an int64 tensor of {list(shape)}; of boundaries 'position_ids' or 'segment_ids'"
            raise UsageError(found=f"{name}, which cannot be exchanged by rows", expected=expected)
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    rows = torch.cat([torch.stack([batch[name] for name in names], 1) for batch in batches])
    own_work = []
    for batch in batches:
        numbers = document_numbers(batch) + 1
        lengths = torch.bincount(numbers.flatten())
        lengths[0] = 0  # padding
        own_work.append(lengths[numbers].sum(1))  # each token counts the length of its document
    gathered = [torch.empty(len(rows), dtype=torch.int64, device=rows.device) for _ in range(size)]
    dist.all_gather(gathered, torch.cat(own_work), group=group)
    work = torch.cat(gathered).cpu().numpy()
    # Assign one row per rank at a time, by decreasing work; the first goes to the rank with the least work.
    owners = np.empty(len(work), np.int64)
    totals = np.zeros(size, np.int64)
    for next_rows in np.argsort(-work, kind="stable").reshape(-1, size):
        ranks = np.argsort(totals, kind="stable")
        owners[next_rows] = ranks
        totals[ranks] += work[next_rows]
    # Each rank sends its rows sorted by owner, so they arrive in the order of their numbers.
    new_owners = owners[rank * len(rows) : (rank + 1) * len(rows)]
    own = np.flatnonzero(owners == rank)
    num_sent = np.bincount(new_owners, minlength=size).tolist()
    num_received = np.bincount(own // len(rows), minlength=size).tolist()
    received = torch.empty_like(rows)
    outgoing = rows[np.argsort(new_owners, kind="stable")]
    dist.all_to_all_single(received, outgoing, num_received, num_sent, group=group)
    received = received[np.argsort(-work[own], kind="stable")]
    parts = (part.unbind(1) for part in received.split(shape[0]))
    return [Batch(zip(names, map(torch.Tensor.contiguous, fields), strict=True)) for fields in parts]
