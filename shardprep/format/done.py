"""Say which shards of a data set are done, and what verify found wrong in them.

============  ==============================================================  ================================
a shard is    if                                                              asked by
============  ==============================================================  ================================
listed        a file has the name of its manifest; no file is opened          ``manifest_ids``
done          its manifest belongs to the plan, its tar and idx are there     ``done_manifest`` returns None,
              with the sizes in it, and no ``verify`` found it wrong          ``done_manifests`` raises;
                                                                              ``find_made_shards`` sorts all
verified      index.json has the counts of all shards, and all are done       ``is_verified``, of a data set
============  ==============================================================  ================================

Nothing here removes a file but ``publish_findings``; see ``preprocess/make/attempt.py`` for temporary files.
Findings of verify are kept in DATA/findings.json until the shard is made again, or an equally thorough verify
finds it right. If a file cannot be read, a shard is neither done nor wrong: the error is raised.

This module does not import numpy, which takes 0.1 s to load.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from shardprep import errors, files
from shardprep.errors import ShardprepError
from shardprep.files import Digest
from shardprep.format import commands, json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.json_files import Text
from shardprep.format.manifest import MAX_MANIFEST_BYTES, SHARD_ERRORS, Manifest, check_shard, manifest_ids
from shardprep.format.spec import DatasetSpec

FINDINGS_NAME = "findings.json"


# How thorough a verify was, in ascending order. "every" is a deep one that made all shards again.
Check = Literal["fast", "full", "deep", "every"]


_THOROUGHNESS: Mapping[Check, int] = {"fast": 0, "full": 1, "deep": 2, "every": 2}


_FINDINGS_FORMAT = "shardprep-findings"


_MAX_FINDINGS_BYTES = 64 << 20


_MAX_MESSAGE_CHARS = 400


_MAX_MESSAGES_CHARS = 8 << 20  # of all findings; each takes at most six bytes in the file


_PLAN_ID = re.compile(rb'"plan_id": ?"([0-9a-f]{64})"')


_NUM_THREADS = 8  # opening a file on Lustre waits for a server


class Finding(Struct, frozen=True, kw_only=True):
    """A shard that ``verify`` found to be wrong."""

    shard: Annotated[int, Meta(ge=0, le=names.MAX_SHARDS - 1)]
    message: Text
    # Of the manifest's bytes. They change when the shard is made again, if only by ``run.began``: its time.
    manifest_sha256: Digest
    check: Check  # of the verify that found it; a less thorough one cannot clear it


class _FindingsFile(Struct, frozen=True, kw_only=True):
    """The content of findings.json."""

    plan_id: Digest
    findings: list[Finding]


class _PlanId(Struct):
    """The part of ``spec`` in index.json that ``is_verified`` compares."""

    plan_id: str


class _IndexCounts(Struct):
    """The part of index.json that ``is_verified`` compares, see ``DatasetIndex``."""

    spec: _PlanId
    shards: list[tuple[int, int, int, int, int, int, str]]
    blanked: str = ""


class MadeShards(Struct, frozen=True, kw_only=True):
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
    wrong = sorted(findings.keys() & set(shard_ids))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = findings[wrong[0]].message.partition("; run: ")[0]  # its remedy is for one shard
        found = f"shard {wrong[0]:05d}{more} is not done, because verify found it wrong: {what}"
        raise errors.BrokenShard(path=folder, found=found, remedy=commands.run(folder))


def refuse_other_plan(folder: DataFolder, plan_id: str) -> bool:
    """Raise OtherPlan if the plan in a folder does not have ``plan_id``, the id of its shards or index.

    Returns whether the folder has this plan. It has not if the file begins with no id of a plan.
    """
    found_id = plan_id_in(folder, names.PLAN_NAME)
    if found_id and found_id != plan_id:
        path = folder.path_of(names.PLAN_NAME)
        found = f"plan {found_id[:12]}"
        expected = f"{plan_id[:12]}, like its shards"
        advice = "restore the plan, or move plan or shards away"
        raise errors.OtherPlan(path=path, found=found, expected=expected, advice=advice)
    return bool(found_id)


def plan_id_in(folder: DataFolder, name: str) -> str:
    """Return the id of the plan in the first bytes of plan.json or index.json, or ""."""
    match = _PLAN_ID.search(folder.read_beginning(name, 400))
    return match[1].decode() if match else ""


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
        raw = folder.read(names.INDEX_NAME, max_bytes=names.MAX_INDEX_BYTES)
        # Only these values become objects: the file of another user may have millions of others.
        index = msgspec.json.decode(raw, type=_IndexCounts)
    except (*files.NOT_THERE, errors.BrokenShard):
        return False
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not an index
        return False
    rows = [(num_tokens, tar_bytes) for _, _, num_tokens, tar_bytes, *_ in index.shards]
    counts = [(each.counts.num_tokens, each.tar.num_bytes) for each in made.done.values()]
    blanked = [shard_id for shard_id, each in made.done.items() if each.unblanked_sha256]
    is_same = (index.spec.plan_id, index.blanked) == (spec.plan_id, names.id_ranges(blanked))
    return is_same and rows == counts


def read_findings(folder: DataFolder, plan_id: str) -> dict[int, Finding]:
    """Return the findings of verify by shard id, except those of shards that were made again since."""
    try:
        file = json_files.read_file(
            folder, FINDINGS_NAME, _FINDINGS_FORMAT, _FindingsFile, max_bytes=_MAX_FINDINGS_BYTES
        )
        _refuse_findings_of_other(folder, file, plan_id)
    except files.NOT_THERE:
        return {}
    except errors.BrokenShard as error:
        # Nobody knows any more which shards were wrong, or how thorough the check was that found them.
        error.remedy = commands.on("verify", folder, "--deep", "all")
        error.advise("only a verify that makes every shard again can clear it")
        raise
    digests: dict[int, str] = {}  # of the manifests; each is read once, however often the file names it
    findings: dict[int, Finding] = {}
    for each in file.findings:
        if each.shard not in digests:
            digests[each.shard] = _manifest_sha256(folder, each.shard)
        if digests[each.shard] == each.manifest_sha256:
            findings[each.shard] = each
    return findings


def _refuse_findings_of_other(folder: DataFolder, file: _FindingsFile, plan_id: str) -> None:
    """Raise BrokenShard for the findings of another data set: those of this one may have been replaced."""
    if file.plan_id != plan_id:
        path = folder.path_of(FINDINGS_NAME)
        raise errors.BrokenShard(path=path, found=f"plan {file.plan_id[:12]}", expected=plan_id[:12])


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
        raw = msgspec.json.encode(json_files.with_content_hash(_FINDINGS_FORMAT, content)) + b"\n"
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
        content = folder.read(names.manifest_name(shard_id), max_bytes=MAX_MANIFEST_BYTES)
    except (*files.NOT_THERE, errors.BrokenShard):
        return ""
    return hashlib.sha256(content).hexdigest()
