"""``--hash_inputs``: the sha256 of each shard's input bytes, in the plan and of what a worker read."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from preprocess.plan import Plan, plan_id
from shardprep.errors import Refused

_READ_BYTES = 4 << 20
_NUM_THREADS = 16  # hashing and reading both release the interpreter's lock


class _Hash(Protocol):
    def hexdigest(self) -> str: ...


def with_hashes(plan: Plan) -> Plan:
    """The same plan with the sha256 of every shard's input bytes in it, and another plan id.

    Reads the whole input once, about a second of one core for a gigabyte. A shard's ranges are read in
    their order by its worker anyway, so that it hashes what it encodes and reads nothing twice. Raises
    NotFound, ReadWriteError or Refused where a file cannot be read or changes meanwhile.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        hashes = list(pool.map(lambda shard_id: _hash_shard(plan, shard_id), range(plan.num_shards)))
    return dataclasses.replace(
        plan,
        shard_sha256=hashes,
        plan_id=plan_id(
            plan.options, plan.tokenizer, plan.probe_sha256, plan.inputs, plan.boundaries, shard_sha256=hashes
        ),
    )


def _hash_shard(plan: Plan, shard_id: int) -> str:
    digest = hashlib.sha256()
    for part in plan.ranges(shard_id):
        file = part.open()
        for start in range(part.start, part.end, _READ_BYTES):
            digest.update(file.read_all(start, min(start + _READ_BYTES, part.end)))
        file.check_unchanged()
    return digest.hexdigest()


def check_hash(plan: Plan, shard_id: int, digest: _Hash) -> None:
    """That a shard was made of the bytes that were planned. Raises Refused."""
    assert plan.shard_sha256 is not None
    found, expected = digest.hexdigest(), plan.shard_sha256[shard_id]
    if found == expected:
        return
    paths = sorted({plan.inputs[part.input_number].path for part in plan.ranges(shard_id)})
    names = ", ".join(paths[:3]) + (" ..." if len(paths) > 3 else "")
    raise Refused(
        f"the input of shard {shard_id:05d} ({names}) changed since it was planned: sha256 "
        f"{found[:12]}, the plan says {expected[:12]}; bring the file back, or plan anew into a new folder"
    )
