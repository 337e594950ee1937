"""The parts of a shard -> its documents, in batches, each with the input and the place that it came from.

Each part is read by its file's format (shardprep/format/names.py). What the user asked to be done to
texts is done here, for all formats alike, and here the documents of a trial are counted off.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from preprocess.read import BATCH_BYTES
from preprocess.read.format import Format, RangeReader, Texts
from preprocess.read.lines import COMPRESSIONS, load_zstd
from preprocess.read.text_fields import TextFields, UnusableText, text_fields_of
from preprocess.read.transform import Transform
from shardprep.command_line import needs
from shardprep.errors import BadInput, Refused, UsageError
from shardprep.format.documents import (
    DocumentNames,
    canonical_conversation,
    digests_of,
    read_excluded,
)
from shardprep.format.names import input_kind, place_text
from shardprep.format.plan import ByteRange, Plan, PlannedShard, PlanOptions

if TYPE_CHECKING:
    from preprocess.read.chat import ChatTemplate

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")
# Of a conversation's messages as JSON; rendering takes more than proportionally longer.
_MOST_MESSAGE_CHARS = 4 << 20
_TOO_LONG = UnusableText("too_long", f"its messages have more than {_MOST_MESSAGE_CHARS} characters")
_EXCLUDED = UnusableText("excluded", "--exclude names it")


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that is left out. All fields but ``named`` are those of a line of the quarantine file."""

    source: int  # position of the input file in the plan; the quarantine file names it
    source_offset: int
    num_bytes: int
    line: int
    reason: str
    detail: str
    named: str = ""  # the source that its record names; "": the file's


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A batch: consecutive documents of one input. Empty lines are left out but counted."""

    input_number: int  # position of the file in the plan
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

    def only(self, numbers: Numbers) -> Documents:
        """Return some of the documents; the counts stay."""
        picked = numbers.tolist()
        return dataclasses.replace(
            self,
            texts=self.texts.only(picked),
            lines=self.lines[numbers],
            offsets=self.offsets[numbers],
            columns={name: [column[n] for n in picked] for name, column in self.columns.items()},
        )

    def parts(self, most: int) -> Iterator[Documents]:
        """Cut the batch into parts of at most ``most`` documents; the last one accounts for the bytes."""
        rest = self
        while len(rest.lines) > most:
            end_line = int(rest.lines[most])
            yield rest.before(most, end_line, num_bytes=0)
            rest = dataclasses.replace(
                rest.only(np.arange(most, len(rest.lines))),
                first_line=end_line,
                num_lines=rest.first_line + rest.num_lines - end_line,
                bad=[each for each in rest.bad if each.line >= end_line],
            )
        yield rest

    def before(self, num_documents: int, end_line: int, *, num_bytes: int) -> Documents:
        """Return the documents before a line, which account for ``num_bytes`` of the input."""
        return dataclasses.replace(
            self.only(np.arange(num_documents)),
            num_lines=end_line - self.first_line,
            num_bytes=num_bytes,
            bad=[each for each in self.bad if each.line < end_line],
        )

    def digests(self) -> npt.NDArray[np.void]:
        """DIGEST[n]: what each document is known by, see shardprep/format/documents.py."""
        if "messages" in self.columns:
            return digests_of(canonical_conversation(each).encode() for each in self.columns["messages"])
        return digests_of(self.texts)

    def sorted_out(
        self, results: Iterable[T | UnusableText], sizes: Numbers | None = None
    ) -> tuple[Documents, list[T]]:
        """Return the documents with a result that is not empty, and these results.

        An UnusableText says why one is left out. ``sizes``: bytes of each in the input, those of their texts
        by default.
        """
        kept, found, bad = list[int](), list[T](), [*self.bad]
        for number, result in enumerate(results):
            if isinstance(result, UnusableText):
                bad.append(
                    BadDocument(
                        source=self.input_number,
                        source_offset=int(self.offsets[number]),
                        num_bytes=len(self.texts[number]) if sizes is None else int(sizes[number]),
                        line=int(self.lines[number]),
                        reason=result.reason,
                        detail=result.detail,
                        named=self.columns["source"][number] if "source" in self.columns else "",
                    )
                )
            elif result:
                kept.append(number)
                found.append(result)
        bad.sort(key=lambda one: one.line)
        return dataclasses.replace(self.only(np.array(kept, np.int64)), bad=bad), found


def documents_of_shard(
    plan: Plan,
    folder: Path,
    shard: PlannedShard,
    *,
    batch_bytes: int = BATCH_BYTES,
    transform: Transform | None = None,
) -> Iterator[Documents]:
    """Yield the documents of a shard's input, without those that the plan excludes.

    Raises what ``read_documents`` does, and Refused where the plan knows the input's hash, and it differs.
    """
    excluded = plan.options.excluded
    digest = None if shard.sha256 is None else hashlib.sha256()
    yield from read_documents(
        shard.ranges,
        plan.options,
        batch_bytes=batch_bytes,
        digest=digest,
        most_documents=shard.most_documents,
        excluded=_excluded(folder, excluded) if excluded else None,
        transform=transform,
    )
    if digest is not None and digest.hexdigest() != shard.sha256:
        names = sorted({plan.inputs[number].path for number in shard.input_numbers})
        raise Refused(
            f"the input of shard {shard.shard_id:05d} ({', '.join(names[:3])}) changed since it was planned: "
            f"sha256 {digest.hexdigest()[:12]}, the plan says {str(shard.sha256)[:12]}; bring the file back, "
            "or plan anew into a new folder"
        )


_excluded = functools.lru_cache(maxsize=1)(read_excluded)  # the same for all shards


def read_documents(
    ranges: list[ByteRange],
    options: PlanOptions,
    *,
    batch_bytes: int = BATCH_BYTES,
    digest: hashlib._Hash | None = None,
    most_documents: int | None = None,
    excluded: DocumentNames | None = None,
    transform: Transform | None = None,
) -> Generator[Documents, None, None]:
    """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``.

    ``digest`` is told all bytes of the ranges, in order. Reading ends behind ``most_documents`` documents.
    ``excluded``: names of documents that are left out. ``transform``: what they go through, if the options
    have its hash.

    Ranges begin and end where their format allows it. Raises NotFound where a file cannot be opened,
    ReadWriteError where reading fails, BadInput where a file is not of its format, Refused where a file was
    written to while it was read and nobody hashes it.
    """
    template = None
    if options.record == "chat":
        from preprocess.read.chat import ChatTemplate  # 12 files that a task of texts need not open

        template = ChatTemplate(options.chat_template, options.chat_tokens, options.allow_special_tokens)
    names = {part.input_number: part.planned.path if part.planned else part.path.name for part in ranges}
    reasons: set[str] = set()  # of LeaveOut so far
    num_left, bytes_left = most_documents, sum(part.end - part.start for part in ranges)
    fields = text_fields_of(options)
    for documents in read_records(ranges, options, fields, batch_bytes=batch_bytes, digest=digest):
        name = names[documents.input_number]
        if transform is not None:
            columns = dict(documents.columns)
            records = columns.pop("record", None)  # of lines of text there are none
            if records is None:
                records = [{"text": text.decode()} for text in documents.texts]
            given = zip(records, documents.offsets.tolist(), strict=True)
            results = transform.texts(given, name, reasons, is_chat=template is not None)
            documents, texts = dataclasses.replace(documents, columns=columns).sorted_out(results)
            documents = dataclasses.replace(documents, texts=Texts(texts))
        if template is not None:
            documents = _rendered(documents, template, name)
        if excluded is not None:
            ids = documents.columns.get("id")
            found = excluded.of_documents(name, documents.offsets, ids, documents.digests)
            named = found.max(axis=0, initial=-1)
            if named.max(initial=-1) >= 0:
                both = zip(documents.texts, named, strict=True)
                documents, _ = documents.sorted_out(text if of < 0 else _EXCLUDED for text, of in both)
        if num_left is not None and len(documents.lines) >= num_left:
            # The last document of a trial: it accounts for all bytes behind it, too.
            end_line = int(documents.lines[num_left - 1]) + 1 if num_left else documents.first_line
            yield documents.before(num_left, end_line, num_bytes=bytes_left)
            return
        if num_left is not None:
            num_left -= len(documents.lines)
        bytes_left -= documents.num_bytes
        yield documents


def read_records(
    ranges: list[ByteRange],
    options: PlanOptions,
    fields: TextFields,
    *,
    batch_bytes: int = BATCH_BYTES,
    digest: hashlib._Hash | None = None,
) -> Iterator[Documents]:
    """Yield the documents as ``fields`` take them out of records: nothing is changed or rendered."""
    line = 0  # of the shard
    for part in ranges:
        reader = RangeReader(part, digest)
        for records in format_of(part.path.name).read(reader, options, fields, batch_bytes):
            texts, num_lines = records.texts, len(records.starts)
            is_whole = isinstance(texts, Texts) or (all(texts) and {bytes}.issuperset(map(type, texts)))
            if not isinstance(texts, Texts):
                texts = Texts([text if isinstance(text, bytes) else b"" for text in texts])
            documents = Documents(
                input_number=part.input_number,
                texts=texts,
                lines=np.arange(line, line + num_lines),
                offsets=records.starts,
                columns={name: list(column) for name, column in records.columns.items()},
                first_line=line,
                num_lines=num_lines,
                num_bytes=records.num_bytes,
            )
            yield documents if is_whole else documents.sorted_out(records.texts, records.sizes)[0]
            line += num_lines
        reader.hash_rest()
        # Where all bytes were hashed as they were read, the hash tells, and a touch does no harm.
        if digest is None or not input_kind(part.path.name).is_in_bytes:
            reader.file.check_unchanged()


def _rendered(documents: Documents, template: ChatTemplate, name: str) -> Documents:
    """Render conversations of the input ``name``, given as the JSON of their messages."""
    from preprocess.read.chat import TooCostly, render_conversations

    messages = (text.decode() for text in documents.texts)
    documents, asked = documents.sorted_out(
        text if len(text) <= _MOST_MESSAGE_CHARS else _TOO_LONG for text in messages
    )
    if not asked:
        return documents
    try:
        found = render_conversations(template, asked)
    except TooCostly as error:
        place = place_text(name, int(documents.offsets[error.number]))
        raise BadInput(
            f"{error}, for the conversation of {place}; change that conversation, or plan anew with another "
            "template as --chat_template_file"
        ) from None
    documents = dataclasses.replace(documents, columns={**documents.columns, "messages": asked})
    kept, rendered = documents.sorted_out(found)
    return dataclasses.replace(
        kept,
        texts=Texts([one.text.encode() for one in rendered]),
        columns={**kept.columns, "spans": [one.spans for one in rendered]},
    )


def format_of(name: str) -> Format:
    """Return what reads a file of this name. Its module is imported when it is first needed.

    Raises UsageError where a library is missing.
    """
    kind = input_kind(name)
    module, _, reader = kind.format.reader.partition(":")
    try:
        found = getattr(importlib.import_module(f"preprocess.read.{module}"), reader)
    except ImportError:
        if not kind.format.library:
            raise
        raise UsageError(needs(kind.format.suffixes[0], kind.format.library)) from None
    if not kind.format.can_be_compressed:
        return cast(Format, found())
    return cast(Format, found(COMPRESSIONS[kind.compression] if kind.compression else None))


def load_libraries(names: Iterable[str]) -> None:
    """Import what reading files of these names takes, before any work. Raises UsageError where it is missing.

    pyarrow takes 0.1 s of CPU, which else would count as work of the first shard.
    """
    kinds = {input_kind(name): name for name in names}
    for kind, name in kinds.items():
        format_of(name)
        if kind.compression == ".zst":
            load_zstd()
