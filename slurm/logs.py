"""``logs DATA N``: the attempts at one shard, and the ends of their logs."""

from __future__ import annotations

import time
from pathlib import Path

from shardprep.console import counted, print_lines
from shardprep.errors import NotFound
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import need_plan
from slurm.causes import remedy_of
from slurm.log_ends import last_lines, log_tail, shortened
from slurm.state import find_state


def logs(folder: Path, shard_id: int) -> int:
    """Print the attempts at one shard, newest last, with the ends of their logs: ``logs DATA N``."""
    plan = need_plan(DataFolder(folder))
    if not 0 <= shard_id < plan.num_shards:
        expected = f"0 to {plan.num_shards - 1}, as the plan has {plan.num_shards} shards"
        raise NotFound(found=f"shard {shard_id}", expected=expected)
    state = find_state(folder, plan, needs_slurm=False)
    shard = state.shards[shard_id]
    lines = [f"shard {shard_id:05d}: {shard.state}, {counted(len(shard.attempts), 'attempt')}"]
    if shard.state == "not visible":
        lines.append(f"  {state.why_not_visible()}")
    for each in shard.attempts:
        when = "task"
        if each.record:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.record.began))
        where = f" on {each.node}" if each.node else ""
        whose = f" of {each.owner}" if each.owner else ""
        lines.append(f"{when} {each.task}{whose}{where}: {each.cause(shard_id) or each.state}")
        message = each.message(shard_id)
        if message:
            lines.append(f"  {message}")
        if each.log:
            lines += [f"  | {shortened(line)}" for line in last_lines(log_tail(Path(each.log)), 20)]
            lines.append(f"  {each.log}")
    if shard.cause:
        lines.append(f"  {remedy_of(shard.cause)}")
    print_lines(*lines)
    return 0
