"""plan.json: which bytes of which input files make shard N, with which options and which tokenizer.

A plan is written once and never edited. Its id is a hash of everything that decides the bytes of the shards:
plans with equal ids make equal data sets.

The file is JSON. Its first line, plus a closing brace, is the head: everything except three tables, which may
be long. The head has the offsets and hashes of the tables' blocks, so a task of a plan with 10^6 inputs reads
only the head and the blocks of its own shard.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shardprep import errors, files
from shardprep.files import Digest, FileStamp
from shardprep.format import commands, json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.inputs import InputKind, input_kind, known_input_kind
from shardprep.format.json_files import Count, Text
from shardprep.format.plan_options import PLAN_FIELDS, PlanOptions, option_differences
from shardprep.format.plan_tables import ROWS_PER_BLOCK, Rows, Table
from shardprep.format.spec import DatasetSpec, TokenizerSpec

_FORMAT = "shardprep-plan"
_HEAD_BYTES = 64 << 10  # of the first read
_MAX_HEAD_BYTES = 64 << 20  # that of 10^6 inputs and 10^5 shards has 200 KB


def _leads_outside(name: str) -> bool:
    """Return whether a path from a JSON file may leave its folder: it has an empty part, "." or ".."."""
    return not {"", ".", ".."}.isdisjoint(name.split("/"))


class InputFile(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An input file. ``mtime_ns`` is not in the plan's id: a copy or a touch changes nothing."""

    path: Text  # relative to the input folder, with /
    num_bytes: Count
    mtime_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    sha256: Digest  # of the first, middle and last 64 KiB
    encoding: Text = ""  # of its text, as planning saw or chose it; "": as --encoding says

    def __post_init__(self) -> None:
        if _leads_outside(self.path):  # links to files are allowed
            raise ValueError(f"path is {self.path!a}, expected the path of a file below the input folder")


class Cut(Struct, frozen=True, array_like=True, gc=False):
    """Where a shard begins, or where the last one ends, in the concatenation of the sorted inputs."""

    input_number: Count
    byte: Count  # of that input
    text_start: Count = 0  # byte of the decompressed text, in a compressed input
    sha256: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""  # of the shard's input, if hashed


class ByteRange(Struct, frozen=True, kw_only=True):
    """The part of an input that belongs to one shard."""

    input_number: int  # position of the file in the plan
    path: Path
    start: int  # byte
    end: int  # byte, exclusive
    kind: InputKind  # by the file's name
    text_start: int = 0  # of a compressed file: byte of the text at ``start``
    planned: InputFile | None = None  # the file at planning; None to accept any
    encoding: str = ""  # of its text; "": as --encoding says
    name: str = ""  # its path in the input folder; "": unknown


class PlannedShard(Struct, frozen=True, kw_only=True):
    """One shard of a plan, with all that is needed to make it."""

    shard_id: int
    ranges: list[ByteRange]  # of the inputs, in order
    num_bytes: int  # of the inputs
    max_documents: int | None  # its share of ``--limit``; None without a limit
    sha256: str | None  # of its input, with ``--hash_inputs``


@dataclass(frozen=True, kw_only=True)
class _Decisions:
    """Fields of both ``Plan`` and the head of plan.json."""

    plan_id: Digest
    options: PlanOptions
    max_bad_fraction: Annotated[float, Meta(ge=0, le=1)]
    tokenizer: TokenizerSpec
    tokenizer_files: dict[str, FileStamp]  # files in DATA/tokenizer, by name
    probe: list[str]  # texts on which engines may differ, see make/probe.py
    probe_sha256: Digest  # of the probe's ids from the reference engine
    fast_engine_is_equal: bool  # the fast engine gave equal ids for the probe and a sample


@dataclass(frozen=True, kw_only=True)
class Plan(_Decisions):
    """The content of plan.json."""

    input_dir: Path
    # In a plan that was read, these are ``Rows``, which read a block of the file when it is needed.
    inputs: Sequence[InputFile]
    cuts: Sequence[Cut]  # num_shards + 1, ascending
    left_out: Sequence[tuple[str, str]] = ()  # (reason, name), sorted: see InputListing

    @property
    def num_shards(self) -> int:
        return len(self.cuts) - 1

    @cached_property
    def spec(self) -> DatasetSpec:
        shared = ("record", "token_format", "seq_len", "append_eos", "validation_fraction")
        options = {name: getattr(self.options, name) for name in shared}
        tokenizer = self.tokenizer
        num_shards = self.num_shards
        return DatasetSpec(plan_id=self.plan_id, num_shards=num_shards, tokenizer=tokenizer, **options)

    @property
    def end_id(self) -> int | None:
        """Return the id of the EOS token if it is appended to each document."""
        options = self.options
        return self.tokenizer.eos_token_id if options.append_eos and not options.own_eos else None

    def at(self, input_dir: Path | None) -> Plan:
        """Return the plan with another input folder, for inputs that moved. None: the planned folder."""
        return self if input_dir is None else replace(self, input_dir=input_dir)

    def shard(self, shard_id: int) -> PlannedShard:
        """Return one shard. Raises NotFound if the plan does not have it."""
        if not 0 <= shard_id < self.num_shards:
            last = self.num_shards - 1
            expected = f"0 to {last}, as a job array --array=0-{last}"
            remedy = f"--array=0-{last}"
            raise errors.NotFound(found=f"no shard {shard_id}", expected=expected, remedy=remedy)
        begin = self.cuts[shard_id]
        end = self.cuts[shard_id + 1]
        _check_cuts([begin, end], self.inputs)
        ranges = list(ranges_between(self.input_dir, self.inputs, begin, end))
        share, rest = divmod(self.options.limit, self.num_shards)
        return PlannedShard(
            shard_id=shard_id,
            ranges=ranges,
            num_bytes=sum(byte_range.end - byte_range.start for byte_range in ranges),
            max_documents=share + (shard_id < rest) if self.options.limit else None,
            sha256=begin.sha256 or None,
        )

    def shard_bytes(self) -> list[int]:
        """Return the input bytes of every shard. Reads the whole plan."""
        cuts = list(self.cuts)
        _check_cuts(cuts, self.inputs, are_all=True)
        before = [0, *itertools.accumulate(item.num_bytes for item in self.inputs)]
        places = [before[cut.input_number] + cut.byte for cut in cuts]
        return [end - start for start, end in itertools.pairwise(places)]


def ranges_between(input_dir: Path, inputs: Sequence[InputFile], begin: Cut, end: Cut) -> Iterator[ByteRange]:
    """Yield the byte ranges of the inputs from one cut to another."""
    for number in range(begin.input_number, end.input_number + (end.byte > 0)):
        item = inputs[number]
        start = begin.byte if number == begin.input_number else 0
        stop = end.byte if number == end.input_number else item.num_bytes
        yield ByteRange(
            input_number=number,
            path=input_dir / item.path,
            start=start,
            end=stop,
            kind=input_kind(item.path),
            text_start=begin.text_start if start else 0,
            planned=item,
            encoding=item.encoding,
            name=item.path,
        )


def _check_cuts(cuts: Sequence[Cut], inputs: Sequence[InputFile], *, are_all: bool = False) -> None:
    """Check that cuts ascend and are inside the inputs. ``are_all``: that they also cover all inputs."""
    places = [(cut.input_number, cut.byte) for cut in cuts]
    end = (len(inputs), 0)
    are_valid = places == sorted(places) and places[-1] <= end
    if are_valid:
        are_valid = all(cut.byte <= inputs[cut.input_number].num_bytes for cut in cuts if cut.byte)
    cover_all = places[0] == (0, 0) and places[-1] == end
    if not are_valid or (are_all and not cover_all):
        which = "all of" if are_all else "places in"
        expected = f"{which} {len(inputs)} inputs, ascending; plan into a new folder"
        raise json_files.wrong_value(Path(names.PLAN_NAME), "cuts", f"{places[0]} to {places[-1]}", expected)


def is_one_file_a_shard(plan: Plan) -> bool:
    """Return whether shard N is the N-th input file."""
    one_each = [(number, 0) for number in range(len(plan.inputs) + 1)]
    return [(cut.input_number, cut.byte) for cut in plan.cuts] == one_each


@dataclass(frozen=True, kw_only=True)
class _Head(_Decisions):
    """The first line of plan.json."""

    input_dir: Text
    inputs_sha256: Digest  # of the columns that the plan's id depends on
    cuts_sha256: Digest
    tables: dict[str, Table]


# Table -> the type of its rows.
_TABLES: dict[str, Any] = {"inputs": list[InputFile], "cuts": list[Cut], "left_out": list[tuple[str, str]]}


def plan_id(plan: Plan) -> str:
    """Return the sha256 of all that decides the shards' bytes: not the folder or the mtimes of inputs."""
    return _id_of(plan, *_hashes_of_tables(plan))


def _hashes_of_tables(plan: Plan) -> tuple[str, str]:
    """Return the hashes of the columns of inputs and cuts that the plan's id depends on."""
    inputs = hashlib.sha256()
    cuts = hashlib.sha256()
    for item in plan.inputs:
        facts = (item.path, item.num_bytes, item.sha256)
        inputs.update(msgspec.json.encode((*facts, item.encoding) if item.encoding else facts))
    for cut in plan.cuts:
        cuts.update(msgspec.json.encode((cut.input_number, cut.byte, cut.sha256)))
    return inputs.hexdigest(), cuts.hexdigest()


def _id_of(plan: _Decisions, inputs_sha256: str, cuts_sha256: str) -> str:
    tokenizer = {**asdict(plan.tokenizer), "model_id": None}
    decisions = {"options": plan.options.identity(), "tokenizer": tokenizer, "probe": plan.probe_sha256}
    identity = {
        **decisions,
        "version": json_files.FORMAT_VERSION,
        "inputs": inputs_sha256,
        "cuts": cuts_sha256,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def publish_plan(plan: Plan, output_dir: DataFolder) -> Plan:
    """Write plan.json, or return the plan that the folder has. Raises Refused if that is another one."""
    tables: dict[str, Any] = {}
    body = bytearray()
    for name in _TABLES:
        rows = list(getattr(plan, name))
        body += b',"%s":[\n' % name.encode()
        offset = len(body)
        starts = range(0, len(rows), ROWS_PER_BLOCK)
        blocks = [msgspec.json.encode(rows[start : start + ROWS_PER_BLOCK])[1:-1] for start in starts]
        body += b",\n".join(blocks) + b"]\n"
        places = [(len(block), hashlib.sha256(block).hexdigest()) for block in blocks]
        tables[name] = {"num_rows": len(rows), "offset": offset, "blocks": places}
    inputs_sha256, cuts_sha256 = _hashes_of_tables(plan)
    decisions = {item.name: getattr(plan, item.name) for item in fields(_Decisions)}
    head = {
        **msgspec.to_builtins(decisions),
        "input_dir": str(plan.input_dir),
        "inputs_sha256": inputs_sha256,
        "cuts_sha256": cuts_sha256,
        "tables": tables,
    }
    first_line = msgspec.json.encode(json_files.with_content_hash(_FORMAT, head))[:-1]
    with output_dir.new_file(names.PLAN_NAME) as file:
        file.write(first_line + b"\n" + body + b"}\n")
        file.sync()
        if file.publish_first():
            output_dir.sync()
            return plan
    frozen = need_plan(output_dir)
    refuse_another_plan(frozen, plan, output_dir)
    return frozen


def refuse_another_plan(frozen: Plan, plan: Plan, output_dir: DataFolder) -> None:
    """Raise Refused, with the differences, if a folder's plan, ``frozen``, is not ``plan``."""
    if frozen.plan_id == plan.plan_id:
        return
    differences = option_differences(frozen.options, plan.options)
    if frozen.tokenizer.fingerprint != plan.tokenizer.fingerprint:
        now = plan.tokenizer.model_id
        differences.append(f"tokenizer {frozen.tokenizer.model_id} (you asked for {now}, with other ids)")
    old = {item.path: (item.num_bytes, item.sha256) for item in frozen.inputs}
    new = {item.path: (item.num_bytes, item.sha256) for item in plan.inputs}
    for what, paths in (
        ("added", new.keys() - old.keys()),
        ("gone", old.keys() - new.keys()),
        ("changed", {path for path in old.keys() & new.keys() if old[path] != new[path]}),
    ):
        if paths:
            differences.append(f"{len(paths)} input(s) {what}, such as {min(paths)}")
    if frozen.num_shards != plan.num_shards:
        differences.append(f"{frozen.num_shards} shards (you asked for {plan.num_shards})")
    elif [cut.sha256 for cut in frozen.cuts] != [cut.sha256 for cut in plan.cuts]:
        differences.append("the whole inputs' hashes differ, or one plan has none (--hash_inputs)")
    others = "the cuts between shards, the tokenizer's special tokens or its library differ"
    found = f"it has another plan: {'; '.join(differences) or others}"
    remedy = "--output_dir NEW"
    advice = f"a plan never changes: for more data or other options plan into a new folder ({remedy}), and "
    advice += "give the loader a list of folders"
    raise errors.Refused(path=output_dir, found=found, advice=advice, remedy=remedy)


def read_plan(output_dir: DataFolder) -> Plan | None:
    """Return the plan of a data set, or None if it has none. Tables are read when they are used."""
    try:
        return _open_plan(output_dir)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise errors.NotFound(path=output_dir, found="a file", expected="the folder of a data set") from None
    except errors.BrokenShard as error:
        error.advise("a plan never changes: restore the original file, or plan into a new folder")
        raise


def need_plan(output_dir: DataFolder) -> Plan:
    """Return the plan of a data set. Raises NotFound, with the command to plan, if there is none."""
    plan = read_plan(output_dir)
    if plan is None:
        found = f"no {names.PLAN_NAME}" if output_dir.exists() else "no such folder"
        raw = "RAW"
        made = os.path.abspath(output_dir)  # noqa: PTH100 - Path.resolve() would follow links
        listed = output_dir.names()
        # A folder with raw inputs was probably given as the output folder by mistake.
        if any(map(known_input_kind, listed)) and not any(name.startswith("shard-") for name in listed):
            raw = made
            made = f"{made}_shards"
        remedy = commands.plan(raw, made)
        raise errors.NotFound(path=output_dir, found=found, expected=names.PLAN_NAME, remedy=remedy)
    return plan


def read_input_names(folder: DataFolder) -> list[str]:
    """Return the paths of a data set's inputs in the input folder. An idx refers to them by position."""
    return [item.path for item in need_plan(folder).inputs]


def _open_plan(folder: DataFolder) -> Plan:
    path = folder.path_of(names.PLAN_NAME)
    with files.errors_named(path):
        file = folder.open(names.PLAN_NAME)  # closed when the plan and its tables are freed
        file.expect_scattered_reads()
        raw = file.read(0, min(file.num_bytes, _HEAD_BYTES))
        while b"\n" not in raw and len(raw) < min(file.num_bytes, _MAX_HEAD_BYTES):
            raw += file.read(len(raw), min(file.num_bytes - len(raw), len(raw)))
    line = bytes(raw.partition(b"\n")[0])
    data = json_files.checked_object(path, line if line.endswith(b"}") else line + b"}", _FORMAT)
    options = data.get("options")
    if isinstance(options, dict):
        for name in options.keys() - {item.name for item in PLAN_FIELDS}:
            value = options.pop(name)  # an unknown option that is off changes nothing
            if value not in (False, "", None):  # 0 equals False
                found = f"options.{name!a} is {value!r:.60}"
                advice = "install the shardprep that planned this, or plan again"
                known = "an option known here"
                raise errors.UnknownVersion(path=path, found=found, expected=known, advice=advice)
    try:
        with json_files.type_errors_named(path, data):
            head = msgspec.convert(data, _Head)
    except errors.UsageError as error:
        raise errors.BrokenShard(f"{path}: its options are invalid: {error}", path=path) from None
    found = _id_of(head, head.inputs_sha256, head.cuts_sha256)
    if head.plan_id != found:
        raise json_files.wrong_value(
            path, "plan_id", head.plan_id, f"{found}, computed from options and tables"
        )
    if head.tables.keys() != _TABLES.keys():
        raise json_files.wrong_value(path, "tables", [*head.tables], f"{', '.join(_TABLES)}")
    num_shards = head.tables["cuts"].num_rows - 1
    if not 1 <= num_shards <= names.MAX_SHARDS:
        raise json_files.wrong_value(path, "tables.cuts", num_shards, f"1 to {names.MAX_SHARDS} shards")
    for name in head.tokenizer_files:
        if _leads_outside(name) or "/" in name:
            raise json_files.wrong_value(
                path, "tokenizer_files", name, "names of files in the tokenizer's folder"
            )
    values = {item.name: getattr(head, item.name) for item in fields(_Decisions)}
    for name, kind in _TABLES.items():
        values[name] = Rows(file, len(line) + 1, head.tables[name], kind)
    return Plan(**values, input_dir=Path(head.input_dir))
