"""The command ``verify``: check a data set, and write index.json.

``shard_checks`` compares the shards with their manifests and the plan. With ``--deep``, ``remade_shards``
makes some of them again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from preprocess.make.settings import InputSettings, WorkerSettings
from preprocess.remade_shards import DeepRequest, remake
from preprocess.shard_checks import Problems, check_shards
from shardprep import errors, files
from shardprep.console import (
    counted,
    print_exactly,
    print_lines,
    say,
    shards_text,
    source_lines,
)
from shardprep.format import commands, done, manifest, names
from shardprep.format.attempts import read_attempts
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import kept_ids
from shardprep.format.done import Check
from shardprep.format.excluded import unmatched_names
from shardprep.format.index import DatasetIndex, merge_manifests
from shardprep.format.manifest import Manifest
from shardprep.format.plan import Plan, need_plan
from shardprep.format.planned_tokenizer import check_tokenizer_files
from shardprep.option_flags import add_flags_of, given_of

_MAX_PRINTED = 5  # problems of one kind


def verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", metavar="DATA", type=Path, help="folder of the data set")
    tier = parser.add_mutually_exclusive_group()
    text = "check manifests, sizes and coverage; read no shard"
    tier.add_argument("--fast", action="store_true", help=text)
    text = (
        "also make N shards, or all, again with the engine tokenizers, and compare (default: 0; without N: 3)"
    )
    tier.add_argument("--deep", nargs="?", const="3", metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print one line of JSON on standard output")
    add_flags_of(parser.add_argument_group("for --deep"), InputSettings, is_grouped=False)


def verify(args: argparse.Namespace) -> int:
    """Check all shards, then write index.json or report the problems. Return the exit code."""
    deep = None if args.deep is None else DeepRequest.parsed(args.deep)
    folder = DataFolder(args.output_dir)
    given = given_of(args, WorkerSettings)
    return verify_shards(folder, given, is_fast=args.fast, deep=deep, is_json=args.json)


def verify_shards(
    folder: DataFolder,
    given: dict[str, object],
    *,
    is_fast: bool = False,
    deep: DeepRequest | None = None,
    is_json: bool = False,
) -> int:
    """Check a data set as ``verify`` does. ``given``: flags of the worker that makes shards again."""
    plan = need_plan(folder)
    check: Check = "fast" if is_fast else "full"
    makes_every = deep is not None and deep.is_every(plan)
    tell = say if is_json else print_lines
    # What only a deep verify can clear stands until ``remake`` has looked at these shards, too.
    standing = done.uncleared_findings(folder, plan.plan_id, "every" if makes_every else check)
    compare_tokenizer = partial(check_tokenizer_files, folder, plan.tokenizer_files)
    files.with_retries(f"the tokenizer in {folder} cannot be read", compare_tokenizer)
    known = standing if deep is None else {}
    manifests, problems = check_shards(folder, plan, is_fast=is_fast, standing=known)
    if deep is not None and (makes_every or not problems):
        differing = remake(folder, plan, given, deep, also=standing, wrong=problems, tell=tell)
        check = "every" if makes_every else "deep"
        problems = {**differing, **problems}
    if problems:
        if is_json:
            print_exactly(json.dumps(_facts(folder, plan, check, problems=problems)))
        return _report_problems(folder, plan, problems, check)
    index = merge_manifests(folder, manifests)
    wrote = _publish_index(folder, index)
    if is_json:
        print_exactly(json.dumps(_facts(folder, plan, check, index=index)))
    else:
        _print_sums(folder, plan, index, wrote, is_fast=is_fast)
    if plan.options.excluded:
        for line in _exclude_lines(folder, plan, manifests):
            tell(line)
    with contextlib.suppress(OSError):
        folder.remove(done.FINDINGS_NAME)
    _remove_ended_attempts(folder, plan)
    return 0


def _publish_index(folder: DataFolder, index: DatasetIndex) -> str:
    """Write index.json, unless a read-only folder has the same one. Return what was done, for a message."""
    content = index.to_json()
    try:
        folder.publish(names.INDEX_NAME, content)
    except errors.CannotWrite as error:  # for example a read-only folder of a colleague
        existing = b""
        with contextlib.suppress(*files.NOT_THERE, errors.BrokenShard):
            existing = folder.read(names.INDEX_NAME, max_bytes=len(content))
        if existing != content:
            error.advise(f"all shards are right, but {names.INDEX_NAME} was not written")
            raise
        return "found the same in"
    return "wrote"


def _print_sums(folder: DataFolder, plan: Plan, index: DatasetIndex, wrote: str, *, is_fast: bool) -> None:
    """Print what is in a data set whose shards are all right."""
    sums = (counted(int(index.column(f"num_{noun}s").sum()), noun) for noun in ("sample", "token"))
    # Only who has read every byte may call it verified.
    compared = "checked manifests and sizes of" if is_fast else "verified"
    path = folder.path_of(names.INDEX_NAME)
    print_lines(f"{compared} {counted(plan.num_shards, 'shard')}: {', '.join(sums)}; {wrote} {path}")
    if is_fast:
        print_lines(f"to also check every byte: {commands.on('verify', folder)}")
    counts = {name: source.to_dict() for name, source in index.sources.items()}
    print_lines(*source_lines(counts, all_in=names.INDEX_NAME))


def _remove_ended_attempts(folder: DataFolder, plan: Plan) -> None:
    """Remove the records of failed attempts, whose shards others have made."""
    for record in read_attempts(folder, plan.plan_id).of_this_folder:
        if record.ended is not None:
            with contextlib.suppress(OSError, errors.ShardprepError):
                folder.remove(record.name)


def _exclude_lines(folder: DataFolder, plan: Plan, manifests: Sequence[Manifest]) -> list[str]:
    """Say how many names of --exclude match no document. Reads the quarantine files with excluded documents.

    Says nothing with --limit, because documents that were not read may have these names.
    """
    if plan.options.limit:
        return []
    id_field = plan.options.id_field
    quarantines = [
        (each.shard_id, each.quarantine)
        for each in manifests
        if each.quarantine is not None and "excluded" in each.counts.quarantined
    ]
    unmatched = unmatched_names(folder, plan.options.excluded, id_field, quarantines)
    if unmatched is None:
        return []
    some_id = _some_id(folder, manifests) if id_field and unmatched.num_unmatched else ""
    return [unmatched.sentence(some_id)]


def _some_id(folder: DataFolder, manifests: Sequence[Manifest]) -> str:
    """Return the id of a document, as an example, or ""."""
    for each in manifests:
        for *_, name in kept_ids(folder, each.shard_id, each.ids) if each.ids is not None else ():
            if name:
                return name
    return ""


def _facts(
    folder: DataFolder,
    plan: Plan,
    check: Check,
    *,
    index: DatasetIndex | None = None,
    problems: Problems | None = None,
) -> dict[str, object]:
    """Return what ``--json`` prints: ``index`` if all shards are right, else ``problems``."""
    facts: dict[str, object] = {
        "output_dir": str(folder),
        "check": check,
        "is_right": index is not None,
        "num_shards": plan.num_shards,
    }
    if index is not None:
        for noun in ("samples", "documents", "tokens"):
            facts[f"num_{noun}"] = int(index.column(f"num_{noun}").sum())
        facts["sources"] = {name: source.to_dict() for name, source in index.sources.items()}
    if problems:
        facts["problems"] = {
            str(shard_id): {"exit_code": error.exit_code, "message": str(error)}
            for shard_id, error in sorted(problems.items())
        }
    return facts


def _report_problems(folder: DataFolder, plan: Plan, problems: Problems, check: Check) -> int:
    """Print the problems, record them for other commands, and return the exit code."""
    is_made = False  # whether any shard has a manifest
    for shard_id in range(plan.num_shards):
        error = problems.get(shard_id)
        manifest_path = str(folder.path_of(names.manifest_name(shard_id)))
        is_made |= not isinstance(error, errors.MissingShard) or error.path != manifest_path
    if is_made:
        _print_problems(folder, problems)
    else:
        say(f"error: {errors.NotFound(path=folder, found='no shard is made', remedy=commands.run(folder))}")
    # A shard that is wrong comes before one that could not be read, about which nothing is known.
    wrong = {number: error for number, error in problems.items() if isinstance(error, manifest.SHARD_ERRORS)}
    not_read = problems.keys() - wrong.keys()
    try:
        done.publish_findings(folder, plan.plan_id, wrong, check, not_read)
    except errors.ShardprepError as error:
        say(f"warning: other commands will not know this: {error}")
    unknown = "could not be checked, so nothing is known about them"
    for some, what in ((wrong, "are not right"), (not_read, unknown)):
        if some and is_made:
            ids = names.id_ranges(some)
            say(f"{len(some)} of {plan.num_shards} shards {what}: {shards_text(ids)}; see the lines above")
    return problems[min(wrong or problems)].exit_code


def _print_problems(folder: DataFolder, problems: Problems) -> None:
    """Print the first problems of each kind, and which other shards have problems of this kind."""
    for kind in dict.fromkeys(map(type, problems.values())):
        same = [shard_id for shard_id, error in problems.items() if type(error) is kind]
        for shard_id in same[:_MAX_PRINTED]:
            say(f"error: shard {shard_id:05d}: {problems[shard_id]}")
        ids = names.id_ranges(same[_MAX_PRINTED:])
        if ids:
            say(f"error: {shards_text(ids)}: the same; to make them again, run: {commands.run(folder, ids)}")
