"""What a task says in its log: what it will do and with what, then what it made and how fast."""

from __future__ import annotations

from collections.abc import Sequence

from preprocess.formats.inputs import ByteRange
from preprocess.make.worker import Work, Worker
from preprocess.options import WorkerSettings
from preprocess.plan.plan_file import Plan, PlannedShard
from shardprep.console import counted, short_bytes, short_number
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import Manifest

_NUM_NAMED = 3  # inputs of a shard that are named, each with its bytes


def part_line(plan: Plan, shard: PlannedShard) -> str:
    """Which part of the input a shard is made of: the files, and from where to where in them."""
    name = f"shard {shard.shard_id:05d} of {len(plan.boundaries) - 1}"
    if not shard.ranges:
        return f"{name}: no input"
    parts = []
    for part in shard.ranges:
        path, num_bytes = plan.inputs[part.input_number].path, plan.inputs[part.input_number].num_bytes
        whole = (part.start, part.end) == (0, num_bytes)
        parts.append(path if whole else f"{path} {_stretch(path, part)}")
    if len(parts) > _NUM_NAMED:
        named = f"{', '.join(parts[: _NUM_NAMED - 1])}, ..., {parts[-1]} ({len(parts)} files)"
    else:
        named = ", ".join(parts)
    return f"{name}: {short_bytes(shard.num_bytes)} of {plan.input_dir}: {named}"


def _stretch(path: str, part: ByteRange) -> str:
    """From where to where a part of a file goes, so that nobody takes it for the places of documents.

    These are rows or bytes of the decompressed text in some formats (``input_formats``).
    """
    where = f"{part.start} to {part.end}"
    kind = input_kind(path)
    if kind.unit == "row":
        return f"{kind.format.cut_at or 'rows'} in bytes {where}"
    if kind.is_in_bytes:
        return f"bytes {where}"
    return f"compressed bytes {where} (from about byte {part.text_start} of the text)"


def engine_line(worker: Worker) -> str:
    """Which engine encodes, and why it is this one."""
    engine, wanted = worker.engine, worker.settings.engine
    if engine.name == "gigatoken":
        why = "its ids equal those of tokenizers, seen on the plan's probe just now"
    elif wanted == "tokenizers":
        why = "as --engine asks; gigatoken would be many times faster"
    elif not worker.plan.allows_gigatoken:
        why = (
            "planning did not see gigatoken give the same ids: a little text, or an unknown kind of tokenizer"
        )
    else:
        why = "gigatoken cannot be used here"
    return f"engine: {engine.name} {engine.version}: {why}"


def means_line(settings: WorkerSettings, num_cpus: int, *, num_processes: int = 1) -> str:
    """CPUs, sizes of batches and the memory limit of a process."""
    each = "" if num_processes == 1 else f"{num_processes} processes, each with "
    sizes = f"batches of {settings.batch_bytes >> 10} KiB of text"
    if settings.batch_size is not None:
        sizes += f", at most {settings.batch_size} documents encoded at once"
    if settings.writer_batch_size is not None:
        sizes += f", at most {settings.writer_batch_size} documents laid out at once"
    memory = "no memory limit" if settings.memory_gb is None else f"memory limit {settings.memory_gb:.2f} GiB"
    return f"{each}{num_cpus} CPU{'s' if num_cpus > 1 else ''}, {sizes}, {memory}"


def speed_line(manifest: Manifest) -> str:
    """How fast a shard was made, at what price, and what was written."""
    run, counts = manifest.run, manifest.counts
    wall_s = max(run["wall_s"], 1e-3)
    speeds = speeds_of(wall_s, counts.input_bytes, counts.num_documents, counts.num_tokens)
    return (
        f"made in {run['wall_s']:.1f} s: {speeds}; {run['cpu_s']:.1f} s of CPU, "
        f"{short_bytes(run['max_rss_bytes'])} of memory, a tar of {short_bytes(manifest.tar.num_bytes)}"
    )


def speeds_of(wall_s: float, num_bytes: int, num_documents: int, num_tokens: int) -> str:
    """``12.3 MB/s, 4.56 k documents/s, 1.2 M tokens/s``."""
    return (
        f"{short_bytes(num_bytes / wall_s)}/s, {short_number(num_documents / wall_s)} documents/s, "
        f"{short_number(num_tokens / wall_s)} tokens/s"
    )


def total_line(works: Sequence[Work], wall_s: float) -> str:
    """What several shards made side by side hold, and how fast they were made together."""
    num_bytes, num_documents, num_tokens = (sum(column) for column in zip((0, 0, 0), *works, strict=True))
    speeds = speeds_of(max(wall_s, 1e-3), num_bytes, num_documents, num_tokens)
    made = f"{counted(num_documents, 'document')}, {counted(num_tokens, 'token')}"
    return f"{made} in {wall_s:.1f} s: {speeds}"
