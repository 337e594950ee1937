"""Single documents: their digests, their ids, and the lists that name them.

A digest does not depend on the shard, the kind of record or the tokenizer: it is a hash of the text as it is
encoded, or of a conversation's messages. Equal documents have equal digests, and so are on the same side of a
validation split. Digests are in DATA/digests.

A list for ``plan --exclude`` or ``blank --ids`` names a document per line: an id of --id_field, ``sha256:``
and the sha256 of a text, or ``at:FILE:BYTE``, its place in an input. Lists are read as editors, spreadsheets
and ``jq`` write them: with a byte order mark, any line ends, padding, or names in quotes. White space around
an id does not count, in the list and in the data. A name becomes a key of 16 bytes, so a million names take
16 MB in each process that looks for them.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardprep import errors, files
from shardprep.errors import BadInput, BrokenShard, NotFound, UsageError
from shardprep.files import FileStamp
from shardprep.format import commands, names
from shardprep.format.data_folder import DataFolder
from shardprep.format.json_files import Count
from shardprep.format.manifest import read_side_file, side_file_lines
from shardprep.format.plan import PlannedShard

DIGEST = np.dtype(f"V{names.DIGEST_BYTES}")
NameKind = Literal["id", "text", "place"]
Numbers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.void]  # DIGEST[n]
_TEXT = "sha256:"
_PLACE = "at:"
_EXPECTED = "an id in UTF-8, sha256: and 64 hex digits, or at:FILE:BYTE"
HEX_DIGITS = re.compile("[0-9a-fA-F]{64}")
_CSV_STRING = re.compile('"(?:[^"]|"")*"')
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}  # of columns
# Encodings that a byte order mark shows; UTF-32 comes first, as its mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
EXCLUDED_DETAIL = "--exclude names it: "  # then keys of the document, in hex digits
MOST_NAMES = 10_000_000
MAX_LINE_CHARS = 1 << 20  # of a list
_KEPT_ID = msgspec.json.Decoder(tuple[Count, Count, str])  # a line of DATA/ids


def digests_of(texts: Iterable[bytes]) -> Digests:
    """Return the first 16 bytes of the sha256 of each text: DIGEST[texts]. 1 us, and 1 ns per byte, each."""
    digests = [hashlib.sha256(text).digest()[: names.DIGEST_BYTES] for text in texts]
    return np.frombuffer(b"".join(digests), DIGEST)


def canonical_conversation(conversation: str) -> str:
    """Return the JSON that the digest of a conversation is a hash of: keys sorted, without nulls.

    It is that of the messages, or of an object of them and of what else the template gets.
    """
    parsed = json.loads(conversation)
    messages = parsed["messages"] if isinstance(parsed, dict) else parsed
    for number, message in enumerate(messages):
        # Tables have a null for each key that only other messages have.
        if isinstance(message, dict):
            messages[number] = {key: value for key, value in message.items() if value is not None}
    return json.dumps(parsed, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


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

    def why_excluded(self, positions: npt.NDArray[np.intp]) -> str:
        """Return the detail of an excluded document in the quarantine file, with the keys that name it.

        ``positions``: of one document, intp[kinds], as ``of_documents`` returns them.
        """
        keys = [self.keys[position].tobytes().hex() for position in positions.tolist() if position >= 0]
        return EXCLUDED_DETAIL + " ".join(keys)

    def may_be_in(self, folder: DataFolder, shard: PlannedShard, stamp: FileStamp | None) -> bool:
        """Return whether a shard may have a listed text or place. ``stamp``: of its digests, if kept."""
        if "text" in self.kinds:
            if stamp is None:
                return True
            if (self.find(read_digests(folder, shard.shard_id, stamp)) >= 0).any():
                return True
        for byte_range in shard.ranges:
            path = byte_range.planned.path if byte_range.planned else byte_range.path.name
            # Offsets in rows or in decompressed text say nothing about the part of the file.
            bounds = (byte_range.start, byte_range.end) if byte_range.kind.is_in_bytes else (0, 2**63 - 1)
            first, end = np.searchsorted(self.keys, keys_of_places(path, np.array(bounds)))
            if first < end:
                return True
        return False


def keys_of_ids(ids: Iterable[str]) -> Digests:
    """Return the keys of ids: DIGEST[n]. White space and byte order marks around an id do not count."""
    return digests_of(b"id:" + _unpadded(name).encode() for name in ids)


def _unpadded(name: str) -> str:
    return name.strip().strip("\ufeff").strip()


def keys_of_places(path: str, offsets: Numbers) -> Digests:
    """Return the keys of places in an input: DIGEST[n], 8 bytes of its path's hash, then the offset."""
    keys = np.empty((len(offsets), 2), ">u8")
    keys[:, 0] = int.from_bytes(hashlib.sha256(_PLACE.encode() + path.encode()).digest()[:8], "big")
    keys[:, 1] = offsets
    return keys.view(DIGEST).reshape(-1)


def name_of_place(path: str, offset: int) -> str:
    """Return the line that names a document by its place, as a JSON string if the path needs it."""
    name = f"{_PLACE}{path}:{offset}"
    return name if name.isprintable() else json.dumps(name)


def read_names(path: Path, *, id_field: str) -> DocumentNames:
    """Read a user's list. Raises BadInput, NotFound or UsageError. A million lines take 2 s and 50 MB."""
    keys = bytearray()
    kinds = set[NameKind]()
    for _, key, kind in names_of_list(path, id_field):
        keys += key
        kinds.add(kind)
        if len(keys) > MOST_NAMES * names.DIGEST_BYTES:
            too_many = f"more than {MOST_NAMES:,} names, which every process that makes shards would load"
            raise BadInput(path=path, found=too_many, expected="fewer, or a filtered input")
    if not keys:
        raise BadInput(path=path, found="no document", expected="a line for each document")
    unique_keys = np.unique(np.frombuffer(keys, DIGEST))
    return DocumentNames(keys=unique_keys, kinds=frozenset(kinds))


def lines_of(
    path: Path, listed: DocumentNames, wanted: npt.NDArray[np.bool_], *, id_field: str
) -> Iterator[str]:
    """Yield the lines of a list that are ``wanted``: bool[names]."""
    for line, key, _ in names_of_list(path, id_field):
        position = listed.find(np.frombuffer(key, DIGEST))[0]
        if position >= 0 and wanted[position]:
            yield line


def names_of_list(path: Path, id_field: str) -> Iterator[tuple[str, bytes, NameKind]]:
    """Yield each line that is not blank, without padding, its key of 16 bytes, and its kind.

    Raises BadInput also at the end: if all lines have columns, the list is a table.
    """
    num_ids = 0
    columns: dict[str, set[int]] = {each: set() for each in _SEPARATORS}  # numbers of separators in a line
    try:
        for number, raw in _lines_in(path):
            line = _unpadded(raw)
            if not line:
                continue
            try:
                name = name_in_line(line)
                key, kind = key_of_name(name, has_ids=bool(id_field))
            except ValueError as error:  # also a UnicodeEncodeError
                found = f"{os.fsencode(line[:80])!r} in line {number} ({error})"
                raise BadInput(path=path, found=found, expected=_EXPECTED) from None
            if kind == "id" and not id_field:
                found = f"an id in line {number}, without --id_field"
                expected = "sha256:HEX, or at:FILE:BYTE"
                raise UsageError(path=path, found=found, expected=expected, remedy="--id_field")
            if kind == "id" and name == line:  # not in quotes
                num_ids += 1
                for separator, numbers in columns.items():
                    numbers.add(line.count(separator))
            yield line, key, kind
    except files.NOT_THERE:
        raise NotFound(path=path, found="no such file") from None
    for separator, numbers in columns.items():
        if num_ids > 1 and len(numbers) == 1 and numbers != {0}:
            num = numbers.pop()
            found = f"a table, with {num} {_SEPARATORS[separator]}{'s' * (num > 1)} in each line"
            column = "cut -f 1" if separator == "\t" else f"cut -d '{separator}' -f 1"
            expected = (
                f"one name a line, such as: {column} {errors.quoted(path)} > ids.txt; ids that contain "
            )
            expected += f"a {_SEPARATORS[separator]} are written in double quotes, as JSON strings"
            raise BadInput(path=path, found=found, expected=expected)


def _lines_in(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the number, from 1, and the text of each line, which ends with ``\n``, ``\r\n`` or ``\r``.

    Bytes that are not UTF-8 become surrogates, and UTF-16 and UTF-32 need a byte order mark.
    """
    with files.errors_named(path), os.fdopen(files.open_regular(path), "rb") as raw:
        beginning = raw.read(4)
        raw.seek(0)
        encoding = next((each for mark, each in _MARKS.items() if beginning.startswith(mark)), "utf-8")
        handling = "surrogateescape" if encoding == "utf-8" else "strict"
        text = io.TextIOWrapper(raw, encoding=encoding, errors=handling)
        number = 0
        try:
            while line := text.readline(MAX_LINE_CHARS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    found = f"a line of more than {MAX_LINE_CHARS} characters: line {number}"
                    raise BadInput(path=path, found=found, expected=_EXPECTED)
                yield number, line
        except UnicodeDecodeError as error:
            found = f"bytes that are not {encoding}, after line {number} ({error.reason})"
            raise BadInput(path=path, found=found, expected=_EXPECTED) from None


def name_in_line(line: str) -> str:
    """Return the name in a line, which may be a string of JSON or of CSV. Raises ValueError."""
    if not line.isascii():
        line.encode()  # raises ValueError for bytes that are not UTF-8
    if "\0" in line:
        raise ValueError("a NUL: save the list as UTF-8")
    if line[0] == '"':
        try:
            return str(json.loads(line))
        except ValueError:
            if _CSV_STRING.fullmatch(line):
                return line[1:-1].replace('""', '"')
        raise ValueError("more than one string: write one a line, as jq -r '.[]' does")
    if line[0] in "[]{}":
        try:
            is_json = len(line) == 1 or isinstance(json.loads(line.removesuffix(",")), (list, dict))
        except RecursionError:
            is_json = True
        except ValueError:
            is_json = False
        if is_json:
            raise ValueError("JSON, but not a string: write one name a line, as jq -r '.[]' or '.id' does")
    return line


def key_of_name(name: str, *, has_ids: bool) -> tuple[bytes, NameKind]:
    """Return the key and the kind of a name. Without ids 64 hex digits are a sha256. Raises ValueError."""
    if not has_ids and HEX_DIGITS.fullmatch(name):
        name = _TEXT + name
    if name.startswith(_TEXT):
        digest = bytes.fromhex(name.removeprefix(_TEXT))
        if len(digest) not in (names.DIGEST_BYTES, 32):
            raise ValueError("wrong length")
        return digest[: names.DIGEST_BYTES], "text"
    if name.startswith(_PLACE):
        place = re.fullmatch(r"(.+):([0-9]{1,18})", name.removeprefix(_PLACE), re.DOTALL)
        if place is None:
            raise ValueError("not a file and a byte")
        return keys_of_places(place[1], np.array([int(place[2])])).tobytes(), "place"
    return keys_of_ids([name]).tobytes(), "id"


def as_digests(path: Path, raw: bytes) -> Digests:
    if len(raw) % names.DIGEST_BYTES:
        raise BrokenShard(path=path, found=f"{len(raw)} bytes", expected="whole digests of 16 bytes")
    return np.frombuffer(raw, DIGEST)


def kept_ids(folder: DataFolder, shard_id: int, stamp: FileStamp) -> Iterator[tuple[int, int, str]]:
    """Yield the input, the place in it and the id of each document of a shard planned with --id_field.

    ``stamp``: of the file of ids, from the manifest. Raises BrokenShard after the last one if the file is not
    as stamped, so none may be relied on before all were read.
    """
    name = names.ids_name(shard_id)
    for line in side_file_lines(folder, name, shard_id, stamp):
        try:
            yield _KEPT_ID.decode(line)
        except (msgspec.MsgspecError, ValueError):
            path = folder.path_of(name)
            remedy = commands.shard_again(shard_id, folder)
            raise BrokenShard(path=path, found=f"the line {line[:60]!r}", remedy=remedy) from None


def read_digests(folder: DataFolder, shard_id: int, stamp: FileStamp) -> Digests:
    """Read the digests of a shard, see docs/format.md, and compare them with their stamp."""
    name = names.digests_name(shard_id)
    return as_digests(folder.path_of(name), read_side_file(folder, name, shard_id, stamp))
