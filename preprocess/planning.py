"""Makes a plan: lists the inputs, resolves the tokenizer, tests the engines, divides, measures, freezes.

The input is only sampled, but for the places between shards, so planning takes seconds for terabytes, unless
``--hash_inputs`` asks for a hash of every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lustre
from preprocess.chat_rendering import chat_template_of, chat_versions, template_notes
from preprocess.cost_estimate import CostEstimate, measure, sample_texts, scratch_folder
from preprocess.documents import format_of_input
from preprocess.engines import (
    FEW_BYTES,
    Engine,
    equal_fast_engine,
    ids_sha256,
)
from preprocess.formats.format import Inspected, reading_of
from preprocess.formats.text_lines import CompressedText, TextLines
from preprocess.input_files import InputListing, find_inputs, left_out_lines, stamp_inputs
from preprocess.inputs import InputFile
from preprocess.options import BytesOptions, PrepConfig
from preprocess.plan import (
    Plan,
    file_boundaries,
    plan_differences,
    plan_id,
    publish_plan,
    read_plan,
)
from preprocess.resolved_tokenizer import ResolvedTokenizer, resolve_tokenizer
from preprocess.resources import BATCH_BYTES
from preprocess.shard_boundaries import Division, check_num_shards, divide
from preprocess.tokenizer_files import (
    TOKENIZER_FILE,
    publish_tokenizer,
    stamp_tokenizer,
)
from shardprep.atomic_files import STALE_AFTER_S, remove_temporaries
from shardprep.console import Progress
from shardprep.errors import CannotWrite, Refused, UsageError
from shardprep.format.names import INDEX_NAME, OSTS_NAME, PLAN_NAME, TOKENIZER_DIR

LONG_SHARD_S = 600.0  # on one core; the plan command warns of longer shards
_MANY_SHARDS = 1000  # more, each smaller than half of _SHARD_BYTES, and the plan command speaks of it
_SHARD_BYTES = 256 << 20  # of input: minutes of one core
_HASHED_BYTES = 4 << 20  # read at once
_NUM_HASH_THREADS = 16  # hashing and reading both release the interpreter's lock
_NO_STRIPES = lustre.StripeRequest(stripe="none")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many shards: a number, a size of input bytes, or (neither) one per file."""

    num_shards: int | None = None
    shard_bytes: int | None = None


def make_plan(
    config: PrepConfig,
    sharding: Sharding,
    *,
    stripe: lustre.StripeRequest = _NO_STRIPES,
    dry_run: bool = False,
    say: Callable[[str], None],
) -> tuple[Plan, CostEstimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    ``stripe`` is the Lustre layout of a folder without a plan yet.

    Where the folder has a plan already, the new one is compared with it and never written.
    Raises every ShardprepError that the inputs, the tokenizer or the folder give reason for.
    """
    try:
        stripe.layout()
    except lustre.LustreError as error:
        raise UsageError(str(error)) from None
    listing = find_inputs(
        config.input_dir,
        recursive=config.recursive,
        follow_links=config.follow_links,
        also=config.also or "",
    )
    division = _divided(config, listing, sharding, say)
    with scratch_folder() as files:
        say(f"resolving the tokenizer of {config.model_id}")
        allow = config.bytes_options().encodes_control_tokens
        resolved = resolve_tokenizer(config.model_id, files, allow_special_tokens=allow)
        tokenizer = resolved.spec
        if config.append_eos and tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer of {config.model_id} names no eos_token, so documents cannot end with one; "
                "add --no-append_eos, or set eos_token in its tokenizer_config.json"
            )
        if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
            say(
                f"warning: PAD is EOS ({tokenizer.eos_token_id}) in this tokenizer: loaders that mask labels "
                "by PAD lose those of EOS; this project's loader masks by length and keeps them"
            )
        plan, engine = _plan_of(config, listing, division, resolved, say)
        if config.hash_inputs:
            plan = _with_hashes(plan)
        estimate = measure(plan, engine)
        if dry_run:
            frozen = read_plan(config.output_dir)
            if frozen is not None and frozen.plan_id != plan.plan_id:
                raise Refused(
                    f"{config.output_dir} has another plan: {'; '.join(plan_differences(frozen, plan))}"
                )
            _lay_out(config.output_dir, stripe, plan, estimate, say, is_planned=bool(frozen), dry_run=True)
            return plan, estimate
        frozen = _prepare_folder(config.output_dir)
        _lay_out(config.output_dir, stripe, plan, estimate, say, is_planned=bool(frozen))
        if frozen is None:
            stamps = publish_tokenizer(files, config.output_dir, tokenizer, None)
            plan = dataclasses.replace(plan, tokenizer_files=stamps)
        frozen = publish_plan(plan, config.output_dir)
        # It holds what the plan names, whoever planned meanwhile, or damaged it since.
        publish_tokenizer(files, config.output_dir, tokenizer, frozen.tokenizer_files)
        return frozen, estimate


def _check_has_fields(paths: list[Path]) -> None:
    """That no input is plain text, which has no messages. Raises UsageError."""
    if plain := [
        path for path in paths if isinstance(format_of_input(path.name), (TextLines, CompressedText))
    ]:
        raise UsageError(
            f"--record chat reads messages out of JSON lines and tables, and {plain[0]} is text; move it away"
        )


def small_shards_note(plan: Plan, sharding: Sharding) -> str | None:
    """What to type where one file per shard, which nobody asked for, makes many small shards; else None."""
    total = sum(plan.shard_bytes())
    fewer = max(1, round(total / _SHARD_BYTES))
    if sharding != Sharding() or plan.num_shards < _MANY_SHARDS or plan.num_shards < 2 * fewer:
        return None
    return (
        f"each of {plan.num_shards} input files is a shard of its own, {total / plan.num_shards / 1e6:.3g} "
        f"MB on average: {plan.num_shards} tasks, {3 * plan.num_shards} files; for even shards plan into a "
        f"new folder with --num_shards {fewer}"
    )


def _prepare_folder(folder: Path) -> Plan | None:
    """Make the output folder; returns the plan that it has already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"--output_dir {folder} cannot be made: {error.strerror}") from None
    stems = (PLAN_NAME, INDEX_NAME, OSTS_NAME, TOKENIZER_DIR)
    remove_temporaries(folder, *stems, older_than_s=STALE_AFTER_S)
    return read_plan(folder)


def _lay_out(
    folder: Path,
    stripe: lustre.StripeRequest,
    plan: Plan,
    estimate: CostEstimate,
    say: Callable[[str], None],
    *,
    is_planned: bool,
    dry_run: bool = False,
) -> None:
    """Do what ``stripe`` asks for, and say it; where nothing was asked of a planned folder, say nothing."""
    if stripe.stripe == "none" or (is_planned and stripe.layout() is None):
        return
    shards = lustre.PlannedShards(
        num_shards=plan.num_shards, tar_bytes=estimate.output_bytes // plan.num_shards
    )
    try:
        say(lustre.stripe_line(folder, stripe, shards=shards, is_planned=is_planned, dry_run=dry_run))
    except lustre.LustreError as error:
        raise CannotWrite(str(error)) from None


def _divided(
    config: PrepConfig, listing: InputListing, sharding: Sharding, say: Callable[[str], None]
) -> Division:
    """Stamp the inputs, and divide them into shards: even ones, or one per file."""
    paths = listing.paths
    if config.record == "chat":
        _check_has_fields(paths)
    links = f", {listing.num_links} of them links" if listing.num_links else ""
    say(f"{len(paths)} input file(s) in {config.input_dir}{links}")
    for line in left_out_lines(listing.left_out):
        say(line)
    reading = reading_of(config.bytes_options(), BATCH_BYTES)
    with Progress("looking at the inputs", len(paths), unit="files") as progress:
        inputs, inspected = stamp_inputs(config.input_dir, paths, reading, progress.add)
    if empty := [item.path for item in inputs if not item.num_bytes]:
        say(f"{len(empty)} of them hold nothing, such as {empty[0]}")
    num_shards = _num_shards(inputs, inspected, sharding)
    if num_shards is None:
        return Division(inputs=inputs, boundaries=file_boundaries(inputs), text_starts=None)
    return divide(config.input_dir, inputs, inspected, num_shards, reading)


def _num_shards(inputs: list[InputFile], inspected: list[Inspected], sharding: Sharding) -> int | None:
    """How many even shards were asked for; None for one per file. Raises UsageError for too many."""
    num_bytes = sum(item.num_bytes for item in inputs)
    if sharding.num_shards is None and sharding.shard_bytes is None:
        check_num_shards(len(inputs), num_bytes)
        return None
    num_shards = sharding.num_shards
    if num_shards is None:
        assert sharding.shard_bytes is not None
        if sharding.shard_bytes < 1:
            raise UsageError(f"--shard_bytes is {sharding.shard_bytes}, expected at least 1")
        num_shards = max(1, -(-sum(item.text_bytes for item in inspected) // sharding.shard_bytes))
    check_num_shards(num_shards, num_bytes)
    return num_shards


def _with_template(config: PrepConfig, tokenizer_folder: Path, say: Callable[[str], None]) -> BytesOptions:
    """The options; those of conversations with the template of their tokenizer. Raises UsageError."""
    options = config.bytes_options()
    if not options.is_chat:
        return options
    template = chat_template_of(
        tokenizer_folder, config.chat_template_file, allows_control_tokens=options.allow_special_tokens
    )
    for note in template_notes(template):
        say(f"warning: {note}")
    return dataclasses.replace(
        options, chat_template=template.text, chat_tokens=template.tokens, chat_versions=chat_versions()
    )


def _plan_of(
    config: PrepConfig,
    listing: InputListing,
    division: Division,
    resolved: ResolvedTokenizer,
    say: Callable[[str], None],
) -> tuple[Plan, Engine]:
    """The plan, with the engines' self-check, and the engine that workers will use."""
    tokenizer, proof = resolved.spec, resolved.proof
    options = dataclasses.replace(
        _with_template(config, resolved.folder, say), also=listing.also, follow_links=listing.follow_links
    )
    allow = options.encodes_control_tokens
    plan = Plan(
        plan_id=plan_id(options, tokenizer, proof.probe_sha256, division.inputs, division.boundaries),
        input_dir=config.input_dir.resolve(),
        options=options,
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=tokenizer,
        tokenizer_files=stamp_tokenizer(resolved.folder),
        probe=proof.probe,
        probe_sha256=proof.probe_sha256,
        fast_engine_is_equal=False,
        can_be_cut=proof.can_be_cut,
        inputs=division.inputs,
        boundaries=division.boundaries,
        text_starts=division.text_starts,
        left_out=listing.left_out,
    )
    reference = resolved.reference(allow_special_tokens=allow)
    is_little = config.engine == "auto" and sum(plan.shard_bytes()) < FEW_BYTES
    if config.engine == "tokenizers" or options.is_chat or is_little:
        return plan, reference
    texts = [*proof.probe, *sample_texts(plan, num_bytes=1 << 18)]
    fast = equal_fast_engine(
        resolved.folder / TOKENIZER_FILE,
        allow_special_tokens=allow,
        texts=texts,
        expected_sha256=ids_sha256([reference.encode(texts)]),
    )
    if isinstance(fast, Engine):
        return dataclasses.replace(plan, fast_engine_is_equal=True), fast
    say(f"fastokens is not used for this tokenizer ({fast}); tokenizers encodes, several times slower")
    return plan, reference


def _with_hashes(plan: Plan) -> Plan:
    """The same plan with the sha256 of every shard's input bytes in it, and another plan id.

    Reads the whole input once, about a second of one core for a gigabyte. A shard's ranges are read in
    their order by its worker anyway, so that it hashes what it encodes and reads nothing twice. Raises
    NotFound, ReadWriteError or Refused where a file cannot be read or changes meanwhile.
    """
    with ThreadPoolExecutor(_NUM_HASH_THREADS) as pool:
        hashes = list(pool.map(lambda shard_id: _input_sha256(plan, shard_id), range(plan.num_shards)))
    return dataclasses.replace(
        plan,
        shard_sha256=hashes,
        plan_id=plan_id(
            plan.options, plan.tokenizer, plan.probe_sha256, plan.inputs, plan.boundaries, shard_sha256=hashes
        ),
    )


def _input_sha256(plan: Plan, shard_id: int) -> str:
    digest = hashlib.sha256()
    for part in plan.ranges(shard_id):
        file = part.open()
        for start in range(part.start, part.end, _HASHED_BYTES):
            digest.update(file.read_all(start, min(start + _HASHED_BYTES, part.end)))
        file.check_unchanged()
    return digest.hexdigest()
