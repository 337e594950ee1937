"""plan.json: which bytes of which input files are shard N, for which options and which tokenizer.

A plan is written once and never edited. Its id is a hash of what decides the bytes of the shards: two plans
with one id make equal data sets. The lists of a plan of more than 4,096 inputs and shards stand in parts: a
task reads the head and the blocks of its shard, and each block is checked by a hash in the head.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import orjson

from shardprep.console import quoted
from shardprep.errors import BrokenShard, NotFound, Refused, UnknownVersion, UsageError
from shardprep.files import (
    Digest,
    FileStamp,
    PublishedFile,
    is_folder,
    is_name_inside,
    names_in,
    sync_folder,
)
from shardprep.format.checked_json import MOST, Fields, is_text, with_content_hash
from shardprep.format.dataset_spec import DatasetSpec, TokenizerSpec
from shardprep.format.input_formats import known_input_kind
from shardprep.format.names import FORMAT_VERSION, MAX_PLAN_BYTES, MAX_SHARDS, PLAN_NAME, source_of_path
from shardprep.format.options import PLAN_FIELDS, PlanOptions, option_differences, option_types
from shardprep.format.parts import VERSION as PARTS_VERSION
from shardprep.format.parts import PartsFile, Rows, json_by_parts, sha256s_of

Boundary = tuple[int, int]  # (input, byte): where a shard begins in the sorted inputs read as one
_FORMAT = "shardprep-plan"
_MOST_WHOLE = 4096  # inputs and shards; a plan of more is written in parts


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the plan. ``mtime_ns`` is outside the plan id: a copy or a touch changes nothing."""

    path: str  # relative to the input folder, with /
    num_bytes: int
    mtime_ns: int
    sha256: str  # of the first, middle and last 64 KiB


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """A part of an input that belongs to one shard."""

    input_number: int  # position of the file in the plan
    path: Path
    start: int  # byte
    end: int  # byte, not included
    text_start: int = 0  # where the file is compressed: byte of its text at ``start``
    planned: InputFile | None = None  # what the file was at planning; None: it is taken as it is


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One shard of a plan: worked out once, and handed to whatever has to do with making it."""

    shard_id: int
    ranges: list[ByteRange]  # of the input, in order
    num_bytes: int  # of the input
    most_documents: int | None  # of a trial, its share of ``--limit``; None for no trial
    sha256: str | None  # of its input, where the plan has it

    @property
    def input_numbers(self) -> list[int]:
        return [part.input_number for part in self.ranges]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What plan.json holds. Frozen: a plan is never edited."""

    plan_id: Digest
    input_dir: Path
    options: PlanOptions
    max_bad_fraction: Annotated[float, 1]
    tokenizer: TokenizerSpec
    tokenizer_files: dict[str, FileStamp]  # name -> of each file in DATA/tokenizer
    probe: list[str]  # texts that tell engines apart, see engines.py
    probe_sha256: Digest  # of their ids by the reference engine
    fast_engine_is_equal: bool  # the fast engine gave the reference's ids on probe and sample
    can_be_cut: bool  # a long document may be encoded in pieces, see long_documents.py
    # Of a plan in parts the lists are Rows, which read what they are asked for.
    inputs: Sequence[InputFile]
    boundaries: Sequence[Boundary]  # num_shards + 1, ascending; in plan.json the key is cuts
    shard_sha256: Sequence[str] | None = None  # of each shard's input bytes: see planning.py
    text_starts: Sequence[int] | None = None  # of each boundary: its byte of the text of a compressed file
    names_left_out: Sequence[tuple[str, str]] = ()  # (reason, name), sorted: see planning.InputListing

    @property
    def num_shards(self) -> int:
        return len(self.boundaries) - 1

    @cached_property
    def spec(self) -> DatasetSpec:
        options = self.options
        return DatasetSpec(
            plan_id=self.plan_id,
            num_shards=self.num_shards,
            record=options.record,
            token_format=options.token_format,
            seq_len=options.seq_len,
            append_eos=options.append_eos,
            tokenizer=self.tokenizer,
            validation_fraction=options.validation_fraction,
        )

    @property
    def left_out(self) -> dict[str, list[str]]:
        """The names in the input folder that are no input, by reason."""
        found: dict[str, list[str]] = {}
        for reason, name in self.names_left_out:
            found.setdefault(reason, []).append(name)
        return found

    @property
    def end_id(self) -> int | None:
        """The token that is put behind each document: EOS where it is appended."""
        options = self.options
        return self.tokenizer.eos_token_id if options.append_eos and not options.own_eos else None

    def at(self, input_dir: Path | None) -> Plan:
        """The same plan where its inputs lie in another folder by now; None: where they were."""
        return self if input_dir is None else dataclasses.replace(self, input_dir=input_dir)

    def shard(self, shard_id: int) -> PlannedShard:
        """What is to be known to make one shard. Raises NotFound for a shard past the plan's end."""
        ranges, (share, rest) = self.ranges(shard_id), divmod(self.options.limit, self.num_shards)
        return PlannedShard(
            shard_id=shard_id,
            ranges=ranges,
            num_bytes=sum(part.end - part.start for part in ranges),
            most_documents=share + (shard_id < rest) if self.options.limit else None,
            sha256=None if self.shard_sha256 is None else self.shard_sha256[shard_id],
        )

    def ranges(self, shard_id: int) -> list[ByteRange]:
        """The byte ranges of a shard, in order. Raises NotFound for a shard past the plan's end."""
        if not 0 <= shard_id < self.num_shards:
            raise NotFound(
                f"there is no shard {shard_id}: the plan has {self.num_shards}, 0 to {self.num_shards - 1}; "
                f"as a job array that is --array=0-{self.num_shards - 1}",
                found=f"shard {shard_id}",
                expected=f"0 to {self.num_shards - 1}",
                remedy=f"--array=0-{self.num_shards - 1}",
            )
        (first, start), (last, end) = self.boundaries[shard_id], self.boundaries[shard_id + 1]
        if not (0, 0) <= (first, start) <= (last, end) <= (len(self.inputs), 0):
            raise BrokenShard(
                f"{PLAN_NAME}: shard {shard_id} is from {first, start} to {last, end}, expected ascending "
                f"places in {len(self.inputs)} inputs; plan into a new folder"
            )
        ranges = []
        for number in range(first, last + (end > 0)):
            item = self.inputs[number]
            begin = start if number == first else 0
            ranges.append(
                ByteRange(
                    input_number=number,
                    path=self.input_dir / item.path,
                    start=begin,
                    end=end if number == last else item.num_bytes,
                    text_start=self.text_starts[shard_id] if begin and self.text_starts is not None else 0,
                    planned=item,
                )
            )
        return ranges

    def source_of(self, input_number: int) -> str:
        """The source of an input file: its first subfolder, or "." for one in the input folder itself."""
        return source_of_path(self.inputs[input_number].path)

    def shard_bytes(self) -> list[int]:
        """Input bytes of every shard."""
        if isinstance(self.boundaries, Rows):  # others were checked when they were read
            check_boundaries(self)
        prefix = [0, *itertools.accumulate(item.num_bytes for item in self.inputs)]
        places = [prefix[number] + byte for number, byte in self.boundaries]
        return [end - start for start, end in itertools.pairwise(places)]


def file_boundaries(inputs: Sequence[InputFile]) -> list[Boundary]:
    """One input file is one shard: what the baseline did."""
    return [(number, 0) for number in range(len(inputs) + 1)]


def is_one_file_a_shard(plan: Plan) -> bool:
    """Whether shard N is the N-th input file."""
    return plan.num_shards == len(plan.inputs) and list(plan.boundaries) == file_boundaries(plan.inputs)


def plan_id(plan: Plan) -> str:
    """sha256 of what decides the shards' bytes: not where the input lies, nor when it was touched."""
    return _id_of(plan, is_in_parts=_is_large(plan))


def _is_large(plan: Plan) -> bool:
    return len(plan.inputs) + plan.num_shards > _MOST_WHOLE


def _id_of(plan: Plan, *, is_in_parts: bool) -> str:
    """The id; in parts by the hashes of the lists' blocks, which a plan that was read by parts has."""
    inputs: Sequence[Any] = plan.inputs
    if not is_in_parts:
        inputs = [(item.path, item.num_bytes, item.sha256) for item in plan.inputs]
    elif not isinstance(inputs, Rows):
        inputs = _rows_of_inputs(plan.inputs)
    lists = {"inputs": inputs, "cuts": plan.boundaries, "shard_sha256": plan.shard_sha256}
    identity = {
        "options": plan.options.identity(),
        "tokenizer": {**dataclasses.asdict(plan.tokenizer), "model_id": None},
        "probe": plan.probe_sha256,
        "version": PARTS_VERSION if is_in_parts else FORMAT_VERSION,
    }
    for name, rows in lists.items():
        if rows is not None:
            identity[name] = (len(rows), sha256s_of(rows)) if is_in_parts else list(rows)
    return hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _rows_of_inputs(inputs: Sequence[InputFile]) -> list[dict[str, Any]]:
    """What a plan in parts says of inputs; their mtimes, which the id leaves out, are a list of their own."""
    return [
        {"path": item.path, "num_bytes": item.num_bytes, "sampled_sha256": item.sha256} for item in inputs
    ]


def plan_json(plan: Plan) -> bytes:
    """The bytes of plan.json. Raises UsageError where it would be too large to be read."""
    lists: dict[str, Sequence[Any] | None] = {
        "inputs": _rows_of_inputs(plan.inputs),
        "cuts": plan.boundaries,
        "shard_sha256": plan.shard_sha256,
        "text_starts": plan.text_starts,
    }
    not_in_head = {"inputs", "boundaries", "shard_sha256", "text_starts", "names_left_out"}
    content = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)  # not asdict, which copies each of 99,999 cuts: 0.7 s
        if field.name not in not_in_head
    }
    content |= {
        "input_dir": str(plan.input_dir),
        "options": plan.options.to_json(),
        "tokenizer": dataclasses.asdict(plan.tokenizer),
        "tokenizer_files": {name: dataclasses.asdict(stamp) for name, stamp in plan.tokenizer_files.items()},
    }
    if _is_large(plan):
        lists |= {"mtimes_ns": [item.mtime_ns for item in plan.inputs], "left_out": plan.names_left_out}
        raw = json_by_parts(
            _FORMAT, content, {name: rows for name, rows in lists.items() if rows is not None}
        )
    else:
        for row, item in zip(lists["inputs"] or [], plan.inputs, strict=True):
            row["mtime_ns"] = item.mtime_ns
        if plan.names_left_out:
            content["left_out"] = plan.left_out
        raw = orjson.dumps(with_content_hash(_FORMAT, content | lists), option=orjson.OPT_APPEND_NEWLINE)
    if len(raw) > MAX_PLAN_BYTES:
        raise UsageError(
            f"{PLAN_NAME} of {len(plan.inputs)} inputs and {len(plan.names_left_out)} names left out would "
            f"have {len(raw)} bytes, the limit is {MAX_PLAN_BYTES}; join small files, move away what is no "
            "input, or make several data sets for a loader of several folders"
        )
    return raw


def publish_plan(plan: Plan, output_dir: Path) -> Plan:
    """Freeze a plan as plan.json; returns the plan that is frozen there. Raises Refused for another."""
    raw = plan_json(plan)
    file = PublishedFile(output_dir / PLAN_NAME)
    try:
        file.write(raw)
        file.sync()
        if file.publish_first():
            sync_folder(output_dir)
            return plan
    finally:
        file.discard()
    frozen = need_plan(output_dir)
    if frozen.plan_id != plan.plan_id:
        raise Refused(
            f"{output_dir} has another plan ({frozen.plan_id[:12]}, this one would be {plan.plan_id[:12]}): "
            f"{'; '.join(plan_differences(frozen, plan))}. A plan is never changed: for more data or other "
            "options plan into a new folder (--output_dir NEW), and give the loader a list of folders",
            path=output_dir,
            found=frozen.plan_id[:12],
            expected=plan.plan_id[:12],
            remedy="--output_dir NEW",
        )
    return frozen


def read_plan(output_dir: Path) -> Plan | None:
    """The plan of a data set, or None where there is none yet; takes 0.1 s of CPU for 10^4 inputs.

    Of a plan in parts only the head is read; its lists may raise BrokenShard where they are used. Raises
    NotFound, BrokenShard, UnknownVersion, ReadWriteError.
    """
    try:
        file = PartsFile(output_dir / PLAN_NAME)
        return _plan_of(file.read_head(_FORMAT, max_bytes=MAX_PLAN_BYTES), file)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise NotFound(
            f"{output_dir} is no folder, expected the folder of a data set",
            path=output_dir,
            expected="the folder of a data set",
        ) from None
    except BrokenShard as error:
        raise BrokenShard(
            f"{error}; a plan is frozen: bring the file back as it was, or plan into a new folder",
            path=error.path,
            found=error.found,
            expected=error.expected,
        ) from None


def _plan_of(fields: Fields, file: PartsFile) -> Plan:
    parts = fields.fields("parts") if fields.has("parts") else None
    plan = fields.all_of(
        Plan,
        options=options_of_json(fields.fields("options")),
        tokenizer=TokenizerSpec.from_json(fields.fields("tokenizer")),
        **(_lists_of(fields) if parts is None else _lists_in_parts(parts, file)),
    )
    _check_lengths(plan, fields)
    for name in plan.tokenizer_files:
        if not is_name_inside(name) or "/" in name:
            raise fields.wrong("tokenizer_files", name, "names of files in the tokenizer's folder")
    if parts is None:
        check_boundaries(plan, fields.path)
    expected = _id_of(plan, is_in_parts=parts is not None)
    if plan.plan_id != expected:
        raise fields.wrong(
            "plan_id", plan.plan_id[:12], f"{expected[:12]}, which options, tokenizer, inputs and cuts give"
        )
    return plan


def _lists_of(fields: Fields) -> dict[str, Any]:
    left_out = fields.each("left_out", Fields.texts) if fields.has("left_out") else {}
    return {
        "inputs": [_input_of(item, item.whole("mtime_ns", -MOST)) for item in fields.objects("inputs")],
        "boundaries": _cuts_of(fields, "cuts"),
        "shard_sha256": fields.or_none("shard_sha256", fields.digests),
        "text_starts": fields.or_none("text_starts", fields.wholes),
        "names_left_out": [(reason, name) for reason, names in left_out.items() for name in names],
    }


def _lists_in_parts(parts: Fields, file: PartsFile) -> dict[str, Any]:
    """The lists of a plan in parts, none of which is read yet."""

    def inputs_of(fields: Fields, name: str, first: int) -> list[InputFile]:
        return [_input_of(item, mtimes[first + number]) for number, item in enumerate(fields.objects(name))]

    readers: dict[str, Callable[[Fields, str, int], list[Any]]] = {
        "mtimes_ns": lambda fields, name, _: fields.wholes(name, -MOST),
        "inputs": inputs_of,
        "cuts": lambda fields, name, _: _cuts_of(fields, name),
        "left_out": lambda fields, name, _: _names_left_out(fields, name),
        "shard_sha256": lambda fields, name, _: fields.digests(name),
        "text_starts": lambda fields, name, _: fields.wholes(name),
    }
    optional = ("shard_sha256", "text_starts")
    found = {
        name: file.rows(parts, name, read)
        for name, read in readers.items()
        if parts.has(name) or name not in optional
    }
    mtimes, num_inputs = found.pop("mtimes_ns"), len(found["inputs"])
    if len(mtimes) != num_inputs:
        raise parts.wrong("mtimes_ns", f"{len(mtimes)} rows", f"one for each of {num_inputs} inputs")
    parts.end()
    return {"boundaries": found.pop("cuts"), "names_left_out": found.pop("left_out"), **found}


def _names_left_out(fields: Fields, name: str) -> list[tuple[str, str]]:
    def is_right(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(is_text, value))

    return [(reason, name) for reason, name in fields.list_of(name, is_right, "a reason and a name")]


def _cuts_of(fields: Fields, name: str) -> list[Boundary]:
    def is_right(value: Any) -> bool:
        return type(value) is list and [*map(type, value)] == [int, int]

    return [(number, byte) for number, byte in fields.list_of(name, is_right, "an input and a byte of it")]


def options_of_json(fields: Fields) -> PlanOptions:
    """The options, settled and checked as those of a command line are; an absent one has its default.

    One that nobody knows here is left alone where it says no, and refused where it says anything else.
    """
    kinds = option_types(PlanOptions)
    values = {
        item.name: fields.value(item.name, kinds[item.name]) for item in PLAN_FIELDS if fields.has(item.name)
    }
    for name, value in fields.rest().items():
        if value not in (False, "", None):  # 0 is False
            raise UnknownVersion(
                f"{fields.path}: options.{name!a} is {value!r:.60}, an option that this shardprep does not "
                "know: a newer one planned this data set; install that one, or plan anew into a new folder"
            )
    try:
        return PlanOptions(**values)
    except UsageError as error:
        raise BrokenShard(f"{fields.path}: its options cannot be: {error}") from None


def _input_of(fields: Fields, mtime_ns: int) -> InputFile:
    item = fields.all_of(InputFile, mtime_ns=mtime_ns, sha256=fields.digest("sampled_sha256"))
    if not is_name_inside(item.path):  # what lies there may be a link, as planning takes links to files
        raise fields.wrong("path", item.path, "the path of a file below the input folder")
    return item


def check_boundaries(plan: Plan, path: Path = Path(PLAN_NAME)) -> None:
    """That the boundaries divide the inputs, in order and without a gap. Raises BrokenShard."""
    cuts, ends = list(plan.boundaries), [*(item.num_bytes for item in plan.inputs), 0]
    inside = all(0 <= source < len(ends) and 0 <= byte <= ends[source] for source, byte in cuts)
    if not inside or cuts[0] != (0, 0) or cuts[-1] != (len(plan.inputs), 0) or cuts != sorted(cuts):
        raise Fields(path, {}).wrong(
            "cuts", f"{cuts[0]} to {cuts[-1]}", f"places in {len(plan.inputs)} inputs, ascending"
        )


def _check_lengths(plan: Plan, fields: Fields) -> None:
    if not 1 <= plan.num_shards <= MAX_SHARDS:
        raise fields.wrong("cuts", f"{plan.num_shards} shards", f"1 to {MAX_SHARDS}")
    for name, rows, expected in (
        ("text_starts", plan.text_starts, plan.num_shards + 1),
        ("shard_sha256", plan.shard_sha256, plan.num_shards),
    ):
        if rows is not None and len(rows) != expected:
            raise fields.wrong(name, f"{len(rows)} of them", f"{expected} for {plan.num_shards} shards")


def need_plan(output_dir: Path) -> Plan:
    """The plan of a data set. Raises NotFound, with the command that makes one."""
    plan = read_plan(output_dir)
    if plan is None:
        missing = "" if is_folder(output_dir) else "does not exist, so it "
        raw, made = "RAW", quoted(output_dir)
        names = names_in(output_dir)
        if any(map(known_input_kind, names)) and not any(name.startswith("shard-") for name in names):
            raw, made = made, quoted(f"{os.path.abspath(output_dir)}_shards")  # noqa: PTH100 - as in quoted
        raise NotFound(
            f"{output_dir} {missing}has no {PLAN_NAME}",
            path=output_dir,
            expected=PLAN_NAME,
            remedy=f"shardprep plan --input_dir {raw} --output_dir {made} --model_id MODEL --num_shards N",
        )
    return plan


def plan_differences(frozen: Plan, other: Plan) -> list[str]:
    found = option_differences(frozen.options, other.options)
    if frozen.tokenizer.fingerprint != other.tokenizer.fingerprint:
        found.append(
            f"the tokenizer was {frozen.tokenizer.model_id}, now {other.tokenizer.model_id}, with other ids"
        )
    old = {item.path: (item.num_bytes, item.sha256) for item in frozen.inputs}
    new = {item.path: (item.num_bytes, item.sha256) for item in other.inputs}
    for what, paths in (
        ("added", new.keys() - old.keys()),
        ("gone", old.keys() - new.keys()),
        ("changed", {path for path in old.keys() & new.keys() if old[path] != new[path]}),
    ):
        if paths:
            found.append(f"{len(paths)} input(s) {what}, such as {min(paths)}")
    if frozen.num_shards != other.num_shards:
        found.append(f"{frozen.num_shards} shards, now {other.num_shards}")
    if (frozen.shard_sha256 is None) != (other.shard_sha256 is None):
        found.append(f"--hash_inputs was {frozen.shard_sha256 is not None}")
    elif list(frozen.shard_sha256 or ()) != list(other.shard_sha256 or ()):
        found.append("the whole inputs' hashes differ")
    return found or ["the cuts between shards, the tokenizer's special tokens or its library differ"]
