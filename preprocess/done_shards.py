"""Which shards are done, and whether the data set is verified: the one answer that all commands use.

A shard is done if its manifest is of this plan, tar and idx have the manifest's sizes, and the last
``verify`` did not find it wrong. What verify found is in DATA/findings.json until the shard is made anew or
a verify finds nothing. A data set is verified if its index.json has the numbers of the shards that are
done, and nothing was found wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from preprocess.plan.plan_file import Plan
from shardprep.errors import BrokenShard, NotFound, ReadWriteError, ShardprepError
from shardprep.files import NOT_THERE, publish_bytes, read_regular
from shardprep.format.names import INDEX_NAME, MAX_MANIFEST_BYTES, manifest_path, shard_name
from shardprep.format.shard_making import ShardMaking, read_making

FINDINGS_NAME = "findings.json"
_MAX_BYTES = 64 << 20
_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server
_SHORT_WAIT_S = 2e-4  # for the three files of a shard; a server takes longer
_PART = 64  # shards


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shard that ``verify`` found wrong."""

    shard: int
    exit_code: int
    message: str
    manifest_sha256: str  # of the manifest's bytes: a shard that was made anew has another


@dataclass(frozen=True, kw_only=True)
class MadeShards:
    """What the manifests in a folder say."""

    done: Mapping[int, ShardMaking]  # shard -> how it was made
    tar_bytes: Mapping[int, int]  # of the shards that are done
    wrong: Mapping[int, Finding]  # shards that verify found wrong
    other_plan: Sequence[int]  # shards of another plan
    broken: Mapping[int, str]  # shard -> what its manifest, tar or idx lacks


def find_made_shards(folder: Path, plan: Plan) -> MadeShards:
    """Look at every manifest: one listing, and a read and two stats per manifest.

    Eight are read at a time where the file system lets a reader wait. 10,000 shards take about 0.3 s of CPU.
    Raises NotFound or ReadWriteError.
    """
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 - names alone, a Path each would double the time
    except FileNotFoundError:
        raise NotFound(f"{folder} is no data set: there is no such folder") from None
    except OSError as error:
        raise ReadWriteError(
            f"{folder} cannot be listed ({error.strerror}), so what is done is not known; it must be a "
            "folder that you can read"
        ) from None
    ids = [shard_id for shard_id in range(plan.num_shards) if f"{shard_name(shard_id)}.json" in names]
    findings = read_findings(folder, plan.plan_id) if FINDINGS_NAME in names else {}

    def look(part: Sequence[int]) -> list[tuple[ShardMaking, int] | str]:
        return [_look_at(f"{folder}/{shard_name(shard_id)}", shard_id) for shard_id in part]

    begun_s, used_s = time.perf_counter(), time.thread_time()
    found = look(ids[:_PART])
    waited_s = time.perf_counter() - begun_s - (time.thread_time() - used_s)
    parts = [ids[number : number + _PART] for number in range(_PART, len(ids), _PART)]
    is_quick = waited_s < _SHORT_WAIT_S * _PART  # threads would only wait for each other
    with ThreadPoolExecutor(1 if is_quick else _NUM_THREADS) as pool:
        found += itertools.chain.from_iterable(pool.map(look, parts))
    looks = dict(zip(ids, found, strict=True))
    made = {shard_id: each for shard_id, each in looks.items() if not isinstance(each, str)}
    of_plan = {shard_id for shard_id, (making, _) in made.items() if making.plan_id == plan.plan_id}
    done = sorted(of_plan - findings.keys())
    return MadeShards(
        done={shard_id: made[shard_id][0] for shard_id in done},
        tar_bytes={shard_id: made[shard_id][1] for shard_id in done},
        wrong=findings,
        other_plan=sorted(made.keys() - of_plan),
        broken={shard_id: each for shard_id, each in looks.items() if isinstance(each, str)},
    )


def _look_at(stem: str, shard_id: int) -> tuple[ShardMaking, int] | str:
    """How the shard of ``stem``.json was made and the bytes of its tar, or what is wrong with its files."""
    path = f"{stem}.json"
    try:
        making, data = read_making(path, shard_id)
        for name in ("tar", "idx"):
            num_bytes = os.stat(f"{stem}.{name}").st_size  # noqa: PTH116 - a Path takes as long as the stat
            if num_bytes != data[name]["num_bytes"]:
                return f"{stem}.{name} has {num_bytes} of {data[name]['num_bytes']} bytes"
    except (LookupError, TypeError) as error:
        return f"{path} is no manifest ({error})"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    except ShardprepError as error:
        return str(error)
    return making, data["tar"]["num_bytes"]


def is_verified(folder: Path, plan: Plan, made: MadeShards) -> bool:
    """Whether all shards are done and index.json has their numbers. Raises ReadWriteError."""
    if len(made.done) != plan.num_shards or made.wrong:
        return False
    try:
        data = orjson.loads(read_regular(folder / INDEX_NAME, max_bytes=_MAX_BYTES))
        rows = [(row[2], row[3]) for row in data["shards"]]
        plan_id = data["spec"]["plan_id"]
    except (*NOT_THERE, BrokenShard, ValueError, LookupError, TypeError):
        return False
    return plan_id == plan.plan_id and rows == [
        (made.done[shard_id].num_tokens, made.tar_bytes.get(shard_id)) for shard_id in range(plan.num_shards)
    ]


def publish_findings(folder: Path, plan_id: str, wrong: Iterable[tuple[int, ShardprepError]]) -> None:
    """Write what a verify found wrong, and remove index.json, which says otherwise.

    A shard without a manifest is not done anyway, and left out. Raises CannotWrite or ReadWriteError.
    """
    findings = [
        Finding(shard=shard_id, exit_code=error.exit_code, message=str(error)[:2000], manifest_sha256=digest)
        for shard_id, error in wrong
        if (digest := _manifest_sha256(folder, shard_id))
    ]
    content: dict[str, Any] = {"format": "shardprep-findings", "version": 1, "plan_id": plan_id}
    if findings:
        content["findings"] = [asdict(each) for each in findings]
        publish_bytes(folder / FINDINGS_NAME, orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE))
    try:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ReadWriteError(
            f"{folder / INDEX_NAME} cannot be removed ({error.strerror}), and some shards are wrong: "
            "remove it"
        ) from None


def remove_findings(folder: Path) -> None:
    """After a verify that found nothing; what fails is left."""
    with contextlib.suppress(OSError):
        (folder / FINDINGS_NAME).unlink()


def read_findings(folder: Path, plan_id: str) -> dict[int, Finding]:
    """The shards that the last verify found wrong and that were not made anew since."""
    try:
        data = orjson.loads(read_regular(folder / FINDINGS_NAME, max_bytes=_MAX_BYTES))
        found = [Finding(**each) for each in data["findings"]] if data["plan_id"] == plan_id else []
    except (*NOT_THERE, ValueError, LookupError, TypeError, BrokenShard):
        return {}
    return {
        each.shard: each for each in found if _manifest_sha256(folder, each.shard) == each.manifest_sha256
    }


def _manifest_sha256(folder: Path, shard_id: int) -> str:
    try:
        content = read_regular(manifest_path(folder, shard_id), max_bytes=MAX_MANIFEST_BYTES)
    except (OSError, ShardprepError):
        return ""
    return hashlib.sha256(content).hexdigest()
