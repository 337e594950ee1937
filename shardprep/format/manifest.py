"""shard-N.json, the manifest: what one shard holds, and how it was made; and which shards are done.

A manifest is written last. A shard is done if

1. its manifest is of this plan, and tar and idx have the sizes that it says: ``check_shard``;
2. no ``verify`` found it wrong: ``done_manifests`` asks both, and ``done_manifest`` gives None in place of an
   error where the shard is to be made.

What verify found stands in DATA/findings.json until the shard is made anew, or a verify as thorough finds it
right. A file that cannot be read makes a shard neither done nor wrong: the error goes to the caller. A data
set is verified if index.json has the numbers of all shards, all are done, and nothing was found wrong.

Nothing here needs numpy, which takes 0.1 s to load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardprep import errors, files
from shardprep.errors import ShardprepError
from shardprep.files import Digest, FileStamp
from shardprep.format import names
from shardprep.format.names import Count, DatasetSpec, Seconds, Text

_FORMAT = "shardprep-manifest"
_MAX_BYTES = 4 << 20  # one has about 3 KB, and as much for each source beyond the first
_MANIFEST_NAME = re.compile(r"shard-(\d{5})\.json", re.ASCII)
_Length = Annotated[str, Meta(pattern=r"\A[0-9]{1,19}\Z")]
LENGTH_BITS = 4  # that a length keeps in TextCounts
FINDINGS_NAME = "findings.json"
Check = Literal["fast", "full", "deep"]  # what verify compared, from the least to the most
_RANKS: Mapping[Check, int] = {"fast": 0, "full": 1, "deep": 2}
_FINDINGS_FORMAT = "shardprep-findings"
_MAX_FINDINGS_BYTES = 256 << 20
_MOST_MESSAGE_CHARS = 400  # so that a finding for each of MAX_SHARDS can be read again
_PLAN_ID = re.compile(rb'"plan_id": ?"([0-9a-f]{64})"')
# Errors of a shard that was read, and not of reading, an input or a library.
OF_SHARD = (errors.BrokenShard, errors.MissingShard, errors.OtherPlan, errors.UnknownVersion)
_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What one source gave: the first subfolder of the input, or what --source_field names."""

    num_documents: Count
    num_tokens: Count  # padding excluded
    num_bytes: Count  # of the input files; with --source_field, of the documents' text
    num_quarantined: Count


def sum_of_sources(shards: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """Add up the counts of several shards, in the order of the sources' names."""
    found = defaultdict[str, Counter[str]](Counter)
    for sources in shards:
        for name, counts in sources.items():
            found[name].update(vars(counts))
    return {name: SourceCounts(**found[name]) for name in sorted(found)}


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """The texts of one source, as they were encoded: stripped, changed, rendered; for reports alone."""

    num_bytes: Count  # as UTF-8
    num_chars: Count
    # Documents and tokens by length in tokens, rounded down to four binary digits: "22" is 22 and 23.
    lengths: dict[_Length, Annotated[list[Count], Meta(min_length=2, max_length=2)]]


def longest_of(low: int) -> int:
    """Return the largest number of tokens that is counted at ``low`` in the lengths of TextCounts."""
    return low + (1 << max(low.bit_length() - LENGTH_BITS, 0)) - 1


@dataclass(frozen=True, kw_only=True)
class ValidationCounts:
    """What of a shard is for validation by the plan's fraction: the last samples of its idx."""

    num_samples: Count
    num_documents: Count  # that have tokens
    num_tokens: Count


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """What a shard holds. Equal for equal inputs and options, whatever made it."""

    num_samples: Annotated[int, Meta(ge=0, le=names.MAX_SAMPLES)]  # documents, or packed rows
    num_documents: Count
    num_tokens: Count  # padding excluded
    num_lines: Count  # lines or rows of the input, the empty ones included
    num_empty_lines: Count  # left out because nothing is left of them after str.strip
    num_pad_tokens: Count  # in the rows that are not full
    num_documents_across_rows: Count  # those that do not lie whole in one row
    input_bytes: Count
    quarantined: dict[str, Count]  # documents left out, by reason
    # [b]: documents of 2**(b-1) <= tokens < 2**b; lengths are below 2**63
    length_histogram: Annotated[list[Count], Meta(max_length=64)]
    sources: dict[str, SourceCounts]  # in the order of their names
    validation: ValidationCounts | None = None  # of all the above; None without a plan's fraction

    @property
    def held_out(self) -> ValidationCounts:
        """Return what is for validation, nothing without a plan's fraction."""
        return self.validation or ValidationCounts(num_samples=0, num_documents=0, num_tokens=0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How a shard was made: where, when, and at what price. For reports, never for decisions."""

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
    transform_cpu_s: Seconds = 0.0  # of cpu_s, in the function of --transform

    @property
    def ended(self) -> float:
        return self.began + self.wall_s

    @property
    def job_id(self) -> str:
        """Return Slurm's, of the array where it was one; empty where no job made it."""
        return self.slurm.get("SLURM_ARRAY_JOB_ID") or self.slurm.get("SLURM_JOB_ID", "")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """shard-N.json."""

    spec: DatasetSpec
    shard_id: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    counts: ShardCounts
    tar: FileStamp
    idx: FileStamp
    quarantine: FileStamp | None
    ids: FileStamp | None  # of --id_field
    run: RunFacts  # what may vary between equal shards
    digests: FileStamp | None = None  # of --digests
    made_from: Digest | None = None  # sha256 of the tar before documents of it were blanked: see documents.py

    def to_json(self) -> bytes:
        """Return the bytes on disk. The part before ``run`` is equal for equal shards. Each has its hash."""
        content = asdict(self)
        if self.made_from is None:
            del content["made_from"]
        data = names.with_content_hash(_FORMAT, content, run=content.pop("run"))
        return json.dumps(data, ensure_ascii=False, indent=1).encode() + b"\n"


def read_manifest(folder: Path, shard_id: int) -> Manifest:
    path = names.manifest_path(folder, shard_id)
    try:
        return names.read_file(path, _FORMAT, Manifest, max_bytes=_MAX_BYTES)
    except files.NOT_THERE:
        raise names.missing_file(path, shard_id, folder) from None
    except errors.BrokenShard as error:
        error.remedy = names.rerun_command(shard_id, folder)
        raise


def manifest_ids(folder: Path) -> list[int]:
    """Return the shards that have a manifest in a folder, ascending."""
    return [int(match[1]) for match in map(_MANIFEST_NAME.fullmatch, files.names_in(folder)) if match]


def check_shard(folder: Path, shard_id: int, plan_id: str) -> Manifest:
    """Return the manifest of a shard, if it is of this plan, and tar and idx have the sizes that it says."""
    manifest = read_manifest(folder, shard_id)
    if manifest.spec.plan_id != plan_id or manifest.shard_id != shard_id:
        found = f"shard {manifest.shard_id} of plan {manifest.spec.plan_id[:12]}"
        path, remedy = names.manifest_path(folder, shard_id), names.remake_command(shard_id, folder)
        expected = f"shard {shard_id} of plan {plan_id[:12]}. Use a new folder for other inputs or options. "
        expected += f"If this manifest is in the wrong folder, run: {remedy}"
        raise errors.OtherPlan(path=path, found=found, expected=expected, remedy=remedy)
    check_sizes(folder, manifest, ("tar", "idx"))
    return manifest


def shard_files(
    folder: Path, manifest: Manifest, which: Iterable[str] = tuple(names.VOUCHED_PATHS)
) -> list[tuple[Path, FileStamp]]:
    """Return the files that a manifest vouches for, with what it says of each. ``which``: only these."""
    paths, shard_id = names.VOUCHED_PATHS, manifest.shard_id
    stamps = ((paths[name](folder, shard_id), getattr(manifest, name)) for name in which)
    return [(path, stamp) for path, stamp in stamps if stamp is not None]


def check_sizes(folder: Path, manifest: Manifest, which: Iterable[str] = tuple(names.VOUCHED_PATHS)) -> None:
    """Compare the sizes of files that a manifest vouches for, by their names there."""
    for path, stamp in shard_files(folder, manifest, which):
        found = files.size_of_file(path)
        if found is None:
            raise names.missing_file(path, manifest.shard_id, folder)
        if found != stamp.num_bytes:
            remedy = names.rerun_command(manifest.shard_id, folder)
            expected = stamp.num_bytes
            raise errors.BrokenShard(path=path, found=f"{found} bytes", expected=expected, remedy=remedy)


def check_hashes(folder: Path, manifest: Manifest, tar_sha256: str) -> None:
    """Read a shard's files whole, but for the tar, and compare their sha256, and that of the tar."""
    for path, stamp in shard_files(folder, manifest):
        try:
            found = tar_sha256 if stamp is manifest.tar else files.stamp_file(path).sha256
        except files.NOT_THERE:
            raise names.missing_file(path, manifest.shard_id, folder) from None
        if found != stamp.sha256:
            remedy, found = names.remake_command(manifest.shard_id, folder), f"sha256 {found[:12]}"
            raise errors.BrokenShard(path=path, found=found, expected=stamp.sha256[:12], remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shard that ``verify`` found wrong."""

    shard: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    message: Text
    manifest_sha256: Digest  # of the manifest's bytes: a shard that was made anew has another
    check: Check  # that found it; a lesser one cannot tell that it is right again


@dataclass(frozen=True, kw_only=True)
class _FindingsFile:
    """The values of findings.json."""

    plan_id: Digest
    findings: list[Finding]


@dataclass(frozen=True, kw_only=True)
class MadeShards:
    """What the manifests in a folder say."""

    done: Mapping[int, Manifest]  # without the texts of ``run``, which would be gigabytes of 10^5 shards
    wrong: Mapping[int, Finding]  # shards that verify found wrong
    other_plan: Sequence[int]  # shards of another plan
    broken: Mapping[int, str]  # shard -> what its manifest, tar or idx lacks


def done_manifests(folder: Path, plan_id: str, shard_ids: Iterable[int]) -> Iterator[Manifest]:
    """Yield the manifests of shards that must be done.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do; ReadWriteError.
    """
    findings = read_findings(folder, plan_id)
    for shard_id in shard_ids:
        manifest = check_shard(folder, shard_id, plan_id)
        refuse_found(folder, findings, [shard_id])
        yield manifest


def done_manifest(
    folder: Path, shard_id: int, plan_id: str, findings: Mapping[int, Finding] | None = None
) -> Manifest | None:
    """Return the manifest of a shard that is done, or None for one that is to be made.

    ``findings``: what ``read_findings`` gave, if it was asked already. Raises OtherPlan, UnknownVersion or
    ReadWriteError, and BrokenShard if findings.json is damaged: the shard may be done.
    """
    try:
        manifest = check_shard(folder, shard_id, plan_id)
    except (errors.MissingShard, errors.BrokenShard):
        return None
    findings = read_findings(folder, plan_id) if findings is None else findings
    return None if shard_id in findings else manifest


def refuse_found(folder: Path, findings: Mapping[int, Finding], shard_ids: Iterable[int]) -> None:
    """Raise BrokenShard if verify found one of these shards wrong."""
    if wrong := sorted(findings.keys() & set(shard_ids)):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = findings[wrong[0]].message.partition("; run: ")[0]  # its own remedy is of one shard
        found = f"shard {wrong[0]:05d}{more} is not done, because verify found it wrong: {what}"
        raise errors.BrokenShard(path=folder, found=found, remedy=f"shardprep run {errors.quoted(folder)}")


def refuse_other_plan(folder: Path, plan_id: str) -> None:
    """Raise OtherPlan if a folder has a plan, and manifests or an index of this id are not of it."""
    # Its first bytes hold its id.
    match = _PLAN_ID.search(files.read_beginning(folder / names.PLAN_NAME, 400))
    if match and (found := match[1].decode()) != plan_id:
        expected = f"{plan_id[:12]}, as its shards: bring the plan back, or move one of both away"
        raise errors.OtherPlan(path=folder / names.PLAN_NAME, found=f"plan {found[:12]}", expected=expected)


def find_made_shards(
    folder: Path,
    spec: DatasetSpec,
    *,
    known: MadeShards | None = None,
    see: Callable[[Manifest], None] | None = None,
) -> MadeShards:
    """Look at every manifest: one listing, and a read and two stats per manifest.

    ``known``: what was found a moment ago; the manifests of what was done then are not read again. ``see``
    gets the manifest of each shard of the plan whose files have its sizes, whatever findings say of it. Eight
    are read at a time, as a file system over a network lets a reader wait. 10,000 shards take about 0.6 s of
    CPU. What cannot be read is an error: it may be the manifest of a done shard.
    """
    present = [number for number in manifest_ids(folder) if number < spec.num_shards]
    if not present and not files.is_folder(folder):
        raise errors.NotFound(path=folder, found="no such folder", expected="the folder of a data set")
    findings = read_findings(folder, spec.plan_id)
    made = {number: known.done[number] for number in present if number in known.done} if known else {}
    broken: dict[int, str] = {}
    other_plan: list[int] = []
    to_read = [number for number in present if number not in made]

    def look(shard_id: int) -> Manifest | ShardprepError:
        """Return a manifest of this plan whose files have its sizes, or what is wrong."""
        try:
            return check_shard(folder, shard_id, spec.plan_id)
        except OF_SHARD as error:
            return error

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for shard_id, found in zip(to_read, pool.map(look, to_read), strict=True):
            if isinstance(found, errors.OtherPlan):
                other_plan.append(shard_id)
            elif isinstance(found, ShardprepError):
                broken[shard_id] = str(found)
            else:
                if see:
                    see(found)
                made[shard_id] = replace(found, spec=spec, run=replace(found.run, texts=None))
    done = {shard_id: made[shard_id] for shard_id in sorted(made.keys() - findings.keys())}
    return MadeShards(done=done, wrong=findings, other_plan=other_plan, broken=broken)


def is_verified(folder: Path, spec: DatasetSpec, made: MadeShards) -> bool:
    """Return whether all shards are done and index.json has their numbers."""
    if len(made.done) != spec.num_shards or made.wrong:
        return False
    try:
        raw = files.read_regular(folder / names.INDEX_NAME, max_bytes=_MAX_FINDINGS_BYTES)
        data = msgspec.json.decode(raw)
        rows = [(row[2], row[3]) for row in data["shards"]]
        plan_id = data["spec"]["plan_id"]
    except (*files.NOT_THERE, errors.BrokenShard, ValueError, RecursionError, LookupError, TypeError):
        return False
    numbers = [(each.counts.num_tokens, each.tar.num_bytes) for each in made.done.values()]
    return bool(plan_id == spec.plan_id) and rows == numbers


def read_findings(folder: Path, plan_id: str) -> dict[int, Finding]:
    """Return the shards that a verify found wrong and that were not made anew since, by number."""
    try:
        path = folder / FINDINGS_NAME
        file = names.read_file(path, _FINDINGS_FORMAT, _FindingsFile, max_bytes=_MAX_FINDINGS_BYTES)
    except files.NOT_THERE:
        return {}
    except errors.BrokenShard as error:
        # Which shards were found wrong is not known.
        error.remedy = f"shardprep verify {errors.quoted(folder)}"
        raise
    if file.plan_id != plan_id:
        return {}
    # One more open for each finding.
    return {
        each.shard: each
        for each in file.findings
        if _manifest_sha256(folder, each.shard) == each.manifest_sha256
    }


def standing_findings(
    folder: Path, plan_id: str, check: Check, not_read: Collection[int] = ()
) -> dict[int, Finding]:
    """Return what stands after a verify of this thoroughness: what a more thorough one found.

    Findings of the shards that it could not read stand, too.
    """
    try:
        found = read_findings(folder, plan_id)
    except errors.BrokenShard:
        if check == "fast":
            raise
        return {}
    return {
        number: each
        for number, each in found.items()
        if number in not_read or _RANKS[each.check] > _RANKS[check]
    }


def publish_findings(
    folder: Path, plan_id: str, wrong: Mapping[int, ShardprepError], check: Check, not_read: Collection[int]
) -> None:
    """Write what a verify found wrong of shards, and remove index.json, which says otherwise."""
    if not wrong:
        return
    findings = standing_findings(folder, plan_id, check, not_read)
    for shard_id in wrong.keys() - findings.keys():
        if digest := _manifest_sha256(folder, shard_id):
            # Without half surrogates and NULs, which the file cannot hold.
            said = str(wrong[shard_id])[:_MOST_MESSAGE_CHARS].encode(errors="replace").decode()
            findings[shard_id] = Finding(
                shard=shard_id,
                message=said.replace("\0", "?"),
                manifest_sha256=digest,
                check=check,
            )
    if findings:
        content = {"plan_id": plan_id, "findings": [asdict(findings[number]) for number in sorted(findings)]}
        raw = msgspec.json.encode(names.with_content_hash(_FINDINGS_FORMAT, content)) + b"\n"
        files.publish_bytes(folder / FINDINGS_NAME, raw)
    path = folder / names.INDEX_NAME
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        found = f"an index of wrong shards that cannot be removed: {error.strerror}"
        raise errors.ReadWriteError(path=path, found=found, expected="none: remove it") from None


def _manifest_sha256(folder: Path, shard_id: int) -> str:
    """Return the hash of a manifest's bytes, "" where there is none."""
    try:
        path = names.manifest_path(folder, shard_id)
        content = files.read_regular(path, max_bytes=_MAX_BYTES)
    except (*files.NOT_THERE, errors.BrokenShard):
        return ""
    return hashlib.sha256(content).hexdigest()
