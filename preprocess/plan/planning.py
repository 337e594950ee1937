"""Make a plan: list and divide the inputs, resolve the tokenizer, estimate the cost, freeze it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import lustre
from preprocess.make.engine import Engine
from preprocess.make.fast import equal_fast_engine
from preprocess.make.probe import FEW_BYTES, ids_sha256
from preprocess.plan.conversations import fitted_template, template_warnings
from preprocess.plan.cost import Lookup, measure
from preprocess.plan.dividing import NUM_THREADS, divide_inputs
from preprocess.plan.estimate import Estimate
from preprocess.plan.inputs import InputListing, find_inputs
from preprocess.plan.sampling import sample_documents, sample_of_plan
from preprocess.plan.scratch import scratch_folder
from preprocess.plan.tokenizer import ResolvedTokenizer, added_ids, document_ends_line, resolve_tokenizer
from preprocess.plan.trial import check_transform
from preprocess.read import chat
from preprocess.read.formats import Texts
from preprocess.read.inputs import RangeReader
from preprocess.read.transform import Transform
from shardprep import errors, publishing
from shardprep.console import say
from shardprep.format import names, plan_options
from shardprep.format import plan as plans
from shardprep.format.data_folder import SUBFOLDERS, DataFolder, refuse_foreign_files
from shardprep.format.documents import DocumentNames, read_names
from shardprep.format.excluded import publish_excluded, stamps_of_given
from shardprep.format.plan import Cut, InputFile, Plan, PlannedShard
from shardprep.format.plan_options import PlanOptions, PrepConfig

Say = Callable[[str], None]
_PLAIN_SUFFIXES = (".txt", ".jsonl", ".json")  # of files that have no more text than bytes


class _Named(NamedTuple):
    """The user's files that a plan names by their hashes."""

    transform: Transform | None
    excluded: DocumentNames | None  # of --exclude


def make_plan(
    config: PrepConfig,
    *,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    stripe: str = "none",
    dry_run: bool = False,
    looks: bool = True,
    say: Say = say,
) -> tuple[Plan, Estimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    Shards are even, by their number or by bytes of input; without either, each file is a shard. ``stripe`` is
    the Lustre layout of a folder without a plan, as ``plan --stripe`` takes it. A plan that is already in the
    folder stays, and the new one is only compared with it. ``looks``: refuse files of which nothing can be
    made, and drop byte order marks; the first script's files are taken as they are. ``say`` gets lines to
    print during the work, such as warnings. Returns the plan, and its cost.
    Raises Refused if the folder has another plan, NotFound, BadInput, UsageError, CannotWrite, LustreError.
    """
    if stripe not in {"auto", "none"}:
        lustre.parse_stripe(stripe)
    _refuse_output_among_inputs(config)
    named = _read_named(config)
    if named.transform is not None:
        config = dataclasses.replace(config, transform_sha256=named.transform.sha256)
    if named.excluded is not None:
        sha256 = hashlib.sha256(named.excluded.keys.tobytes()).hexdigest()
        config = dataclasses.replace(config, excluded=sha256)
    # List the inputs, and divide them into shards.
    listing = find_inputs(config.input_dir, config)
    # Before any of them is read, because that may wait for an archive.
    for line in lustre.released_lines(config.input_dir, listing.paths):
        say(line)
    inputs, cuts = divide_inputs(config, listing, num_shards, shard_bytes, say, looks=looks)
    tries_fast = _tries_fast_engine(config, listing, inputs)
    with scratch_folder() as scratch:
        resolved = _resolve(config, scratch, tries_fast=tries_fast, say=say)
        plan = _decide(config, listing, inputs, cuts, resolved, scratch, say)
        # Measure a sample, with the user's function and the engine that the workers will use.
        if named.transform is not None:
            check_transform(plan, named.transform, say)
        engine = resolved.reference
        if tries_fast:
            allow = config.encodes_control_tokens
            fast = _fast_engine(plan, resolved, named.transform, scratch, allow_special_tokens=allow)
            if isinstance(fast, Engine):
                engine = fast
                plan = dataclasses.replace(plan, fast_engine_is_equal=True)
            else:
                say(f"gigatoken is not used for this tokenizer ({fast}); tokenizers is several times slower")
        _say_how_documents_end(plan, resolved, say)
        estimate = _measure(config, plan, engine, named)
        folder = DataFolder(config.output_dir)
        if not dry_run:
            _make_folder(folder)
        frozen = plans.read_plan(folder)
        _compare_with_folder(config, plan, frozen, named, folder)
        # "auto" says nothing about a planned folder, and about a folder that is not on Lustre.
        is_quiet = stripe == "auto" and (frozen or lustre.why_not_usable(config.output_dir))
        if stripe != "none" and not is_quiet:
            say(lustre.stripe_line(config.output_dir, stripe, is_planned=bool(frozen), dry_run=dry_run))
        if not dry_run:
            plan = _freeze(config, plan, resolved, named, folder, is_first=frozen is None)
        return plan, estimate


def _refuse_output_among_inputs(config: PrepConfig) -> None:
    """Raise UsageError if plan.json would lie where inputs are looked for."""
    output_dir = config.output_dir.resolve()
    input_dir = config.input_dir.resolve()
    is_same = output_dir == input_dir
    if is_same or (config.recursive and output_dir.is_relative_to(input_dir)):
        found = f"it is inside --input_dir {input_dir}, where --recursive looks"
        if is_same:
            found = "--output_dir is --input_dir"
        expected = "a folder outside of it, because plan.json would be an input"
        raise errors.UsageError(path=config.output_dir, found=found, expected=expected)


def _read_named(config: PrepConfig) -> _Named:
    """Read the file of --transform and the list of --exclude."""
    transform = None
    excluded = None
    if config.transform is not None:
        transform = Transform(config.transform, config.transform_files)
    if config.exclude is not None:
        excluded = read_names(config.exclude, id_field=config.id_field)
    return _Named(transform, excluded)


def _tries_fast_engine(config: PrepConfig, listing: InputListing, inputs: Sequence[InputFile]) -> bool:
    """Return whether to try gigatoken. Reads compressed inputs and tables until they are known to be large.

    Only the reference can mask conversations, and it encodes little text sooner than engines can be compared.
    """
    if config.is_chat or config.engine == "tokenizers":
        return False
    if config.engine == "gigatoken":
        return True
    options = _options_of(config, _found_in_listing(listing))
    return not _have_little_text(config.input_dir.resolve(), inputs, options)


def _options_of(config: PrepConfig, found_out: dict[str, Any]) -> PlanOptions:
    """Return the plan's options: those of ``config``, and what planning found out."""
    values = {item.name: getattr(config, item.name) for item in plan_options.PLAN_FIELDS}
    return PlanOptions(**{**values, **found_out})


def _found_in_listing(listing: InputListing) -> dict[str, Any]:
    """Return the options that the listing of the inputs decides."""
    return {"also": ",".join(sorted(listing.used_patterns)), "follow_links": listing.follows_links}


def _resolve(config: PrepConfig, scratch: Path, *, tries_fast: bool, say: Say) -> ResolvedTokenizer:
    """Return the tokenizer. Raises UsageError if documents should end with an EOS that it does not have."""
    allow = config.encodes_control_tokens
    resolved = resolve_tokenizer(
        config.model_id, scratch, allow_special_tokens=allow, for_fast_engine=tries_fast
    )
    if resolved.alteration:
        say(f"warning: {resolved.alteration}")
    if config.append_eos and resolved.spec.eos_token_id is None:
        found = "a tokenizer without eos_token, so documents cannot end with one"
        expected = "eos_token in its tokenizer_config.json, or --no-append_eos"
        remedy = "--no-append_eos"
        raise errors.UsageError(path=config.model_id, found=found, expected=expected, remedy=remedy)
    return resolved


def _decide(
    config: PrepConfig,
    listing: InputListing,
    inputs: list[InputFile],
    cuts: list[Cut],
    resolved: ResolvedTokenizer,
    scratch: Path,
    say: Say,
) -> Plan:
    """Return the plan, without a choice of engine. Its id covers all that decides the bytes of the shards."""
    found_out = _found_in_listing(listing)
    if config.is_chat:
        found_out |= _chat_options(config, scratch, say)
    elif config.add_special_tokens:
        _, after = added_ids(resolved.reference)
        if after[-1:] == [resolved.spec.eos_token_id]:  # the tokenizer itself ends each document with EOS
            found_out |= {"append_eos": True, "own_eos": True}
    left_out: list[tuple[str, str]] = []
    for reason, lost in listing.left_out.items():
        left_out += [(reason, name) for name in lost]
    plan = Plan(
        plan_id="",
        input_dir=config.input_dir.resolve(),
        options=_options_of(config, found_out),
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=resolved.spec,
        tokenizer_files=resolved.files,
        probe=resolved.probe,
        probe_sha256=resolved.probe_sha256,
        fast_engine_is_equal=False,
        inputs=inputs,
        cuts=cuts,
        left_out=left_out,
    )
    if config.hash_inputs:
        plan = dataclasses.replace(plan, cuts=_hashed_cuts(plan))
    return dataclasses.replace(plan, plan_id=plans.plan_id(plan))


def _chat_options(config: PrepConfig, scratch: Path, say: Say) -> dict[str, Any]:
    """Return the options about conversations: the tokenizer's template, and how its output is masked."""
    template, mask_rule = chat.chat_template_of(
        scratch, config.chat_template_file, allows_control_tokens=config.allow_special_tokens
    )
    template = fitted_template(template, config)
    for warning in template_warnings(template):
        say(f"warning: {warning}")
    return {
        "chat_template": template.text,
        "chat_tokens": template.tokens,
        "chat_tool_template": template.tool_text,
        "chat_arguments": template.arguments,
        "chat_content": template.content,
        "chat_versions": chat.chat_versions(),
        "chat_mask_rule": mask_rule,
    }


def _say_how_documents_end(plan: Plan, resolved: ResolvedTokenizer, say: Say) -> None:
    line = document_ends_line(plan, resolved.reference, resolved.saved[names.TOKENIZER_FILE])
    if line:
        say(line)
    if not (plan.options.has_rows or plan.options.append_eos):
        todo = "--append_eos adds it"
        if resolved.spec.eos_token_id is None:
            todo = "name eos_token in the tokenizer_config.json of a copy"
        say(f"note: documents end without EOS; {todo}")


def _measure(config: PrepConfig, plan: Plan, engine: Engine, named: _Named) -> Estimate:
    """Return the cost of the plan, measured on a sample of its inputs."""
    lookup = None
    if named.excluded is not None and config.exclude is not None:
        lookup = Lookup(named.excluded, config.exclude)
    if not plan.options.add_special_tokens:
        engine = engine.bare()
    return measure(plan, engine, named.transform, lookup)


def _make_folder(folder: DataFolder) -> None:
    """Create the data set's folder, and remove what attempts that died left in it. Raises CannotWrite."""
    try:
        folder.make_folder()
    except errors.CannotWrite as error:
        found = f"it cannot be created: {error.found}"
        expected = "a folder that you can write to"
        raise errors.CannotWrite(path=folder, found=found, expected=expected) from None
    folder.remove_temporaries(older_than_s=publishing.STALE_AFTER_S, subfolders=SUBFOLDERS)


def _compare_with_folder(
    config: PrepConfig, plan: Plan, frozen: Plan | None, named: _Named, folder: DataFolder
) -> None:
    """Raise Refused if the folder has another plan, or no plan and files that this one would replace."""
    if frozen is not None:
        plans.refuse_another_plan(frozen, plan, folder)
        return
    own = {} if named.transform is None else named.transform.stamps_of_copy()
    if named.excluded is not None and config.exclude is not None:
        own |= stamps_of_given(folder, config.exclude, named.excluded, id_field=config.id_field)
    refuse_foreign_files(folder, own)


def _freeze(
    config: PrepConfig,
    plan: Plan,
    resolved: ResolvedTokenizer,
    named: _Named,
    folder: DataFolder,
    *,
    is_first: bool,
) -> Plan:
    """Write the plan and the files that it names, and return the plan that the folder has now.

    The plan is the last file: tasks that wait for it begin when it is there. Before it (``is_first``) no file
    is replaced, as another planner may have written it. Beside a plan, damaged files are replaced. If this is
    killed, there is no plan, and planning again goes on. A tokenizer, function or list that it left must be
    equal to the new one, or else is refused by its name.
    """
    if is_first:
        resolved.publish_first(folder)
    if named.transform is not None:
        named.transform.publish_copy(folder, is_first=is_first)
    if named.excluded is not None and config.exclude is not None:
        publish_excluded(folder, config.exclude, named.excluded, id_field=config.id_field, is_first=is_first)
    frozen = plans.publish_plan(plan, folder)
    resolved.repair(folder, frozen.tokenizer_files)
    return frozen


def _fast_engine(
    plan: Plan,
    resolved: ResolvedTokenizer,
    transform: Transform | None,
    scratch: Path,
    *,
    allow_special_tokens: bool,
) -> Engine | str:
    """Return the fast engine if its ids equal the reference's, or else why it is not used.

    They are compared for the probe, a sample of the input and the gate's texts.
    """
    sample = [text.encode() for text in resolved.probe]
    for documents in sample_of_plan(plan, _COMPARED_BYTES, transform):
        sample += map(_beginning, itertools.islice(documents.texts, _MOST_COMPARED_TEXTS))
    texts = Texts(sample)
    saved = resolved.saved
    sha256 = ids_sha256([resolved.reference.encode(texts)])
    content = saved.get(names.FAST_TOKENIZER_FILE, saved[names.TOKENIZER_FILE])
    path = scratch / names.TOKENIZER_FILE
    fast = equal_fast_engine(content, path, texts, sha256, allow_special_tokens=allow_special_tokens)
    if isinstance(fast, Engine) and not resolved.passes_gate(fast):
        return "its ids differ from those of tokenizers"
    return fast


def _hashed_cuts(plan: Plan) -> list[Cut]:
    """Return the plan's cuts with the hash of each shard's input: about 1 s of a core per gigabyte."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        hashes = [*pool.map(_sha256_of_input, map(plan.shard, range(plan.num_shards))), ""]
    pairs = zip(plan.cuts, hashes, strict=True)
    return [msgspec.structs.replace(cut, sha256=sha256) for cut, sha256 in pairs]


def _sha256_of_input(shard: PlannedShard) -> str:
    digest = hashlib.sha256()
    for byte_range in shard.ranges:
        reader = RangeReader(byte_range, digest)
        reader.hash_rest()
        reader.file.check_unchanged()
    return digest.hexdigest()


_COMPARED_BYTES = 1 << 18  # of the input that both engines encode
# The reference takes about 250 bytes of memory per token, so it gets only the beginning of a long text.
_MOST_COMPARED_TEXT_BYTES = 1 << 16
_MOST_COMPARED_TEXTS = 2048  # of a batch; the reference takes 2 kB for each text


def _beginning(text: bytes) -> bytes:
    """Return the beginning of a text, up to _MOST_COMPARED_TEXT_BYTES."""
    if len(text) <= _MOST_COMPARED_TEXT_BYTES:
        return text
    return text[:_MOST_COMPARED_TEXT_BYTES].decode(errors="ignore").encode()


def _have_little_text(input_dir: Path, inputs: Sequence[InputFile], options: PlanOptions) -> bool:
    """Return whether all inputs together have less than FEW_BYTES of text.

    A compressed file or a table may have much more text than bytes. So these are read until it is known,
    unless there is a function, without which their text is not known.
    """
    if sum(item.num_bytes for item in inputs) >= FEW_BYTES:
        return False
    if all(item.path.lower().endswith(_PLAIN_SUFFIXES) for item in inputs):
        return True
    if options.transform_sha256:
        return False
    num_bytes = 0
    # What is wrong with an input is reported when it is measured.
    with contextlib.suppress(errors.ShardprepError):
        for documents in sample_documents(input_dir, inputs, options, num_bytes=FEW_BYTES, num_places=1):
            num_bytes += sum(map(len, documents.texts))
            if num_bytes >= FEW_BYTES:
                return False
    return True
