"""``python -m preprocess COMMAND``, or ``--shard_id N`` alone, which makes one shard (``task``).

Each command imports what it needs when it runs: ``--help`` takes 0.1 s, and a worker never loads the planner.
"""

from __future__ import annotations

if __name__ == "__main__":
    from shardprep import begin_command

    begin_command()

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from preprocess.make import resources
from preprocess.make.resources import WorkerSettings
from shardprep.command_line import Command, Program, given_words
from shardprep.console import Progress, counted, print_lines, say, shards_text
from shardprep.errors import CannotWrite, NotFound, ShardprepError, UsageError
from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import PLAN_NAME, chosen_shards, id_ranges
from shardprep.format.plan_options import PrepConfig
from shardprep.meanings import HUB_HINT
from shardprep.option_flags import add_flags_of, given_of, parse_size

_HUB_NAME = re.compile(r"(?:datasets/)?([\w-][\w.-]*/[\w-][\w.-]*)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are a line on standard error, never a traceback."""
    words = given_words(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["shard", *words]  # --shard_id N alone makes a shard
    code = PROGRAM.run(words)
    # A job's script records each attempt in a file, see shardprep/format/attempts.py. A successful task
    # removes it, so done shards have no record.
    if code == 0 and "SHARDPREP_ATTEMPT" in os.environ:
        from shardprep.format.attempts import remove_own_record

        remove_own_record()
    return code


def task(args: argparse.Namespace) -> int:
    """Make one shard: the command of a job array's task."""
    try:
        resources.check_address_space()  # before anything large is loaded
        given = given_of(args, PrepConfig)
        folder = DataFolder(given.setdefault("output_dir", PrepConfig.output_dir))
        cpus = resources.allowed_cpus(offset=args.shard_id)
        num_cpus = resources.bind_to(cpus)  # before planning, which may start threads
        may_plan = not (args.planned or args.check_inputs)
        has_to_plan = may_plan and folder.status_of(PLAN_NAME) is None
        # A task of a job array usually gets only --output_dir. The planner, whose import takes 0.2 s, is
        # needed only to compare other flags with the plan, or to make a missing plan.
        if has_to_plan or args.check_inputs or given.keys() != {"output_dir"}:
            from preprocess.plan.task_plan import plan_of_task

            plan_of_task(given, may_plan=may_plan, checks_inputs=args.check_inputs)
        from preprocess.make.worker import make_shard

        settings = resources.worker_settings(given_of(args, WorkerSettings))
        note = resources.memory_note(settings.memory_gb)
        return make_shard(folder, args.shard_id, settings, num_cpus, note)
    except ShardprepError as error:
        from shardprep.format.attempts import Failure, append_failure

        append_failure(Failure.of(args.shard_id, error))
        raise


def _shard_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make one shard."
    add = parser.add_argument
    add("--shard_id", metavar="N", type=int, required=True, help="number of the shard, from 0")
    text = "fail with exit code 66 if --output_dir has no plan, instead of making one"
    add("--planned", action="store_true", help=text)
    text = "first check that --input_dir has the planned inputs of all shards"
    add("--check_inputs", action="store_true", help=text)
    add_flags_of(parser, PrepConfig)
    others = {item.name for item in dataclasses.fields(PrepConfig)}
    add_flags_of(parser, WorkerSettings, exclude=others)


def plan_data_set(args: argparse.Namespace) -> int:
    """Decide which input bytes become which shard, and print the cost and the next command."""
    resources.check_address_space()
    from lustre import Need, space_lines
    from preprocess.plan.planning import make_plan

    given = given_of(args, PrepConfig)
    config = PrepConfig(**given)
    fields = sorted({"text_field", "text_template"} & given.keys())
    if config.transform and fields:
        raise UsageError(found=f"--{fields[0]} --transform", expected="one of them: each gives the text")
    if given.get("token_format") == "json" and config.has_rows:
        expected = "--token_format npy, as rows are always stored, or --record documents"
        raise UsageError(found="--token_format json", expected=expected, remedy="--token_format npy")
    on_hub = _HUB_NAME.fullmatch(str(config.input_dir))
    if on_hub is not None and not os.path.lexists(config.input_dir):
        hint = HUB_HINT.replace("NAME", on_hub[1])
        message = f"--input_dir {config.input_dir} is not a folder; {hint}"
        raise NotFound(message, path=config.input_dir, remedy="hf download")
    shard_bytes = parse_size(args.shard_bytes, "--shard_bytes") if args.shard_bytes else None
    cut = {"num_shards": args.num_shards, "shard_bytes": shard_bytes}
    plan, estimate = make_plan(config, **cut, stripe=args.stripe, dry_run=args.dry_run)
    need = Need(num_bytes=estimate.output_bytes, num_shards=plan.num_shards)
    if args.json:
        print_lines(json.dumps({"output_dir": str(config.output_dir), **estimate.to_json(plan)}))
        return 0
    print_lines(*estimate.lines(plan), *space_lines(config.output_dir, need))
    if args.dry_run:
        print_lines("nothing was written because of --dry_run: leave it out to write this plan")
        return 0
    from shutil import which

    following = commands.submit if which("sbatch") else commands.run
    print_lines(f"next: {following(config.output_dir)}")
    return 0


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    shards = parser.add_argument_group("shards")
    add = shards.add_mutually_exclusive_group().add_argument
    add("--num_shards", metavar="N", type=int, help="make N even shards (default: one per input file)")
    text = "make even shards of about this much input, such as 512M (default: by --num_shards)"
    add("--shard_bytes", metavar="SIZE", help=text)
    shards.add_argument("--dry_run", action="store_true", help="print what would be planned, write nothing")
    parser.add_argument("--json", action="store_true", help="print one line of JSON on standard output")
    add = parser.add_argument_group("Lustre layout of a new output folder").add_argument
    text = (
        "auto: print it, change nothing. none: ignore it. N[,SIZE][,POOL]: one stripe for the first 64 MiB "
        "of a file, then N, such as 8,4M. Or options of lfs setstripe, such as '-c 8' (default: auto)"
    )
    add("--stripe", metavar="LAYOUT", default="auto", help=text)
    add_flags_of(parser, PrepConfig)


def run(args: argparse.Namespace) -> int:
    """Make the missing shards on this machine."""
    from lustre import released_lines
    from preprocess.make.attempt import missing_shards
    from preprocess.make.log_lines import amounts_line
    from preprocess.make.many import run_shards
    from shardprep.format.attempts import RunRecord
    from shardprep.format.plan import need_plan

    resources.check_address_space()
    folder = DataFolder(args.output_dir)
    plan = need_plan(folder)
    chosen = chosen_shards(plan.num_shards, args.shards)
    wanted = list(range(plan.num_shards)) if chosen is None else sorted(chosen)
    settings = resources.worker_settings(given_of(args, WorkerSettings))
    todo = missing_shards(folder, plan.plan_id, wanted)
    if settings.again:
        if chosen is None:
            raise UsageError(found="--again", expected="--shards, too", remedy="--shards IDS")
        todo = wanted
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} shards are done already")
    if not todo:
        return 0
    if not os.access(folder, os.W_OK | os.X_OK):
        found = "a folder that you cannot write to"
        advice = "its owner can make the shards"
        raise CannotWrite(path=folder, found=found, expected="write permission", advice=advice)
    for line in released_lines(plan.input_dir, [plan.input_dir / item.path for item in plan.inputs]):
        say(line)
    cpus = resources.allowed_cpus(offset=todo[0])
    assert settings.memory_gb is not None  # worker_settings sets it
    num_proc = args.num_proc
    if num_proc is None:
        num_proc = resources.environment_number("DATASET_NUM_PROC")
    if num_proc is None:  # one per CPU, if there is enough memory
        fitting = int(settings.memory_gb * 2**30) // (resources.PROCESS_BYTES + (100 << 20))
        num_proc = max(1, min(len(cpus), fitting))
    if num_proc < 1:
        raise UsageError.of_value("--num_proc", num_proc, "1 or more")
    num_proc = min(num_proc, len(todo))
    settings = dataclasses.replace(settings, memory_gb=settings.memory_gb / num_proc)
    note = resources.memory_note(settings.memory_gb, num_proc)
    if note:
        say(f"note: {note}")
    cpus_of = [cpus[number::num_proc] or cpus for number in range(num_proc)]  # all, if they are too few
    sizes = plan.shard_bytes()
    progress = Progress(counted(len(todo), "shard"), sum(sizes[shard_id] for shard_id in todo))
    with RunRecord(folder, plan.plan_id, todo, num_cpus=len(cpus)) as record:
        made, failures = run_shards(folder, plan, settings, todo, cpus_of, progress, is_verbose=args.verbose)
        record.exit_code = failures[0].exit_code if failures else 0
    counts = [manifest.counts for manifest in made]
    total = amounts_line(
        sum(each.input_bytes for each in counts),
        sum(each.num_documents for each in counts),
        sum(each.num_tokens for each in counts),
        progress.elapsed_s,
    )
    say(f"{len(made)} of {counted(len(todo), 'shard')} made by {counted(num_proc, 'process')}: {total}")
    if failures:
        ids = id_ranges(failure.shard_id for failure in failures)
        say(f"error: failed: {shards_text(ids)}; fix the errors above, then run: {commands.run(folder, ids)}")
        return failures[0].exit_code
    return 0


def _run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    add("--shards", metavar="IDS", help="make only these, such as 0-9,12 (default: all)")
    _making_flags(parser)


def _making_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of processes (default: DATASET_NUM_PROC, or one per CPU, fewer if memory is short)"
    add("--num_proc", metavar="N", type=int, help=text)
    add("-v", "--verbose", action="store_true", help="print a line for each shard")
    add_flags_of(parser, WorkerSettings)


def blank(args: argparse.Namespace) -> int:
    """Link or copy the shards without any of the documents, make the others again, and verify."""
    from preprocess.blank import check_places, start
    from preprocess.verify import verify_shards

    folder = DataFolder(args.data_dir)
    new = DataFolder(args.output_dir)
    settings = resources.InputSettings(**given_of(args, resources.InputSettings))
    blanking = start(folder, new, args.ids, settings)
    num_shards = blanking.plan.num_shards
    num_touched = len(blanking.touched)
    say(f"{num_shards - num_touched} of {counted(num_shards, 'shard')} are unchanged: linked or copied")
    code = run(args)
    if code:
        return code
    check_places(folder, new, blanking.touched)
    code = verify_shards(new, {}, is_fast=True)
    if code:
        return code
    return 0 if blanking.are_all_found else NotFound.exit_code


def _blank_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a copy of a data set without some documents, in which all others keep their places, so that a "
        "training run can continue with it. Only shards with such documents are made again, from the input."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    text = "list of the documents: ids of --id_field, or sha256:HEX of texts, one per line"
    add("--ids", metavar="FILE", type=Path, required=True, help=text)
    text = "folder of the new data set; on the same file system it shares the files of unchanged shards"
    add("--output", "--output_dir", metavar="NEW", dest="output_dir", type=Path, required=True, help=text)
    _making_flags(parser)
    parser.set_defaults(shards=None)  # of ``run``


_ELSEWHERE = (  # command, its module, which is imported when it is called, and a line of help
    ("verify", "verify", "check all shards and write index.json"),
    ("doctor", "doctor", "check machine, tokenizer and folders before the work"),
    ("peek", "peek", "print decoded samples and where they came from"),
    ("export", "export", "write the token ids as Megatron, nanoGPT or Hugging Face files"),
    ("overlap", "overlap", "find the documents that contain text of an evaluation"),
    ("duplicates", "duplicates", "find equal documents, and list those to remove"),
    ("clean", "clean", "remove files of dead attempts, and the logs of a verified data set"),
    ("train_tokenizer", "train_tokenizer", "train a byte-level BPE like Llama 3's"),
)

PROGRAM = Program(
    name="python -m preprocess",
    dashed_values=("--stripe",),
    description="Raw text to token shards. Without a command it makes one shard: --shard_id N.",
    epilog="shardprep --shard_id N [...] makes shard N of the plan in --output_dir. Without a plan, it first "
    "plans a shard for each .txt file in --input_dir; shard 0 is the first that ls *.txt shows.",
    commands={
        "shard": Command("make one shard: --shard_id N", _shard_flags, task, is_nameless=True),
        "plan": Command(
            "decide which input bytes belong to which shard, and write plan.json", _plan_flags, plan_data_set
        ),
        "run": Command("make the missing shards on this machine", _run_flags, run),
        "blank": Command("make a copy of a data set without some documents", _blank_flags, blank),
        **{
            name: Command(summary, f"preprocess.{module}:{name}_flags", f"preprocess.{module}:{name}")
            for name, module, summary in _ELSEWHERE
        },
    },
)

if __name__ == "__main__":
    sys.exit(main())
