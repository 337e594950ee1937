"""What ``--shard_id N`` does: find the plan, or make one, make the shard, and say in the log what it does.

It works by the plan in its folder. Without one it makes 'one file, one shard' and publishes that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from preprocess.formats.inputs import OpenInput, sample_sha256
from preprocess.make.resources import (
    WorkerSettings,
    bind_to_task_cpus,
    environment_number,
    memory_limit_gb,
    memory_note,
)
from preprocess.make.worker import Work, Worker, finished_manifest, load_worker
from preprocess.plan.tokenizer_spec import describe_tokenizer
from shardprep.command_line import given_of
from shardprep.console import Progress, counted, quoted, say, shards_text, short_bytes, short_number
from shardprep.errors import NotFound, OtherTokenizer, ReadWriteError, Refused
from shardprep.files import size_of_file
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import Manifest
from shardprep.format.names import PLAN_NAME, TOKENIZER_DIR, id_ranges, quarantine_path
from shardprep.format.options import PLAN_FIELDS, PrepConfig, option_differences
from shardprep.format.plan import (
    ByteRange,
    InputFile,
    Plan,
    PlannedShard,
    is_one_file_a_shard,
    need_plan,
    read_plan,
)
from shardprep.format.tokenizer_files import TOKENIZER_FILE

# A task waits for another's plan for about as long as its own would take: 3 s and more for many files.
_LEAST_WAIT_S = 3.0
_STAMPED_PER_S = 2000
_LOOK_EVERY_S = 0.2
_NUM_STAT_THREADS = 16  # a stat is a round trip on a network file system
_CLAIM_NAME = f".{PLAN_NAME}.claimed.tmp"
_NUM_NAMED = 3  # inputs that are named, of a shard or of those that differ


def make_shard(args: argparse.Namespace) -> int:
    """Make the shard that ``--shard_id`` names; returns the exit code."""
    from lustre import layout_line

    given = {"output_dir": PrepConfig().output_dir, **given_of(args, PrepConfig)}
    folder, shard_id = given["output_dir"], args.shard_id
    num_cpus = bind_to_task_cpus(offset=shard_id)  # planning, too, may load what starts threads
    if args.check_inputs:
        check_inputs(need_plan(folder), given.get("input_dir", PrepConfig().input_dir))
    plan = plan_of_task(given, is_planned=args.planned).at(given.get("input_dir"))
    if note := array_note(os.environ, plan.num_shards, folder):
        say(f"note: {note}")
    shard = plan.shard(shard_id)
    if finished_manifest(plan, folder, shard_id):
        say(f"shard {shard_id:05d} is done already")
        return 0
    settings = worker_settings(args)
    if settings.memory_gb is not None and (note := memory_note(settings.memory_gb)):
        say(f"note: {note}")
    say(part_line(plan, shard))
    say(means_line(settings, num_cpus))
    worker = load_worker(plan, folder, settings, num_cpus=num_cpus, warn=say, shard=shard)
    say(engine_line(worker))
    if line := layout_line(folder):
        say(line)
    with Progress(f"shard {shard_id:05d}", shard.num_bytes) as progress:
        manifest = worker.run_shard(shard, lambda work: progress.add(work.num_bytes, work.counts))
    counts = manifest.counts
    say(speed_line(manifest))
    say(f"shard {shard_id:05d} is done: {counts.num_documents} documents, {counts.num_tokens} tokens")
    if num_bad := sum(counts.quarantined.values()):
        say(f"{num_bad} documents were left out: {quarantine_path(folder, shard_id)}")
    return 0


def worker_settings(args: argparse.Namespace) -> WorkerSettings:
    """The worker's options: given, or of DATASET_[WRITER_]BATCH_SIZE, or the defaults."""
    settings: dict[str, Any] = {
        "batch_size": environment_number(os.environ, "DATASET_BATCH_SIZE"),
        "writer_batch_size": environment_number(os.environ, "DATASET_WRITER_BATCH_SIZE"),
        "memory_gb": memory_limit_gb(os.environ),
    }
    return WorkerSettings(**settings | given_of(args, WorkerSettings))


def plan_of_task(given: dict[str, Any], *, is_planned: bool = False) -> Plan:
    """The plan in ``output_dir``, checked against what the user gave; without one, 'one file, one shard'.

    ``is_planned``: the task was submitted for a plan, and makes none where that is gone. Of several tasks
    that find none, one plans and the others wait a little; who does not see the plan in time plans, too: the
    first to publish wins, the others compare.
    """
    output_dir: Path = given["output_dir"]
    plan = need_plan(output_dir) if is_planned else read_plan(output_dir)
    if plan is None:
        # Shard N is the N-th of the .txt files, README.txt and the like included.
        config = PrepConfig(**{**given, "also": ",".join(filter(None, ["*.txt", given.get("also")]))})
        say(f"no plan in {output_dir}: planning one shard per file of {config.input_dir}")
        plan = _plan_once(config)
    _check_given(plan, given)
    if "input_dir" in given and is_one_file_a_shard(plan):
        _refuse_other_inputs(plan, given["input_dir"], _other_names(plan, given["input_dir"]))
    return plan


def _plan_once(config: PrepConfig) -> Plan:
    """The plan that another task is making, if it comes soon, else one's own."""
    from preprocess.plan.planning import Sharding, make_plan

    with _claimed(config.output_dir) as is_ours:
        if not is_ours and (plan := _awaited_plan(config)):
            return plan
        if (plan := read_plan(config.output_dir)) is not None:  # it came between the first look and the claim
            return plan
        return make_plan(config, Sharding(), say=say)[0]


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Whether this task is the one to plan, told by a file. It is no lock: nothing is wrong without it."""
    claim = folder / _CLAIM_NAME
    is_ours = is_new_folder = False
    with contextlib.suppress(OSError):  # planning will say what is wrong with the folder
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            is_new_folder = True
        claim.touch(exist_ok=False)
        is_ours = True
    try:
        yield is_ours
    finally:
        with contextlib.suppress(OSError):
            if is_ours:
                claim.unlink()
            if is_new_folder:
                folder.rmdir()  # which does nothing to a folder that holds something


def _awaited_plan(config: PrepConfig) -> Plan | None:
    """The plan that appears while another task's claim is there; None where it takes too long, or fails."""
    from preprocess.plan.planning import list_inputs

    claim = config.output_dir / _CLAIM_NAME
    num_files = len(list_inputs(config.input_dir, recursive=config.recursive))
    until = time.monotonic() + _LEAST_WAIT_S + num_files / _STAMPED_PER_S
    if size_of_file(claim) is not None:
        say("another task is planning: waiting for its plan")
    while size_of_file(claim) is not None and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        if size_of_file(config.output_dir / PLAN_NAME) is not None:
            break
    return read_plan(config.output_dir)


def _check_given(plan: Plan, given: dict[str, Any]) -> None:
    """Raises Refused or OtherTokenizer where given options are not the plan's."""
    base = {item.name: getattr(plan.options, item.name) for item in PLAN_FIELDS}
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # seq_len and keep_text of the one record are no options of the other
    if "text_field" in given or "text_template" in given:
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    differing = option_differences(plan.options, PrepConfig(**{**base, **given}), set(given))
    if differing:
        raise Refused(
            f"{given['output_dir']} was planned with other options: {'; '.join(differing)}; leave them out, "
            "or use a new --output_dir",
            path=given["output_dir"],
            found="; ".join(differing),
            remedy="--output_dir",
        )
    model_id = given.get("model_id", plan.tokenizer.model_id)
    if model_id == plan.tokenizer.model_id:
        return
    folder = Path(model_id)
    is_local = size_of_file(folder / TOKENIZER_FILE) is not None
    found = describe_tokenizer(folder, model_id).fingerprint if is_local else None
    if found != plan.tokenizer.fingerprint:
        raise OtherTokenizer(
            f"{given['output_dir']} was planned with the tokenizer of {plan.tokenizer.model_id} (fingerprint "
            f"{plan.tokenizer.fingerprint[:12]}, files in {TOKENIZER_DIR}/), --model_id is {model_id} "
            f"({found[:12] if found else 'not a local folder, so it cannot be compared'}); "
            "leave --model_id out, or use a new --output_dir",
            path=given["output_dir"],
            found=f"--model_id {model_id}",
            expected=plan.tokenizer.fingerprint[:12],
            remedy="--output_dir",
        )


def check_inputs(plan: Plan, input_dir: Path) -> None:
    """Raises Refused where a folder no longer holds the planned inputs, and these alone.

    A file of the planned size and mtime is not opened; of another mtime its sample is read and compared.
    """
    try:
        differing = _other_names(plan, input_dir)
        with ThreadPoolExecutor(_NUM_STAT_THREADS) as pool:
            differing += filter(None, pool.map(partial(_change_of, input_dir), plan.inputs))
    except NotFound as error:
        differing = [str(error)]
    _refuse_other_inputs(plan, input_dir, differing)


def _other_names(plan: Plan, input_dir: Path) -> list[str]:
    """The files that were added or are missing, in words."""
    from preprocess.plan.planning import find_inputs  # a task with a plan needs none of it

    options, planned = plan.options, {item.path for item in plan.inputs}
    listing = find_inputs(
        input_dir,
        recursive=options.recursive,
        follow_links=options.follow_links,
        also=options.also,
        split=options.split,
    )
    found = {path.relative_to(input_dir).as_posix() for path in listing.paths}
    added, missing = sorted(found - planned), sorted(planned - found)
    return [f"{name} was added" for name in added] + [f"{name} is missing" for name in missing]


def _change_of(input_dir: Path, planned: InputFile) -> str | None:
    """How an input differs from the planned one, in words; None for one that is missing or equal."""
    try:
        status = (input_dir / planned.path).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadWriteError(f"input {input_dir / planned.path} cannot be read: {error.strerror}") from None
    if status.st_size != planned.num_bytes:
        return f"{planned.path} has {status.st_size} bytes, not {planned.num_bytes}"
    if status.st_mtime_ns == planned.mtime_ns:
        return None
    is_equal = sample_sha256(OpenInput(input_dir / planned.path)) == planned.sha256
    return None if is_equal else f"{planned.path} holds other bytes"


def _refuse_other_inputs(plan: Plan, input_dir: Path, differing: list[str]) -> None:
    if not differing:
        return
    more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    raise Refused(
        f"{input_dir} does not hold the {counted(len(plan.inputs), 'planned input file')}: "
        f"{'; '.join(differing[:_NUM_NAMED])}{more}. "
        "A plan is never changed: bring the planned files back, or put new files into a folder of their own, "
        "with an --output_dir of its own, and give the loader a list of folders",
        path=input_dir,
        found="; ".join(differing[:_NUM_NAMED]),
        expected=counted(len(plan.inputs), "planned input file"),
        remedy="--output_dir",
    )


def array_note(environ: Mapping[str, str], num_shards: int, folder: Path) -> str | None:
    """What this task's job array leaves out of the plan, with the line that submits it; else None.

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
        why = "its ids equal those of tokenizers, seen on the plan's probe just now"
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
    if settings.batch_size is not None:
        sizes += f", at most {settings.batch_size} documents encoded at once"
    if settings.writer_batch_size is not None:
        sizes += f", at most {settings.writer_batch_size} documents laid out at once"
    memory = "no memory limit" if settings.memory_gb is None else f"memory limit {settings.memory_gb:.2f} GiB"
    return f"{each}{counted(num_cpus, 'CPU')}, {sizes}, {memory}"


def speed_line(manifest: Manifest) -> str:
    """How fast a shard was made, at what price, and what was written."""
    run = manifest.run
    return (
        f"made in {run['wall_s']:.1f} s: {_speeds(run['wall_s'], Work.of(manifest))}; "
        f"{run['cpu_s']:.1f} s of CPU, "
        f"{short_bytes(run['max_rss_bytes'])} of memory, a tar of {short_bytes(manifest.tar.num_bytes)}"
    )


def total_line(works: Sequence[Work], wall_s: float) -> str:
    """What several shards made side by side hold, and how fast they were made together."""
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
