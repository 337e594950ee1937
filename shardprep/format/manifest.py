"""shard-N.json, the manifest: the content of one shard and how it was made; and which shards are done.

A manifest is written last. A shard is done if

1. its manifest is of this plan, and tar and idx have the sizes in it: ``check_shard`` checks this;
2. no ``verify`` found it wrong. ``done_manifests`` checks both, for shards that must be done; so does
   ``done_manifest``, which returns None if the shard has to be made.

Findings of verify are kept in DATA/findings.json until the shard is made again, or an equally thorough verify
finds it right. If a file cannot be read, a shard is neither done nor wrong: the error is raised. A data set
is verified if index.json has the counts of all shards, all are done, and none was found wrong.

This module does not import numpy, which takes 0.1 s to load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardprep import errors, files
from shardprep.errors import ShardprepError
from shardprep.files import Digest, FileStamp
from shardprep.format import commands, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import Count, DatasetSpec, Seconds, Text

_FORMAT = "shardprep-manifest"
_MAX_BYTES = 4 << 20  # about 3 KB, plus as much for each further source
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)
_Length = Annotated[str, Meta(pattern=r"\A[0-9]{1,19}\Z")]
LENGTH_BITS = 4  # binary digits of a length in TextCounts
FINDINGS_NAME = "findings.json"
# How thorough a verify was, in ascending order. "every" is a deep one that made all shards again.
Check = Literal["fast", "full", "deep", "every"]
_THOROUGHNESS: Mapping[Check, int] = {"fast": 0, "full": 1, "deep": 2, "every": 2}
_FINDINGS_FORMAT = "shardprep-findings"
_MAX_FINDINGS_BYTES = 64 << 20
_MAX_MESSAGE_CHARS = 400
_MAX_MESSAGES_CHARS = 8 << 20  # of all findings; each takes at most six bytes in the file
_PLAN_ID = re.compile(rb'"plan_id": ?"([0-9a-f]{64})"')
# Errors of a shard that is wrong. Others mean that it could not be read or compared.
SHARD_ERRORS = (errors.BrokenShard, errors.MissingShard, errors.OtherPlan, errors.UnknownVersion)
_NUM_THREADS = 8  # opening a file on Lustre waits for a server


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """Counts of one source: a first subfolder of the input, or a value of --source_field."""

    num_documents: Count
    num_tokens: Count  # without padding
    num_bytes: Count  # of the input files; with --source_field, of the documents' text
    num_quarantined: Count
    num_learnt_tokens: Count | None = None  # of conversations: tokens with labels; None of other records

    def to_dict(self) -> dict[str, int]:
        """Return the counts that there are."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sum_of_sources(shards: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """Add up the counts of several shards, sorted by source."""
    sums = defaultdict[str, Counter[str]](Counter)
    for sources in shards:
        for name, counts in sources.items():
            sums[name].update(counts.to_dict())
    return {name: SourceCounts(**sums[name]) for name in sorted(sums)}


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """Counts of the texts of one source as encoded (stripped, transformed, rendered), for reports."""

    num_bytes: Count  # as UTF-8
    num_chars: Count
    # Length in tokens -> [documents, tokens]. Lengths keep four binary digits: "22" is 22 and 23.
    lengths: dict[_Length, Annotated[list[Count], Meta(min_length=2, max_length=2)]]


def longest_of(low: int) -> int:
    """Return the largest length that TextCounts.lengths counts under ``low``, the smallest one."""
    return low + (1 << max(low.bit_length() - LENGTH_BITS, 0)) - 1


@dataclass(frozen=True, kw_only=True)
class ValidationCounts:
    """Counts of a shard's validation samples, which come last in its idx."""

    num_samples: Count
    num_documents: Count  # with tokens
    num_tokens: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts:
    """Counts of a shard. Equal inputs and options give equal counts."""

    num_samples: Annotated[int, Meta(ge=0, le=names.MAX_SAMPLES)]  # documents, or packed rows
    num_documents: Count
    num_tokens: Count  # without padding
    num_lines: Count  # lines or rows of the input, including empty ones
    num_empty_lines: Count  # left out because they are empty after str.strip
    num_pad_tokens: Count  # in rows that are not full
    num_documents_across_rows: Count  # documents that span several rows
    input_bytes: Count
    quarantined: dict[str, Count]  # reason -> documents left out
    # [b]: documents with 2**(b-1) <= tokens < 2**b; lengths are below 2**63
    length_histogram: Annotated[list[Count], Meta(max_length=64)]
    sources: dict[str, SourceCounts]  # sorted by name
    validation: ValidationCounts | None = None  # part of the counts above; None without --validation_fraction

    @property
    def held_out(self) -> ValidationCounts:
        """Return the counts of the validation samples, which may be 0."""
        return self.validation or ValidationCounts(num_samples=0, num_documents=0, num_tokens=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """How a shard was made: where, when and at what cost. Used for reports, never for decisions."""

    engine: Text = ""
    shardprep: Text = ""
    python: Text = ""
    host: Text = ""
    slurm: dict[str, Text] = field(default_factory=dict)
    began: Seconds = 0.0  # since 1970
    wall_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    num_cpus: Annotated[int, Meta(ge=1, le=2**31)] = 1
    max_rss_bytes: Count = 0
    texts: dict[str, TextCounts] | None = None  # by source
    transform_cpu_s: Seconds = 0.0  # part of cpu_s, in the function of --transform
    libraries: dict[str, Text] = field(default_factory=dict)  # versions of what that function imported
    render_cpu_s: Seconds = 0.0  # part of cpu_s, in the process that renders conversations

    @property
    def ended(self) -> float:
        return self.began + self.wall_s

    @property
    def job_id(self) -> str:
        """Return the id of the Slurm job or of its array; "" if no job made the shard."""
        return self.slurm.get("SLURM_ARRAY_JOB_ID") or self.slurm.get("SLURM_JOB_ID", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """shard-N.json."""

    spec: DatasetSpec
    shard_id: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: RunFacts  # may vary between equal shards
    digests: FileStamp | None = None  # of --digests
    unblanked_sha256: Digest | None = None  # sha256 of the tar before blanking, see documents.py

    def to_json(self) -> bytes:
        """Return the bytes on disk. Equal shards have equal bytes up to ``run``; each part has a hash."""
        content = asdict(self)
        sources = {name: counts.to_dict() for name, counts in self.counts.sources.items()}
        content["counts"]["sources"] = sources
        if self.unblanked_sha256 is None:
            del content["unblanked_sha256"]
        if not self.run.libraries:
            del content["run"]["libraries"]
        if not self.run.render_cpu_s:
            del content["run"]["render_cpu_s"]
        data = names.with_content_hash(_FORMAT, content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"


def read_manifest(folder: DataFolder, shard_id: int) -> Manifest:
    """Read a manifest. Raises MissingShard, BrokenShard, UnknownVersion or ReadWriteError."""
    name = names.manifest_name(shard_id)
    try:
        return names.read_file(folder, name, _FORMAT, Manifest, max_bytes=_MAX_BYTES)
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    except errors.BrokenShard as error:
        error.remedy = commands.shard(shard_id, folder)
        raise


def manifest_ids(folder: DataFolder) -> list[int]:
    """Return the ids of shards with a manifest in a folder, ascending."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, folder.names()) if match]


def check_shard(folder: DataFolder, shard_id: int, plan_id: str) -> Manifest:
    """Return the manifest of a shard if it is of this plan, and tar and idx have the sizes in it."""
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        found = f"shard {manifest.shard_id} of plan {manifest.spec.plan_id[:12]}"
        path = folder.path_of(names.manifest_name(shard_id))
        remedy = commands.shard_of_other_plan(shard_id, folder)
        expected = f"shard {shard_id} of plan {plan_id[:12]}"
        advice = "use a new folder for other inputs or options, or move this shard away"
        raise errors.OtherPlan(path=path, found=found, expected=expected, advice=advice, remedy=remedy)
    check_sizes(folder, manifest, ("tar", "idx"))
    return manifest


def shard_files(
    manifest: Manifest, which: Iterable[str] = tuple(names.STAMPED_NAMES)
) -> list[tuple[str, FileStamp]]:
    """Return the names of a shard's files with their stamps. ``which``: keys of these files."""
    stamps = ((names.STAMPED_NAMES[key](manifest.shard_id), getattr(manifest, key)) for key in which)
    return [(name, stamp) for name, stamp in stamps if stamp is not None]


def check_sizes(
    folder: DataFolder, manifest: Manifest, which: Iterable[str] = tuple(names.STAMPED_NAMES)
) -> None:
    """Compare the sizes of a shard's files with its manifest. ``which``: keys of these files."""
    for name, stamp in shard_files(manifest, which):
        num_bytes = folder.size_of(name)
        if num_bytes is None:
            raise commands.missing_file(folder, name, manifest.shard_id)
        if num_bytes != stamp.num_bytes:
            raise errors.BrokenShard(
                path=folder.path_of(name),
                found=f"{num_bytes} bytes",
                expected=stamp.num_bytes,
                remedy=commands.shard_without(name, manifest.shard_id, folder),
            )


def check_hashes(folder: DataFolder, manifest: Manifest, tar_sha256: str) -> None:
    """Compare the sha256 of a shard's files with its manifest. The hash of the tar is given."""
    for name, stamp in shard_files(manifest):
        try:
            sha256 = tar_sha256 if stamp is manifest.tar else folder.stamp_of(name).sha256
        except files.NOT_THERE:
            raise commands.missing_file(folder, name, manifest.shard_id) from None
        if sha256 != stamp.sha256:
            raise other_hash(folder, name, manifest.shard_id, sha256, stamp)


def other_hash(
    folder: DataFolder, name: str, shard_id: int, sha256: str, stamp: FileStamp
) -> errors.BrokenShard:
    """Build the error for a file of a shard with another sha256, ``found``, than in its manifest."""
    return errors.BrokenShard(
        path=folder.path_of(name),
        found=f"sha256 {sha256[:12]}",
        expected=stamp.sha256[:12],
        remedy=commands.shard_again(shard_id, folder),
    )


def read_side_file(folder: DataFolder, name: str, shard_id: int, stamp: FileStamp) -> bytes:
    """Return the content of a side file of a shard: ids, digests or quarantine.

    Raises MissingShard if it does not exist, and BrokenShard if its size or sha256 is not that of ``stamp``.
    """
    try:
        raw = folder.read(name, max_bytes=stamp.num_bytes)
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 != stamp.sha256:
        raise other_hash(folder, name, shard_id, sha256, stamp)
    return raw


def side_file_lines(folder: DataFolder, name: str, shard_id: int, stamp: FileStamp) -> Iterator[bytes]:
    """Yield the lines of a side file of a shard, which may be too large for memory.

    Raises as ``read_side_file``, but only after the last line: until then no line may be relied on.
    """
    digest = hashlib.sha256()
    try:
        for line in folder.lines(name):
            digest.update(line)
            yield line
    except files.NOT_THERE:
        raise commands.missing_file(folder, name, shard_id) from None
    if digest.hexdigest() != stamp.sha256:
        raise other_hash(folder, name, shard_id, digest.hexdigest(), stamp)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shard that ``verify`` found to be wrong."""

    shard: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    message: Text
    manifest_sha256: Digest  # of the manifest's bytes, which change when the shard is made again
    check: Check  # of the verify that found it; a less thorough one cannot clear it


@dataclass(frozen=True, kw_only=True)
class _FindingsFile:
    """The content of findings.json."""

    plan_id: Digest
    findings: list[Finding]


class _PlanId(msgspec.Struct):
    """The part of ``spec`` in index.json that ``is_verified`` compares."""

    plan_id: str


class _IndexCounts(msgspec.Struct):
    """The part of index.json that ``is_verified`` compares, see ``DatasetIndex``."""

    spec: _PlanId
    shards: list[tuple[int, int, int, int, int, int, str]]


@dataclass(frozen=True, kw_only=True)
class MadeShards:
    """The state of the shards in a folder, by shard id."""

    done: Mapping[int, Manifest]  # without ``run.texts``, which would take gigabytes for 10^5 shards
    wrong: Mapping[int, Finding]  # found wrong by verify
    other_plan: Sequence[int]  # of another plan
    broken: Mapping[int, str]  # what is wrong with manifest, tar or idx


def done_manifests(folder: DataFolder, plan_id: str, shard_ids: Iterable[int]) -> Iterator[Manifest]:
    """Yield the manifests of shards that must all be done. Raises OtherPlan, or as ``read_manifest``."""
    findings = read_findings(folder, plan_id)
    for shard_id in shard_ids:
        manifest = check_shard(folder, shard_id, plan_id)
        refuse_found(folder, findings, [shard_id])
        yield manifest


def done_manifest(
    folder: DataFolder, shard_id: int, plan_id: str, findings: Mapping[int, Finding] | None = None
) -> Manifest | None:
    """Return the manifest of a shard if it is done, or None if it has to be made.

    ``findings``: the result of ``read_findings``, if known. Raises OtherPlan, UnknownVersion or
    ReadWriteError, and BrokenShard if findings.json is damaged, because the shard may be done.
    """
    try:
        manifest = check_shard(folder, shard_id, plan_id)
    except (errors.MissingShard, errors.BrokenShard):
        return None
    findings = read_findings(folder, plan_id) if findings is None else findings
    return None if shard_id in findings else manifest


def refuse_found(folder: DataFolder, findings: Mapping[int, Finding], shard_ids: Iterable[int]) -> None:
    """Raise BrokenShard if verify found one of these shards wrong."""
    if wrong := sorted(findings.keys() & set(shard_ids)):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = findings[wrong[0]].message.partition("; run: ")[0]  # its remedy is for one shard
        found = f"shard {wrong[0]:05d}{more} is not done, because verify found it wrong: {what}"
        raise errors.BrokenShard(path=folder, found=found, remedy=commands.run(folder))


def refuse_other_plan(folder: DataFolder, plan_id: str) -> bool:
    """Raise OtherPlan if the plan in a folder does not have ``plan_id``, the id of its shards or index.

    Returns whether the folder has this plan. It has not if the file begins with no id of a plan.
    """
    # The id is in the first bytes of the file.
    match = _PLAN_ID.search(folder.read_beginning(names.PLAN_NAME, 400))
    if match and match[1].decode() != plan_id:
        path, found = folder.path_of(names.PLAN_NAME), f"plan {match[1].decode()[:12]}"
        expected, advice = f"{plan_id[:12]}, like its shards", "restore the plan, or move plan or shards away"
        raise errors.OtherPlan(path=path, found=found, expected=expected, advice=advice)
    return match is not None


def find_made_shards(
    folder: DataFolder,
    spec: DatasetSpec,
    *,
    known: MadeShards | None = None,
    see: Callable[[Manifest], None] | None = None,
) -> MadeShards:
    """Read every manifest: one listing, and a read and two stats per manifest.

    ``known``: an earlier result; manifests of shards that were done are not read again. ``see`` is called
    with each manifest of this plan whose files have the right sizes, even if verify found the shard wrong.
    Eight threads read, because a network file system has latency. 10,000 shards take about 0.6 s of CPU. A
    file that cannot be read raises ReadWriteError: it may be the manifest of a done shard.
    """
    present = [number for number in manifest_ids(folder) if number < spec.num_shards]
    if not present and not folder.exists():
        raise errors.NotFound(path=folder, found="no such folder", expected="the folder of a data set")
    findings = read_findings(folder, spec.plan_id)
    made = {number: known.done[number] for number in present if number in known.done} if known else {}
    broken: dict[int, str] = {}
    other_plan: list[int] = []
    to_read = [number for number in present if number not in made]

    def check(shard_id: int) -> Manifest | ShardprepError:
        """Return what ``check_shard`` returns, or its error."""
        try:
            return check_shard(folder, shard_id, spec.plan_id)
        except SHARD_ERRORS as error:
            return error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for shard_id, checked in zip(to_read, pool.map(check, to_read), strict=True):
            if isinstance(checked, errors.OtherPlan):
                other_plan.append(shard_id)
            elif isinstance(checked, ShardprepError):
                broken[shard_id] = str(checked)
            else:
                if see:
                    see(checked)
                made[shard_id] = replace(checked, spec=spec, run=replace(checked.run, texts=None))
    done = {shard_id: made[shard_id] for shard_id in sorted(made.keys() - findings.keys())}
    return MadeShards(done=done, wrong=findings, other_plan=other_plan, broken=broken)


def is_verified(folder: DataFolder, spec: DatasetSpec, made: MadeShards) -> bool:
    """Return whether all shards are done and index.json has their counts."""
    if len(made.done) != spec.num_shards or made.wrong:
        return False
    try:
        raw = folder.read(names.INDEX_NAME, max_bytes=_MAX_FINDINGS_BYTES)
        # Only these values become objects: the file of another user may have millions of others.
        index = msgspec.json.decode(raw, type=_IndexCounts)
    except (*files.NOT_THERE, errors.BrokenShard):
        return False
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not an index
        return False
    rows = [(num_tokens, tar_bytes) for _, _, num_tokens, tar_bytes, *_ in index.shards]
    counts = [(each.counts.num_tokens, each.tar.num_bytes) for each in made.done.values()]
    return index.spec.plan_id == spec.plan_id and rows == counts


def read_findings(folder: DataFolder, plan_id: str) -> dict[int, Finding]:
    """Return the findings of verify by shard id, except those of shards that were made again since."""
    try:
        file = names.read_file(
            folder, FINDINGS_NAME, _FINDINGS_FORMAT, _FindingsFile, max_bytes=_MAX_FINDINGS_BYTES
        )
    except files.NOT_THERE:
        return {}
    except errors.BrokenShard as error:
        # Nobody knows any more which shards were wrong, or how thorough the check was that found them.
        error.remedy = commands.on("verify", folder, "--deep", "all")
        error.advise("only a verify that makes every shard again can clear it")
        raise
    if file.plan_id != plan_id:
        return {}
    digests: dict[int, str] = {}  # of the manifests; each is read once, however often the file names it
    findings: dict[int, Finding] = {}
    for each in file.findings:
        if each.shard not in digests:
            digests[each.shard] = _manifest_sha256(folder, each.shard)
        if digests[each.shard] == each.manifest_sha256:
            findings[each.shard] = each
    return findings


def uncleared_findings(
    folder: DataFolder, plan_id: str, check: Check, not_read: Collection[int] = ()
) -> dict[int, Finding]:
    """Return the findings that this verify cannot clear: of a more thorough one, or of shards not read.

    Raises BrokenShard if findings.json is damaged, unless ``check`` is "every": a deep one of all shards.
    """
    try:
        findings = read_findings(folder, plan_id)
    except errors.BrokenShard:
        if check != "every" or not_read:
            raise
        return {}
    return {
        number: each
        for number, each in findings.items()
        if number in not_read or _THOROUGHNESS[each.check] > _THOROUGHNESS[check]
    }


def publish_findings(
    folder: DataFolder,
    plan_id: str,
    wrong: Mapping[int, ShardprepError],
    check: Check,
    not_read: Collection[int],
) -> None:
    """Add the shards that a verify found wrong to findings.json, and remove index.json."""
    if not wrong:
        return
    findings = uncleared_findings(folder, plan_id, check, not_read)
    max_chars = min(_MAX_MESSAGE_CHARS, _MAX_MESSAGES_CHARS // (len(wrong) + len(findings)))
    for shard_id in wrong.keys() - findings.keys():
        digest = _manifest_sha256(folder, shard_id)
        if digest:
            # The file cannot contain lone surrogates and NULs.
            message = str(wrong[shard_id])[:max_chars].encode(errors="replace").decode()
            message = message.replace("\0", "?")
            found_by: Check = "deep" if check == "every" else check
            findings[shard_id] = Finding(
                shard=shard_id, message=message, manifest_sha256=digest, check=found_by
            )
    if findings:
        content = {"plan_id": plan_id, "findings": [asdict(findings[number]) for number in sorted(findings)]}
        raw = msgspec.json.encode(names.with_content_hash(_FINDINGS_FORMAT, content)) + b"\n"
        folder.publish(FINDINGS_NAME, raw)
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.remove(names.INDEX_NAME)
    except OSError as error:
        path = folder.path_of(names.INDEX_NAME)
        found = f"some shards are wrong, and it cannot be removed: {error.strerror}"
        raise errors.ReadWriteError(
            path=path, found=found, expected="no such file", advice="remove it"
        ) from None


def _manifest_sha256(folder: DataFolder, shard_id: int) -> str:
    """Return the hash of a manifest's bytes, or "" if it cannot be read."""
    try:
        content = folder.read(names.manifest_name(shard_id), max_bytes=_MAX_BYTES)
    except (*files.NOT_THERE, errors.BrokenShard):
        return ""
    return hashlib.sha256(content).hexdigest()
