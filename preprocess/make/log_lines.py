"""Lines of the log of a task: what it reads, and what it made."""

from __future__ import annotations

from shardprep.console import counted, short_bytes, short_number
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan, PlannedShard

_MAX_NAMED_INPUTS = 3  # of a shard, in the log


def input_line(plan: Plan, shard: PlannedShard) -> str:
    """Return a log line with the input files of a shard, and the byte range of each one that is not whole."""
    inputs = []
    for byte_range in shard.ranges:
        item = plan.inputs[byte_range.input_number]
        line = item.path
        if (byte_range.start, byte_range.end) != (0, item.num_bytes):
            # "file bytes": here the offsets of documents are rows, or bytes of the decompressed text.
            unit = "bytes" if byte_range.kind.is_in_bytes else "file bytes"
            line += f" {unit} {byte_range.start} to {byte_range.end}"
        inputs.append(line)
    if len(inputs) > _MAX_NAMED_INPUTS:
        inputs = [*inputs[: _MAX_NAMED_INPUTS - 1], "...", f"{inputs[-1]} ({len(inputs)} files)"]
    amount = f"{short_bytes(shard.num_bytes)} of {plan.input_dir}: {', '.join(inputs)}"
    return f"shard {shard.shard_id:05d} of {plan.num_shards}: {amount if inputs else 'no input'}"


def done_line(manifest: Manifest, folder: DataFolder) -> str:
    """Return a log line with the counts of a finished shard, its speed and its cost."""
    run, counts, shard_id = manifest.run, manifest.counts, manifest.shard_id
    facts = [amounts_line(counts.input_bytes, counts.num_documents, counts.num_tokens, run.wall_s)]
    if left_out := sum(counts.quarantined.values()):
        facts.append(
            f"{counted(left_out, 'document')} left out: {folder.path_of(names.quarantine_name(shard_id))}"
        )
    facts.append(f"{run.cpu_s:.1f} s of CPU")
    if run.transform_cpu_s:
        facts.append(f"{run.transform_cpu_s:.1f} of them in --transform")
    if run.render_cpu_s:
        facts.append(f"{run.render_cpu_s:.1f} of them rendering conversations")
    facts.append(f"{short_bytes(run.max_rss_bytes)} of memory")
    facts.append(f"a tar of {short_bytes(manifest.tar.num_bytes)}")
    return f"shard {shard_id:05d} is done: {', '.join(facts)}"


def amounts_line(num_bytes: int, num_documents: int, num_tokens: int, wall_s: float) -> str:
    """Return documents and tokens with their time, and the rates of input bytes and tokens per second."""
    amounts = f"{counted(num_documents, 'document')}, {counted(num_tokens, 'token')} in {wall_s:.1f} s"
    wall_s = max(wall_s, 1e-3)
    return f"{amounts} ({short_bytes(num_bytes / wall_s)}/s, {short_number(num_tokens / wall_s)} tokens/s)"
