"""What ``--shard_id N`` does, once its plan is known: make the shard, and say in the log what it does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from preprocess.make.resources import WorkerSettings, memory_note
from preprocess.make.worker import Work, Worker, finished_manifest, load_worker
from shardprep.console import Progress, counted, quoted, say, shards_text, short_bytes, short_number
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import Manifest
from shardprep.format.names import id_ranges, quarantine_path
from shardprep.format.plan import ByteRange, Plan, PlannedShard

_NUM_NAMED = 3  # inputs that are named, of a shard


def make_shard(plan: Plan, folder: Path, shard_id: int, settings: WorkerSettings, num_cpus: int) -> int:
    """Make one shard of a plan, on the CPUs that this process is bound to; returns the exit code."""
    from lustre import layout_line

    # Open: the way ends here where the shard is done.
    if note := array_note(os.environ, plan.num_shards, folder):
        say(f"note: {note}")
    shard = plan.shard(shard_id)
    if finished_manifest(plan, folder, shard_id):
        say(f"shard {shard_id:05d} is done already")
        return 0
    # Load: the tokenizer's files are the plan's, and its ids those of planning.
    if settings.memory_gb is not None and (note := memory_note(settings.memory_gb)):
        say(f"note: {note}")
    say(part_line(plan, shard))
    say(means_line(settings, num_cpus))
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=say, shard=shard)
    say(engine_line(worker))
    if line := layout_line(folder):
        say(line)
    # Make.
    with Progress(f"shard {shard_id:05d}", shard.num_bytes) as progress:
        manifest = worker.run_shard(shard, lambda work: progress.add(work.num_bytes, work.counts))
    # Tell: all that was made is in the manifest.
    counts = manifest.counts
    say(speed_line(manifest))
    say(f"shard {shard_id:05d} is done: {counts.num_documents} documents, {counts.num_tokens} tokens")
    if num_bad := sum(counts.quarantined.values()):
        say(f"{num_bad} documents were left out: {quarantine_path(folder, shard_id)}")
    return 0


def array_note(environ: Mapping[str, str], num_shards: int, folder: Path) -> str | None:
    """Return what this task's job array leaves out of the plan, with the line that submits it; else None.

    The line names ``submit``, which fits an array to the site: MaxArraySize may refuse these indices.
    """
    try:
        first, last, step, count = (
            int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "MAX", "STEP", "COUNT")
        )
    except (KeyError, ValueError):
        return None
    covered = set(range(first, last + 1, max(1, step)))
    left = sorted(set(range(num_shards)) - covered)
    if not left or count != len(covered):  # a list such as 1,5,7: Slurm does not tell its tasks which
        return None
    return (
        f"this job array covers {num_shards - len(left)} of the plan's {num_shards} shards; it leaves out "
        f"{shards_text(id_ranges(left))}; to make them: shardprep submit {quoted(folder)}"
    )


def part_line(plan: Plan, shard: PlannedShard) -> str:
    """Which part of the input a shard is made of: the files, and from where to where in them."""
    name = f"shard {shard.shard_id:05d} of {plan.num_shards}"
    if not shard.ranges:
        return f"{name}: no input"
    parts = []
    for part in shard.ranges:
        item = plan.inputs[part.input_number]
        is_whole = (part.start, part.end) == (0, item.num_bytes)
        parts.append(item.path if is_whole else f"{item.path} {_stretch(item.path, part)}")
    if len(parts) > _NUM_NAMED:
        parts[_NUM_NAMED - 1 :] = ["...", f"{parts[-1]} ({len(parts)} files)"]
    return f"{name}: {short_bytes(shard.num_bytes)} of {plan.input_dir}: {', '.join(parts)}"


def _stretch(path: str, part: ByteRange) -> str:
    """From where to where a part of a file goes, so that nobody takes it for the places of documents.

    These are rows or bytes of the decompressed text in some formats (``input_formats``).
    """
    where, kind = f"{part.start} to {part.end}", input_kind(path)
    if kind.unit == "row":
        return f"{kind.format.cut_at or 'rows'} in bytes {where}"
    if kind.is_in_bytes:
        return f"bytes {where}"
    return f"compressed bytes {where} (from about byte {part.text_start} of the text)"


def engine_line(worker: Worker) -> str:
    """Which engine encodes, and why it is this one."""
    if worker.engine.name == "gigatoken":
        why = "its ids equal those of tokenizers"
    elif worker.plan.options.is_chat:
        why = "it tells the characters of each token, for loss masks"
    elif worker.settings.engine == "tokenizers":
        why = "as --engine asks; gigatoken would be many times faster"
    elif not worker.plan.fast_engine_is_equal:
        why = (
            "planning did not see gigatoken give the same ids: a little text, or an unknown kind of tokenizer"
        )
    else:
        why = "gigatoken cannot be used here"
    return f"engine: {worker.engine.name} {worker.engine.version}: {why}"


def means_line(settings: WorkerSettings, num_cpus: int, *, num_processes: int = 1) -> str:
    """CPUs, sizes of batches and the memory limit of a process."""
    each = "" if num_processes == 1 else f"{num_processes} processes, each with "
    sizes = f"batches of {settings.batch_bytes >> 10} KiB of text"
    if settings.most_documents is not None:
        sizes += f", at most {settings.most_documents} documents at once"
    memory = "no memory limit" if settings.memory_gb is None else f"memory limit {settings.memory_gb:.2f} GiB"
    return f"{each}{counted(num_cpus, 'CPU')}, {sizes}, {memory}"


def speed_line(manifest: Manifest) -> str:
    """How fast a shard was made, at what price, and what was written."""
    run, transform = manifest.run, ""
    if (transform_s := run.get("transform_cpu_s")) is not None:
        rate = short_number(manifest.counts.num_documents / max(transform_s, 1e-3))
        share = transform_s / max(run["cpu_s"], 1e-3)
        transform = f" ({share:.0%} in --transform: {rate} documents per second)"
    return (
        f"made in {run['wall_s']:.1f} s: {_speeds(run['wall_s'], Work.of(manifest))}; "
        f"{run['cpu_s']:.1f} s of CPU{transform}, "
        f"{short_bytes(run['max_rss_bytes'])} of memory, a tar of {short_bytes(manifest.tar.num_bytes)}"
    )


def total_line(works: Sequence[Work], wall_s: float) -> str:
    """Return what several shards made side by side hold, and how fast they were made together."""
    total = Work(*(sum(column) for column in zip(Work(0, 0, 0), *works, strict=True)))
    made = f"{counted(total.num_documents, 'document')}, {counted(total.num_tokens, 'token')}"
    return f"{made} in {wall_s:.1f} s: {_speeds(wall_s, total)}"


def _speeds(wall_s: float, work: Work) -> str:
    """``12.3 MB/s, 4.56 k documents/s, 1.2 M tokens/s``."""
    num_bytes, num_documents, num_tokens = (number / max(wall_s, 1e-3) for number in work)
    return (
        f"{short_bytes(num_bytes)}/s, {short_number(num_documents)} documents/s, "
        f"{short_number(num_tokens)} tokens/s"
    )
