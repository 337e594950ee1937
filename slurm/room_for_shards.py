"""Whether shards that are to be sent will fit on the Lustre where their data set stands."""

from __future__ import annotations

from collections.abc import Sequence

import lustre
from preprocess.cost_estimate import estimate_of
from shardprep.errors import ShardprepError
from slurm.dataset_state import DatasetState


def room_lines(state: DatasetState, shard_ids: Sequence[int]) -> list[str]:
    """What these shards need against quotas and free space; empty off Lustre, where nothing is asked.

    The need is measured on a sample of the input, as planning did: a second or two of CPU. Never raises.
    """
    if not lustre.is_usable(state.folder):
        return []
    try:
        whole = estimate_of(state.plan, state.folder).output_bytes
    except (ShardprepError, OSError) as error:
        return [f"note: whether the shards will fit cannot be told: {error}"]
    sizes = state.plan.shard_bytes()
    part = sum(sizes[shard_id] for shard_id in shard_ids) / max(1, sum(sizes))
    need = lustre.Need(num_bytes=round(whole * part), num_files=3 * len(shard_ids))
    return lustre.space_lines(state.folder, need)
