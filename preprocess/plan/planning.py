"""``plan``: list the inputs, divide them into shards, resolve the tokenizer, measure, freeze the plan.

Also the plan that ``--shard_id N`` works by: the one in its folder, checked against the flags, or a new one.

What is measured and tried is a sample, 2 MiB from 8 places, one in each eighth of the input, so planning
takes a second or two longer for it, however large the input is. It goes through the stages of a worker, whose
CPU seconds are scaled up. A sample without one usable record stops planning: its fields are others. A user's
function must give the same texts again, in this process and in another one: the order of a set differs
between processes, and what a function remembers only shows in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import lustre
from preprocess.make.engines import FEW_BYTES, Engine, equal_fast_engine, ids_sha256
from preprocess.make.shard_writer import Counting, ShardWriter
from preprocess.plan.inputs import (
    NUM_THREADS,
    InputListing,
    count_shards,
    divide,
    find_inputs,
    left_out_lines,
    sample_documents,
    split_line,
    stamp_inputs,
)
from preprocess.plan.tokenizer import (
    ResolvedTokenizer,
    added_ids,
    document_ends_line,
    publish_tokenizer,
    resolve_tokenizer,
)
from preprocess.read.chat import (
    ChatTemplate,
    TooCostly,
    chat_template_of,
    chat_versions,
    render_conversations,
    texts_in,
)
from preprocess.read.documents import Documents, OpenInput, RangeReader, read_records, sample_sha256
from preprocess.read.text_fields import TextFields, Transform, UnusableText
from shardprep import HOME
from shardprep.console import Progress, counted, printable, say
from shardprep.errors import (
    BadInput,
    CannotWrite,
    NotFound,
    OtherTokenizer,
    ReadWriteError,
    Refused,
    UsageError,
)
from shardprep.files import (
    NOT_THERE,
    STALE_AFTER_S,
    make_folder,
    publish_bytes,
    read_regular,
    remove_temporaries,
    size_of_file,
)
from shardprep.format.documents import DocumentNames, read_names
from shardprep.format.input_formats import input_kind
from shardprep.format.names import (
    EXCLUDED_NAME,
    INDEX_NAME,
    MAX_TOKENIZER_BYTES,
    PLAN_NAME,
    TOKENIZER_DIR,
    TOKENIZER_FILE,
    fingerprint_of,
    load_json,
)
from shardprep.format.plan import (
    PLAN_FIELDS,
    ByteRange,
    Cut,
    InputFile,
    Plan,
    PlanOptions,
    PrepConfig,
    is_one_file_a_shard,
    option_differences,
    plan_id,
    publish_plan,
    read_plan,
    refuse_another_plan,
)

Say = Callable[[str], None]
# A task waits for another's plan for about as long as its own would take: 3 s and more for many files.
_LEAST_WAIT_S = 3.0
_STAMPED_PER_S = 2000
_LOOK_EVERY_S = 0.2
_CLAIM_NAME = f".{PLAN_NAME}.claimed.tmp"
_NUM_NAMED = 3  # inputs that differ


def make_plan(
    config: PrepConfig,
    *,
    num_shards: int | None = None,
    shard_bytes: int | None = None,
    stripe: str = "none",
    dry_run: bool = False,
    say: Say = say,
) -> tuple[Plan, CostEstimate]:
    """Plan a data set and, unless ``dry_run``, freeze plan and tokenizer in its folder.

    Shards are even ones, of a number or of a size of input bytes, or without either one per file.
    ``stripe`` is what ``plan --stripe`` takes: the Lustre layout of a folder without a plan yet. Where the
    folder has a plan already, the new one is compared with it and never written. ``say`` gets what differs
    from the usual, as it is found.
    Raises every ShardprepError that the inputs, the tokenizer or the folder give reason for.
    """
    if stripe not in {"auto", "none"}:
        lustre.parse_stripe(stripe)  # an impossible one is told first
    made, raw = config.output_dir.resolve(), config.input_dir.resolve()
    if made == raw or (config.recursive and made.is_relative_to(raw)):
        found = "--input_dir" if made == raw else f"it lies in --input_dir {raw}, where --recursive looks"
        expected = "a folder outside of the raw text, as plan.json would be an input"
        raise UsageError(path=config.output_dir, found=found, expected=expected)
    transform = None
    if config.transform is not None:
        transform = Transform(config.transform, config.transform_files)
        config = dataclasses.replace(config, transform_sha256=transform.sha256)
    names = None if config.exclude is None else read_names(config.exclude, id_field=config.id_field)
    listing = find_inputs(config.input_dir, config)
    inputs, cuts = _divided(config, listing, num_shards, shard_bytes, say)
    with scratch_folder() as files:
        resolved = resolve_tokenizer(
            config.model_id,
            files,
            allow_special_tokens=config.encodes_control_tokens,
            for_fast_engine=_may_be_fast(config, inputs),
        )
        plan = _plan_of(config, listing, inputs, cuts, resolved, names, say)
        if transform is not None:
            check_transform(plan, transform, say)
        plan, engine = _with_engine(plan, config, resolved, transform, say)
        if line := document_ends_line(plan, resolved.reference, files):
            say(line)
        if not (plan.options.has_rows or plan.options.append_eos):
            todo = "add --append_eos, or train with seq_len=, which puts EOS behind each document"
            if resolved.spec.eos_token_id is None:
                todo = "name the eos_token in the tokenizer_config.json of a copy of the model's folder"
            say(f"note: documents end without EOS, so a fine-tuned model never learns to stop; {todo}")
        estimate = measure(plan, engine, transform)
        if not dry_run:
            try:
                make_folder(config.output_dir, parents=True)
            except CannotWrite as error:
                found, expected = f"it cannot be made: {error.found}", "a folder that you can write to"
                raise CannotWrite(path=config.output_dir, found=found, expected=expected) from None
            stems = (PLAN_NAME, INDEX_NAME, TOKENIZER_DIR)  # of what dead attempts left
            remove_temporaries(config.output_dir, *stems, older_than_s=STALE_AFTER_S)
        frozen = read_plan(config.output_dir)
        if frozen is not None:
            refuse_another_plan(frozen, plan, config.output_dir)
        try:
            # Where nothing was asked, nothing is said off Lustre and of a planned folder.
            is_quiet = stripe == "auto" and (frozen or lustre.why_not_usable(config.output_dir))
            if stripe != "none" and not is_quiet:
                say(lustre.stripe_line(config.output_dir, stripe, is_planned=bool(frozen), dry_run=dry_run))
        except lustre.LustreError as error:
            raise CannotWrite(str(error)) from None
        if dry_run:
            return plan, estimate
        if frozen is None:
            publish_tokenizer(resolved, config.output_dir, resolved.files)
        frozen = publish_plan(plan, config.output_dir)
        # Again: another planner may have put its own files there meanwhile, or they were damaged since.
        publish_tokenizer(resolved, config.output_dir, frozen.tokenizer_files)
        if transform is not None:
            transform.publish_copy(config.output_dir)
        if names is not None:
            publish_bytes(config.output_dir / EXCLUDED_NAME, names.keys.tobytes())
        return frozen, estimate


def _divided(
    config: PrepConfig, listing: InputListing, num_shards: int | None, shard_bytes: int | None, say: Say
) -> tuple[list[InputFile], list[Cut]]:
    """Stamp the inputs, and divide them into shards: even ones, or one per file."""
    paths = listing.paths
    for path in paths if config.is_chat else ():
        if not input_kind(path.name).format.has_fields:
            expected = "JSON lines and tables, out of which --record chat reads messages; move it away"
            raise UsageError(path=path, found="text", expected=expected)
    progress = Progress("looking at the inputs", len(paths), unit="files")
    weighed = stamp_inputs(config.input_dir, paths, config, progress.add)
    inputs = [item.file for item in weighed]
    links = f", {listing.num_links} of them links" if listing.num_links else ""
    empty = {item.path for item in inputs if not item.num_bytes}
    hold_nothing = f"; {len(empty)} of them hold nothing, such as {min(empty)}" if empty else ""
    say(f"{counted(len(paths), 'input file')} in {config.input_dir}{links}{hold_nothing}")
    for line in left_out_lines(listing.left_out):
        say(line)
    if line := split_line([(item.path, item.num_bytes) for item in inputs], config.split):
        say(line)
    first_paths: dict[tuple[int, str], str] = {}
    pairs = [(item.path, first_paths.setdefault((item.num_bytes, item.sha256), item.path)) for item in inputs]
    equal = [(path, first) for path, first in pairs if path != first and path not in empty]
    if equal:
        found = f"{counted(len(equal), 'input file')} with the size and the samples of another one"
        which = f"such as {equal[0][0]} and {equal[0][1]}"
        say(f"warning: {found}, {which}; all are taken: move them away if they are copies")
    number = count_shards(weighed, num_shards, shard_bytes)
    if num_shards is None and shard_bytes is None:
        return inputs, [Cut(number, 0) for number in range(len(inputs) + 1)]
    return divide(config.input_dir, weighed, number, config)


def _plan_of(
    config: PrepConfig,
    listing: InputListing,
    inputs: list[InputFile],
    cuts: list[Cut],
    resolved: ResolvedTokenizer,
    names: DocumentNames | None,
    say: Say,
) -> Plan:
    """Return the plan with what planning found out, such as a conversation's template. Raises UsageError."""
    if config.append_eos and resolved.spec.eos_token_id is None:
        found = "a tokenizer without eos_token, so documents cannot end with one"
        expected = "eos_token in its tokenizer_config.json, or --no-append_eos"
        raise UsageError(path=config.model_id, found=found, expected=expected, remedy="--no-append_eos")
    options = config.plan_options()
    found_out: dict[str, Any] = {"also": listing.also, "follow_links": listing.follow_links}
    if names is not None:
        found_out["excluded"] = hashlib.sha256(names.keys.tobytes()).hexdigest()
    if options.is_chat:
        template, mask_rule = chat_template_of(
            resolved.folder, config.chat_template_file, allows_control_tokens=options.allow_special_tokens
        )
        for warning in template_warnings(template):
            say(f"warning: {warning}")
        found_out |= {"chat_template": template.text, "chat_tokens": template.tokens}
        found_out |= {"chat_versions": chat_versions(), "chat_mask_rule": mask_rule}
    elif options.add_special_tokens:
        _, after = added_ids(resolved.reference)
        if after and after[-1] == resolved.spec.eos_token_id:
            found_out |= {"append_eos": True, "own_eos": True}
    plan = Plan(
        plan_id="",
        input_dir=config.input_dir.resolve(),
        options=dataclasses.replace(options, **found_out),
        max_bad_fraction=config.max_bad_fraction,
        tokenizer=resolved.spec,
        tokenizer_files=resolved.files,
        probe=resolved.probe,
        probe_sha256=resolved.probe_sha256,
        fast_engine_is_equal=False,
        inputs=inputs,
        cuts=cuts,
        names_left_out=[(reason, name) for reason, names in listing.left_out.items() for name in names],
    )
    if config.hash_inputs:  # reads all of the input, about a second per core and gigabyte

        def sha256_of_input(shard_id: int) -> str:
            digest = hashlib.sha256()
            for part in plan.shard(shard_id).ranges:
                reader = RangeReader(part, digest)
                reader.hash_rest()
                reader.file.check_unchanged()
            return digest.hexdigest()

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            hashes = list(pool.map(sha256_of_input, range(plan.num_shards)))
        cuts = [
            msgspec.structs.replace(cut, sha256=sha256)
            for cut, sha256 in zip(plan.cuts, [*hashes, ""], strict=True)
        ]
        plan = dataclasses.replace(plan, cuts=cuts)
    return dataclasses.replace(plan, plan_id=plan_id(plan))


def _may_be_fast(config: PrepConfig, inputs: Sequence[InputFile]) -> bool:
    """Return whether the fast engine is to be tried: not for conversations, and not for little text."""
    if config.engine == "tokenizers" or config.is_chat:
        return False
    return config.engine != "auto" or sum(item.num_bytes for item in inputs) >= FEW_BYTES


def _with_engine(
    plan: Plan, config: PrepConfig, resolved: ResolvedTokenizer, transform: Transform | None, say: Say
) -> tuple[Plan, Engine]:
    """Return the plan with what it says of the fast engine, and the engine that workers will use.

    The fast engine must give the reference's ids on the probe, on a sample of the input and at the gate.
    """
    engine = resolved.reference
    if _may_be_fast(config, plan.inputs):
        texts = [*resolved.probe]
        for documents in sample_of_plan(plan, 1 << 18, transform):
            texts += map(bytes.decode, documents.texts)
        fast = equal_fast_engine(
            resolved.folder / TOKENIZER_FILE,
            allow_special_tokens=config.encodes_control_tokens,
            texts=texts,
            expected_sha256=ids_sha256([engine.encode_texts(texts)]),
        )
        if isinstance(fast, Engine) and not resolved.passes_gate(fast):
            fast = "its ids differ from those of tokenizers"
        if isinstance(fast, Engine):
            engine, plan = fast, dataclasses.replace(plan, fast_engine_is_equal=True)
        else:
            say(
                f"gigatoken is not used for this tokenizer ({fast}); tokenizers encodes, several times slower"
            )
    return plan, engine if plan.options.add_special_tokens else engine.bare()


def plan_of_task(plan: Plan | None, given: dict[str, Any]) -> Plan:
    """Return the plan in ``output_dir``, checked against what the user gave, or make 'one file, one shard'.

    Of several tasks that find no plan, one plans and the others wait a little. One that does not see the plan
    in time plans, too: the first to publish wins, the others compare.
    """
    output_dir: Path = given["output_dir"]
    if plan is None:
        # Shard N is the N-th of the .txt files, README.txt and the like included.
        config = PrepConfig(**{**given, "also": ",".join(filter(None, ["*.txt", given.get("also")]))})
        say(f"no plan in {output_dir}: planning one shard per file of {config.input_dir}")
        plan = _plan_once(config)
    _check_given(plan, given)
    if "input_dir" in given and is_one_file_a_shard(plan):
        check_inputs(plan, given["input_dir"], names_alone=True)
    return plan


def _plan_once(config: PrepConfig) -> Plan:
    """Return the plan that another task is making, if it comes soon, else one's own.

    A file tells who plans. It is no lock: nothing is wrong without it.
    """
    folder, claim = config.output_dir, config.output_dir / _CLAIM_NAME
    is_ours = is_new_folder = False
    with contextlib.suppress(OSError):  # planning will say what is wrong with the folder
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            is_new_folder = True
        claim.touch(exist_ok=False)
        is_ours = True
    try:
        if not is_ours and size_of_file(claim) is not None:
            say("another task is planning: waiting for its plan")
            num_files = len(find_inputs(config.input_dir, config).paths)
            until = time.monotonic() + _LEAST_WAIT_S + num_files / _STAMPED_PER_S
            while size_of_file(claim) is not None and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                if size_of_file(folder / PLAN_NAME) is not None:
                    break
        if (plan := read_plan(folder)) is not None:  # perhaps it came between the first look and the claim
            return plan
        return make_plan(config)[0]
    finally:
        with contextlib.suppress(OSError):
            if is_ours:
                claim.unlink()
            if is_new_folder:
                folder.rmdir()  # which does nothing to a folder that holds something


def _check_given(plan: Plan, given: dict[str, Any]) -> None:
    """Check given options against the plan's. Raises Refused or OtherTokenizer."""
    base = {item.name: getattr(plan.options, item.name) for item in PLAN_FIELDS}
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # seq_len and keep_text of the one record are no options of the other
    if "text_field" in given or "text_template" in given:
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    differing = option_differences(plan.options, PrepConfig(**{**base, **given}), set(given))
    if differing:
        expected = "the options of its plan: leave them out, or use a new --output_dir"
        raise Refused(
            path=given["output_dir"], found="; ".join(differing), expected=expected, remedy="--output_dir"
        )
    model_id = given.get("model_id", plan.tokenizer.model_id)
    if model_id == plan.tokenizer.model_id:
        return
    found = "no local folder with a tokenizer.json, so it cannot be compared"
    with contextlib.suppress(*NOT_THERE, ValueError, TypeError, AttributeError):
        raw = read_regular(Path(model_id, TOKENIZER_FILE), max_bytes=MAX_TOKENIZER_BYTES)
        found = fingerprint_of(load_json(raw))
    if found != plan.tokenizer.fingerprint:
        what = found if " " in found else found[:12]
        raise OtherTokenizer(
            path=given["output_dir"],
            found=f"--model_id {model_id} ({what})",
            expected=f"the tokenizer of {plan.tokenizer.model_id} ({plan.tokenizer.fingerprint[:12]}), as "
            "planned: leave --model_id out, or use a new --output_dir",
            remedy="--output_dir",
        )


def check_inputs(plan: Plan, input_dir: Path, *, names_alone: bool = False) -> None:
    """Refuse a folder that no longer holds the planned inputs, and these alone.

    A file of the planned size and mtime is not opened. Of another mtime its sample is read and compared.
    ``names_alone``: look at no file. Raises Refused, ReadWriteError, NotFound for a folder without inputs.
    """
    planned = {item.path for item in plan.inputs}
    try:
        listing = find_inputs(input_dir, plan.options)
        found = {path.relative_to(input_dir).as_posix() for path in listing.paths}
        differing = [f"{name} was added" for name in sorted(found - planned)]
        differing += [f"{name} is missing" for name in sorted(planned - found)]
        if not names_alone:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                changes = pool.map(lambda item: _change_of(input_dir, item), plan.inputs)
                differing += filter(None, changes)
    except NotFound as error:
        if names_alone:
            raise
        differing = [str(error)]
    if differing:
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        raise Refused(
            path=input_dir,
            found="; ".join(differing[:_NUM_NAMED]) + more,
            expected=f"the {counted(len(plan.inputs), 'planned input file')}, as a plan is never changed: "
            "bring them back, or put new files into a folder and an --output_dir of their own, and give the "
            "loader a list of folders",
            remedy="--output_dir",
        )


def _change_of(input_dir: Path, planned: InputFile) -> str | None:
    """Return how an input differs from the planned one, or None for one that is missing or equal."""
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


_NUM_PLACES = 8  # of the input that are sampled
_SAMPLE_BYTES = 2 << 20  # in all
_MOST_FILES = 16  # of the sample: to open one is a round trip on a network file system
_NUM_SHOWN = 20  # fields
_FUNCTION_BYTES = 1 << 18  # that a function is tried on
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from preprocess.plan.planning import answer; answer()"
_STARTUP_S = 3.0  # a task's Python and tokenizer, generously


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Figures of the whole plan, scaled up from the sample."""

    num_tokens: int
    output_bytes: int
    core_hours: float
    longest_shard_s: float  # on one core
    notes: tuple[str, ...]  # what in the sample is not as the options expect it


def sample_of_plan(plan: Plan, num_bytes: int, transform: Transform | None) -> Iterator[Documents]:
    """Yield documents of about this much of a plan's input, from evenly spread places."""
    return sample_documents(
        plan.input_dir,
        plan.inputs,
        plan.options,
        num_bytes=num_bytes,
        num_places=_NUM_PLACES,
        most_files=_MOST_FILES,
        transform=transform,
    )


def measure(plan: Plan, engine: Engine, transform: Transform | None = None) -> CostEstimate:
    """Run a sample through the worker's own stages into a scratch folder, and scale its CPU seconds up.

    Raises BadInput where no record of the sample has the field of the text.
    """
    num_bytes = 0
    found: dict[str, bool] = {}  # "id" and "source", where records are asked for them: whether one has it
    with scratch_folder() as folder, ShardWriter(folder, plan, 0) as writer:
        began = time.process_time()
        for documents in sample_of_plan(plan, _SAMPLE_BYTES, transform):
            tokens = engine.encode_documents(
                documents, end_id=plan.end_id, mask_rule=plan.options.chat_mask_rule
            )
            writer.append(writer.lay_out(documents, tokens))
            num_bytes += documents.num_bytes
            for name in ("id", "source") if documents.texts else ():
                if name in documents.columns:
                    found[name] = found.get(name, False) or any(documents.columns[name])
        cpu_s = time.process_time() - began
        manifest = writer.commit({})
    counting = writer.counting
    _check_fields(plan, counting)
    notes = []
    if counting.bad_fraction > plan.max_bad_fraction:
        what = f"are left out ({', '.join(sorted(counting.bad_reasons))})"
        limit = f"a shard with more than {plan.max_bad_fraction:.0%} fails"
        notes.append(f"{counting.bad_fraction:.0%} of the documents in a sample {what}; {limit}")
    fields = {name: getattr(plan.options, f"{name}_field") for name in found}
    unseen = [f"--{name}_field {field}" for name, field in fields.items() if field and not found[name]]
    if unseen:
        notes.append(f"no record of a sample has a value for {', '.join(unseen)}; check the spelling")
    shard_bytes = plan.shard_bytes()
    scale = sum(shard_bytes) / max(1, num_bytes)
    num_documents = counting.num_documents * scale
    taken = min(1.0, (plan.options.limit or num_documents) / max(1.0, num_documents))  # of a trial
    files = filter(None, [manifest.tar, manifest.idx, manifest.digests, manifest.ids])
    return CostEstimate(
        num_tokens=round(counting.num_tokens * scale * taken),
        output_bytes=round(sum(file.num_bytes for file in files) * scale * taken),
        core_hours=(cpu_s * scale * taken + _STARTUP_S * plan.num_shards) / 3600,
        longest_shard_s=cpu_s * taken * max(shard_bytes) / max(1, num_bytes) + _STARTUP_S,
        notes=tuple(notes),
    )


class _SeenFields(TextFields):
    """Remembers which fields the records have, and takes no text."""

    def __init__(self, options: PlanOptions) -> None:
        super().__init__(options)
        self.plain_name = None
        self.num_chars: Counter[str] = Counter()  # of texts, by field; 0 for other values
        self.messages: list[str] = []  # fields that are lists of messages

    def text(self, record: Any, place: str = "") -> UnusableText:
        for name, value in record.items() if isinstance(record, dict) else ():
            self.num_chars[place + name] += len(value) if isinstance(value, str) else 0
            if isinstance(value, dict):
                self.text(value, f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
                self.messages.append(place + name)
        return UnusableText("no_field", "")


def _check_fields(plan: Plan, counting: Counting) -> None:
    """Raise BadInput where no record of the sample has the field of the text, naming the fields it has."""
    is_other_field = counting.bad_reasons and counting.bad_reasons <= {"no_field", "wrong_type"}
    if counting.num_documents or not is_other_field or plan.max_bad_fraction == 1:
        return
    options, seen = plan.options, _SeenFields(plan.options)
    item = next(item for item in plan.inputs if item.num_bytes)
    part = ByteRange(input_number=0, path=plan.input_dir / item.path, start=0, end=item.num_bytes)
    records = read_records([part], seen, _SAMPLE_BYTES // _NUM_PLACES)
    next(records, None)
    if not seen.num_chars:
        return
    wanted = options.text_template or options.text_field
    flags = [f"--text_field {name}" for name, number in seen.num_chars.most_common(1) if number]
    for name in dict.fromkeys(seen.messages):
        flags.insert(0, "--record chat" + ("" if name == "messages" else f" --text_field {name}"))
    names = ", ".join(printable(name) for name in list(seen.num_chars)[:_NUM_SHOWN])
    flags = flags or ["--text_field NAME"]
    kind = "a list of messages" if options.is_chat else "a string"
    message = f"no record of a sample of {plan.input_dir} has {wanted!r} as {kind}; their fields are: {names}"
    raise BadInput(
        f"{message}; plan with {', or '.join(flags)}",
        path=plan.input_dir,
        found=names,
        expected=repr(wanted),
        remedy=flags[0],
    )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder under TMPDIR for the time of a ``with``. Raises CannotWrite."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        found = f"no scratch folder can be made: {error.strerror}"
        raise CannotWrite(found=found, expected="one with some space; let TMPDIR name it") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # rmtree ignores no error of close()
            shutil.rmtree(folder, ignore_errors=True)


def _try(plan: Plan, transform: Transform) -> tuple[str, int, list[str]]:
    """Put a sample through a function. Return the texts' hash, the documents' number, and why some failed."""
    digest, num_documents, failures = hashlib.sha256(), 0, list[str]()
    for documents in sample_of_plan(plan, _FUNCTION_BYTES, transform):
        num_documents += len(documents.texts) + len(documents.bad)
        failures += [bad.detail for bad in documents.bad if bad.reason == "transform_error"]
        for text in documents.texts:
            digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest(), num_documents, failures


def check_transform(plan: Plan, transform: Transform, say: Callable[[str], None]) -> None:
    """Try the function on a sample of the input.

    Raises UsageError where it gives other texts again or ends its process, BadInput where it fails for all.
    """
    # First in another process: what ends a process ends that one.
    command = [sys.executable, "-c", _CODE, str(HOME)]
    done = subprocess.run(
        command, input=pickle.dumps((plan, transform.path)), capture_output=True, check=False
    )
    words = done.stdout.split()
    if done.returncode or not words:
        last_line = "".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        found = f"it ended the process that tried it, with exit code {done.returncode}"
        expected = f"a text; its last words: {last_line or 'none'}"
        raise UsageError(path=transform.path, found=found, expected=expected)
    texts_elsewhere = words[-1].decode()  # the function may print, too
    texts, num_documents, failures = _try(plan, transform)
    if failures:
        found = f"--transform {transform.path} fails for {len(failures)} of {num_documents} sampled documents"
        message = f"{found}, first so: {failures[0]}"
        if len(failures) == num_documents:
            raise BadInput(message, path=transform.path)
        say(f"warning: {message}")
    for texts_again, where in (
        (_try(plan, transform)[0], "the second time that it was given the same sample"),
        (texts_elsewhere, "in another process"),
    ):
        if texts_again != texts:
            expected = "the same text for the same record, whatever the time, chance and other documents"
            raise UsageError(path=transform.path, found=f"other texts {where}", expected=expected)


def answer() -> None:
    """Print the hash of the texts of the sample that stands on standard input."""
    plan, path = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - of the process that started this one
    transform = Transform(path, plan.options.transform_files)
    sys.stdout.write(f"\n{_try(plan, transform)[0]}\n")


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


_QUESTION = _turns("user: What is it?", "assistant: A probe.")
_CALL = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_SHAPES = {
    "several turns": [*_QUESTION, *_turns("user: And now?", "assistant: Again.")],
    "a system message": [*_turns("system: Be brief."), *_QUESTION],
    "two user messages in a row": [*_turns("user: Hear this."), *_QUESTION],
    "two answers in a row": [*_QUESTION, *_turns("assistant: And more.")],
    "reasoning in an earlier turn": [
        *_turns("user: Why?", "assistant: <think>\nSince probes ask.\n</think>\n\nSo.", "user: And then?"),
        *_turns("assistant: <think>\nThey end.\n</think>\n\nNothing."),
    ],
    "tool calls": [
        *_turns("user: Ask the tool."),
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "The tool says so."},
        *_turns("assistant: It answered."),
    ],
}


def template_warnings(template: ChatTemplate) -> Iterator[str]:
    """Yield why conversations of some shapes cannot be rendered, and which lose text.

    Raises UsageError where one takes too much memory or time, and ReadWriteError.
    """
    shapes = {name: shape for name, shape in _SHAPES.items() if name != "tool calls"}
    if "tool_calls" in template.text:
        shapes["tool calls"] = _SHAPES["tool calls"]
    try:
        rendered = render_conversations(template, list(map(json.dumps, shapes.values())))
    except TooCostly as error:
        num_messages = len(list(shapes.values())[error.number])
        raise UsageError(
            f"{error}, for a conversation of {counted(num_messages, 'message')} that plan tries; pass a "
            "template without endless loops and huge texts as --chat_template_file"
        ) from None
    unusable: dict[str, list[str]] = {}  # why -> names of shapes
    losing = []
    for (name, shape), found in zip(shapes.items(), rendered, strict=True):
        if isinstance(found, UnusableText):
            unusable.setdefault(found.detail, []).append(name)
            continue
        said: list[str] = []
        for message in shape:
            for text in texts_in([message.get("content"), message.get("tool_calls")]):
                said += re.split(r"\s*</?think>\s*", text)
        lost = [words for words in said if words not in ("call00001", "function") and words not in found.text]
        if lost:
            losing.append(f"{name} ({lost[0]!a})")
    for why, names in unusable.items():
        yield (
            f"the chat template cannot render conversations with {', or '.join(names)}: {why}; such "
            "conversations will be left out; change the data, or put {% generation %} and "
            "{% endgeneration %} around what the assistant writes in a copy of the template, and pass "
            "--chat_template_file"
        )
    if losing:
        yield (
            f"the chat template leaves out text of conversations with {', or '.join(losing)}; the assistant "
            "will not learn it: to keep it, pass a template that renders it as --chat_template_file"
        )
