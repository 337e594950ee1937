"""plan.json: which bytes of which input files are shard N, for which options and which tokenizer.

A plan is written once and never edited. Its id is a hash of what decides the bytes of the shards: two plans
with one id make equal data sets. Reading one back checks the hash, the id and the boundaries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson

from preprocess.formats.inputs import ByteRange, InputFile
from preprocess.options import PLAN_FIELDS, PlanOptions, option_differences, option_types
from shardprep.errors import BrokenShard, NotFound, Refused, UnknownVersion, UsageError
from shardprep.files import FileStamp, PublishedFile, sync_folder
from shardprep.format.checked_json import MOST, Fields, read_checked, with_content_hash
from shardprep.format.dataset_spec import DatasetSpec, TokenizerSpec
from shardprep.format.names import (
    FORMAT_VERSION,
    MAX_PLAN_BYTES,
    MAX_SHARDS,
    PLAN_NAME,
    source_of_path,
)

Boundary = tuple[int, int]  # (input, byte): where a shard begins in the sorted inputs read as one
_FORMAT = "shardprep-plan"


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One shard of a plan: worked out once, and handed to whatever has to do with making it."""

    shard_id: int
    ranges: list[ByteRange]  # of the input, in order
    num_bytes: int  # of the input
    most_documents: int | None  # of a trial; None for no trial
    sha256: str | None  # of its input, where the plan has it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What plan.json holds. Frozen: a plan is never edited."""

    plan_id: str
    input_dir: Path
    options: PlanOptions
    max_bad_fraction: float
    tokenizer: TokenizerSpec
    tokenizer_files: dict[str, FileStamp]  # name -> of each file in DATA/tokenizer
    probe: list[str]  # texts that tell engines apart, see engines.py
    probe_sha256: str  # of their ids by the reference engine
    fast_engine_is_equal: bool  # the fast engine gave the reference's ids on probe and sample
    can_be_cut: bool  # a long document may be encoded in pieces, see long_documents.py
    inputs: list[InputFile]
    boundaries: list[Boundary]  # num_shards + 1, ascending; in plan.json the key is cuts
    shard_sha256: list[str] | None = None  # of each shard's input bytes: see planning.py
    text_starts: list[int] | None = None  # of each boundary: its byte of the text of a compressed file
    left_out: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # see input_files.InputListing
    fast_engine: str = ""  # its name; "" in a plan from before gigatoken, or where it is not equal

    @property
    def num_shards(self) -> int:
        return len(self.boundaries) - 1

    @cached_property
    def spec(self) -> DatasetSpec:
        """What its shards have in common."""
        options = self.options
        return DatasetSpec(
            plan_id=self.plan_id,
            num_shards=self.num_shards,
            record=options.record,
            token_format=options.token_format,
            seq_len=options.seq_len,
            append_eos=options.append_eos,
            tokenizer=self.tokenizer,
        )

    @property
    def end_id(self) -> int | None:
        """The token that ends each document: EOS where it is appended."""
        return self.tokenizer.eos_token_id if self.options.append_eos else None

    @property
    def allows_gigatoken(self) -> bool:
        """Whether it may encode. An older plan saw fastokens be equal: enough for known tokenizers."""
        return self.fast_engine_is_equal and (self.can_be_cut or self.fast_engine == "gigatoken")

    def at(self, input_dir: Path | None) -> Plan:
        """The same plan where its inputs lie in another folder by now; None: where they were."""
        return self if input_dir is None else dataclasses.replace(self, input_dir=input_dir)

    def shard(self, shard_id: int) -> PlannedShard:
        """What is to be known to make one shard. Raises NotFound for a shard past the plan's end."""
        ranges = self.ranges(shard_id)
        return PlannedShard(
            shard_id=shard_id,
            ranges=ranges,
            num_bytes=sum(part.end - part.start for part in ranges),
            most_documents=self.most_documents(shard_id),
            sha256=None if self.shard_sha256 is None else self.shard_sha256[shard_id],
        )

    def ranges(self, shard_id: int) -> list[ByteRange]:
        """The byte ranges of a shard, in order. Raises NotFound for a shard past the plan's end."""
        if not 0 <= shard_id < self.num_shards:
            raise NotFound(
                f"there is no shard {shard_id}: the plan has {self.num_shards}, 0 to {self.num_shards - 1}; "
                f"as a job array that is --array=0-{self.num_shards - 1}"
            )
        (first, start), (last, end) = self.boundaries[shard_id], self.boundaries[shard_id + 1]
        ranges = []
        for number in range(first, last + (end > 0)):
            item = self.inputs[number]
            begin = start if number == first else 0
            stop = end if number == last else item.num_bytes
            ranges.append(
                ByteRange(
                    input_number=number,
                    path=self.input_dir / item.path,
                    start=begin,
                    end=stop,
                    text_start=self._text_start(shard_id, begin),
                    planned=item,
                )
            )
        return ranges

    def _text_start(self, shard_id: int, begin: int) -> int:
        return self.text_starts[shard_id] if self.text_starts is not None and begin else 0

    def most_documents(self, shard_id: int) -> int | None:
        """How many documents of a trial a shard has at most: its share of ``--limit``; None for no trial."""
        if not self.options.limit:
            return None
        return self.options.limit // self.num_shards + (shard_id < self.options.limit % self.num_shards)

    def source_of(self, input_number: int) -> str:
        """The source of an input file: its first subfolder, or "." for one in the input folder itself."""
        return source_of_path(self.inputs[input_number].path)

    def shard_bytes(self) -> list[int]:
        """Input bytes of every shard."""
        prefix = [0, *itertools.accumulate(item.num_bytes for item in self.inputs)]
        places = [prefix[number] + byte for number, byte in self.boundaries]
        return [end - start for start, end in itertools.pairwise(places)]


def file_boundaries(inputs: list[InputFile]) -> list[Boundary]:
    """One input file is one shard: what the baseline did."""
    return [(number, 0) for number in range(len(inputs) + 1)]


def is_one_file_a_shard(plan: Plan) -> bool:
    """Whether shard N is the N-th input file."""
    return plan.boundaries == file_boundaries(plan.inputs)


def plan_id(plan: Plan) -> str:
    """sha256 of what decides the shards' bytes: not where the input lies, nor when it was touched."""
    identity = {
        "options": plan.options.identity(),
        "tokenizer": {**dataclasses.asdict(plan.tokenizer), "model_id": None},
        "probe": plan.probe_sha256,
        "inputs": [(item.path, item.num_bytes, item.sha256) for item in plan.inputs],
        "cuts": plan.boundaries,
        "version": FORMAT_VERSION,
    }
    if plan.shard_sha256 is not None:
        identity["shard_sha256"] = plan.shard_sha256
    return hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()


def plan_json(plan: Plan) -> bytes:
    """The bytes of plan.json. Raises UsageError where it would be too large to be read."""
    content = {
        "cuts" if field.name == "boundaries" else field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)  # not asdict, which copies each of 99,999 cuts: 0.7 s
    }
    content |= {
        "input_dir": str(plan.input_dir),
        "options": plan.options.to_json(),
        "tokenizer": dataclasses.asdict(plan.tokenizer),
        "tokenizer_files": {name: dataclasses.asdict(stamp) for name, stamp in plan.tokenizer_files.items()},
        "inputs": [
            {
                "path": item.path,
                "num_bytes": item.num_bytes,
                "mtime_ns": item.mtime_ns,
                "sampled_sha256": item.sha256,
            }
            for item in plan.inputs
        ],
    }
    for name in ("left_out", "fast_engine"):
        if not content[name]:
            del content[name]
    raw = orjson.dumps(with_content_hash(_FORMAT, content), option=orjson.OPT_APPEND_NEWLINE)
    if len(raw) > MAX_PLAN_BYTES:
        num_left_out = sum(map(len, plan.left_out.values()))
        raise UsageError(
            f"{PLAN_NAME} of {len(plan.inputs)} inputs and {num_left_out} names left out would have "
            f"{len(raw)} bytes, the limit is {MAX_PLAN_BYTES}; join small files, move away what is no input, "
            "or make several data sets for a loader of several folders"
        )
    return raw


def publish_plan(plan: Plan, output_dir: Path) -> Plan:
    """Freeze a plan as plan.json; where another is there already, compare. Returns the frozen one.

    Raises Refused, naming what differs, where the folder has another plan.
    """
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
            "options plan into a new folder, and give the loader a list of folders"
        )
    return frozen


def read_plan(output_dir: Path) -> Plan | None:
    """The plan of a data set, or None where there is none yet.

    Its hash is compared with its content, and its id with the one that the content gives: takes 0.1 s of CPU
    for 10^4 inputs. Raises NotFound, BrokenShard, UnknownVersion, ReadWriteError.
    """
    path = output_dir / PLAN_NAME
    try:
        return _plan_of(read_checked(path, _FORMAT, max_bytes=MAX_PLAN_BYTES))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise NotFound(f"{output_dir} is no folder") from None
    except BrokenShard as error:
        raise BrokenShard(
            f"{error}; a plan is frozen: bring the file back as it was, or plan into a new folder"
        ) from None


def _plan_of(fields: Fields) -> Plan:
    """Raises BrokenShard."""
    plan = Plan(
        plan_id=fields.digest("plan_id"),
        input_dir=Path(fields.text("input_dir")),
        options=options_of_json(fields.fields("options")),
        max_bad_fraction=fields.share("max_bad_fraction"),
        tokenizer=TokenizerSpec.from_json(fields.fields("tokenizer")),
        tokenizer_files=fields.each("tokenizer_files", Fields.stamp),
        probe=fields.texts("probe"),
        probe_sha256=fields.digest("probe_sha256"),
        fast_engine_is_equal=fields.flag("fast_engine_is_equal"),
        can_be_cut=fields.flag("can_be_cut"),
        inputs=[_input_of(item) for item in fields.objects("inputs")],
        boundaries=fields.pairs("cuts", "an input and a byte of it"),
        shard_sha256=fields.or_none("shard_sha256", fields.digests),
        text_starts=fields.or_none("text_starts", fields.wholes),
        left_out=fields.each("left_out", Fields.texts) if fields.has("left_out") else {},
        fast_engine=fields.text("fast_engine") if fields.has("fast_engine") else "",
    )
    fields.end()
    _check_boundaries(fields, plan)
    expected = plan_id(plan)
    if plan.plan_id != expected:
        raise fields.wrong(
            "plan_id", plan.plan_id[:12], f"{expected[:12]}, which options, tokenizer, inputs and cuts give"
        )
    return plan


def options_of_json(fields: Fields) -> PlanOptions:
    """The options, settled and checked as those of a command line are.

    An option that is absent has its default. One that nobody knows here is left alone where it says no, and
    refused where it says anything else.
    """
    kinds = option_types(PlanOptions)
    values = {
        item.name: fields.value_of_type(item.name, kinds[item.name])
        for item in PLAN_FIELDS
        if fields.has(item.name)
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


def _input_of(fields: Fields) -> InputFile:
    item = InputFile(
        path=fields.text("path"),
        num_bytes=fields.whole("num_bytes"),
        mtime_ns=fields.whole("mtime_ns", -MOST, MOST),
        sha256=fields.digest("sampled_sha256"),
    )
    fields.end()
    return item


def _check_boundaries(fields: Fields, plan: Plan) -> None:
    """That the boundaries divide the inputs, in order and without a gap. Raises BrokenShard."""
    cuts, ends = plan.boundaries, [*(item.num_bytes for item in plan.inputs), 0]
    if not 1 <= plan.num_shards <= MAX_SHARDS:
        raise fields.wrong("cuts", f"{plan.num_shards} shards", f"1 to {MAX_SHARDS}")
    inside = all(0 <= source < len(ends) and 0 <= byte <= ends[source] for source, byte in cuts)
    if not inside or cuts[0] != (0, 0) or cuts[-1] != (len(plan.inputs), 0) or cuts != sorted(cuts):
        raise fields.wrong(
            "cuts", f"{cuts[0]} to {cuts[-1]}", f"places in {len(plan.inputs)} inputs, ascending"
        )
    if plan.text_starts is not None and len(plan.text_starts) != len(cuts):
        raise fields.wrong(
            "text_starts", f"{len(plan.text_starts)} numbers", f"one for each of {len(cuts)} cuts"
        )
    if plan.shard_sha256 is not None and len(plan.shard_sha256) != plan.num_shards:
        raise fields.wrong(
            "shard_sha256", f"{len(plan.shard_sha256)} hashes", f"one for each of {plan.num_shards}"
        )


def need_plan(output_dir: Path) -> Plan:
    """The plan of a data set. Raises NotFound, with the command that makes one."""
    plan = read_plan(output_dir)
    if plan is None:
        raise NotFound(
            f"{output_dir} has no {PLAN_NAME}; run: shardprep plan --input_dir RAW "
            f"--output_dir {output_dir} --model_id MODEL --num_shards N"
        )
    return plan


def plan_differences(frozen: Plan, other: Plan) -> list[str]:
    """What makes two plans differ, in words."""
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
    elif frozen.shard_sha256 != other.shard_sha256:
        found.append("the whole inputs' hashes differ")
    return found or ["the cuts between shards, the tokenizer's special tokens or its library differ"]
