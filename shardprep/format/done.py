"""Which shards are done, and whether the data set is verified: the one answer for commands and loader.

A shard is done if its manifest is of this plan, tar and idx have the manifest's sizes, and no ``verify``
found it wrong. What verify found stands in DATA/findings.json until the shard is made anew, or a verify as
thorough finds it right. A data set is verified if its index.json has the numbers of the shards that are done,
and nothing was found wrong. What cannot be read is no answer: the caller's error, neither done nor wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import orjson
from msgspec import Meta

from shardprep.errors import (
    BrokenShard,
    MissingShard,
    NotFound,
    OtherPlan,
    ReadWriteError,
    ShardprepError,
    UnknownVersion,
    quoted,
)
from shardprep.files import NOT_THERE, Digest, publish_bytes, read_beginning, read_regular
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.json_files import Text, read_file, with_content_hash
from shardprep.format.manifest import Manifest, ShardMaking, check_shard, check_sizes, read_manifest
from shardprep.format.names import (
    INDEX_NAME,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    PLAN_NAME,
    manifest_path,
    shard_name,
)

FINDINGS_NAME = "findings.json"
Check = Literal["fast", "full", "deep"]  # what verify compared, from the least to the most
_RANKS: Mapping[Check, int] = {"fast": 0, "full": 1, "deep": 2}
_FORMAT = "shardprep-findings"
_MAX_BYTES = 256 << 20
_MOST_MESSAGE_CHARS = 400  # so that a finding for each of MAX_SHARDS can be read again
_PLAN_ID = re.compile(rb'"plan_id": ?"([0-9a-f]{64})"')
_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shard that ``verify`` found wrong."""

    shard: Annotated[int, Meta(ge=0, le=MAX_SHARDS - 1)]
    exit_code: int
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

    done: Mapping[int, ShardMaking]  # shard -> how it was made
    wrong: Mapping[int, Finding]  # shards that verify found wrong
    other_plan: Sequence[int]  # shards of another plan
    broken: Mapping[int, str]  # shard -> what its manifest, tar or idx lacks


def check_done(folder: Path, shard_id: int, plan_id: str, findings: Mapping[int, Finding]) -> Manifest:
    """Return the manifest of a shard that is done. ``findings``: what ``read_findings`` gives.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan, each saying what to do; ReadWriteError.
    """
    manifest = check_shard(folder, shard_id, plan_id)
    refuse_found(folder, findings, [shard_id])
    return manifest


def done_manifest(
    folder: Path, shard_id: int, plan_id: str, findings: Mapping[int, Finding] | None = None
) -> Manifest | None:
    """Return ``check_done``, or None for a shard that is to be made.

    ``findings``: where they were read already. Raises OtherPlan, ReadWriteError, BrokenShard for findings
    that cannot be read.
    """
    try:
        manifest = check_shard(folder, shard_id, plan_id)
    except (MissingShard, BrokenShard):
        return None
    findings = read_findings(folder, plan_id) if findings is None else findings
    return None if shard_id in findings else manifest


def refuse_found(folder: Path, findings: Mapping[int, Finding], shard_ids: Iterable[int]) -> None:
    """Raise BrokenShard if verify found one of these shards wrong."""
    if wrong := sorted(findings.keys() & set(shard_ids)):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = findings[wrong[0]].message.partition("; run: ")[0]  # its own remedy is of one shard
        raise BrokenShard(
            f"shard {wrong[0]:05d}{more} of {folder} is not done, as verify found it wrong: {what}; to make "
            "again what is wrong",
            path=folder,
            found=what,
            remedy=f"shardprep run {quoted(folder)}",
        )


def refuse_other_plan(folder: Path, plan_id: str) -> None:
    """Raise OtherPlan if a folder has a plan, and manifests or an index of this id are not of it.

    For readers that need nothing else of a plan: the first bytes of plan.json hold its id.
    """
    match = _PLAN_ID.search(read_beginning(folder / PLAN_NAME, 400))
    if match and (found := match[1].decode()) != plan_id:
        raise OtherPlan(
            f"{folder} has shards of plan {plan_id[:12]}, its {PLAN_NAME} is of {found[:12]}; bring the plan "
            "back, or move one of both to a folder of its own",
            path=folder / PLAN_NAME,
            found=found[:12],
            expected=plan_id[:12],
        )


def find_made_shards(folder: Path, spec: DatasetSpec, *, known: MadeShards | None = None) -> MadeShards:
    """Look at every manifest: one listing, and a read and two stats per manifest.

    ``known``: what was found a moment ago; the manifests of what was done then are not read again.
    Eight are read at a time, as a file system over a network lets a reader wait. 10,000 shards take about
    0.6 s of CPU. Raises NotFound, BrokenShard for findings that cannot be read, or ReadWriteError: a manifest
    that cannot be read may be that of a done shard.
    """
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 - names alone, a Path each would double the time
    except FileNotFoundError:
        raise NotFound(f"{folder} is no data set: there is no such folder", path=folder) from None
    except OSError as error:
        raise ReadWriteError(
            f"{folder} cannot be listed ({error.strerror}), so what is done is not known; it must be a "
            "folder that you can read",
            path=folder,
            found=error.strerror,
        ) from None
    findings = read_findings(folder, spec.plan_id) if FINDINGS_NAME in names else {}
    made: dict[int, ShardMaking] = {}
    broken: dict[int, str] = {}
    to_read: list[int] = []
    for shard_id in range(spec.num_shards):
        if f"{shard_name(shard_id)}.json" in names:
            if known and shard_id in known.done:
                made[shard_id] = known.done[shard_id]
            else:
                to_read.append(shard_id)

    def look(shard_id: int) -> ShardMaking | str:
        """Return how a shard was made, or what is wrong with its files. Raises ReadWriteError."""
        try:
            manifest = read_manifest(folder, shard_id)
            check_sizes(folder, manifest, ("tar", "idx"))
            return ShardMaking.of(manifest, manifest_path(folder, shard_id))
        except (BrokenShard, MissingShard, UnknownVersion) as error:
            return str(error)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for shard_id, found in zip(to_read, pool.map(look, to_read), strict=True):
            if isinstance(found, str):
                broken[shard_id] = found
            else:
                made[shard_id] = found
    of_plan = {shard_id for shard_id, making in made.items() if making.plan_id == spec.plan_id}
    return MadeShards(
        done={shard_id: made[shard_id] for shard_id in sorted(of_plan - findings.keys())},
        wrong=findings,
        other_plan=sorted(made.keys() - of_plan),
        broken=broken,
    )


def is_verified(folder: Path, spec: DatasetSpec, made: MadeShards) -> bool:
    """Return whether all shards are done and index.json has their numbers. Raises ReadWriteError."""
    if len(made.done) != spec.num_shards or made.wrong:
        return False
    try:
        data = orjson.loads(read_regular(folder / INDEX_NAME, max_bytes=_MAX_BYTES))
        rows = [(row[2], row[3]) for row in data["shards"]]
        plan_id = data["spec"]["plan_id"]
    except (*NOT_THERE, BrokenShard, ValueError, LookupError, TypeError):
        return False
    numbers = [(making.num_tokens, making.tar_bytes) for making in made.done.values()]
    return bool(plan_id == spec.plan_id) and rows == numbers


def is_of_shard(error: ShardprepError) -> bool:
    """Return whether an error is one of the shard that was read, not of reading, an input or a library."""
    return isinstance(error, (BrokenShard, MissingShard, OtherPlan, UnknownVersion))


def read_findings(folder: Path, plan_id: str) -> dict[int, Finding]:
    """Return the shards that a verify found wrong and that were not made anew since, by number.

    One open where nothing was found, and one more for each finding. Raises BrokenShard, UnknownVersion where
    they cannot be known, ReadWriteError.
    """
    try:
        file = read_file(folder / FINDINGS_NAME, _FORMAT, _FindingsFile, max_bytes=_MAX_BYTES)
    except NOT_THERE:
        return {}
    except BrokenShard as error:
        error.remedy = f"shardprep verify {quoted(folder)}"  # which shards were found wrong is not known
        raise
    if file.plan_id != plan_id:
        return {}
    return {
        each.shard: each
        for each in file.findings
        if _manifest_sha256(folder, each.shard) == each.manifest_sha256
    }


def standing_findings(folder: Path, plan_id: str, check: Check) -> dict[int, Finding]:
    """Return what stands after a verify of this thoroughness: what a more thorough one found.

    Raises BrokenShard for findings that cannot be read, unless all bytes are to be compared anyway.
    """
    try:
        found = read_findings(folder, plan_id)
    except BrokenShard:
        if check == "fast":
            raise
        return {}
    return {number: each for number, each in found.items() if _RANKS[each.check] > _RANKS[check]}


def publish_findings(
    folder: Path,
    plan_id: str,
    wrong: Iterable[tuple[int, ShardprepError]],
    *,
    check: Check = "full",
    not_read: Collection[int] = (),
) -> None:
    """Write what a verify found wrong, and remove index.json, which says otherwise.

    An error of reading or writing says nothing of a shard: where there are no others, nothing is written. A
    shard without a manifest is not done anyway, and left out. Findings of before stand for the shards in
    ``not_read``, and where a more thorough verify made them. Raises CannotWrite or ReadWriteError.
    """
    of_shards = {shard_id: error for shard_id, error in wrong if is_of_shard(error)}
    if not of_shards:
        return
    before: dict[int, Finding] = {}
    with contextlib.suppress(BrokenShard):
        before = read_findings(folder, plan_id)
    findings = {
        number: each
        for number, each in before.items()
        if number in not_read or _RANKS[each.check] > _RANKS[check]
    }
    for shard_id, error in of_shards.items():
        if not (digest := _manifest_sha256(folder, shard_id)):
            continue
        stands = findings.get(shard_id)  # of a more thorough verify, which alone may take it back
        findings[shard_id] = Finding(
            shard=shard_id,
            exit_code=error.exit_code,
            # Without half surrogates and NULs, which the file cannot hold.
            message=str(error)[:_MOST_MESSAGE_CHARS].encode(errors="replace").decode().replace("\0", "?"),
            manifest_sha256=digest,
            check=stands.check if stands else check,
        )
    if findings:
        content = {"plan_id": plan_id, "findings": [asdict(findings[number]) for number in sorted(findings)]}
        raw = orjson.dumps(with_content_hash(_FORMAT, content), option=orjson.OPT_APPEND_NEWLINE)
        publish_bytes(folder / FINDINGS_NAME, raw)
    try:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ReadWriteError(
            f"{folder / INDEX_NAME} cannot be removed ({error.strerror}), and some shards are wrong: "
            "remove it",
            path=folder / INDEX_NAME,
        ) from None


def remove_findings(folder: Path) -> None:
    """Remove them after a verify that found nothing; what fails is left."""
    with contextlib.suppress(OSError):
        (folder / FINDINGS_NAME).unlink()


def _manifest_sha256(folder: Path, shard_id: int) -> str:
    """Return the hash of a manifest's bytes, "" where there is none. Raises ReadWriteError."""
    try:
        content = read_regular(manifest_path(folder, shard_id), max_bytes=MAX_MANIFEST_BYTES)
    except (*NOT_THERE, BrokenShard):
        return ""
    return hashlib.sha256(content).hexdigest()
