"""Read the documents of a shard in batches.

The user's function, chat templates and exclusions are applied here, in the same way for all formats.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from preprocess.read.fields import text_fields_of
from preprocess.read.formats import BATCH_BYTES, Numbers, Texts, format_of_kind, texts_of
from preprocess.read.inputs import RESTORE, RangeReader
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.errors import BadInput, Refused
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import DocumentNames, canonical_conversation, digests_of
from shardprep.format.excluded import read_excluded
from shardprep.format.inputs import input_kind, place_text
from shardprep.format.plan import ByteRange, PlannedShard
from shardprep.format.plan_options import PlanOptions

if TYPE_CHECKING:
    from preprocess.read.rendering import ChatTemplate
    from preprocess.read.transform import Transform

# Of the JSON of a conversation's messages. The time to render them grows faster than their length.
_MAX_MESSAGE_CHARS = 4 << 20
_TOO_LONG = UnusableText("too_long", f"its messages have more than {_MAX_MESSAGE_CHARS} characters")


class BadDocument(Struct, frozen=True, kw_only=True):
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
    reasons: set[tuple[str, bool]] = set()  # with whether --text_field is for the input
    encodings: set[bool] = set()  # of undecodable text: whether --encoding is for the input
    for each in bad:
        input_format = input_kind(each.input).format
        reasons.add((each.reason, input_format.has_fields))
        if each.reason == "undecodable":
            encodings.add(input_format.is_text)
    advice: list[str] = []
    if any((reason, True) in reasons for reason in _WRONG_FIELD) and options.text_field:
        advice.append(
            f"If --text_field {options.text_field} is wrong, plan into a new folder with the right one."
        )
    if True in encodings:
        advice.append(
            f"If --encoding {options.encoding} is wrong, plan into a new folder with the right one."
        )
    if False in encodings:
        advice.append("Parquet and Arrow have texts in UTF-8: write such files again.")
    if advice:
        return [*advice, "If not, correct the input and plan again."]
    return ["Correct the input and plan again."]


class DocumentBatch(Struct, frozen=True, kw_only=True):
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

    def moved(self, num_lines: int) -> DocumentBatch:
        """Return the documents with line numbers that are larger by ``num_lines``."""
        bad = [replace(each, line=each.line + num_lines) for each in self.bad]
        return replace(self, lines=self.lines + num_lines, first_line=self.first_line + num_lines, bad=bad)

    def only(self, numbers: Numbers, texts: Texts | None = None) -> DocumentBatch:
        """Return some of the documents, with the given texts or their own. The counts do not change."""
        picked = numbers.tolist()
        columns = {name: [column[n] for n in picked] for name, column in self.columns.items()}
        texts = texts or self.texts.only(picked)
        lines = self.lines[numbers]
        offsets = self.offsets[numbers]
        return replace(self, texts=texts, lines=lines, offsets=offsets, columns=columns)

    def of_lines(self, first_line: int, end_line: int, *, num_bytes: int) -> DocumentBatch:
        """Return the documents of the lines [first_line, end_line), as a batch of ``num_bytes``."""
        first, end = np.searchsorted(self.lines, (first_line, end_line))
        some = self.only(np.arange(first, end))
        num_lines = end_line - first_line
        bad = [each for each in self.bad if first_line <= each.line < end_line]
        return replace(some, bad=bad, first_line=first_line, num_lines=num_lines, num_bytes=num_bytes)

    def split(self, most: int) -> Iterator[DocumentBatch]:
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
        """Replace the texts. Documents with an empty text are dropped. One with an UnusableText is bad.

        ``sizes``: bytes of each document in the input (default: of its text before).
        """
        kept = list[int]()
        kept_texts = list[bytes]()
        bad = [*self.bad]
        for number, text in enumerate(texts):
            if isinstance(text, UnusableText):
                bad.append(
                    BadDocument(
                        input=self.input_path,
                        input_offset=int(self.offsets[number]),
                        num_bytes=len(self.texts.each[number]) if sizes is None else int(sizes[number]),
                        line=int(self.lines[number]),
                        **asdict(text),
                        source=self.columns["source"][number] if "source" in self.columns else "",
                    )
                )
            elif text:
                kept.append(number)
                kept_texts.append(text)
        bad.sort(key=lambda each: each.line)
        return replace(self.only(np.array(kept, np.int64), Texts(kept_texts)), bad=bad)


class DocumentReader:
    """Reads the documents of inputs with the options of a plan, except those that are ``excluded``."""

    def __init__(
        self, options: PlanOptions, transform: Transform | None = None, excluded: DocumentNames | None = None
    ) -> None:
        self.transform = transform
        self._excluded = excluded
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
        transform = None
        if options.transform_sha256 or transform_file is not None:
            from preprocess.read.transform import transform_of  # 15 ms that other tasks save

            transform = transform_of(folder, options, transform_file)
        excluded = read_excluded(folder, options.excluded) if options.excluded else None
        return DocumentReader(options, transform, excluded)

    def read_shard(self, shard: PlannedShard, batch_bytes: int = BATCH_BYTES) -> Iterator[DocumentBatch]:
        """Yield the documents of a shard. Raises as ``read_ranges``, and Refused if its input changed."""
        digest = None if shard.sha256 is None else hashlib.sha256()
        yield from self.read_ranges(shard.ranges, batch_bytes, digest, shard.max_documents)
        if self.transform is not None:
            self.transform.files.check_unchanged()
        if digest is not None:
            check_digest(shard, digest)

    def read_ranges(
        self,
        ranges: list[ByteRange],
        batch_bytes: int = BATCH_BYTES,
        digest: hashlib._Hash | None = None,
        max_documents: int | None = None,
        *,
        keeps_reasons: bool = False,
    ) -> Generator[DocumentBatch, None, None]:
        """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``.

        All bytes of the ranges are added to ``digest``, in order. Reading ends after ``max_documents``.
        ``keeps_reasons``: keep all reasons of LeaveOut, of which a shard may have only so many.
        Raises NotFound, ReadWriteError, BadInput if a file is not of its format, and Refused if it changed
        while it was read, unless the digest shows every change.
        """
        reasons: set[str] | None = None if keeps_reasons else set()  # of LeaveOut, so far
        num_left = max_documents
        bytes_left = sum(byte_range.end - byte_range.start for byte_range in ranges)
        for documents in read_records(ranges, self._fields, batch_bytes, digest):
            documents = self.prepare(documents, reasons)
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

    def prepare(self, documents: DocumentBatch, reasons: set[str] | None) -> DocumentBatch:
        """Apply the user's function, the chat template and the exclusions to documents as they were read.

        ``reasons``: those of LeaveOut so far in the shard, which a shard may have only so many of; new ones
        are added. None keeps all.
        """
        transform = self.transform
        template = self._template
        excluded = self._excluded
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
            matches = excluded.of_documents(documents.input_path, documents.offsets, ids, documents.digests)
            is_named = matches.max(axis=0, initial=-1) >= 0  # by its id, text or place
            if is_named.any():
                texts: list[bytes | UnusableText] = list(documents.texts)
                for number in np.flatnonzero(is_named).tolist():
                    why = excluded.why_excluded(matches[:, number])
                    # A record is left out once, however many documents it has.
                    is_again = bool(number) and documents.lines[number] == documents.lines[number - 1]
                    texts[number] = b"" if is_again else UnusableText("excluded", why)
                documents = documents.with_texts(texts)
        return documents


def check_digest(shard: PlannedShard, digest: hashlib._Hash) -> None:
    """Raise Refused if the bytes of a shard's input are not those that were planned."""
    if digest.hexdigest() != shard.sha256:
        names = ", ".join(str(byte_range.path) for byte_range in shard.ranges[:3])
        found = f"other input bytes of shard {shard.shard_id:05d}, with sha256 {digest.hexdigest()[:12]}"
        raise Refused(path=names, found=found, expected=str(shard.sha256)[:12], advice=RESTORE)


def read_records(
    ranges: list[ByteRange], fields: TextFields, batch_bytes: int, digest: hashlib._Hash | None = None
) -> Iterator[DocumentBatch]:
    """Yield the documents with the texts that ``fields`` give, before any function or chat template."""
    line = 0  # number in the shard
    for byte_range in ranges:
        reader = RangeReader(byte_range, digest)
        here = fields.of_file(byte_range.name)
        for records in format_of_kind(byte_range.kind).read(reader, here, batch_bytes):
            texts = records.texts
            columns = records.columns
            if records.records is not None:
                values, columns = here.of_records(records.records)
                texts = texts_of(values)
            num_lines = len(records.starts)
            # Usually each line has a text, so no document is dropped or bad.
            if not isinstance(texts, Texts) and all(texts) and {bytes}.issuperset(map(type, texts)):
                texts = Texts(cast(list[bytes], list(texts)))
            documents = DocumentBatch(
                input_number=byte_range.input_number,
                input_path=byte_range.planned.path if byte_range.planned else byte_range.path.name,
                texts=texts if isinstance(texts, Texts) else Texts([]),
                lines=np.arange(line, line + num_lines),
                offsets=records.starts,
                columns={name: list(column) for name, column in columns.items()},
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
    messages = [text.decode() for text in documents.texts]
    if not messages:
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
    for number, result in enumerate(rendered):
        if isinstance(result, UnusableText):
            numbers.append(number)
            texts.append(result)
            spans.append([])
            continue
        for each in result:
            numbers.append(number)
            texts.append(each.text.encode())
            spans.append(each.spans)
    documents = replace(documents, columns={**documents.columns, "messages": messages})
    documents = documents.only(np.array(numbers, np.int64))
    documents = replace(documents, columns={**documents.columns, "spans": spans})
    return documents.with_texts(texts)
