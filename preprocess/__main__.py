"""``python -m preprocess``: plan, run, verify, train_tokenizer, or one shard by ``--shard_id N``.

A command imports what it needs when it runs: ``--help`` takes 0.1 s, and a worker never loads the planner.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preprocess.make import resources
from preprocess.make.resources import WorkerSettings, environment_number
from shardprep.command_line import Command, Program, add_flags_of, given_of, given_words, parse_size
from shardprep.console import Progress, counted, print_lines, quoted, say, shards_text, short_bytes
from shardprep.errors import BadInput, CannotWrite, NotFound, Refused, ShardprepError, UsageError
from shardprep.format.names import INDEX_NAME, id_ranges, ids_of_ranges
from shardprep.format.options import GROUPS, RESOURCES, PrepConfig

if TYPE_CHECKING:
    from preprocess.check.verify import Problem
    from shardprep.format.done import Check, Finding
    from shardprep.format.plan import Plan


_FINAL_CODES = {BadInput.exit_code, NotFound.exit_code, Refused.exit_code}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    code = PROGRAM.run(command_words(given_words(argv)))
    if code == 0 and (record := os.environ.get("SHARDPREP_ATTEMPT")):  # of a job's task, which succeeded
        with contextlib.suppress(OSError):
            os.unlink(record)  # noqa: PTH108 - one call, as no file stays for a shard that is done
    return code


def command_words(argv: Sequence[str]) -> list[str]:
    """The words with their command: ``--shard_id N`` alone makes a shard."""
    is_nameless = not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help"))
    return ["shard", *argv] if is_nameless else list(argv)


def make_shard(args: argparse.Namespace) -> int:
    """``--shard_id N``: the command of a job array's task."""
    from shardprep.format.attempts import Failure, append_failure

    try:
        resources.check_address_space()  # before anything large is loaded
        given = given_of(args, PrepConfig)
        folder = given.setdefault("output_dir", PrepConfig().output_dir)
        num_cpus = resources.bind_to_task_cpus(offset=args.shard_id)  # planning, too, may start threads
        plan = _plan_of_task(args, given).at(given.get("input_dir"))
        from preprocess.make.worker import make_shard as make

        return make(plan, folder, args.shard_id, resources.worker_settings(args), num_cpus)
    except ShardprepError as error:
        append_failure(Failure.of(args.shard_id, error))
        raise


def _plan_of_task(args: argparse.Namespace, given: dict[str, Any]) -> Plan:
    """Return the plan in the task's folder; load the planner where there is none, or options are given."""
    from shardprep.format.plan import need_plan, read_plan

    folder = given["output_dir"]
    plan = need_plan(folder) if args.planned or args.check_inputs else read_plan(folder)
    if plan is not None and not args.check_inputs and given.keys() == {"output_dir"}:
        return plan
    from preprocess.plan.plan_of_task import check_inputs, plan_of_task

    if plan is not None and args.check_inputs:
        check_inputs(plan, given.get("input_dir", PrepConfig().input_dir))
    return plan_of_task(plan, given)


def make_plan(args: argparse.Namespace) -> int:
    """``plan``: freeze which bytes are which shard, and say what it will cost."""
    resources.check_address_space()
    from lustre import Need, space_lines
    from preprocess.plan import planning

    given = given_of(args, PrepConfig)
    config = PrepConfig(**given)
    if config.transform and (fields := sorted({"text_field", "text_template"} & given.keys())):
        raise UsageError(
            f"--{fields[0]} says what the text is, and so does --transform, which gets all fields; give one",
            found=f"--{fields[0]} --transform",
            expected="one",
        )
    if (name := _HUB_NAME.fullmatch(str(config.input_dir))) and not os.path.lexists(config.input_dir):
        raise NotFound(
            f"--input_dir {config.input_dir} is no folder; {_HUB.replace('NAME', name[1])}",
            path=config.input_dir,
            remedy="hf download",
        )
    shard_bytes = parse_size(args.shard_bytes, "--shard_bytes") if args.shard_bytes else None
    sharding = planning.Sharding(num_shards=args.num_shards, shard_bytes=shard_bytes)
    plan, cost = planning.make_plan(config, sharding, stripe=args.stripe, dry_run=args.dry_run, say=say)
    sizes = plan.shard_bytes()
    size = str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    need = Need(num_bytes=cost.output_bytes, num_shards=plan.num_shards)
    warnings = [*cost.notes, planning.small_shards_note(plan, sharding)]
    if cost.longest_shard_s > planning.LONG_SHARD_S:
        more = round(plan.num_shards * cost.longest_shard_s / planning.LONG_SHARD_S) + 1
        minutes = cost.longest_shard_s / 60
        warnings.insert(
            len(cost.notes), f"a shard will take {minutes:.0f} minutes on one core; --num_shards {more}?"
        )
    if empty := sizes.count(0):
        warnings.append(f"{counted(empty, 'shard')} without any input; fewer would do")
    shards, cores = counted(plan.num_shards, "shard"), counted(cost.num_useful_cores, "core")
    print_lines(
        f"plan {plan.plan_id[:12]}: {shards} of {size} input bytes",
        f"about {cost.num_tokens:.3g} tokens, {short_bytes(cost.output_bytes)} on disk, "
        f"{cost.core_hours:.2g} core hours, the longest shard {cost.longest_shard_s:.0f} s on one core",
        f"a task uses up to {cores} well: --cpus-per-task={cost.num_useful_cores}",
        *space_lines(config.output_dir, need),
        *(f"warning: {warning}" for warning in warnings if warning),
        *(
            ["nothing was written, because of --dry_run: leave it out to make this plan"]
            if args.dry_run
            else planning.next_lines(config.output_dir, plan.num_shards)
        ),
    )
    return 0


def run(args: argparse.Namespace) -> int:
    """``run DATA``: the missing shards on this machine."""
    from preprocess.make.local_run import run_shards
    from preprocess.make.worker import amounts_line, missing_shards
    from shardprep.format.attempts import RunRecord
    from shardprep.format.plan import need_plan

    resources.check_address_space()
    folder = args.output_dir
    plan = need_plan(folder)
    wanted = range(plan.num_shards) if args.shards is None else parse_ids(args.shards, plan.num_shards)
    todo = missing_shards(plan, folder, wanted)
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} shards are done already")
    if not todo:
        return 0
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(
            f"{folder} is no folder that you can write to; its owner can make the shards", path=folder
        )
    cpus = resources.allowed_cpus(os.environ, os.sched_getaffinity(0), offset=todo[0])
    settings = resources.worker_settings(args)
    assert settings.memory_gb is not None
    num_proc = min(num_processes(args, len(cpus), settings.memory_gb), len(todo))
    settings = dataclasses.replace(settings, memory_gb=settings.memory_gb / num_proc)
    if note := resources.memory_note(settings.memory_gb or 0, num_proc):
        say(f"note: {note}")
    cpus_of = [cpus[number::num_proc] or cpus for number in range(num_proc)]
    sizes = plan.shard_bytes()
    with (
        RunRecord(folder, plan.plan_id, todo, num_cpus=len(cpus)) as record,
        Progress(f"{len(todo)} shards", sum(sizes[shard_id] for shard_id in todo)) as progress,
    ):
        made, failures = run_shards(folder, settings, todo, cpus_of, progress)
        record.exit_code = failures[0].exit_code if failures else 0
    counts = [manifest.counts for manifest in made]
    total = amounts_line(
        sum(each.input_bytes for each in counts),
        sum(each.num_documents for each in counts),
        sum(each.num_tokens for each in counts),
        progress.elapsed_s,
    )
    num_made = len(todo) - len(failures)
    say(f"{num_made} of {counted(len(todo), 'shard')} made by {counted(num_proc, 'process')}: {total}")
    if failures:
        ids = id_ranges(failure.shard_id for failure in failures)
        what = "run again"
        if {failure.exit_code for failure in failures} <= _FINAL_CODES:
            what = "the same input fails in the same way: do what the lines above say, then"
        say(f"error: failed: {shards_text(ids)}; {what}: shardprep run {quoted(folder)} --shards {ids}")
        return failures[0].exit_code
    return 0


def blank(args: argparse.Namespace) -> int:
    """``blank DATA``: take over the shards that hold none of the documents, make the others, and verify."""
    from preprocess.blank import check_places, take_over

    folder, new = args.data_dir, args.output_dir
    plan, touched, are_all_found = take_over(
        folder,
        new,
        args.ids,
        input_dir=getattr(args, "input_dir", None),
        transform_file=getattr(args, "transform", None),
    )
    num_taken = plan.num_shards - len(touched)
    say(f"{num_taken} of {counted(plan.num_shards, 'shard')} hold none of them: taken as they are")
    if code := run(args):
        return code
    check_places(folder, new, touched)
    return verify(args) or (0 if are_all_found else NotFound.exit_code)


def verify(args: argparse.Namespace) -> int:
    """``verify DATA``: prove the shards whole and write index.json."""
    from preprocess.check.verify import verify_dataset
    from shardprep.console import source_lines
    from shardprep.format.attempts import read_attempts, remove_finished
    from shardprep.format.done import remove_findings, standing_findings
    from shardprep.format.plan import need_plan

    if args.deep is not None and args.deep < 1:
        raise UsageError.of_value("--deep", args.deep, "a number of shards from 1")
    folder = args.output_dir
    plan = need_plan(folder)
    check: Check = "fast" if args.fast else "full"
    standing = standing_findings(folder, plan.plan_id, check)
    with Progress("verifying", plan.num_shards, unit="shards") as progress:
        problems, index = verify_dataset(
            folder,
            plan,
            fast=args.fast,
            progress=lambda _: progress.add(1),
            standing={} if args.deep is not None else standing,
        )
    if index is None:
        return _tell_problems(folder, plan, problems, check)
    samples, tokens = int(index.column("num_samples").sum()), int(index.column("num_tokens").sum())
    print_lines(
        f"verified {counted(plan.num_shards, 'shard')}: {counted(samples, 'sample')}, "
        f"{counted(tokens, 'token')}; wrote {folder / INDEX_NAME}"
    )
    counts = {name: dataclasses.asdict(of) for name, of in index.sources.items()}
    print_lines(*source_lines(counts, all_in=INDEX_NAME))
    if args.deep is not None and (code := _verify_deep(args, plan, standing)):
        return code
    remove_findings(folder)
    remove_finished(read_attempts(folder, plan.plan_id).own, [True] * plan.num_shards)
    return 0


def _tell_problems(folder: Path, plan: Plan, problems: Sequence[Problem], check: Check) -> int:
    """Say what is wrong, write it down for the other commands, and return the exit code.

    What is wrong with a shard is told before what could not be read, of which nothing is known.
    """
    from shardprep.format.done import is_of_shard, publish_findings

    of_kind: dict[type[ShardprepError], list[Problem]] = {}
    for problem in problems:
        of_kind.setdefault(type(problem.error), []).append(problem)
    for same in of_kind.values():
        for problem in same[:_MOST_TOLD]:
            say(f"error: shard {problem.shard_id:05d}: {problem.error}")
        if ids := id_ranges(problem.shard_id for problem in same[_MOST_TOLD:]):
            say(f"error: {shards_text(ids)}: likewise; shardprep run {quoted(folder)} makes what is missing")
    wrong = [each for each in problems if is_of_shard(each.error)]
    others = [each for each in problems if not is_of_shard(each.error)]
    try:
        errors = [(each.shard_id, each.error) for each in wrong]
        not_read = {each.shard_id for each in others}
        publish_findings(folder, plan.plan_id, errors, check=check, not_read=not_read)
    except ShardprepError as error:
        say(f"warning: other commands will not know this: {error}")
    for some, what in (
        (wrong, "are not right"),
        (others, "could not be compared, and nothing is said of them"),
    ):
        if some:
            ids = id_ranges(each.shard_id for each in some)
            say(f"{len(some)} of {plan.num_shards} shards {what}: {shards_text(ids)}; see the lines above")
    return (wrong or others)[0].error.exit_code


def _verify_deep(args: argparse.Namespace, plan: Plan, standing: Mapping[int, Finding]) -> int:
    """Make some shards again and compare, among them those that such a comparison found wrong before."""
    from preprocess.check.deep_verify import choose_shards, verify_deep

    num_cpus = resources.bind_to_task_cpus(offset=0)
    chosen = sorted({*choose_shards(plan, args.deep), *standing})
    with Progress("making shards again", len(chosen), unit="shards") as progress:
        problems = verify_deep(
            args.output_dir,
            plan,
            chosen,
            settings=resources.worker_settings(args),
            num_cpus=num_cpus,
            progress=progress.add,
        )
    if problems:
        return _tell_problems(args.output_dir, plan, problems, "deep")
    print_lines(
        f"the reference engine makes the same of the input of {counted(len(chosen), 'shard')} "
        f"({id_ranges(chosen)}), byte for byte"
    )
    return 0


def parse_ids(text: str, num_shards: int) -> list[int]:
    """``0-9,12`` -> shard ids in order, each once. Raises UsageError."""
    try:
        return sorted(set(ids_of_ranges(text, end=num_shards)))
    except ValueError:
        expected = f"ids of 0 to {num_shards - 1}, such as {num_shards - 1}"
        raise UsageError.of_value("--shards", text, expected) from None


def num_processes(args: argparse.Namespace, num_cpus: int, memory_gb: float) -> int:
    """--num_proc, else DATASET_NUM_PROC, else one per CPU as far as the memory goes. Raises UsageError."""
    given = environment_number(os.environ, "DATASET_NUM_PROC") if args.num_proc is None else args.num_proc
    if given is None:
        fitting = int(memory_gb * 2**30) // (resources.PROCESS_BYTES + (100 << 20))
        return max(1, min(num_cpus, fitting))
    if given < 1:
        raise UsageError.of_value("--num_proc", given, "1 or more")
    return int(given)


def _shard_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make one shard."
    add = parser.add_argument
    add("--shard_id", metavar="N", type=int, required=True, help="number of the shard, from 0")
    text = "fail with exit code 66 if --output_dir has no plan, instead of making one"
    add("--planned", action="store_true", help=text)
    text = "first check that --input_dir holds the planned inputs of all shards"
    add("--check_inputs", action="store_true", help=text)
    add_flags_of(parser, PrepConfig, groups=GROUPS[:-1])
    others = {item.name for item in dataclasses.fields(PrepConfig)}
    add_flags_of(parser, WorkerSettings, but=others, groups=[RESOURCES])


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    shards = parser.add_argument_group("shards")
    add = shards.add_mutually_exclusive_group().add_argument
    add("--num_shards", metavar="N", type=int, help="make N even shards (default: one per input file)")
    text = "make even shards of about this much input, such as 512M (default: by --num_shards)"
    add("--shard_bytes", metavar="SIZE", help=text)
    shards.add_argument("--dry_run", action="store_true", help="print what would be planned, write nothing")
    add = parser.add_argument_group("Lustre layout of a new output folder").add_argument
    text = (
        "auto: change nothing, print it. none: do not look at it. N[,SIZE][,POOL]: one stripe up to 64 MiB "
        "of a file, N from there on, such as 8,4M. Or options of lfs setstripe: '-c 8' (default: auto)"
    )
    add("--stripe", metavar="LAYOUT", default="auto", help=text)
    add_flags_of(parser, PrepConfig, groups=GROUPS)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="DATA", type=Path, help="folder of the data set")


def _run_flags(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    add = parser.add_argument
    add("--shards", metavar="IDS", help="make only these, such as 0-9,12 (default: all)")
    _making_flags(parser)


def _making_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of processes (default: DATASET_NUM_PROC, or one per CPU, fewer if memory is short)"
    add("--num_proc", metavar="N", type=int, help=text)
    add_flags_of(parser, WorkerSettings, groups=GROUPS)


def _blank_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a data set without some documents, in which all others keep their places: only the shards that "
        "hold one of them are made again, of the input. A training run goes on with it."
    )
    add = parser.add_argument
    add("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    text = "list of the documents: ids of --id_field, or sha256:HEX of texts, one per line"
    add("--ids", metavar="FILE", type=Path, required=True, help=text)
    text = "folder of the new data set; one on the same file system shares the other shards' files"
    add("--output", "--output_dir", metavar="NEW", dest="output_dir", type=Path, required=True, help=text)
    _making_flags(parser)
    parser.set_defaults(shards=None, fast=True, deep=None)


def _clean_flags(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--dry_run", action="store_true", help="print what would be removed, remove nothing")


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    tier = parser.add_mutually_exclusive_group()
    text = "check manifests, sizes and coverage; read no shard"
    tier.add_argument("--fast", action="store_true", help=text)
    text = "also make N shards again with the engine tokenizers, and compare (default: 0; without N: 3)"
    tier.add_argument("--deep", nargs="?", type=int, const=3, metavar="N", help=text)
    text = "for --deep, folder of the input, if it moved (default: the plan's)"
    parser.add_argument("--input_dir", metavar="PATH", type=Path, help=text)
    text = "for --deep, the file of the plan's --transform (default: none)"
    parser.add_argument("--transform", metavar="PATH", type=Path, help=text)


_PACKED = "documents are packed into rows by --record packed --seq_len 8192"
_MOST_TOLD = 5  # problems of one kind that verify prints
_HUB_NAME = re.compile(r"(?:(?:hf|https?):/+(?:huggingface\.co/+)?datasets/)?([\w-][\w.-]*/[\w-][\w.-]*)")
_HUB = (
    "a data set of the hub is brought to disk first: hf download NAME --repo-type dataset --local-dir RAW; "
    "then plan --input_dir RAW --recursive"
)
_LOADER_CUTS = "documents are kept whole here; the loader cuts: get_llama3_dataloader(..., max_length=2048)"


def _elsewhere(module: str, summary: str) -> Command:
    """A command of another module, which is imported when it is called; its ``run`` is named after it."""
    name = f"preprocess.{module}"
    return Command(summary, f"{name}:add_flags", f"{name}:{module.rpartition('.')[2]}")


PROGRAM = Program(
    name="python -m preprocess",
    dashed_values=("--stripe",),
    description="Raw text to token shards. Without a command it makes one shard: --shard_id N.",
    epilog="shardprep --shard_id N [...] makes shard N: of the plan in --output_dir, or "
    "without one of the N-th .txt file in --input_dir (as ls *.txt shows them).",
    hints={
        "--packing": _PACKED,
        "--pack_sequences": _PACKED,
        "--dataset": _HUB,
        "--dataset_name": _HUB,
        "--max_length": _LOADER_CUTS,
        "--max_seq_length": _LOADER_CUTS,
    },
    commands={
        "shard": Command("make one shard: --shard_id N", _shard_flags, make_shard, is_nameless=True),
        "plan": Command(
            "decide which input bytes belong to which shard, and write plan.json", _plan_flags, make_plan
        ),
        "run": Command("make the missing shards on this machine", _run_flags, run),
        "verify": Command("check all shards and write index.json", _verify_flags, verify),
        "doctor": _elsewhere("look.doctor", "check machine, tokenizer and folders before the work"),
        "peek": _elsewhere("look.peek", "print decoded samples and where they came from"),
        "export": _elsewhere("look.export", "write the token ids as Megatron, nanoGPT or Hugging Face files"),
        "blank": Command("make the data set anew with some documents blanked", _blank_flags, blank),
        "clean": Command(
            "remove temporary files of finished shards, those older than 24 hours, logs of a verified set",
            _clean_flags,
            "preprocess.check.clean:clean",
        ),
        "train_tokenizer": Command(
            "train a byte-level BPE like Llama 3's",
            "preprocess.look.train_tokenizer:add_arguments",
            "preprocess.look.train_tokenizer:main",
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
