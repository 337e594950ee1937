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
from preprocess.make.settings import InputSettings, WorkerSettings, worker_settings
from shardprep.command_line import Command, Program, given_words
from shardprep.console import counted, print_exactly, print_lines, say
from shardprep.errors import NotFound, ShardprepError, UsageError
from shardprep.format import commands
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import PLAN_NAME
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
    # A job's script records each attempt in a file, see shardprep/format/attempts.py, and names it to the one
    # command that it starts: this one, never ``shardprep``. If it succeeds, the record goes, so done shards
    # have none.
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
            from preprocess.plan.task_plan import ensure_plan_matches

            ensure_plan_matches(given, may_plan=may_plan, checks_inputs=args.check_inputs)
        from preprocess.make.worker import make_shard

        settings = worker_settings(given_of(args, WorkerSettings))
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
    # PrepConfig, because a task may have to plan. What both declare, such as --engine, is one flag: a new
    # plan and the worker take its value, and an existing plan is compared with it if the plan keeps it.
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
    stripe = "auto" if args.stripe is None else args.stripe
    plan, estimate = make_plan(config, **cut, stripe=stripe, dry_run=args.dry_run)
    need = Need(num_bytes=estimate.output_bytes, num_shards=plan.num_shards)
    if args.json:
        print_exactly(json.dumps({"output_dir": str(config.output_dir), **estimate.to_json(plan)}))
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
        "auto: keep the folder's layout, and print it. none: the same, without calling lfs. N[,SIZE][,POOL]: "
        "one stripe for the first 64 MiB of a file, then N, such as 8,4M. Or options of lfs setstripe, such "
        "as '-c 8' (default: auto)"
    )
    add("--stripe", metavar="LAYOUT", help=text)
    add_flags_of(parser, PrepConfig)


def blank(args: argparse.Namespace) -> int:
    """Link or copy the shards without any of the documents, make the others again, and verify."""
    from preprocess.blank import check_places, start
    from preprocess.run import run
    from preprocess.verify import verify_shards

    folder = DataFolder(args.data_dir)
    new = DataFolder(args.output_dir)
    settings = InputSettings(**given_of(args, InputSettings))
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
    from preprocess.run_flags import making_flags

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
    making_flags(parser)
    parser.set_defaults(shards=None, part="0/1", array=False, json=False)  # of ``run``


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
        "run": Command(
            "make the missing shards, on this machine or under srun",
            "preprocess.run_flags:run_flags",
            "preprocess.run:run",
        ),
        "blank": Command("make a copy of a data set without some documents", _blank_flags, blank),
        **{
            name: Command(summary, f"preprocess.{module}:{name}_flags", f"preprocess.{module}:{name}")
            for name, module, summary in _ELSEWHERE
        },
    },
)

if __name__ == "__main__":
    sys.exit(main())
