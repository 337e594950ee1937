"""This rank's part of the newest global batch, and how many labels all ranks have in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loader.read.chunks import IGNORED
from shardprep.errors import UsageError


@dataclass
class NewestStep:
    """The batches of this rank in the newest global batch, and their labels."""

    num_batches: int
    labels: list[torch.Tensor | None]  # int64[batch, seq] of each batch; None: a collate_fn gave none
    num_per_rank: torch.Tensor | None = None  # float32[]; computed by the first call of ``labels_per_rank``

    def labels_per_rank(
        self,
        device: torch.device | str,
        group: torch.distributed.ProcessGroup | None,
        *,
        world_size: int,
        shifts_targets: bool,
    ) -> torch.Tensor:
        """Return the labels of all ranks, divided by the number of ranks: float32[] on ``device``.

        The first call all-reduces one number. ``shifts_targets``: whether the labels are shifted already; a
        model that shifts them itself ignores the first one of each row. Raises UsageError without labels, or
        for several ranks without a process group.
        """
        if self.num_per_rank is not None:
            return self.num_per_rank
        labels = [each for each in self.labels if each is not None]
        if not labels or len(labels) < len(self.labels):
            raise UsageError(found="labels_per_rank without a batch", expected="a newest batch with labels")
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if world_size > 1 and not is_distributed:
            found = f"labels_per_rank on {world_size} ranks without a process group"
            raise UsageError(found=found, expected="torch.distributed.init_process_group before it")
        first = 0 if shifts_targets else 1
        # counts: int64[] of each batch
        counts = [(each[:, first:] != IGNORED).sum() for each in labels]
        num_labels = torch.stack(counts).sum().to(device)
        num_ranks = 1
        if is_distributed:
            torch.distributed.all_reduce(num_labels, group=group)
            num_ranks = torch.distributed.get_world_size(group)
        self.num_per_rank = num_labels / num_ranks
        return self.num_per_rank
