"""Make a plan: list the inputs, divide them into shards, resolve the tokenizer, estimate the cost, freeze it.

``--shard_id N`` also gets its plan here: the one in its folder, compared with the flags, or a new one.

The estimate comes from a sample of 2 MiB, from 8 places. A worker's stages process the sample, and the CPU
time is scaled up. If no record of the sample is usable, planning fails. A user's function must return the
same texts a second time, and in another process, where the order of a set is different.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import lustre
from preprocess.make.counts import Counting
from preprocess.make.engine import Engine
from preprocess.make.fast import equal_fast_engine
from preprocess.make.probe import FEW_BYTES, ids_sha256
from preprocess.make.writer import ShardWriter
from preprocess.plan.conversations import (
    ConversationSample,
    fitted_template,
    form_line,
    template_warnings,
)
from preprocess.plan.estimate import Estimate
from preprocess.plan.inputs import NUM_THREADS, divide_inputs, find_inputs, sample_documents
from preprocess.plan.looks import problem_of_fields
from preprocess.plan.tokenizer import added_ids, document_ends_line, resolve_tokenizer
from preprocess.read import chat
from preprocess.read.documents import DocumentBatch, advice_about, read_records
from preprocess.read.formats import Texts
from preprocess.read.inputs import RangeReader
from preprocess.read.text_fields import RecordFields, from_json, value_at
from preprocess.read.transform import Transform
from shardprep import errors, files
from shardprep.child_process import call_in_child
from shardprep.console import counted, printable, say
from shardprep.format import json_files, names, plan_options
from shardprep.format import plan as plans
from shardprep.format.attempts import start_ticks
from shardprep.format.data_folder import SUBFOLDERS, DataFolder, refuse_foreign_files
from shardprep.format.documents import DocumentNames, lines_of, read_names  # fmt: skip
from shardprep.format.excluded import publish_excluded, stamps_of_given, unmatched_of  # fmt: skip
from shardprep.format.inputs import place_text
from shardprep.format.manifest import RunFacts
from shardprep.format.plan import Cut, InputFile, Plan, PlannedShard, ranges_between
from shardprep.format.plan_options import PlanOptions, PrepConfig
from shardprep.format.spec import fingerprint_of

Say = Callable[[str], None]
# A task waits for another task's plan about as long as it would take to plan: 3 s, or more for many files.
_MIN_WAIT_S = 3.0
_FILES_STAMPED_PER_S = 2000
_LOOK_EVERY_S = 0.2
_PLAIN_SUFFIXES = (".txt", ".jsonl", ".json")  # of files that have no more text than bytes
_CLAIM_NAME = f".{names.PLAN_NAME}.claimed.tmp"
_NUM_NAMED = 3  # names of inputs that differ, in an error


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
    output_dir = config.output_dir.resolve()
    input_dir = config.input_dir.resolve()
    is_same = output_dir == input_dir
    if is_same or (config.recursive and output_dir.is_relative_to(input_dir)):
        found = "--input_dir" if is_same else f"it is inside --input_dir {input_dir}, where --recursive looks"
        expected = "a folder outside of the raw text, because plan.json would be an input"
        raise errors.UsageError(path=config.output_dir, found=found, expected=expected)
    transform = None
    excluded = None
    if config.transform is not None:
        transform = Transform(config.transform, config.transform_files)
        config = dataclasses.replace(config, transform_sha256=transform.sha256)
    if config.exclude is not None:
        excluded = read_names(config.exclude, id_field=config.id_field)
        sha256 = hashlib.sha256(excluded.keys.tobytes()).hexdigest()
        config = dataclasses.replace(config, excluded=sha256)
    # List the inputs, and divide them into shards.
    listing = find_inputs(config.input_dir, config)
    # Before any of them is read, because that may wait for an archive.
    for line in lustre.released_lines(config.input_dir, listing.paths):
        say(line)
    found_out: dict[str, Any] = {"also": ",".join(sorted(listing.used_patterns))}  # options as found
    found_out["follow_links"] = listing.follows_links
    inputs, cuts = divide_inputs(config, listing, num_shards, shard_bytes, say, looks=looks)
    # Resolve the tokenizer. Only the reference can mask conversations, and it encodes little text sooner than
    # engines can be compared.
    given = {item.name: getattr(config, item.name) for item in plan_options.PLAN_FIELDS}
    tries_fast = not config.is_chat and config.engine != "tokenizers"
    if tries_fast and config.engine != "gigatoken":
        tries_fast = not _have_little_text(input_dir, inputs, PlanOptions(**{**given, **found_out}))
    with scratch_folder() as scratch:
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
        if config.is_chat:
            template, mask_rule = chat.chat_template_of(
                scratch, config.chat_template_file, allows_control_tokens=config.allow_special_tokens
            )
            template = fitted_template(template, config)
            for warning in template_warnings(template):
                say(f"warning: {warning}")
            found_out |= {"chat_template": template.text, "chat_tokens": template.tokens}
            found_out |= {"chat_arguments": template.arguments, "chat_content": template.content}
            found_out |= {"chat_versions": chat.chat_versions(), "chat_mask_rule": mask_rule}
        elif config.add_special_tokens:
            _, after = added_ids(resolved.reference)
            if after[-1:] == [resolved.spec.eos_token_id]:  # the tokenizer itself ends each document with EOS
                found_out |= {"append_eos": True, "own_eos": True}
        # Make the plan. Its id covers all that decides the bytes of the shards.
        plan = Plan(
            plan_id="",
            input_dir=input_dir,
            options=PlanOptions(**{**given, **found_out}),
            max_bad_fraction=config.max_bad_fraction,
            tokenizer=resolved.spec,
            tokenizer_files=resolved.files,
            probe=resolved.probe,
            probe_sha256=resolved.probe_sha256,
            fast_engine_is_equal=False,
            inputs=inputs,
            cuts=cuts,
            left_out=[(reason, name) for reason, lost in listing.left_out.items() for name in lost],
        )
        if config.hash_inputs:  # reads the whole input: about 1 s of a core per gigabyte
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                hashes = [*pool.map(_sha256_of_input, map(plan.shard, range(plan.num_shards))), ""]
            pairs = zip(cuts, hashes, strict=True)
            hashed = [msgspec.structs.replace(cut, sha256=sha256) for cut, sha256 in pairs]
            plan = dataclasses.replace(plan, cuts=hashed)
        plan = dataclasses.replace(plan, plan_id=plans.plan_id(plan))
        # Measure a sample, with the user's function and the engine that the workers will use.
        if transform is not None:
            check_transform(plan, transform, say)
        engine = resolved.reference
        if tries_fast:
            # The fast engine must give equal ids for the probe, a sample of the input and the gate's texts.
            sample = [text.encode() for text in resolved.probe]
            for documents in sample_of_plan(plan, _COMPARED_BYTES, transform):
                sample += map(_beginning, itertools.islice(documents.texts, _MOST_COMPARED_TEXTS))
            texts = Texts(sample)
            saved = resolved.saved
            path = scratch / names.TOKENIZER_FILE
            sha256 = ids_sha256([engine.encode(texts)])
            content = saved.get(names.FAST_TOKENIZER_FILE, saved[names.TOKENIZER_FILE])
            fast = equal_fast_engine(content, path, texts, sha256, allow_special_tokens=allow)
            if isinstance(fast, Engine) and resolved.passes_gate(fast):
                engine = fast
                plan = dataclasses.replace(plan, fast_engine_is_equal=True)
            else:
                why = fast if isinstance(fast, str) else "its ids differ from those of tokenizers"
                say(f"gigatoken is not used for this tokenizer ({why}); tokenizers is several times slower")
        if line := document_ends_line(plan, resolved.reference, resolved.saved[names.TOKENIZER_FILE]):
            say(line)
        if not (plan.options.has_rows or plan.options.append_eos):
            todo = "add --append_eos, or train with seq_len=, which puts EOS after each document"
            if resolved.spec.eos_token_id is None:
                todo = "name the eos_token in the tokenizer_config.json of a copy of the model's folder"
            say(f"note: documents end without EOS, so a fine-tuned model never learns to stop; {todo}")
        engine = engine if plan.options.add_special_tokens else engine.bare()
        lookup = None if excluded is None or config.exclude is None else Lookup(excluded, config.exclude)
        estimate = measure(plan, engine, transform, lookup)
        # Freeze the plan, or compare it with the one in the folder.
        folder = DataFolder(config.output_dir)
        if not dry_run:
            try:
                folder.make_folder()
            except errors.CannotWrite as error:
                found = f"it cannot be created: {error.found}"
                expected = "a folder that you can write to"
                raise errors.CannotWrite(path=config.output_dir, found=found, expected=expected) from None
            # Left by attempts that died.
            folder.remove_temporaries(older_than_s=files.STALE_AFTER_S, subfolders=SUBFOLDERS)
        frozen = plans.read_plan(folder)
        if frozen is not None:
            plans.refuse_another_plan(frozen, plan, folder)
        else:
            own = {} if transform is None else transform.stamps_of_copy()
            if excluded is not None and config.exclude is not None:
                own |= stamps_of_given(folder, config.exclude, excluded, id_field=config.id_field)
            refuse_foreign_files(folder, own)
        # "auto" says nothing about a planned folder, and about a folder that is not on Lustre.
        is_quiet = stripe == "auto" and (frozen or lustre.why_not_usable(config.output_dir))
        if stripe != "none" and not is_quiet:
            say(lustre.stripe_line(config.output_dir, stripe, is_planned=bool(frozen), dry_run=dry_run))
        if dry_run:
            return plan, estimate
        if frozen is None:
            resolved.publish_first(folder)
        frozen = plans.publish_plan(plan, folder)
        resolved.repair(folder, frozen.tokenizer_files)
        if transform is not None:
            transform.publish_copy(folder)
        if excluded is not None and config.exclude is not None:
            publish_excluded(folder, config.exclude, excluded, id_field=config.id_field)
        return frozen, estimate


def _sha256_of_input(shard: PlannedShard) -> str:
    digest = hashlib.sha256()
    for byte_range in shard.ranges:
        reader = RangeReader(byte_range, digest)
        reader.hash_rest()
        reader.file.check_unchanged()
    return digest.hexdigest()


def plan_of_task(given: dict[str, Any], *, may_plan: bool, checks_inputs: bool) -> None:
    """Compare the plan in ``output_dir`` with the flags of a task, or make one with a shard per file."""
    folder = DataFolder(given["output_dir"])
    plan = plans.read_plan(folder) if may_plan else plans.need_plan(folder)
    if plan is not None and checks_inputs:
        check_inputs(plan, given.get("input_dir", PrepConfig.input_dir))
    if plan is None:
        # Shard N is the N-th .txt file, and files like README.txt count, too.
        config = PrepConfig(**{**given, "also": ",".join(filter(None, ["*.txt", given.get("also")]))})
        say(f"no plan in {folder}: planning one shard per file of {config.input_dir}")
        plan = _plan_once(config)
    base = {item.name: getattr(plan.options, item.name) for item in plan_options.PLAN_FIELDS}
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # options of the planned record, such as seq_len, may not exist for the given one
    if {"text_field", "text_template"} & given.keys():  # each replaces the other
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    if differing := plan_options.option_differences(
        plan.options, PrepConfig(**{**base, **given}), set(given)
    ):
        found = "; ".join(differing)
        expected = "its plan's options, or a new --output_dir"
        raise errors.Refused(path=folder, found=found, expected=expected, remedy="--output_dir")
    model_id = given.get("model_id", plan.tokenizer.model_id)
    fingerprint = ""
    if model_id != plan.tokenizer.model_id:
        with contextlib.suppress(*files.NOT_THERE, ValueError, TypeError, AttributeError):
            path = Path(model_id, names.TOKENIZER_FILE)
            raw = files.read_regular(path, max_bytes=names.MAX_TOKENIZER_BYTES)
            fingerprint = fingerprint_of(json_files.load_json(raw))
        if fingerprint != plan.tokenizer.fingerprint:
            found = f"--model_id {model_id}, whose tokenizer.json differs, or cannot be compared"
            fields = {"found": found, "expected": plan.tokenizer.model_id, "remedy": "--output_dir"}
            advice = "leave --model_id out, or use a new --output_dir"
            raise errors.OtherTokenizer(path=folder, advice=advice, **fields)
    if "input_dir" in given and plans.is_one_file_a_shard(plan):
        check_inputs(plan, given["input_dir"], names_alone=True)


def _plan_once(config: PrepConfig) -> Plan:
    """Return the plan of another task that is planning, if it is written soon, or else make one."""
    # A file shows that a task is planning. It is not a lock: if several tasks plan, the first plan counts.
    is_new_folder = False
    with contextlib.suppress(OSError):  # planning will say what is wrong with the folder
        config.output_dir.mkdir()
        is_new_folder = True
    folder = DataFolder(config.output_dir)
    is_ours = _claim(folder)
    try:
        plan = plans.read_plan(folder)
        if not is_ours and folder.status_of(_CLAIM_NAME) is not None:
            say("another task is planning: waiting for its plan")
            num_files = len(find_inputs(config.input_dir, config).paths)
            until = time.monotonic() + _MIN_WAIT_S + num_files / _FILES_STAMPED_PER_S
            while plan is None and folder.status_of(_CLAIM_NAME) is not None and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                plan = plans.read_plan(folder)
        return plan or plans.read_plan(folder) or make_plan(config, looks=False)[0]
    finally:
        with contextlib.suppress(OSError, errors.ShardprepError):
            if is_ours:
                folder.remove(_CLAIM_NAME)
            if is_new_folder:
                config.output_dir.rmdir()  # fails if the folder is not empty


def _claim(folder: DataFolder) -> bool:
    """Show other tasks that this process is planning. Return False if another one is."""
    pid = os.getpid()
    ours = f"{os.uname().nodename} {pid} {start_ticks(pid)}".encode()
    for _ in range(2):
        try:
            folder.create(_CLAIM_NAME, ours)
        except FileExistsError:
            pass
        except (OSError, errors.ShardprepError):  # planning will say what is wrong with the folder
            return False
        else:
            return True
        # The file of a planner that was killed on this host would cost every later task the wait.
        host, _, process = folder.read_beginning(_CLAIM_NAME, 400).decode(errors="replace").partition(" ")
        numbers = process.split()
        is_here = host == os.uname().nodename and len(numbers) == 2 and numbers[0].isdecimal()
        if not is_here or str(start_ticks(int(numbers[0]))) == numbers[1]:
            return False
        with contextlib.suppress(OSError):
            folder.remove(_CLAIM_NAME)
    return False


def check_inputs(plan: Plan, input_dir: Path, *, names_alone: bool = False) -> None:
    """Raise Refused if a folder no longer has the planned inputs, or with ``names_alone`` their names."""
    planned = {item.path: item for item in plan.inputs}

    def change_of(item: InputFile) -> str:
        try:
            RangeReader(next(ranges_between(input_dir, [item], Cut(0, 0), Cut(1, 0))), None)
        except errors.Refused as error:
            return f"{item.path} has {error.found}"
        return ""

    try:
        taken = find_inputs(input_dir, plan.options).taken
        differing = [f"{name} was added" for name in sorted(taken.keys() - planned.keys())]
        differing += [f"{name} is missing" for name in sorted(planned.keys() - taken.keys())]
        if not names_alone:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                there = [item for path, item in planned.items() if path in taken]
                differing += filter(None, pool.map(change_of, there))
    except errors.NotFound as error:
        if names_alone:
            raise
        where = "" if error.path == str(input_dir) else f"{error.path}: "
        differing = [f"{where}{error.found or error}"]
    if differing:
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        expected = f"the {counted(len(planned), 'planned input file')}"
        advice = "bring them back, or plan new ones in a folder of their own, with another --output_dir, and "
        advice += "give the loader a list of folders"
        fields = {"found": "; ".join(differing[:_NUM_NAMED]) + more, "expected": expected, "advice": advice}
        raise errors.Refused(path=input_dir, remedy="--output_dir", **fields)


_NUM_PLACES = 8  # of a sample
_SAMPLE_BYTES = 2 << 20  # of the input that is sampled
_COMPARED_BYTES = 1 << 18  # of the input that both engines encode
# The reference takes about 250 bytes of memory per token, so it gets only the beginning of a long text.
_MOST_COMPARED_TEXT_BYTES = 1 << 16
_MOST_COMPARED_TEXTS = 2048  # of a batch; the reference takes 2 kB for each text
_NUM_SHOWN = 20  # names of fields, in an error
_FUNCTION_BYTES = 1 << 18  # of the input that a user's function is tried on
_STARTUP_S = 3.0  # for a task's Python and tokenizer, a generous estimate
_LONG_SHARD_S = 600.0  # on one core; a longer shard gets a warning
_MANY_SHARDS = 1000  # this many small shards, each of one input file, get a warning
_SHARD_BYTES = 256 << 20  # of input, which takes minutes on one core


def _beginning(text: bytes) -> bytes:
    """Return the beginning of a text, up to _MOST_COMPARED_TEXT_BYTES."""
    if len(text) <= _MOST_COMPARED_TEXT_BYTES:
        return text
    return text[:_MOST_COMPARED_TEXT_BYTES].decode(errors="ignore").encode()


def sample_of_plan(plan: Plan, num_bytes: int, transform: Transform | None) -> Iterator[DocumentBatch]:
    """Yield the documents of about ``num_bytes`` of a plan's input, from evenly spread places."""
    # Few files are opened, as each is a round trip on a network file system.
    how: dict[str, Any] = {"num_places": _NUM_PLACES, "max_files": 2 * _NUM_PLACES, "transform": transform}
    return sample_documents(plan.input_dir, plan.inputs, plan.options, num_bytes=num_bytes, **how)


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
    with contextlib.suppress(
        errors.ShardprepError
    ):  # what is wrong with an input is reported when it is measured
        for documents in sample_documents(input_dir, inputs, options, num_bytes=FEW_BYTES, num_places=1):
            num_bytes += sum(map(len, documents.texts))
            if num_bytes >= FEW_BYTES:
                return False
    return True


class Lookup:
    """Looks up the documents of a sample in the list of --exclude."""

    def __init__(self, listed: DocumentNames, path: Path) -> None:
        self._listed = listed
        self._path = path
        self._is_matched = np.zeros(len(listed.keys), np.bool_)
        self._some_id = ""  # of a document, to compare with the names

    def see(self, documents: DocumentBatch) -> None:
        ids = documents.columns.get("id")
        path = documents.input_path
        offsets = documents.offsets
        positions = self._listed.of_documents(path, offsets, ids, documents.digests)
        self._is_matched[positions[positions >= 0]] = True
        self._some_id = self._some_id or next(filter(None, ids or ()), "")

    def line(self, *, has_all: bool, id_field: str) -> str:
        """Return what is known about names that match nothing. ``has_all``: all documents were seen."""
        lines = lines_of(self._path, self._listed, ~self._is_matched, id_field=id_field)
        unmatched = unmatched_of(self._listed, self._is_matched, lines)
        if has_all:
            return unmatched.sentence(self._some_id)
        shown = f", such as {unmatched.examples[0]}" if unmatched.examples else ""
        compared = f"; ids of documents are such as {self._some_id}" if self._some_id else ""
        return (
            f"--exclude: {counted(unmatched.num_names, 'name')}{shown}{compared}; after the run, verify says "
            "how many match no document"
        )


def measure(
    plan: Plan, engine: Engine, transform: Transform | None, lookup: Lookup | None = None
) -> Estimate:
    """Estimate the cost by a sample in a worker's stages."""
    num_bytes = num_text_bytes = 0
    mask_rule = plan.options.chat_mask_rule
    has_value: dict[str, bool] = {}  # whether any record has a value, by column, such as "id" and "source"
    with scratch_folder() as path, ShardWriter(DataFolder(path), plan.spec, plan.options, 0) as writer:
        conversations = ConversationSample(plan.options) if plan.options.is_chat else None
        began = time.process_time()
        render_began_s = chat.cpu_s() if conversations else 0.0
        for documents in sample_of_plan(plan, _SAMPLE_BYTES, transform):
            if lookup is not None:
                lookup.see(documents)
            tokens = engine.encode_documents(documents, end_id=plan.end_id, mask_rule=mask_rule)
            writer.append(writer.lay_out(documents, tokens))
            num_bytes += documents.num_bytes
            num_text_bytes += documents.texts.num_bytes
            if conversations is not None:
                conversations.see(documents, tokens)
            for name, column in documents.columns.items():
                has_value[name] = has_value.get(name, False) or any(column)
        cpu_s = time.process_time() - began
        if conversations is not None:
            render_s = chat.cpu_s() - render_began_s
            cpu_s += render_s
        manifest = writer.commit(RunFacts())
    counting = writer.counting
    _check_sample(plan, counting)
    warnings = []
    if counting.bad_fraction > plan.max_bad_fraction:
        what = f"are left out ({', '.join(sorted(counting.bad_reasons))})"
        limit = f"a shard with more than {plan.max_bad_fraction:.0%} fails"
        warnings.append(f"{counting.bad_fraction:.0%} of the documents in a sample {what}; {limit}")
    fields = {"id": plan.options.id_field, "source": plan.options.source_field}
    unseen = [f"--{name}_field {fields[name]}" for name in fields if not has_value.get(name, True)]
    if unseen:
        warnings.append(f"no record of a sample has a value for {', '.join(unseen)}; check the spelling")
    sizes = plan.shard_bytes()
    num_shards = plan.num_shards
    notes = list(conversations.lines()) if conversations is not None else []
    if conversations is not None and transform is None:
        notes[:0] = filter(None, [form_line(_sampled_records(plan), plan.options)])
    if conversations is not None and counting.num_documents:
        share = render_s / max(cpu_s, 1e-9)
        rate = counting.num_documents / max(render_s, 1e-3)
        notes.append(
            f"rendering conversations takes {share:.0%} of the CPU time, in a process of its own: "
            f"about {rate:,.0f} documents per second"
        )
    if lookup is not None:
        has_all = num_bytes >= sum(sizes) and not plan.options.limit
        notes.append(lookup.line(has_all=has_all, id_field=plan.options.id_field))
    num_bytes = max(1, num_bytes)
    num_documents = counting.num_documents * sum(sizes) / num_bytes
    fraction = min(1.0, (plan.options.limit or num_documents) / max(1.0, num_documents))  # 1 without --limit
    scale = sum(sizes) / num_bytes * fraction
    stamps = (manifest.tar, manifest.idx, manifest.digests, manifest.ids)
    sample_bytes = sum(stamp.num_bytes for stamp in stamps if stamp)
    longest_s = cpu_s * fraction * max(sizes) / num_bytes + _STARTUP_S  # on one core
    if longest_s > _LONG_SHARD_S:
        more = round(num_shards * longest_s / _LONG_SHARD_S) + 1
        warnings.append(f"a shard will take {longest_s / 60:.0f} minutes on one core; --num_shards {more}?")
    fewer = max(1, round(sum(sizes) / _SHARD_BYTES))
    if num_shards >= max(_MANY_SHARDS, 2 * fewer) and plans.is_one_file_a_shard(plan):
        each_one = f"each of {num_shards} input files is a shard of its own, and so a task"
        warnings.append(f"{each_one}; for even shards plan into a new folder with --num_shards {fewer}")
    num_full = num_shards - sizes.count(0)
    if 0 < num_full < num_shards and not plans.is_one_file_a_shard(plan):
        empty = f"{num_shards - num_full:,} of {counted(num_shards, 'shard')} will be empty"
        warnings.append(f"{empty}: the input has too few lines, rows or files; --num_shards {num_full}?")
    return Estimate(
        num_tokens=round(counting.num_tokens * scale),
        output_bytes=round(sample_bytes * scale),
        core_s=cpu_s * scale + _STARTUP_S * num_shards,
        longest_s=longest_s,
        num_cores=len(os.sched_getaffinity(0)),
        output_per_text_byte=sample_bytes / max(1, num_text_bytes),
        notes=[*(f"warning: {warning}" for warning in warnings), *notes],
    )


def _check_sample(plan: Plan, counting: Counting) -> None:
    """Raise BadInput, with what to change, if no document of the sample is usable."""
    unusable = [bad for bad in counting.bad if not names.is_chosen(bad.reason)]
    if counting.num_documents or not unusable or plan.max_bad_fraction == 1:
        return
    if {bad.reason for bad in unusable} <= {"no_field", "wrong_type"}:
        problem = problem_of_fields(plan.input_dir, _sampled_records(plan), plan.options)
        if problem is not None:
            raise problem
    if {bad.reason for bad in unusable} == {"preference_pair"}:
        raise errors.BadInput(
            path=plan.input_dir,
            found="preference pairs, chosen and rejected, which are no rows for a language model's loss",
            expected="conversations",
            advice="for one side, plan with --text_field chosen; pairs are for a preference trainer",
            remedy="--text_field chosen",
        )
    first = unusable[0]
    reasons = ", ".join(sorted({bad.reason for bad in unusable}))
    found = f"all documents of a sample, {len(unusable):,}, would be left out ({reasons}), and the limit is "
    found += f"{plan.max_bad_fraction:.2%}"
    advice = " ".join(advice_about(unusable, plan.options))
    keys = _keys_of_messages(plan) if plan.options.is_chat and not plan.options.transform_sha256 else []
    if keys and not {"role", "content"} <= {*keys}:
        found += f"; their messages have the keys {', '.join(keys)}"
        advice = f"plan with --transform FILE in place of --text_field: {_mapping(plan, keys)}"
    found += f"; the first is {place_text(first.input, first.input_offset)}: {first.detail}"
    wanted = "messages with role and content" if plan.options.is_chat else "usable documents"
    raise errors.BadInput(path=plan.input_dir, found=found, expected=wanted, advice=advice)


def _keys_of_messages(plan: Plan) -> list[str]:
    """Return the keys of the first message in the sampled records, or []."""
    path = tuple(plan.options.text_field.split("."))
    for record in _sampled_records(plan):
        messages = value_at(record, path)
        if isinstance(messages, str):
            messages = from_json(messages)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            return [printable(str(key)) for key in messages[0]][:_NUM_SHOWN]
    return []


def _mapping(plan: Plan, keys: list[str]) -> str:
    """Return a function for --transform, in one line, that gives messages their usual keys."""
    speaker, said = ("from", "value") if {"from", "value"} <= {*keys} else ("SPEAKER", "TEXT")
    roles = "{'human': 'user', 'gpt': 'assistant'}"
    message = f"{{'role': {roles}.get(m['{speaker}'], m['{speaker}']), 'content': m['{said}']}}"
    field = "".join(f"[{name!r}]" for name in plan.options.text_field.split("."))
    return f"def transform(record): return [{message} for m in record{field}]"


def _sampled_records(plan: Plan) -> list[Any]:
    """Return records from the beginning of the first input."""
    item = next(item for item in plan.inputs if item.num_bytes)
    byte_range = next(ranges_between(plan.input_dir, [item], Cut(0, 0), Cut(1, 0)))
    documents = next(
        read_records([byte_range], RecordFields(plan.options), _SAMPLE_BYTES // _NUM_PLACES), None
    )
    return list(documents.columns.get("record", ())) if documents else []


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create an empty folder under TMPDIR, and remove it at the end of the block. Raises CannotWrite."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        found = f"no scratch folder can be created: {error.strerror}"
        raise errors.CannotWrite(found=found, expected="a folder with some space in TMPDIR") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # rmtree does not ignore errors of close()
            shutil.rmtree(folder, ignore_errors=True)


def _try(plan: Plan, path: Path, transform: Transform | None = None) -> tuple[str, int, list[str]]:
    """Put a sample through a function. Returns a hash of the texts, the number of documents, and failures."""
    transform = transform or Transform(path, plan.options.transform_files)
    digest = hashlib.sha256()
    num_documents = 0
    failures = list[str]()
    for documents in sample_of_plan(plan, _FUNCTION_BYTES, transform):
        num_documents += len(documents.texts) + len(documents.bad)
        failures += [bad.detail for bad in documents.bad if bad.reason == "transform_error"]
        for text in documents.texts:
            digest.update(len(text).to_bytes(8, "big") + text)
        digest.update(repr([(bad.line, bad.reason) for bad in documents.bad]).encode())
    return digest.hexdigest(), num_documents, failures


def check_transform(plan: Plan, transform: Transform, say: Callable[[str], None]) -> None:
    """Check that a function works on a sample, with equal texts each time. Raises UsageError or BadInput."""
    try:  # first in another process, in case the function ends its process
        texts_elsewhere, num_documents, failures = call_in_child(_try, plan, transform.path)
    except ChildProcessError as error:
        found = f"a function that ended the process that tried it: {error}"
        raise errors.UsageError(path=transform.path, found=found, expected="a text") from None
    if failures:
        found = f"--transform {transform.path} fails for {len(failures)} of {num_documents} sampled documents"
        message = f"{found}, first with: {failures[0]}"
        if len(failures) == num_documents:
            raise errors.BadInput(message, path=transform.path)
        say(f"warning: {message}")
    texts, _, _ = _try(plan, transform.path, transform)
    texts_again, _, _ = _try(plan, transform.path, transform)
    if {texts_again, texts_elsewhere} != {texts}:
        where = "the second time" if texts_again != texts else "in another process"
        expected = "the same text for the same record, independent of time, chance and other documents"
        raise errors.UsageError(path=transform.path, found=f"other texts {where}", expected=expected)
