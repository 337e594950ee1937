"""The parts of a shard -> its documents, in batches, and the questions that every input format answers.

A file is opened once and read by position, and is looked at again at the end: one that was written to
meanwhile is refused. Its stamp at planning is its size, its mtime and a hash of 3 x 64 KiB.

A part is a range of the file's own bytes, whatever the format: so each byte of the input is in exactly one
shard. Where a part may begin is the format's to say: at a line, a row group, a frame; or at byte 0 alone.
What the user asked to be done to texts is done here, for all formats alike.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from preprocess.read.text_fields import (
    MOST_DOCUMENT_BYTES,
    TextFields,
    Transform,
    UnusableText,
    text_fields_of,
    too_long,
    transform_of,
)
from shardprep.command_line import needs
from shardprep.errors import BadInput, BrokenShard, NotFound, ReadWriteError, Refused, UsageError
from shardprep.files import ReadFile, with_retries
from shardprep.format.documents import DocumentNames, canonical_conversation, digests_of, read_excluded
from shardprep.format.names import InputKind, input_kind, place_text
from shardprep.format.plan import ByteRange, PlannedShard, PlanOptions

if TYPE_CHECKING:
    from preprocess.read.chat import ChatTemplate

Numbers = npt.NDArray[np.int64]
Stretches = Sequence[tuple[int, int]]  # of a file: (byte, end), ascending
BATCH_BYTES = 512 << 10  # of raw text in a batch; 128 KiB to 2 MiB take the same time
# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32
# What says that there is no such input; whatever else opening ends with may go away.
_NO_SUCH_INPUT = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
    errno.ENXIO, errno.ENODEV,
})  # fmt: skip
_BRING_BACK = "bring the file back, or plan anew into a new folder"
_SAMPLE_BYTES = 64 << 10
HASH_BYTES = 1 << 19  # read at once where bytes are only hashed, or only a line's end is looked for
# Of a conversation's messages as JSON; rendering takes more than proportionally longer.
_MOST_MESSAGE_CHARS = 4 << 20
_TOO_LONG = UnusableText("too_long", f"its messages have more than {_MOST_MESSAGE_CHARS} characters")
_EXCLUDED = UnusableText("excluded", "--exclude names it")


# Inputs. -----------------------------------------------------------------------------------------------


class Stamp(NamedTuple):
    """What the file system says of a file: a write moves one of them, and so does a touch or a new link."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    def __str__(self) -> str:
        """Return the size and the times, in UTC, for a message."""
        mtime, ctime = (np.datetime64(time_ns, "ns") for time_ns in self[1:])
        return f"{self.num_bytes} bytes, mtime {mtime}Z, ctime {ctime}Z"


class OpenInput:
    """A regular file, open for reading until nobody holds it any more: threads share it.

    All reads go to the one descriptor, so that a file put in its place meanwhile is never mixed with it. What
    may go away is tried again. Raises ReadWriteError, NotFound for what is not there or no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = with_retries(f"input {path} cannot be opened", functools.partial(ReadFile, path))
        except (BrokenShard, ReadWriteError) as error:
            cause, found = error.__cause__, error.found
            if isinstance(cause, OSError) and cause.errno in _NO_SUCH_INPUT:
                found = cause.strerror
            if found is None:
                raise
            if isinstance(cause, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114 - it never raises
                found = "a link to nothing"
            expected = "a regular file that can be read; bring it back, or move it away"
            raise NotFound(path=path, found=found, expected=expected) from None
        self.stamp = self._status()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), fewer where the file ends before. Raises ReadWriteError."""
        data, read = b"", self.file.read_beginning
        while (at := start + len(data)) < end:
            what = f"input {self.path} cannot be read at byte {at}"
            piece = with_retries(what, functools.partial(read, at, end - at))
            if not piece:
                break
            data += piece  # most often all of it: nothing is copied then
        return data

    def read_all(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError, also where the file ends before."""
        data = self.read(start, end)
        if len(data) < end - start:
            what = f"input {self.path} ended at byte {start + len(data)}, the plan says {end}"
            raise ReadWriteError(f"{what}; {_BRING_BACK}")
        return data

    def check_unchanged(self) -> None:
        """Check that nobody wrote to the file since it was opened. Raises Refused, or ReadWriteError."""
        found = self._status()
        if found != self.stamp:
            changed = f"a file that changed while it was read: {found}"
            expected = f"{self.stamp}; run this again once nobody writes to it, or plan into a new folder "
            expected += "if its text changed"
            raise Refused(path=self.path, found=changed, expected=expected)

    def _status(self) -> Stamp:
        try:
            status = self.file.status()
        except OSError as error:
            raise ReadWriteError(f"input {self.path} cannot be read: {error.strerror}") from None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# What git-lfs and git-annex leave in the place of a file that was not fetched, and what fetches it.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/v1\n": "git lfs pull",
    b"/annex/objects/": "git annex get .",
}
MOST_POINTER_BYTES = 1024


def what_fetches(data: bytes) -> str | None:
    """Return the command that brings the content of which a whole file's ``data`` is a pointer, else None."""
    for beginning, command in _POINTERS.items():
        if data.startswith(beginning) and len(data) <= MOST_POINTER_BYTES:
            return command
    return None


def check_is_fetched(file: OpenInput) -> None:
    """Raise BadInput where a file is only the pointer that a clone of a repository has in its place."""
    size = file.stamp.num_bytes
    if size <= MOST_POINTER_BYTES and (command := what_fetches(file.read(0, size))) is not None:
        expected = f"the file itself; run in its repository: {command}"
        raise BadInput(path=file.path, found="a pointer to a file that was not fetched", expected=expected)


def unreadable(file: OpenInput, why: str) -> BadInput:
    """Return the error of an input that cannot be read as what its name says."""
    message = f"input {file.path} {why}; bring a whole file, or move it away and plan anew"
    return BadInput(message, path=file.path, expected="a whole file")


class RangeReader:
    """Reads a range of bytes of a file, for one thread, and hashes each byte once, in order.

    Raises NotFound where the file is gone, Refused where it is not as planned. Its sample is read again only
    where its size or mtime differs: ``plan --hash_inputs`` sees other changes.
    """

    def __init__(self, part: ByteRange, digest: hashlib._Hash | None) -> None:
        self.part = part
        self._digest = digest
        self._num_hashed = part.start  # byte up to which the range is hashed
        planned = part.planned
        try:
            self.file = OpenInput(part.path)
        except NotFound as error:
            if planned is not None:
                error.advise("if the raw folder moved, pass --input_dir")
                error.remedy = "--input_dir"  # which the advice says
            raise
        size = self.file.stamp.num_bytes
        if planned is None or (size, self.file.stamp.mtime_ns) == (planned.num_bytes, planned.mtime_ns):
            return
        found = sample_sha256(self.file)
        if (size, found) != (planned.num_bytes, planned.sha256):
            expected = f"{planned.num_bytes} with {planned.sha256[:12]} as planned; {_BRING_BACK}"
            raise Refused(path=part.path, found=f"{size} bytes with sample {found[:12]}", expected=expected)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._num_hashed:
            self._digest.update(memoryview(data)[self._num_hashed - start :])
            self._num_hashed = end
        return data

    def hash_rest(self) -> None:
        """Hash what was not read, if the range is hashed at all."""
        while self._digest is not None and self._num_hashed < self.part.end:
            self.read(self._num_hashed, min(self._num_hashed + HASH_BYTES, self.part.end))


def sample_sha256(file: OpenInput) -> str:
    """sha256, in hex, of the first, middle and last 64 KiB, or of all. Raises ReadWriteError."""
    size = file.stamp.num_bytes
    if size <= 3 * _SAMPLE_BYTES:
        return hashlib.sha256(file.read(0, size)).hexdigest()
    starts = (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES)
    return hashlib.sha256(b"".join(file.read(start, start + _SAMPLE_BYTES) for start in starts)).hexdigest()


class Inspected(NamedTuple):
    """What planning wants to know of a file."""

    text_bytes: int  # about; shards are made even by it
    is_whole: bool  # no part of it begins inside it


class Start(NamedTuple):
    """A place where a part of a file may begin."""

    byte: int  # of the file
    text_byte: int = 0  # of the text, where that is compressed; else 0


# Stands between two texts that are joined. None of its beginnings is an end of it, so it cannot overlap
# itself. The quotes are those of two strings of JSON, which are joined as they are.
BETWEEN = b'"\0\1document\2"'


class Texts:
    """Texts of consecutive documents, as UTF-8: joined, and one by one where somebody asks for that.

    They are given by ``each``, or by ``joined``, with BETWEEN between two of them and in none of them.
    ``characters``: a string that has all their characters beyond ASCII, so that none need be decoded again.
    """

    def __init__(
        self,
        each: list[bytes] | None = None,
        *,
        joined: bytes = b"",
        num_texts: int = 0,
        characters: str | None = None,
    ) -> None:
        self.joined, self.num_texts = joined, num_texts
        if each is not None:
            self.each, self.joined, self.num_texts = each, BETWEEN.join(each), len(each)
        self.num_bytes = len(self.joined) - max(0, self.num_texts - 1) * len(BETWEEN)  # of the texts alone
        self.characters = characters

    @staticmethod
    def of_strings(texts: Iterable[str]) -> Texts:
        """Return texts that are held as strings."""
        return Texts([text.encode() for text in texts])

    @functools.cached_property
    def each(self) -> list[bytes]:
        return self.joined.split(BETWEEN) if self.num_texts else []

    def only(self, numbers: Iterable[int]) -> Texts:
        """Return some of the texts."""
        each = self.each
        return Texts([each[number] for number in numbers])

    def __len__(self) -> int:
        return self.num_texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.each)


@dataclass(frozen=True, kw_only=True)
class Records:
    """Consecutive lines or rows of a file: what each says, and where it lies."""

    texts: Texts | Sequence[bytes | UnusableText] = ()  # as UTF-8; of a list an empty one is no document
    starts: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # byte of the text, or row
    sizes: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # bytes of each, or 1 for a row
    num_bytes: int  # of the file, that these account for
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what each tells beside its text


class Format(Protocol):
    """One format of input files. It keeps nothing of a file: every method may run in several threads."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Weigh a file for planning, with few reads. Raises BadInput where it cannot be of this format."""

    def starts(self, file: OpenInput, stretches: Stretches, options: PlanOptions) -> list[Start | None]:
        """For each (byte, end) the first place at or behind ``byte`` where a part may begin.

        None where there is none before ``end``; the file's size where none follows. Raises BadInput.
        """

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[Records]:
        """Yield the records of a part in order, about ``batch_bytes`` of text at a time.

        Their ``num_bytes`` sum up to the part's bytes. Raises BadInput, ReadWriteError.
        """


def starts_among(places: Iterable[Start], file: OpenInput, stretches: Stretches) -> list[Start | None]:
    """Answer ``Format.starts`` for a file with these places, ascending; without any it is only read whole."""
    end_of_file, remaining, place = Start(file.stamp.num_bytes), iter(places), Start(0)
    found: list[Start | None] = []
    for byte, end in stretches:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        found.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return found


def texts_of(values: Iterable[str | UnusableText]) -> list[bytes | UnusableText]:
    """Return the texts of records as UTF-8, none of white space alone; all others stay as they are."""
    found: list[bytes | UnusableText] = []
    for value in values:
        if isinstance(value, UnusableText):
            found.append(value)
        else:
            text = b"" if value.isspace() else value.encode()
            found.append(text if len(text) <= MOST_DOCUMENT_BYTES else too_long("its text"))
    return found


# Documents. --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that is left out, as the quarantine file tells it."""

    source: str  # path of its input in the input folder
    source_offset: int
    num_bytes: int
    line: int
    reason: str
    detail: str
    source_label: str = ""  # that its record names; "": the file's


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A batch: consecutive documents of one input. Empty lines are left out but counted."""

    input_number: int  # position of the file in the plan
    input_path: str  # in the input folder
    texts: Texts  # each document as UTF-8; never empty
    lines: Numbers  # int64[n]: line, or row, of each document in the shard, from 0
    offsets: Numbers  # int64[n]: where each begins in the file, see docs/format.md
    # What stands beside each text, by name: "id" and "source" of its record; of conversations "spans", the
    # characters by the assistant, and "messages", the JSON that the text is rendered from.
    columns: dict[str, list[Any]] = field(default_factory=dict)
    first_line: int  # in the shard
    num_lines: int
    num_bytes: int  # of the file
    bad: list[BadDocument] = field(default_factory=list)

    def only(self, numbers: Numbers, texts: Texts | None = None) -> Documents:
        """Return some of the documents, with their texts or these; the counts stay."""
        picked = numbers.tolist()
        columns = {name: [column[n] for n in picked] for name, column in self.columns.items()}
        texts, lines, offsets = texts or self.texts.only(picked), self.lines[numbers], self.offsets[numbers]
        return replace(self, texts=texts, lines=lines, offsets=offsets, columns=columns)

    def of_lines(self, first_line: int, end_line: int, *, num_bytes: int) -> Documents:
        """Return the documents of some lines, which account for ``num_bytes`` of the input."""
        first, end = np.searchsorted(self.lines, (first_line, end_line))
        some, num_lines = self.only(np.arange(first, end)), end_line - first_line
        bad = [each for each in self.bad if first_line <= each.line < end_line]
        return replace(some, bad=bad, first_line=first_line, num_lines=num_lines, num_bytes=num_bytes)

    def parts(self, most: int) -> Iterator[Documents]:
        """Cut the batch into parts of at most ``most`` documents; the last one accounts for the bytes."""
        end = self.first_line + self.num_lines
        borders = [self.first_line, *self.lines[most::most].tolist(), end]
        for first_line, end_line in itertools.pairwise(borders):
            yield self.of_lines(first_line, end_line, num_bytes=self.num_bytes if end_line == end else 0)

    def digests(self) -> npt.NDArray[np.void]:
        """DIGEST[n]: what each document is known by, see shardprep/format/documents.py."""
        if "messages" in self.columns:
            return digests_of(canonical_conversation(each).encode() for each in self.columns["messages"])
        return digests_of(self.texts)

    def with_texts(self, texts: Iterable[bytes | UnusableText], sizes: Numbers | None = None) -> Documents:
        """Return the documents with other texts, without those that have none.

        An UnusableText says why; an empty one is not told. ``sizes``: bytes of each in the input, those of
        their texts so far by default.
        """
        kept, found, bad = list[int](), list[bytes](), [*self.bad]
        for number, text in enumerate(texts):
            if isinstance(text, UnusableText):
                bad.append(
                    BadDocument(
                        source=self.input_path,
                        source_offset=int(self.offsets[number]),
                        num_bytes=len(self.texts.each[number]) if sizes is None else int(sizes[number]),
                        line=int(self.lines[number]),
                        **vars(text),
                        source_label=self.columns["source"][number] if "source" in self.columns else "",
                    )
                )
            elif text:
                kept.append(number)
                found.append(text)
        bad.sort(key=lambda one: one.line)
        return replace(self.only(np.array(kept, np.int64), Texts(found)), bad=bad)


class DocumentReader:
    """Reads documents of inputs by the options of a plan, without those that it ``excluded``."""

    def __init__(
        self, options: PlanOptions, transform: Transform | None = None, excluded: DocumentNames | None = None
    ) -> None:
        self.transform, self._excluded, self._fields = transform, excluded, text_fields_of(options)
        self._template: ChatTemplate | None = None
        if options.record == "chat":
            from preprocess.read.chat import ChatTemplate  # 12 files that a task of texts need not open

            allows = options.allow_special_tokens
            self._template = ChatTemplate(options.chat_template, options.chat_tokens, allows)

    @staticmethod
    def of_plan(folder: Path, options: PlanOptions, transform_file: Path | None) -> DocumentReader:
        """Load the user's function, and what is excluded. Raises as ``transform_of``, ``read_excluded``."""
        transform = transform_of(options, transform_file)
        excluded = read_excluded(folder, options.excluded) if options.excluded else None
        return DocumentReader(options, transform, excluded)

    def of_shard(self, shard: PlannedShard, batch_bytes: int = BATCH_BYTES) -> Iterator[Documents]:
        """Yield the documents of a shard. Raises as ``of_ranges``, and Refused where its input changed."""
        digest = None if shard.sha256 is None else hashlib.sha256()
        yield from self.of_ranges(shard.ranges, batch_bytes, digest, shard.max_documents)
        if digest is not None and digest.hexdigest() != shard.sha256:
            names = ", ".join(str(part.path) for part in shard.ranges[:3])
            found = f"other input bytes of shard {shard.shard_id:05d}, with sha256 {digest.hexdigest()[:12]}"
            expected = f"{str(shard.sha256)[:12]} as planned; {_BRING_BACK}"
            raise Refused(path=names, found=found, expected=expected)

    def of_ranges(
        self,
        ranges: list[ByteRange],
        batch_bytes: int = BATCH_BYTES,
        digest: hashlib._Hash | None = None,
        max_documents: int | None = None,
    ) -> Generator[Documents, None, None]:
        """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``.

        ``digest`` is told all bytes of the ranges, in order. Reading ends after ``max_documents``. Raises
        NotFound, ReadWriteError, BadInput where a file is not of its format, Refused where one changed while
        it was read, unless its bytes were hashed.
        """
        transform, template, excluded = self.transform, self._template, self._excluded
        reasons: set[str] = set()  # of LeaveOut so far
        num_left, bytes_left = max_documents, sum(part.end - part.start for part in ranges)
        for documents in read_records(ranges, self._fields, batch_bytes, digest):
            if transform is not None:
                columns = dict(documents.columns)
                records = columns.pop("record", None)  # of lines of text there are none
                if records is None:
                    records = [{"text": text.decode()} for text in documents.texts]
                given = zip(records, documents.offsets.tolist(), strict=True)
                results = transform.texts(given, documents.input_path, reasons, is_chat=template is not None)
                documents = replace(documents, columns=columns).with_texts(results)
            if template is not None:
                documents = _rendered(documents, template)
            if excluded is not None:
                ids = documents.columns.get("id")
                found = excluded.of_documents(documents.input_path, documents.offsets, ids, documents.digests)
                named = found.max(axis=0, initial=-1)
                if named.max(initial=-1) >= 0:
                    both = zip(documents.texts, named, strict=True)
                    documents = documents.with_texts(text if of < 0 else _EXCLUDED for text, of in both)
            if num_left is not None and len(documents.lines) >= num_left:
                # The last document of a trial: it accounts for all bytes behind it, too.
                end_line = int(documents.lines[num_left - 1]) + 1 if num_left else documents.first_line
                yield documents.of_lines(documents.first_line, end_line, num_bytes=bytes_left)
                return
            if num_left is not None:
                num_left -= len(documents.lines)
            bytes_left -= documents.num_bytes
            yield documents


def read_records(
    ranges: list[ByteRange], fields: TextFields, batch_bytes: int, digest: hashlib._Hash | None = None
) -> Iterator[Documents]:
    """Yield the documents as ``fields`` take them out of records: nothing is changed or rendered."""
    line = 0  # of the shard
    for part in ranges:
        reader = RangeReader(part, digest)
        for records in format_of_kind(part.kind).read(reader, fields, batch_bytes):
            texts, num_lines = records.texts, len(records.starts)
            if not isinstance(texts, Texts) and all(texts) and {bytes}.issuperset(map(type, texts)):
                texts = Texts(cast(list[bytes], list(texts)))
            documents = Documents(
                input_number=part.input_number,
                input_path=part.planned.path if part.planned else part.path.name,
                texts=texts if isinstance(texts, Texts) else Texts([]),
                lines=np.arange(line, line + num_lines),
                offsets=records.starts,
                columns={name: list(column) for name, column in records.columns.items()},
                first_line=line,
                num_lines=num_lines,
                num_bytes=records.num_bytes,
            )
            yield documents if isinstance(texts, Texts) else documents.with_texts(texts, records.sizes)
            line += num_lines
        reader.hash_rest()
        # If every byte was hashed as it was read, the hash tells of a change, and a touch does no harm.
        # Tables and compressed files are read in other places, too.
        if digest is None or not part.kind.is_in_bytes:
            reader.file.check_unchanged()


def _rendered(documents: Documents, template: ChatTemplate) -> Documents:
    """Render conversations, given as the JSON of their messages."""
    from preprocess.read.chat import Rendered, TooCostly, render_conversations

    documents = documents.with_texts(
        text if len(text.decode()) <= _MOST_MESSAGE_CHARS else _TOO_LONG for text in documents.texts
    )
    asked = [text.decode() for text in documents.texts]
    if not asked:
        return documents
    try:
        found = render_conversations(template, asked)
    except TooCostly as error:
        place = place_text(documents.input_path, int(documents.offsets[error.number]))
        what = f"{error}, for the conversation of {place}"
        remedy = "change that conversation, or plan anew with another template as --chat_template_file"
        raise BadInput(f"{what}; {remedy}") from None
    spans = [one.spans if isinstance(one, Rendered) else [] for one in found]
    documents = replace(documents, columns={**documents.columns, "messages": asked, "spans": spans})
    return documents.with_texts(one.text.encode() if isinstance(one, Rendered) else one for one in found)


def format_of(name: str) -> Format:
    """Return what reads a file of this name. Raises UsageError where a library is missing."""
    return format_of_kind(input_kind(name))


@functools.cache
def format_of_kind(kind: InputKind) -> Format:
    module, _, reader = kind.format.reader.partition(":")
    try:
        found = getattr(importlib.import_module(f"preprocess.read.{module}"), reader)
    except ImportError:
        if not kind.format.library:
            raise
        raise UsageError(needs(kind.format.suffixes[0], kind.format.library)) from None
    return cast(Format, found(kind.compression) if kind.format.can_be_compressed else found())
