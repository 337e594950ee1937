"""DATA/blanked: the documents that a copy of a data set does without, by shard.

A blanked document keeps its place: each of its ids is replaced by BLANK, and its text, its id and its digest
are removed. Making the shard again gives the same bytes. The plan's option ``blanked`` lists the shards that
have a file DATA/blanked/shard-N.json.

All blanked copies of a data set have the same plan id. So plan and lists name the hash of all lists, and the
manifest of a shard that of its own list. Those of older versions name none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardprep import files
from shardprep.errors import BrokenShard, OtherPlan
from shardprep.files import Digest
from shardprep.format import json_files, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import DIGEST, Digests, Numbers
from shardprep.format.json_files import Count
from shardprep.format.plan import Plan

_FORMAT = "shardprep-blanked"
_MAX_BLANKED_BYTES = 256 << 20  # about 10^7 documents
_ADVICE = "restore the original file: without it the shard would contain what was blanked"
# Digests of blanked documents for training and for validation, so that these stay on their side of the split.
_BLANK_DIGESTS = np.frombuffer(b"\xff" * names.DIGEST_BYTES + bytes(names.DIGEST_BYTES), DIGEST)


@dataclass(frozen=True, kw_only=True)
class BlankedDocuments:
    """The blanked documents of one shard: each has an input number and an input offset."""

    plan_id: Digest
    shard_id: int
    unblanked_sha256: Digest  # sha256 of the shard's tar before blanking
    input_numbers: list[Count]  # positions of inputs in the plan
    input_offsets: list[Count]  # see docs/format.md, "Places"
    lists_sha256: Digest | None = None  # see ``with_hash_of_all``

    def sha256(self) -> str:
        """Return the hash of what is blanked in the shard."""
        return json_files.content_sha256({**vars(self), "lists_sha256": None})

    def are_at(self, input_number: int, offsets: Numbers) -> npt.NDArray[np.bool_]:
        """Return which documents of an input, given where they begin, are blanked: bool[n]."""
        numbers = np.array(self.input_numbers, np.int64)
        blanked = np.array(self.input_offsets, np.int64)[numbers == input_number]
        return np.isin(offsets, blanked)


def blank_digests(is_for_validation: npt.NDArray[np.bool_]) -> Digests:
    """Return the digests of blanked documents: DIGEST[n]."""
    return _BLANK_DIGESTS[is_for_validation.astype(np.intp)]


def blanked_content(documents: BlankedDocuments) -> bytes:
    """Return the content of DATA/blanked/shard-N.json."""
    content = {name: value for name, value in vars(documents).items() if value is not None}
    return json.dumps(json_files.with_content_hash(_FORMAT, content)).encode() + b"\n"


def with_hash_of_all(lists: Mapping[int, BlankedDocuments]) -> tuple[str, dict[int, BlankedDocuments]]:
    """Return the hash of all lists of a data set, by shard, and the lists with it."""
    hashes = [lists[shard_id].sha256() for shard_id in sorted(lists)]
    sha256 = hashlib.sha256("".join(hashes).encode("ascii")).hexdigest()
    return sha256, {shard_id: replace(each, lists_sha256=sha256) for shard_id, each in lists.items()}


def read_blanked(folder: DataFolder, plan: Plan, shard_id: int) -> BlankedDocuments:
    """Read DATA/blanked/shard-N.json. Raises BrokenShard also if it is missing or of another copy."""
    blanked = _read_list(folder, plan.plan_id, shard_id)
    planned = plan.options.blanked_lists
    if planned and blanked.lists_sha256 != planned:
        path = folder.path_of(names.blanked_name(shard_id))
        found = f"lists_sha256 {str(blanked.lists_sha256)[:12]}"
        raise BrokenShard(path=path, found=found, expected=f"{planned[:12]}, as planned", advice=_ADVICE)
    return blanked


def is_list_of(folder: DataFolder, plan_id: str, shard_id: int) -> bool:
    """Return whether a folder has a list of this data set, perhaps of another blanked copy."""
    try:
        _read_list(folder, plan_id, shard_id)
    except (BrokenShard, OtherPlan):
        return False
    return True


def _read_list(folder: DataFolder, plan_id: str, shard_id: int) -> BlankedDocuments:
    name = names.blanked_name(shard_id)
    path = folder.path_of(name)
    try:
        blanked = json_files.read_file(folder, name, _FORMAT, BlankedDocuments, max_bytes=_MAX_BLANKED_BYTES)
    except files.NOT_THERE:
        raise BrokenShard(f"{path} is missing; {_ADVICE}", path=path, found="missing") from None
    except BrokenShard as error:
        error.advise(_ADVICE)
        raise
    if (blanked.plan_id, blanked.shard_id) != (plan_id, shard_id):
        other = f"shard {blanked.shard_id} of plan {blanked.plan_id[:12]}"
        raise OtherPlan(path=path, found=other, expected=f"{shard_id} of {plan_id[:12]}", advice=_ADVICE)
    if len(blanked.input_numbers) != len(blanked.input_offsets):
        expected = f"{len(blanked.input_numbers)}, as in input_numbers"
        raise json_files.wrong_value(path, "input_offsets", blanked.input_offsets, expected)
    return blanked
