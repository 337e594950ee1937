"""Single documents: their digests, lists of documents written by users, and blanked documents.

A digest does not depend on the shard, the kind of record or the tokenizer: it is a hash of the text as it is
encoded, or of a conversation's messages. Equal documents have equal digests, and so are on the same side of a
validation split. Digests are in DATA/digests.

A list for ``plan --exclude`` or ``blank --ids`` names a document per line: an id of --id_field, ``sha256:``
and the sha256 of a text, or ``at:FILE:BYTE``, its place in an input. A name becomes a key of 16 bytes, so a
million names take 16 MB in each process that looks for them.

A blanked document keeps its place: each of its ids is replaced by BLANK, and its text, its id and its digest
are removed. Making the shard again gives the same bytes. The plan's option ``blanked`` lists the shards that
have a file DATA/blanked/shard-N.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardprep import files
from shardprep.errors import BadInput, BrokenShard, NotFound, OtherPlan, UsageError
from shardprep.files import Digest, FileStamp
from shardprep.format import commands, names
from shardprep.format.names import Count
from shardprep.format.plan import PlannedShard

DIGEST = np.dtype(f"V{names.DIGEST_BYTES}")
NameKind = Literal["id", "text", "place"]
Numbers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.void]  # DIGEST[n]
_TEXT, _PLACE = "sha256:", "at:"
_EXPECTED = "an id in UTF-8, sha256: and 64 hex digits, or at:FILE:BYTE"
_MOST_NAMES = 10_000_000
_FORMAT = "shardprep-blanked"
_KEPT_ID = msgspec.json.Decoder(tuple[Count, Count, str])  # a line of DATA/ids
_MAX_BLANKED_BYTES = 256 << 20  # about 10^7 documents
# Digests of blanked documents for training and for validation, so that these stay on their side of the split.
_BLANK_DIGESTS = np.frombuffer(b"\xff" * names.DIGEST_BYTES + bytes(names.DIGEST_BYTES), DIGEST)


def digests_of(texts: Iterable[bytes]) -> Digests:
    """Return the first 16 bytes of the sha256 of each text: DIGEST[texts]. 1 us, and 1 ns per byte, each."""
    found = [hashlib.sha256(text).digest()[: names.DIGEST_BYTES] for text in texts]
    return np.frombuffer(b"".join(found), DIGEST)


def canonical_conversation(messages: str) -> str:
    """Return the JSON that the digest of a conversation is a hash of: keys sorted, without nulls."""
    found = json.loads(messages)
    for number, message in enumerate(found):
        # Tables have a null for each key that only other messages have.
        if isinstance(message, dict):
            found[number] = {key: value for key, value in message.items() if value is not None}
    return json.dumps(found, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def are_for_validation(digests: Digests, fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents are for validation, bool[n]: digests that begin below ``fraction`` * 2**64."""
    firsts = np.ascontiguousarray(digests).view(">u8")[::2]
    return np.asarray(firsts < np.uint64(math.ceil(fraction * 2**64)))


@dataclass(frozen=True, kw_only=True)
class DocumentNames:
    """A list of documents, in which a batch of documents can be looked up."""

    keys: Digests  # DIGEST[names], ascending: keys of ids, texts (digests) and places
    kinds: frozenset[NameKind] = frozenset({"id", "text", "place"})  # the kinds that may occur

    def find(self, keys: Digests) -> npt.NDArray[np.intp]:
        """Return the positions of keys in the list: intp[n], -1 for keys that are not in it."""
        places = np.searchsorted(self.keys, keys)
        places[places == len(self.keys)] = 0
        is_there = self.keys[places] == keys if len(self.keys) else np.zeros(len(keys), np.bool_)
        return np.where(is_there, places, -1)

    def of_documents(
        self, path: str, offsets: Numbers, ids: Iterable[str] | None, digests: Callable[[], Digests]
    ) -> npt.NDArray[np.intp]:
        """Look up documents of an input by id, text and place: positions as intp[kinds, n], or -1."""
        keys = []
        if "id" in self.kinds and ids is not None:
            keys.append(keys_of_ids(ids))
        if "text" in self.kinds:
            keys.append(digests())  # a function, because hashing takes time
        if "place" in self.kinds:
            keys.append(keys_of_places(path, offsets))
        return np.array([self.find(each) for each in keys], np.intp).reshape(len(keys), len(offsets))

    def may_be_in(self, folder: Path, shard: PlannedShard, stamp: FileStamp | None) -> bool:
        """Return whether a shard may have a listed text or place. ``stamp``: of its digests, if kept."""
        if "text" in self.kinds:
            if stamp is None:
                return True
            if (self.find(read_digests(folder, shard.shard_id, stamp)) >= 0).any():
                return True
        for part in shard.ranges:
            path = part.planned.path if part.planned else part.path.name
            # Offsets in rows or in decompressed text say nothing about the part of the file.
            bounds = (part.start, part.end) if part.kind.is_in_bytes else (0, 2**63 - 1)
            first, end = np.searchsorted(self.keys, keys_of_places(path, np.array(bounds)))
            if first < end:
                return True
        return False


def keys_of_ids(ids: Iterable[str]) -> Digests:
    """Return the keys of ids: DIGEST[n]."""
    return digests_of(b"id:" + name.encode() for name in ids)


def keys_of_places(path: str, offsets: Numbers) -> Digests:
    """Return the keys of places in an input: DIGEST[n], 8 bytes of its path's hash, then the offset."""
    keys = np.empty((len(offsets), 2), ">u8")
    keys[:, 0] = int.from_bytes(hashlib.sha256(_PLACE.encode() + path.encode()).digest()[:8], "big")
    keys[:, 1] = offsets
    return keys.view(DIGEST).reshape(-1)


def name_of_place(path: str, offset: int) -> str:
    """Return the line that names a document by its place. Raises UsageError if the path has a line end."""
    if "\n" in path:
        raise UsageError(path=path, found="an input with a line end in its name", expected="one without")
    return f"{_PLACE}{path}:{offset}"


def read_names(path: Path, *, id_field: str) -> DocumentNames:
    """Read a user's list; a million lines take 1 s and 50 MB. Raises BadInput, NotFound or UsageError."""
    keys, kinds = bytearray(), set[NameKind]()
    for _, key, kind in _names_in(path, id_field):
        keys += key
        kinds.add(kind)
        if len(keys) > _MOST_NAMES * names.DIGEST_BYTES:
            too_many = f"more than {_MOST_NAMES:,} names, which every process that makes shards would load"
            raise BadInput(path=path, found=too_many, expected="fewer, or a filtered input")
    if not keys:
        raise BadInput(path=path, found="no document", expected="a line for each document")
    found = np.unique(np.frombuffer(keys, DIGEST))
    return DocumentNames(keys=found, kinds=frozenset(kinds))


def lines_of(
    path: Path, listed: DocumentNames, wanted: npt.NDArray[np.bool_], *, id_field: str
) -> Iterator[str]:
    """Yield the lines of a list that are ``wanted``: bool[names]."""
    for line, key, _ in _names_in(path, id_field):
        if wanted[listed.find(np.frombuffer(key, DIGEST))[0]]:
            yield line


def _names_in(path: Path, id_field: str) -> Iterator[tuple[str, bytes, NameKind]]:
    """Yield each non-empty line, its key of 16 bytes, and its kind."""
    try:
        for number, raw in enumerate(files.read_lines(path), 1):
            try:
                line = raw.decode().strip()
                key, kind = _key_of(line)
            except ValueError as error:  # also a UnicodeDecodeError
                found = f"{raw[:80]!r} in line {number} ({error})"
                raise BadInput(path=path, found=found, expected=_EXPECTED) from None
            if not line:
                continue
            if kind == "id" and not id_field:
                found, expected = f"an id in line {number}, without --id_field", "sha256:HEX, or at:FILE:BYTE"
                raise UsageError(path=path, found=found, expected=expected, remedy="--id_field")
            yield line, key, kind
    except files.NOT_THERE:
        raise NotFound(path=path, found="no such file") from None


def _key_of(line: str) -> tuple[bytes, NameKind]:
    """Return the key and the kind of a line. Raises ValueError."""
    if line.startswith(_TEXT):
        digest = bytes.fromhex(line.removeprefix(_TEXT))
        if len(digest) not in (names.DIGEST_BYTES, 32):
            raise ValueError("wrong length")
        return digest[: names.DIGEST_BYTES], "text"
    if line.startswith(_PLACE):
        place = re.fullmatch(r"(.+):([0-9]{1,18})", line.removeprefix(_PLACE), re.DOTALL)
        if place is None:
            raise ValueError("not a file and a byte")
        return keys_of_places(place[1], np.array([int(place[2])])).tobytes(), "place"
    return keys_of_ids([line]).tobytes(), "id"


def read_excluded(folder: Path, sha256: str) -> DocumentNames:
    """Read the list of a plan's --exclude. ``sha256``: its hash in the options. Raises BrokenShard."""
    path = folder / names.EXCLUDED_NAME
    try:
        raw = files.read_regular(path, max_bytes=_MOST_NAMES * names.DIGEST_BYTES + 1)
        found = hashlib.sha256(raw).hexdigest()
    except files.NOT_THERE:
        raw, found = b"", "missing"
    if found != sha256:
        expected = f"{sha256[:12]}; run the plan command again with the same --exclude list"
        raise BrokenShard(path=path, found=f"sha256 {found[:12]}", expected=expected)
    return DocumentNames(keys=_as_digests(path, raw))


def _as_digests(path: Path, raw: bytes) -> Digests:
    if len(raw) % names.DIGEST_BYTES:
        raise BrokenShard(path=path, found=f"{len(raw)} bytes", expected="whole digests of 16 bytes")
    return np.frombuffer(raw, DIGEST)


def kept_ids(folder: Path, shard_id: int) -> Iterator[tuple[int, int, str]]:
    """Yield the input, the place in it and the id of each document of a shard planned with --id_field."""
    path = names.ids_path(folder, shard_id)
    try:
        for line in files.read_lines(path):
            yield _KEPT_ID.decode(line)
    except files.NOT_THERE:
        raise commands.missing_file(path, shard_id, folder) from None
    except (msgspec.MsgspecError, ValueError):
        remedy = commands.shard_again(shard_id, folder)
        raise BrokenShard(path=path, found=f"the line {line[:60]!r}", remedy=remedy) from None


def read_digests(folder: Path, shard_id: int, stamp: FileStamp, *, is_checked: bool = False) -> Digests:
    """Read the digests of a shard, see docs/format.md. ``is_checked``: skip the check of their hash."""
    path = names.digests_path(folder, shard_id)
    try:
        raw = files.read_regular(path, max_bytes=stamp.num_bytes)
    except files.NOT_THERE:
        raise commands.missing_file(path, shard_id, folder) from None
    if not is_checked and (found := hashlib.sha256(raw).hexdigest()) != stamp.sha256:
        remedy, expected = commands.shard_again(shard_id, folder), stamp.sha256[:12]
        raise BrokenShard(path=path, found=f"sha256 {found[:12]}", expected=expected, remedy=remedy)
    return _as_digests(path, raw)


@dataclass(frozen=True, kw_only=True)
class BlankedDocuments:
    """The blanked documents of one shard: document i begins at ``offsets[i]`` of input ``inputs[i]``."""

    plan_id: Digest
    shard_id: int
    made_from: Digest  # sha256 of the shard's tar before blanking
    inputs: list[Count]  # positions of inputs in the plan
    offsets: list[Count]  # see docs/format.md, "Places"

    def are_at(self, input_number: int, offsets: Numbers) -> npt.NDArray[np.bool_]:
        """Return which documents of an input, given where they begin, are blanked: bool[n]."""
        blanked = np.array(self.offsets, np.int64)[np.array(self.inputs, np.int64) == input_number]
        return np.isin(offsets, blanked)


def blank_digests(is_for_validation: npt.NDArray[np.bool_]) -> Digests:
    """Return the digests of blanked documents: DIGEST[n]."""
    return _BLANK_DIGESTS[is_for_validation.astype(np.intp)]


def publish_blanked(folder: Path, documents: BlankedDocuments) -> None:
    """Write DATA/blanked/shard-N.json."""
    path = names.blanked_path(folder, documents.shard_id)
    files.make_subfolder(folder, path.parent.name)
    content = json.dumps(names.with_content_hash(_FORMAT, asdict(documents)))
    files.publish_bytes(path, content.encode() + b"\n")


def read_blanked(folder: Path, plan_id: str, shard_id: int) -> BlankedDocuments:
    """Read DATA/blanked/shard-N.json. Raises BrokenShard also if it is missing."""
    path = names.blanked_path(folder, shard_id)
    advice = "restore the original file: without it the shard would contain what was blanked"
    try:
        found = names.read_file(path, _FORMAT, BlankedDocuments, max_bytes=_MAX_BLANKED_BYTES)
    except files.NOT_THERE:
        raise BrokenShard(f"{path} is missing; {advice}", path=path, found="missing") from None
    except BrokenShard as error:
        error.advise(advice)
        raise
    if (found.plan_id, found.shard_id) != (plan_id, shard_id):
        other = f"shard {found.shard_id} of plan {found.plan_id[:12]}"
        raise OtherPlan(path=path, found=other, expected=f"{shard_id} of {plan_id[:12]}", advice=advice)
    if len(found.inputs) != len(found.offsets):
        raise names.wrong_value(path, "offsets", found.offsets, f"{len(found.inputs)}, as in inputs")
    return found
