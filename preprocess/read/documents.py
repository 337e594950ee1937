"""Read the documents of a shard in batches, and define the interface of the input formats.

A file is opened once and read by position. If it was written to in the meantime, it is refused at the end.
Planning records its size, its mtime and a hash of 3 x 64 KiB.

A part of a file is a range of its bytes as they are on disk, so each byte of the input is in one shard. The
format decides where a part may begin: at a line, a row group or a frame, or only at byte 0. The user's
function, chat templates and exclusions are applied here, in the same way for all formats.
"""

from __future__ import annotations

import codecs
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

from preprocess.read import text_fields
from preprocess.read.fields import text_fields_of
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, TextFields, UnusableText
from preprocess.read.transform import Transform, transform_of
from shardprep.command_line import needs
from shardprep.errors import BadInput, BrokenShard, NotFound, ReadWriteError, Refused, UsageError
from shardprep.files import ReadFile, with_retries
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import DocumentNames, canonical_conversation, digests_of, read_excluded
from shardprep.format.names import InputKind, input_kind, place_text
from shardprep.format.plan import ByteRange, PlannedShard, PlanOptions

if TYPE_CHECKING:
    from preprocess.read.rendering import ChatTemplate

Numbers = npt.NDArray[np.int64]
Stretches = Sequence[tuple[int, int]]  # parts of a file, (byte, end), ascending
BATCH_BYTES = 512 << 10  # of raw text in a batch; 128 KiB to 2 MiB take the same time
# A batch has at most as many lines as if each had this size: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32
# Errors that mean that there is no such input. Any other error of opening a file may be temporary.
_NO_SUCH_INPUT = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
    errno.ENXIO, errno.ENODEV,
})  # fmt: skip
_RESTORE = "restore the file, or plan into a new folder"
_SAMPLE_BYTES = 64 << 10
_HASHED_BYTES = 512 << 10  # read at once, if bytes are only hashed
# Of the JSON of a conversation's messages. The time to render them grows faster than their length.
_MAX_MESSAGE_CHARS = 4 << 20
_TOO_LONG = UnusableText("too_long", f"its messages have more than {_MAX_MESSAGE_CHARS} characters")


# Inputs. -----------------------------------------------------------------------------------------------


class Stamp(NamedTuple):
    """Size and times of a file. A write changes one of them, but so does ``touch`` or a new hard link."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    def __str__(self) -> str:
        mtime, ctime = (np.datetime64(time_ns, "ns") for time_ns in self[1:])
        return f"{self.num_bytes} bytes, mtime {mtime}Z, ctime {ctime}Z"


class OpenInput:
    """A regular file that is open for reading; threads may share it.

    All reads use one descriptor, so bytes of a file that replaces it are never mixed in. After a temporary
    error a read is tried again. Raises NotFound if there is no such regular file, and ReadWriteError.
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
                found = "a broken link"
            expected, advice = "a regular file that can be read", "restore it, or move it away"
            raise NotFound(path=path, found=found, expected=expected, advice=advice) from None
        self.stamp = self._status()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), fewer if the file ends before. Raises ReadWriteError."""
        data, read = b"", self.file.read_beginning
        while (at := start + len(data)) < end:
            what = f"input {self.path} cannot be read at byte {at}"
            piece = with_retries(what, functools.partial(read, at, end - at))
            if not piece:
                break
            data += piece  # usually the whole range, in which case nothing is copied
        return data

    def read_all(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError, also if the file ends before."""
        data = self.read(start, end)
        if len(data) < end - start:
            what = f"input {self.path} ended at byte {start + len(data)}, expected {end} or more bytes"
            raise ReadWriteError(f"{what}; {_RESTORE}")
        return data

    def check_unchanged(self) -> None:
        """Check that the file did not change since it was opened. Raises Refused, or ReadWriteError."""
        found = self._status()
        if found != self.stamp:
            changed = f"a file that changed while it was read: {found}"
            advice = "run this again once it no longer changes, or plan into a new folder"
            raise Refused(path=self.path, found=changed, expected=self.stamp, advice=advice)

    def _status(self) -> Stamp:
        try:
            status = self.file.status()
        except OSError as error:
            raise ReadWriteError(f"input {self.path} cannot be read: {error.strerror}") from None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# Beginnings of the pointers that git-lfs, git-annex and git-xet leave in place of a file, and the command to
# fetch it. The first version of git-lfs had other names.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git lfs pull",
    b"version https://hawser.github.com/spec/": "git lfs pull",
    b"version http://git-media.io/v/": "git lfs pull",
    b"/annex/objects/": "git annex get .",
    b".git/annex/objects/": "git annex get .",  # a link that is a file, where git makes no links
    b"# xet version ": "git xet materialize .",
}
MOST_POINTER_BYTES = 1024


def fetch_command(data: bytes) -> str | None:
    """Return the command that fetches the file, if ``data`` is only a pointer to it, or else None.

    Git may have changed the line ends of a pointer, and an editor may have put a byte order mark before it.
    """
    if len(data) > MOST_POINTER_BYTES:
        return None
    text = data.removeprefix(codecs.BOM_UTF8).lstrip()
    while text.startswith(b"../"):
        text = text[3:]
    for beginning, command in _POINTERS.items():
        if text.startswith(beginning):
            return command
    return None


def unreadable(file: OpenInput, why: str) -> BadInput:
    """Build the error for an input that cannot be read as the format of its name."""
    message = f"input {file.path} {why}; replace it with an intact file, or move it away and plan again"
    return BadInput(message, path=file.path, expected="an intact file")


class RangeReader:
    """Reads a range of bytes of a file, in one thread, and hashes each byte once, in order.

    Raises NotFound if the file is gone, Refused if it is not the planned one. The sample is hashed again only
    if size or mtime differ. To notice other changes, too, plan with ``--hash_inputs``.
    """

    def __init__(self, byte_range: ByteRange, digest: hashlib._Hash | None) -> None:
        self.byte_range = byte_range
        self._digest = digest
        self._hashed_end = byte_range.start  # all bytes of the range before this one are hashed
        planned = byte_range.planned
        try:
            self.file = OpenInput(byte_range.path)
        except NotFound as error:
            if planned is not None:
                error.advise("if the raw folder moved, pass --input_dir")
                error.remedy = "--input_dir"
            raise
        size = self.file.stamp.num_bytes
        if planned is None or (size, self.file.stamp.mtime_ns) == (planned.num_bytes, planned.mtime_ns):
            return
        found = sample_sha256(self.file)
        if (size, found) != (planned.num_bytes, planned.sha256):
            sampled = f"{size} bytes with sample {found[:12]}"
            expected = f"{planned.num_bytes} with {planned.sha256[:12]} as planned"
            raise Refused(path=byte_range.path, found=sampled, expected=expected, advice=_RESTORE)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._hashed_end:
            self._digest.update(memoryview(data)[self._hashed_end - start :])
            self._hashed_end = end
        return data

    def hash_rest(self) -> None:
        """Read and hash the rest of the range, unless there is no digest."""
        while self._digest is not None and self._hashed_end < self.byte_range.end:
            self.read(self._hashed_end, min(self._hashed_end + _HASHED_BYTES, self.byte_range.end))


def sample_sha256(file: OpenInput) -> str:
    """Return the sha256 of the first, middle and last 64 KiB, or of a small file. Raises ReadWriteError."""
    size = file.stamp.num_bytes
    if size <= 3 * _SAMPLE_BYTES:
        return hashlib.sha256(file.read(0, size)).hexdigest()
    starts = (0, (size - _SAMPLE_BYTES) // 2, size - _SAMPLE_BYTES)
    return hashlib.sha256(b"".join(file.read(start, start + _SAMPLE_BYTES) for start in starts)).hexdigest()


class Inspected(NamedTuple):
    """Facts about a file, for planning."""

    text_bytes: int  # estimated, to make even shards
    is_whole: bool  # whether it can only be read as a whole


class Start(NamedTuple):
    """A place where a part of a file may begin."""

    byte: int  # of the file
    text_byte: int = 0  # of the decompressed text; 0 if the file is not compressed


# Separates joined texts. JSON strings have quotes of their own, so they are joined with the part between the
# quotes. Two separators can overlap only in a quote.
BETWEEN = b'"\0\1document\2"'


class Texts:
    """Texts of consecutive documents, as UTF-8: joined, and as a list that is made when it is first used.

    They are given as ``each``; or as ``joined`` with BETWEEN, which none of the ``num_texts`` texts contains.
    ``characters``: a string with all their characters beyond ASCII, which saves decoding them again.
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
        self.num_bytes = len(self.joined) - max(0, self.num_texts - 1) * len(BETWEEN)  # without separators
        self.characters = characters

    @staticmethod
    def of_strings(texts: Iterable[str]) -> Texts:
        """Encode strings."""
        return Texts([text.encode() for text in texts])

    @functools.cached_property
    def each(self) -> list[bytes]:
        return self.joined.split(BETWEEN) if self.num_texts else []

    def only(self, numbers: Iterable[int]) -> Texts:
        """Return some of the texts."""
        return Texts([self.each[number] for number in numbers])

    def __len__(self) -> int:
        return self.num_texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.each)


@dataclass(frozen=True, kw_only=True)
class InputRecords:
    """Consecutive lines or rows of a file: their texts, and where they are in the file."""

    texts: Texts | Sequence[bytes | UnusableText] = ()  # as UTF-8; in a list an empty text is not a document
    starts: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # byte of the text, or row
    sizes: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # bytes of a line, 1 for a row
    num_bytes: int  # bytes of the file that were read for these records
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # values beside the texts, by name


class Format(Protocol):
    """A format of input files. It keeps no state, so that all methods may run in several threads."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Estimate a file's text with few reads. Raises BadInput if it is not of this format."""

    def starts(self, file: OpenInput, stretches: Stretches, options: PlanOptions) -> list[Start | None]:
        """Return for each (byte, end) the first place at or after ``byte`` where a part may begin.

        If there is none, return the file's size; if it is not before ``end``, None. Raises BadInput.
        """

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        """Yield the records of a part in order, about ``batch_bytes`` of text at a time.

        Their ``num_bytes`` add up to the size of the part. Raises BadInput, ReadWriteError.
        """


def starts_among(places: Iterable[Start], file: OpenInput, stretches: Stretches) -> list[Start | None]:
    """Return ``Format.starts`` of a file whose parts may begin at ``places``, which ascend."""
    end_of_file, remaining, place = Start(file.stamp.num_bytes), iter(places), Start(0)
    found: list[Start | None] = []
    for byte, end in stretches:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        found.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return found


def texts_of(values: Iterable[str | UnusableText]) -> list[bytes | UnusableText]:
    """Encode the texts of records. A blank text becomes empty, and a too long one an UnusableText."""
    found: list[bytes | UnusableText] = []
    for value in values:
        if isinstance(value, UnusableText):
            found.append(value)
        else:
            text = b"" if value.isspace() else value.encode()
            found.append(text if len(text) <= MOST_DOCUMENT_BYTES else text_fields.too_long("its text"))
    return found


# Documents. --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that is left out: a line of the quarantine file."""

    input: str  # path of its file, relative to the input folder
    input_offset: int
    num_bytes: int
    line: int
    reason: str
    detail: str
    source: str = ""  # the label that its record names; "": the label of its file


# Reasons why documents are left out if the field of the text is the wrong one.
_WRONG_FIELD = ("no_field", "null_field", "wrong_type")


def advice_about(bad: Iterable[BadDocument], options: PlanOptions) -> list[str]:
    """Return sentences about what to change so that documents are not left out, by their reasons."""
    reasons: set[tuple[str, bool]] = set()  # with whether the input has fields, unlike plain text
    for each in bad:
        reasons.add((each.reason, input_kind(each.input).format.has_fields))
    found: list[str] = []
    if any((reason, True) in reasons for reason in _WRONG_FIELD) and options.text_field:
        found.append(
            f"If --text_field {options.text_field} is wrong, plan into a new folder with the right one."
        )
    if ("undecodable", False) in reasons:
        found.append(f"If --encoding {options.encoding} is wrong, plan into a new folder with the right one.")
    if ("undecodable", True) in reasons:
        found.append("JSON and tables are read as UTF-8: convert such files with iconv -f ENCODING -t utf-8.")
    if found:
        return [*found, "If not, correct the input and plan again."]
    return ["Correct the input and plan again."]


@dataclass(frozen=True, kw_only=True)
class DocumentBatch:
    """A batch: consecutive documents of one input. Empty lines are counted, but are not documents."""

    input_number: int  # position of the file in the plan
    input_path: str  # relative to the input folder
    texts: Texts  # of each document, never empty
    lines: Numbers  # int64[n]: line, or row, of each document in the shard, from 0
    offsets: Numbers  # int64[n]: where each document begins in the file, see docs/format.md
    # Values beside the texts, by name: "id" and "source" of the record; of conversations "spans", the
    # characters that the assistant wrote, and "messages", the JSON that the text was rendered from.
    columns: dict[str, list[Any]] = field(default_factory=dict)
    first_line: int  # of the batch, in the shard
    num_lines: int
    num_bytes: int  # bytes of the file that were read for the batch
    bad: list[BadDocument] = field(default_factory=list)

    def only(self, numbers: Numbers, texts: Texts | None = None) -> DocumentBatch:
        """Return some of the documents, with the given texts or their own. The counts do not change."""
        picked = numbers.tolist()
        columns = {name: [column[n] for n in picked] for name, column in self.columns.items()}
        texts, lines, offsets = texts or self.texts.only(picked), self.lines[numbers], self.offsets[numbers]
        return replace(self, texts=texts, lines=lines, offsets=offsets, columns=columns)

    def of_lines(self, first_line: int, end_line: int, *, num_bytes: int) -> DocumentBatch:
        """Return the documents of the lines [first_line, end_line), as a batch of ``num_bytes``."""
        first, end = np.searchsorted(self.lines, (first_line, end_line))
        some, num_lines = self.only(np.arange(first, end)), end_line - first_line
        bad = [each for each in self.bad if first_line <= each.line < end_line]
        return replace(some, bad=bad, first_line=first_line, num_lines=num_lines, num_bytes=num_bytes)

    def parts(self, most: int) -> Iterator[DocumentBatch]:
        """Cut the batch into batches of at most ``most`` documents. The last one counts all its bytes."""
        end = self.first_line + self.num_lines
        borders = [self.first_line, *self.lines[most::most].tolist(), end]
        for first_line, end_line in itertools.pairwise(borders):
            yield self.of_lines(first_line, end_line, num_bytes=self.num_bytes if end_line == end else 0)

    def digests(self) -> npt.NDArray[np.void]:
        """Return DIGEST[n]: a hash of each document, see shardprep/format/documents.py."""
        if "messages" in self.columns:
            return digests_of(canonical_conversation(each).encode() for each in self.columns["messages"])
        return digests_of(self.texts)

    def with_texts(
        self, texts: Iterable[bytes | UnusableText], sizes: Numbers | None = None
    ) -> DocumentBatch:
        """Replace the texts. A document with an empty text is dropped; one with an UnusableText is bad.

        ``sizes``: bytes of each document in the input (default: of its text before).
        """
        kept, found, bad = list[int](), list[bytes](), [*self.bad]
        for number, text in enumerate(texts):
            if isinstance(text, UnusableText):
                bad.append(
                    BadDocument(
                        input=self.input_path,
                        input_offset=int(self.offsets[number]),
                        num_bytes=len(self.texts.each[number]) if sizes is None else int(sizes[number]),
                        line=int(self.lines[number]),
                        **vars(text),
                        source=self.columns["source"][number] if "source" in self.columns else "",
                    )
                )
            elif text:
                kept.append(number)
                found.append(text)
        bad.sort(key=lambda each: each.line)
        return replace(self.only(np.array(kept, np.int64), Texts(found)), bad=bad)


class DocumentReader:
    """Reads the documents of inputs with the options of a plan, except those that are ``excluded``."""

    def __init__(
        self, options: PlanOptions, transform: Transform | None = None, excluded: DocumentNames | None = None
    ) -> None:
        self.transform, self._excluded = transform, excluded
        self._fields = text_fields_of(options)
        self._template: ChatTemplate | None = None
        if options.record == "chat":
            from preprocess.read.rendering import ChatTemplate

            self._template = ChatTemplate.of_options(options)

    @staticmethod
    def open_for_plan(
        folder: DataFolder, options: PlanOptions, transform_file: Path | None
    ) -> DocumentReader:
        """Build the reader of a plan. Raises as ``transform_of`` and ``read_excluded``."""
        transform = transform_of(folder, options, transform_file)
        excluded = read_excluded(folder, options.excluded) if options.excluded else None
        return DocumentReader(options, transform, excluded)

    def read_shard(self, shard: PlannedShard, batch_bytes: int = BATCH_BYTES) -> Iterator[DocumentBatch]:
        """Yield the documents of a shard. Raises as ``read_ranges``, and Refused if its input changed."""
        digest = None if shard.sha256 is None else hashlib.sha256()
        yield from self.read_ranges(shard.ranges, batch_bytes, digest, shard.max_documents)
        if self.transform is not None:
            self.transform.files.check_unchanged()
        if digest is not None and digest.hexdigest() != shard.sha256:
            names = ", ".join(str(byte_range.path) for byte_range in shard.ranges[:3])
            found = f"other input bytes of shard {shard.shard_id:05d}, with sha256 {digest.hexdigest()[:12]}"
            raise Refused(path=names, found=found, expected=str(shard.sha256)[:12], advice=_RESTORE)

    def read_ranges(
        self,
        ranges: list[ByteRange],
        batch_bytes: int = BATCH_BYTES,
        digest: hashlib._Hash | None = None,
        max_documents: int | None = None,
    ) -> Generator[DocumentBatch, None, None]:
        """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``.

        All bytes of the ranges are added to ``digest``, in order. Reading ends after ``max_documents``.
        Raises NotFound, ReadWriteError, BadInput if a file is not of its format, and Refused if it changed
        while it was read, unless the digest shows every change.
        """
        transform, template, excluded = self.transform, self._template, self._excluded
        reasons: set[str] = set()  # of LeaveOut, so far
        num_left, bytes_left = max_documents, sum(byte_range.end - byte_range.start for byte_range in ranges)
        for documents in read_records(ranges, self._fields, batch_bytes, digest):
            if transform is not None:
                columns = dict(documents.columns)
                records = columns.pop("record", None)
                if records is None:  # plain text
                    records = [{"text": text.decode()} for text in documents.texts]
                given = zip(records, documents.offsets.tolist(), strict=True)
                results = transform.texts(given, documents.input_path, reasons, is_chat=template is not None)
                documents = replace(documents, columns=columns).with_texts(results)
            if template is not None:
                documents = _render(documents, template)
            if excluded is not None:
                ids = documents.columns.get("id")
                found = excluded.of_documents(documents.input_path, documents.offsets, ids, documents.digests)
                is_named = found.max(axis=0, initial=-1) >= 0  # by its id, text or place
                if is_named.any():
                    texts: list[bytes | UnusableText] = list(documents.texts)
                    for number in np.flatnonzero(is_named).tolist():
                        why = excluded.why_excluded(found[:, number])
                        texts[number] = UnusableText("excluded", why)
                    documents = documents.with_texts(texts)
            # A conversation may have several documents.
            lines = documents.lines if num_left is None else np.unique(documents.lines)
            if num_left is not None and len(lines) >= num_left:
                # The limit is reached. This batch also counts the bytes that will not be read.
                end_line = int(lines[num_left - 1]) + 1 if num_left else documents.first_line
                yield documents.of_lines(documents.first_line, end_line, num_bytes=bytes_left)
                return
            if num_left is not None:
                num_left -= len(lines)
            bytes_left -= documents.num_bytes
            yield documents


def read_records(
    ranges: list[ByteRange], fields: TextFields, batch_bytes: int, digest: hashlib._Hash | None = None
) -> Iterator[DocumentBatch]:
    """Yield the documents with the texts that ``fields`` give, before any function or chat template."""
    line = 0  # number in the shard
    for byte_range in ranges:
        reader = RangeReader(byte_range, digest)
        for records in format_of_kind(byte_range.kind).read(reader, fields, batch_bytes):
            texts, num_lines = records.texts, len(records.starts)
            # Usually each line has a text, so no document is dropped or bad.
            if not isinstance(texts, Texts) and all(texts) and {bytes}.issuperset(map(type, texts)):
                texts = Texts(cast(list[bytes], list(texts)))
            documents = DocumentBatch(
                input_number=byte_range.input_number,
                input_path=byte_range.planned.path if byte_range.planned else byte_range.path.name,
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
        # If each byte was hashed as it was read, the hash shows every change, and a touch does no harm. But
        # tables, and some compressed files, are also read outside of the range.
        if digest is None or not byte_range.kind.is_in_bytes:
            reader.file.check_unchanged()


def _render(documents: DocumentBatch, template: ChatTemplate) -> DocumentBatch:
    """Render conversations, whose texts so far are their JSON. Some may become several documents."""
    from preprocess.read.chat import TooCostly, render_conversations

    documents = documents.with_texts(
        text if len(text.decode()) <= _MAX_MESSAGE_CHARS else _TOO_LONG for text in documents.texts
    )
    if not (messages := [text.decode() for text in documents.texts]):
        return documents
    try:
        rendered = render_conversations(template, messages)
    except TooCostly as error:
        place = place_text(documents.input_path, int(documents.offsets[error.number]))
        what = f"{error}, for the conversation at {place}"
        remedy = "change that conversation, or plan again with another template as --chat_template_file"
        raise BadInput(f"{what}; {remedy}") from None
    numbers: list[int] = []  # of the conversation of each document
    texts: list[bytes | UnusableText] = []
    spans: list[list[tuple[int, int]]] = []
    for number, found in enumerate(rendered):
        if isinstance(found, UnusableText):
            numbers.append(number)
            texts.append(found)
            spans.append([])
            continue
        for each in found:
            numbers.append(number)
            texts.append(each.text.encode())
            spans.append(each.spans)
    documents = replace(documents, columns={**documents.columns, "messages": messages})
    documents = documents.only(np.array(numbers, np.int64))
    documents = replace(documents, columns={**documents.columns, "spans": spans})
    return documents.with_texts(texts)


def format_of(name: str) -> Format:
    """Return the format of a file by its name. Raises UsageError if a library for it is missing."""
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
