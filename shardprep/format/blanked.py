"""blanked/shard-N.json: which documents of a shard are blanked, by their places in the input.

A blanked document keeps its place: where its ids stood stand as many BLANKs, and its text, its id and its
digest are gone. So whoever makes the shard again makes the same one. The plan's option ``blanked`` names the
shards that have such a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.errors import BrokenShard, OtherPlan
from shardprep.files import NOT_THERE, Digest, make_subfolder, publish_bytes
from shardprep.format.digests import DIGEST
from shardprep.format.json_files import Count, read_file, with_content_hash, wrong_value
from shardprep.format.names import DIGEST_BYTES, blanked_path, ids_of_ranges

_FORMAT = "shardprep-blanked"
_MAX_BYTES = 256 << 20  # some 10^7 documents
# The digest of a blanked document; a document stays on its side of a split.
_BLANK_DIGESTS = np.frombuffer(b"\xff" * DIGEST_BYTES + bytes(DIGEST_BYTES), DIGEST)


@dataclass(frozen=True, kw_only=True)
class BlankedDocuments:
    """The blanked documents of one shard: document i begins at ``offsets[i]`` of input ``inputs[i]``."""

    plan_id: Digest
    shard_id: int
    made_from: Digest  # sha256 of the shard's tar with these documents in it
    inputs: list[Count]  # numbers of input files in the plan
    offsets: list[Count]  # see docs/format.md, "Places"

    def are_at(self, input_number: int, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which documents of an input, by where they begin, are blanked: bool[n]."""
        ours = np.array(self.offsets, np.int64)[np.array(self.inputs, np.int64) == input_number]
        return np.isin(offsets, ours)


def blank_digests(is_for_validation: npt.NDArray[np.bool_]) -> npt.NDArray[np.void]:
    """Return what stands for the digests of blanked documents: DIGEST[n]."""
    return _BLANK_DIGESTS[is_for_validation.astype(np.intp)]


def blanked_shards(blanked: str) -> list[int]:
    """Return the shards that the plan's option names, ascending."""
    return ids_of_ranges(blanked) if blanked else []


def publish_blanked(folder: Path, documents: BlankedDocuments) -> None:
    """Write the file of a shard. Raises CannotWrite, ReadWriteError."""
    path = blanked_path(folder, documents.shard_id)
    make_subfolder(folder, path.parent.name)
    publish_bytes(path, json.dumps(with_content_hash(_FORMAT, asdict(documents))).encode() + b"\n")


def read_blanked(folder: Path, plan_id: str, shard_id: int) -> BlankedDocuments:
    """Read the file of a shard that the plan's option names.

    Raises BrokenShard where it is missing or damaged, OtherPlan, UnknownVersion, ReadWriteError.
    """
    path = blanked_path(folder, shard_id)
    advice = "bring the file back as it was: without it the shard would hold what was blanked"
    try:
        found = read_file(path, _FORMAT, BlankedDocuments, max_bytes=_MAX_BYTES)
    except NOT_THERE:
        raise BrokenShard(f"{path} is missing; {advice}", path=path, found="missing") from None
    except BrokenShard as error:
        error.advise(advice)
        raise
    if (found.plan_id, found.shard_id) != (plan_id, shard_id):
        raise OtherPlan(
            f"{path} is of shard {found.shard_id} of plan {found.plan_id[:12]}, expected shard {shard_id} of "
            f"{plan_id[:12]}; {advice}",
            path=path,
            found=found.plan_id[:12],
            expected=plan_id[:12],
        )
    if len(found.inputs) != len(found.offsets):
        raise wrong_value(path, "offsets", found.offsets, f"{len(found.inputs)}, as there are inputs")
    return found
