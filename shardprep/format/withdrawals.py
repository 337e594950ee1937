"""withdrawn/NNNN.json: documents of a data set that no training may see from now on.

The shards stay as they are; a loader masks what the lists name. A list is written once and never changed. It
has the hash of the list before it, so that one that was altered or lost between two others is noticed.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.console import quoted
from shardprep.errors import BrokenShard, CannotWrite, OtherPlan, ShardprepError
from shardprep.files import NOT_THERE, Digest, PublishedFile, make_subfolder, names_in, sync_folder
from shardprep.format.checked_json import CONTENT_HASH, Fields, read_checked, with_content_hash
from shardprep.format.names import LEFT_OUT_DIR, MAX_SAMPLES, MAX_SHARDS, WITHDRAWN_DIR

Numbers = npt.NDArray[np.int64]
_FORMAT = "shardprep-withdrawal"
WHOLE = 2**31 - 1  # the end of a sample of which all is withdrawn, behind all of its tokens
_MAX_BYTES = 1 << 30  # one of 10^7 documents has about 30 MB
_NAME = re.compile(r"[0-9]{4}\.json", re.ASCII)
_MOST = 9999
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """One list."""

    number: int  # from 1
    plan_id: Digest
    previous_sha256: str  # of the list before it; "" for the first one
    made: str  # UTC
    asked: str  # what the documents were found by
    reason: str
    documents: Mapping[int, Numbers]  # by shard: numbers, ascending, as the shard's input has its documents
    # By shard: the samples that these are; of rows where their tokens begin and end, row x seq_len + place.
    places: Mapping[int, Numbers]
    sha256: str = ""  # of the content, once it is written

    @property
    def num_documents(self) -> int:
        """How many the list names."""
        return sum(map(len, self.documents.values()))

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        shards = [
            {
                "shard": shard_id,
                "num_documents": len(numbers),
                "documents": _packed(numbers),
                "num_places": len(self.places[shard_id]),
                "places": _packed(self.places[shard_id]),
            }
            for shard_id, numbers in sorted(self.documents.items())
        ]
        named = ("number", "plan_id", "previous_sha256", "made", "asked", "reason")
        return with_content_hash(_FORMAT, {**{name: getattr(self, name) for name in named}, "shards": shards})


@dataclass(frozen=True, kw_only=True)
class Withdrawals:
    """All lists of a data set."""

    lists: tuple[Withdrawal, ...]

    @property
    def sha256(self) -> str:
        """Of the last list, which vouches for all; "" where there is none."""
        return self.lists[-1].sha256 if self.lists else ""

    @property
    def num_documents(self) -> int:
        """How many are withdrawn; no two lists name the same one."""
        return sum(each.num_documents for each in self.lists)

    @property
    def shard_ids(self) -> list[int]:
        """The shards that hold any."""
        return sorted({shard_id for each in self.lists for shard_id in each.documents})

    def documents_of(self, shard_id: int) -> Numbers:
        """The withdrawn documents of a shard, ascending: int64[n]."""
        found = [each.documents.get(shard_id, _NONE) for each in self.lists]
        return np.unique(np.concatenate([_NONE, *found]))

    def marks_of(self, shard_id: int, seq_len: int) -> Numbers:
        """What is withdrawn of a shard's samples: int64[n, 3] of sample, first token and end, ascending.

        Of documents (``seq_len`` 0) all tokens; their end is WHOLE.
        """
        places = np.concatenate([_NONE, *(each.places.get(shard_id, _NONE) for each in self.lists)])
        if not seq_len:
            places.sort()
            return np.stack([places, np.zeros_like(places), np.full_like(places, WHOLE)], axis=1)
        begin, end = places.reshape(-1, 2).T
        first = begin // seq_len
        num_rows = (end - 1) // seq_len - first + 1
        span = np.repeat(np.arange(len(begin)), num_rows)
        row = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        begin, end = begin[span] - row * seq_len, end[span] - row * seq_len
        marks = np.stack([row, begin.clip(min=0), end.clip(max=seq_len)], axis=1)
        return marks[np.lexsort((marks[:, 1], marks[:, 0]))]


def withdrawal_path(folder: Path, number: int, *, subfolder: str = WITHDRAWN_DIR) -> Path:
    """Where a list lies, from 1."""
    return folder / subfolder / f"{number:04d}.json"


def read_left_out(folder: Path, sha256: str) -> Withdrawals:
    """The lists by which ``rewrite`` made a data set, the last of which has this hash; none for "".

    Raises BrokenShard where they are not there as they were, and what ``read_withdrawals`` raises.
    """
    found = read_withdrawals(folder, None, subfolder=LEFT_OUT_DIR) if sha256 else Withdrawals(lists=())
    if found.sha256 != sha256:
        raise BrokenShard(
            f"{folder / LEFT_OUT_DIR} ends with a list of sha256 {found.sha256[:12] or '(none)'}, expected "
            f"{sha256[:12]}, as the plan says; bring the folder back as it was"
        )
    return found


def read_withdrawals(folder: Path, plan_id: str | None, *, subfolder: str = WITHDRAWN_DIR) -> Withdrawals:
    """The lists of a data set of this plan (None: any), in order; none where there is no folder of them.

    Raises BrokenShard for a list that is damaged, missing or not the one that the next names, OtherPlan,
    UnknownVersion or ReadWriteError.
    """
    lists: list[Withdrawal] = []
    names = [name for name in names_in(folder / subfolder) if _NAME.fullmatch(name)]
    remedy = "bring the folder back as it was: a list is never changed or removed"
    for number, name in enumerate(names, 1):
        path = withdrawal_path(folder, number, subfolder=subfolder)
        try:
            found = _withdrawal_of(read_checked(path, _FORMAT, max_bytes=_MAX_BYTES), number)
        except NOT_THERE:
            raise BrokenShard(
                f"{path.parent} has {name} and no {path.name}, expected every list from 0001 on; {remedy}"
            ) from None
        except BrokenShard as error:
            raise BrokenShard(f"{error}; {remedy}") from None
        if plan_id is not None and found.plan_id != plan_id:
            raise OtherPlan(
                f"{path} names documents of plan {found.plan_id[:12]}, and {folder} is of {plan_id[:12]}; "
                f"move {quoted(path.parent)} to the data set that it belongs to"
            )
        expected = lists[-1].sha256 if lists else ""
        if found.previous_sha256 != expected:
            raise BrokenShard(
                f"{path} follows a list of sha256 {found.previous_sha256[:12] or '(none)'}, expected "
                f"{expected[:12] or '(none)'}, as the list before it has; {remedy}"
            )
        lists.append(found)
    return Withdrawals(lists=tuple(lists))


def withdrawn_counts(folder: Path, plan_id: str) -> dict[str, Any]:
    """What reports say of the lists; why they cannot be read stands in ``error``."""
    try:
        found, error = read_withdrawals(folder, plan_id), ""
    except ShardprepError as raised:
        found, error = Withdrawals(lists=()), str(raised)
    return {
        "num_documents": found.num_documents,
        "num_lists": len(found.lists),
        "newest": found.lists[-1].made if found.lists else "",
        "error": error,
    }


def publish_withdrawal(
    folder: Path,
    before: Withdrawals,
    *,
    plan_id: str,
    asked: str,
    reason: str,
    documents: Mapping[int, Numbers],
    places: Mapping[int, Numbers],
) -> Withdrawal | None:
    """Write the list that follows those of ``before``; None where another one took its place meanwhile.

    The file appears whole or not at all. Raises CannotWrite or ReadWriteError.
    """
    number = len(before.lists) + 1
    path = withdrawal_path(folder, number)
    if number > _MOST:
        raise CannotWrite(f"{path.parent} has {_MOST} lists, and no more can be named")
    withdrawal = Withdrawal(
        number=number,
        plan_id=plan_id,
        previous_sha256=before.sha256,
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        asked=asked,
        reason=reason,
        documents=documents,
        places=places,
    )
    content = withdrawal.to_json()
    make_subfolder(folder, WITHDRAWN_DIR)
    with PublishedFile(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
        file.sync()
        is_first = file.publish_first()
    sync_folder(path.parent)
    sync_folder(folder)
    return replace(withdrawal, sha256=content[CONTENT_HASH]) if is_first else None


def _withdrawal_of(fields: Fields, number: int) -> Withdrawal:
    documents, places = {}, {}
    for shard in fields.objects("shards"):
        shard_id = shard.whole("shard", most=MAX_SHARDS - 1)
        documents[shard_id] = _unpacked(shard, "documents", shard.whole("num_documents", 1, MAX_SAMPLES))
        places[shard_id] = _unpacked(shard, "places", shard.whole("num_places", 0, MAX_SAMPLES))
        shard.end()
    found = fields.all_of(Withdrawal, documents=documents, places=places, sha256=fields.content_sha256)
    if found.number != number:
        raise fields.wrong("number", found.number, f"{number}, as the file's name says")
    return found


def _packed(numbers: Numbers) -> str:
    """Ascending numbers as text: their differences, compressed; 1 to 3 bytes each."""
    differences = np.diff(numbers, prepend=0).astype("<u8").tobytes()
    return base64.b64encode(zlib.compress(differences)).decode() if len(numbers) else ""


def _unpacked(fields: Fields, name: str, count: int) -> Numbers:
    text = fields.text(name)
    if not count and not text:
        return _NONE
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b64decode(text, validate=True), 8 * count + 1)
        numbers = np.cumsum(np.frombuffer(raw, "<u8").astype(np.int64))
    except (ValueError, zlib.error):
        numbers = _NONE
    if len(numbers) != count or not unpacker.eof or (np.diff(numbers) < 0).any() or numbers[0] < 0:
        raise fields.wrong(name, text, f"{count} numbers, ascending, as they are written")
    return numbers
