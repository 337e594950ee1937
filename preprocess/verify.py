"""The command ``verify``: check a data set, and write index.json.

``verify --fast`` compares manifests, sizes and coverage. Without it every byte is also read, once, to check
hashes, places and all token ids: 4 to 20 s of CPU per gigabyte (one core; most for JSON). ``--deep`` also
makes some shards again, in a temporary folder, with the reference engine and the worker's code. This finds
shards that agree with their manifest but not with their input, unless this version has the same fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from preprocess.make.resources import allowed_cpus, bind_to
from preprocess.make.settings import InputSettings, WorkerSettings, worker_settings
from shardprep import errors, files
from shardprep.console import (
    counted,
    print_exactly,
    print_lines,
    say,
    shards_text,
    source_lines,
    with_progress,
)
from shardprep.format import commands, done, manifest, names
from shardprep.format.attempts import read_attempts
from shardprep.format.blanked import read_blanked
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import kept_ids
from shardprep.format.done import Check, Finding
from shardprep.format.excluded import unmatched_names
from shardprep.format.idx import misplaced_samples, read_idx
from shardprep.format.index import DatasetIndex, merge_manifests
from shardprep.format.inputs import input_kind
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.plan import Plan, need_plan
from shardprep.format.planned_tokenizer import check_tokenizer_files
from shardprep.format.shard_samples import ids_of
from shardprep.format.spec import BLANK, blank_id
from shardprep.option_flags import add_flags_of, given_of

IdxRecords = npt.NDArray[np.void]
_NUM_THREADS = 4  # hashing releases the interpreter's lock
_MAX_PRINTED = 5  # problems of one kind
_COMPARED = ("tar", "idx", "ids", "digests")  # by --deep; quarantine/ depends on the versions of libraries
Problems = dict[int, errors.ShardprepError]  # by shard


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepRequest:
    """How many shards ``--deep`` makes again."""

    num_shards: int | None  # None: all

    @classmethod
    def parsed(cls, word: str) -> DeepRequest:
        """Return the request of ``--deep WORD``. Raises UsageError."""
        if word == "all":
            return cls(num_shards=None)
        if not (word.isdecimal() and int(word) > 0):
            raise errors.UsageError.of_value("--deep", word, "a number of shards from 1, or: all")
        return cls(num_shards=int(word))

    def is_every(self, plan: Plan) -> bool:
        """Return whether all shards of a plan are made again."""
        return self.num_shards is None or self.num_shards >= plan.num_shards


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
    without_deep: Check = "fast" if is_fast else "full"
    makes_every = deep is not None and deep.is_every(plan)
    tell = say if is_json else print_lines
    # What only a deep verify can clear stands until ``_remake`` has looked at these shards, too.
    standing = done.uncleared_findings(folder, plan.plan_id, "every" if makes_every else without_deep)
    compare_tokenizer = partial(check_tokenizer_files, folder, plan.tokenizer_files)
    files.with_retries(f"the tokenizer in {folder} cannot be read", compare_tokenizer)
    known = standing if deep is None else {}
    manifests, problems = _check_shards(folder, plan, is_fast=is_fast, standing=known)
    check = without_deep
    if deep is not None and (makes_every or not problems):
        differing = _remake(folder, plan, given, deep, also=standing, wrong=problems, tell=tell)
        check = "every" if makes_every else "deep"
        problems = {**differing, **problems}
    if problems:
        if is_json:
            print_exactly(json.dumps(_facts(folder, plan, check, problems=problems)))
        return _report_problems(folder, plan, problems, check)
    index = merge_manifests(folder, manifests)
    path = folder.path_of(names.INDEX_NAME)
    content = index.to_json()
    wrote = "wrote"
    try:
        folder.publish(names.INDEX_NAME, content)
    except errors.CannotWrite as error:  # for example a read-only folder of a colleague
        existing = b""
        wrote = "found the same in"
        with contextlib.suppress(*files.NOT_THERE, errors.BrokenShard):
            existing = folder.read(names.INDEX_NAME, max_bytes=len(content))
        if existing != content:
            error.advise(f"all shards are right, but {names.INDEX_NAME} was not written")
            raise
    if is_json:
        print_exactly(json.dumps(_facts(folder, plan, check, index=index)))
    else:
        sums = (counted(int(index.column(f"num_{noun}s").sum()), noun) for noun in ("sample", "token"))
        # Only who has read every byte may call it verified.
        compared = "checked manifests and sizes of" if is_fast else "verified"
        print_lines(f"{compared} {counted(plan.num_shards, 'shard')}: {', '.join(sums)}; {wrote} {path}")
        if is_fast:
            print_lines(f"to also check every byte: {commands.on('verify', folder)}")
        counts = {name: source.to_dict() for name, source in index.sources.items()}
        print_lines(*source_lines(counts, all_in=names.INDEX_NAME))
    if plan.options.excluded:
        for line in _exclude_lines(folder, plan, manifests):
            tell(line)
    with contextlib.suppress(OSError):
        folder.remove(done.FINDINGS_NAME)
    attempts = read_attempts(folder, plan.plan_id).of_this_folder
    for record in attempts:  # whose shards others have made
        if record.ended is not None:
            with contextlib.suppress(OSError, errors.ShardprepError):
                folder.remove(record.name)
    return 0


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


def _remake(
    folder: DataFolder,
    plan: Plan,
    given: dict[str, object],
    deep: DeepRequest,
    *,
    also: Iterable[int],
    wrong: Collection[int],
    tell: Callable[[str], None],
) -> Problems:
    """Make some shards again, but none of the ``wrong`` ones. Return the problems of those that differ.

    Of the shards with input as many as ``deep`` asks for are chosen, the same ones for a plan each time, and
    those in ``also``.
    ``tell`` gets a line if none differs.
    Raises the errors of loading a Worker.
    """
    from preprocess.make.worker import Worker

    num_cpus = bind_to(allowed_cpus(offset=0))
    full = [shard_id for shard_id, size in enumerate(plan.shard_bytes()) if size]
    chooser = random.Random(plan.plan_id)  # noqa: S311 - a sample
    num_chosen = len(full) if deep.num_shards is None else min(deep.num_shards, len(full))
    chosen = sorted({*chooser.sample(full, num_chosen), *also} - {*wrong})
    settings = worker_settings(given)
    settings = dataclasses.replace(settings, engine="tokenizers", max_bad_fraction=1.0)
    worker = Worker(plan.at(settings.input_dir), folder, settings, num_cpus=num_cpus, warn=lambda _: None)
    problems: Problems = {}
    for shard_id in with_progress("making shards again", chosen):
        try:
            # It must not have a shard's name: an attempt at this shard would remove it as a temporary file.
            with folder.temporary_folder("verify") as (_, scratch):
                made = worker.make_in(DataFolder(scratch), worker.plan.shard(shard_id))
            published = read_manifest(folder, shard_id)
            others = [name for name in _COMPARED if getattr(published, name) != getattr(made, name)]
            differing = [names.STAMPED_NAMES[name](shard_id) for name in others]
            for name in (item.name for item in msgspec.structs.fields(manifest.ShardCounts)):
                before = getattr(published.counts, name)
                now = getattr(made.counts, name)
                if before != now:
                    differing.append(f"{name} ({now} in place of {before})")
            if differing:
                message = f"from its input the reference engine makes another {', another '.join(differing)}"
                remedy = commands.shard(shard_id, folder, "--again", "--engine", "tokenizers")
                raise errors.BrokenShard(message, remedy=remedy)
        except errors.ShardprepError as error:
            problems[shard_id] = error
    if not problems:
        shards = f"{counted(len(chosen), 'shard')} ({names.id_ranges(chosen)})"
        tell(f"the reference engine makes the same bytes from the input of {shards}")
    return problems


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


def _check_blanked(folder: DataFolder, plan: Plan, shard: Manifest, *, is_planned: bool) -> None:
    """Check that a shard is the blanked one if the plan says so, and that its list is this data set's.

    A blanked data set and the one that it was made from have the same id.
    """
    name = f"shard {shard.shard_id:05d}"
    if is_planned != (shard.unblanked_sha256 is not None):
        what = "is not blanked, but the plan says so" if is_planned else "is blanked, unlike the plan"
        remedy = commands.shard_again(shard.shard_id, folder)
        raise errors.BrokenShard(f"{name} {what}", remedy=remedy)
    if is_planned:
        listed = read_blanked(folder, plan, shard.shard_id)
        if listed.unblanked_sha256 != shard.unblanked_sha256:
            path = folder.path_of(names.blanked_name(shard.shard_id))
            found = f"unblanked_sha256 {listed.unblanked_sha256[:12]}"
            raise errors.BrokenShard(path=path, found=found, expected=f"{shard.unblanked_sha256}"[:12])
        if shard.blanked_sha256 not in (None, listed.sha256()):
            remedy = commands.shard_again(shard.shard_id, folder)
            raise errors.BrokenShard(f"{name} has other documents blanked than its list names", remedy=remedy)


def _check_shards(
    folder: DataFolder, plan: Plan, *, is_fast: bool, standing: Mapping[int, Finding]
) -> tuple[list[Manifest], Problems]:
    """Return the manifests of the shards that are right, and the problems of the others.

    ``standing`` are findings of a more thorough verify, which this one cannot clear. A shard that cannot be
    read is tried again. Then its problem is a ReadWriteError, which says nothing about the shard.
    """
    sizes = plan.shard_bytes()
    blanked = frozenset(names.ids_of_ranges(plan.options.blanked) if plan.options.blanked else ())
    is_failing = threading.Event()  # set once the file system failed: later shards do not wait for it

    def manifest_of_shard(shard_id: int) -> Manifest:
        shard = manifest.check_shard(folder, shard_id, plan.plan_id)
        manifest.check_sizes(folder, shard)
        # It must be made for this spec, and from exactly the bytes that the plan assigns to it.
        name = f"shard {shard_id:05d}"
        num_bytes = shard.counts.input_bytes
        if shard.spec != plan.spec:
            raise errors.OtherPlan(f"the manifest of {name} describes another data set than plan.json")
        if num_bytes != sizes[shard_id]:
            what = f"was made from {num_bytes} input bytes, but the plan has {sizes[shard_id]}"
            raise errors.BrokenShard(f"{name} {what}")
        for what in ("ids", "digests"):
            is_there = getattr(shard, what) is not None
            if is_there != (what in plan.options.side_files()):
                has = "has" if is_there else "has no"
                raise errors.BrokenShard(f"the manifest of {name} {has} {what}, unlike the plan")
        _check_blanked(folder, plan, shard, is_planned=shard_id in blanked)
        if not is_fast:  # every byte of the tar is read once
            tar_name = names.tar_name(shard_id)
            with files.errors_named(folder.path_of(tar_name)), folder.open_hashed(tar_name) as tar:
                try:
                    _check_ids(shard, tar, _check_idx(folder, plan, shard))
                finally:  # a wrong hash is reported instead of what follows from it
                    manifest.check_hashes(folder, shard, tar.sha256())
        done.refuse_found(folder, standing, [shard_id])
        return shard

    def manifest_or_problem(shard_id: int) -> Manifest | errors.ShardprepError:
        try:
            if is_failing.is_set():
                return manifest_of_shard(shard_id)
            what = f"shard {shard_id:05d} cannot be read"
            return files.with_retries(what, partial(manifest_of_shard, shard_id))
        except errors.ShardprepError as error:
            if isinstance(error, (errors.BrokenShard, errors.OtherPlan)) and error.remedy is None:
                error.remedy = commands.shard_again(shard_id, folder)
            if isinstance(error.__context__, OSError) and error.__context__.errno in files.RETRIED:
                is_failing.set()
            return error
        except OSError as error:
            return errors.ReadWriteError(f"{error.filename}: {error.strerror}")

    ids = range(plan.num_shards)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        results = dict(zip(with_progress("verifying", ids), pool.map(manifest_or_problem, ids), strict=True))
    problems = {number: result for number, result in results.items() if not isinstance(result, Manifest)}
    return [result for result in results.values() if isinstance(result, Manifest)], problems


def _check_idx(folder: DataFolder, plan: Plan, shard: Manifest) -> IdxRecords:
    """Check that an idx agrees with the manifest, the plan and the tar's size. Return its records."""
    shard_id = shard.shard_id
    counts = shard.counts
    name = f"the idx of shard {shard.shard_id:05d}"
    records = read_idx(folder, plan.spec, shard_id)
    # Ids, starts and masks must be inside the tar and have the right size.
    misplaced = misplaced_samples(shard.spec, records, shard.tar.num_bytes)
    if misplaced.any():
        where = f"where it cannot be in a tar of {shard.tar.num_bytes} bytes"
        raise errors.BrokenShard(f"{name} places sample {int(misplaced.argmax())} {where}")
    # The counts must agree. Samples for validation come last.
    num_tokens = records["num_tokens"].astype(np.int64)
    validation = counts.held_out
    num_train = counts.num_samples - validation.num_samples
    begin_in = records["num_starts"] if plan.spec.has_rows else np.ones(len(records), np.int64)
    num_begun = int(begin_in.sum())
    num_digests = num_begun if shard.digests is None else shard.digests.num_bytes // names.DIGEST_BYTES
    for what, number, expected in (
        ("samples", len(records), counts.num_samples),
        ("tokens", int(num_tokens.sum()), counts.num_tokens),
        ("documents for validation", int(begin_in[num_train:].sum()), validation.num_documents),
        ("tokens for validation", int(num_tokens[num_train:].sum()), validation.num_tokens),
        ("documents with digests", num_begun, num_digests),
    ):
        if number != expected:
            raise errors.BrokenShard(f"{name} has {number} {what}, its manifest says {expected}")
    if len(records):
        begin = plan.cuts[shard_id]
        end = plan.cuts[shard_id + 1]
        places = [*zip(records["input_number"].tolist(), records["input_offset"].tolist(), strict=True)]
        in_order = plan.options.pack == "best_fit" or all(
            side == sorted(side) for side in (places[:num_train], places[num_train:])
        )
        # Rows, and bytes of decompressed text, cannot be compared with the file's bytes in the plan.
        first = (begin.input_number, begin.byte)
        stop = (end.input_number, end.byte)
        if begin.byte and not input_kind(plan.inputs[begin.input_number].path).is_in_bytes:
            first = (begin.input_number, 0)
        if end.byte and not input_kind(plan.inputs[end.input_number].path).is_in_bytes:
            stop = (end.input_number + 1, 0)
        if not in_order or min(places) < first or max(places) >= stop:
            raise errors.BrokenShard(f"{name} names sources outside of its part of the plan")
    return records


def _check_ids(shard: Manifest, tar: files.HashedFile, records: IdxRecords) -> None:
    """Check that ids are in the vocabulary or blank, JSON lists have their lengths, and the tar its end.

    A million tokens take 126 ms of CPU as JSON, 8 ms packed (one core).
    """
    # The tar has the order of the idx, except for samples for validation.
    spec = shard.spec
    vocab_size = shard.spec.tokenizer.vocab_size
    records = records[np.argsort(records["offset"], kind="stable")]
    try:
        for ids in ids_of(spec, records, tar.read):
            if shard.unblanked_sha256 is not None:
                ids = ids[(ids != BLANK) & (ids != blank_id(vocab_size))]
            if len(ids) and ids.max() >= vocab_size:
                found = f"{tar.path} contains the token id {ids.max()}"
                raise errors.BrokenShard(f"{found}, the vocabulary has {vocab_size}")
    except (ValueError, OverflowError) as error:
        raise errors.BrokenShard(f"{tar.path} contains token ids that cannot be read ({error})") from None
    if tar.read(tar.num_bytes - len(names.TAR_END), len(names.TAR_END)) != names.TAR_END:
        raise errors.BrokenShard(f"{tar.path} does not end in two zero blocks")
