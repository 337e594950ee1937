"""The parts of a shard -> its documents, in batches, each with the input and the place that it came from.

Each part is read by its file's format (shardprep/format/input_formats.py). What the user asked to be done to
texts is done here, for all formats alike, and here the documents of a trial are counted off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from preprocess.read.chat import ChatTemplate, TooCostly, render_conversations
from preprocess.read.compression import COMPRESSIONS, load_zstd
from preprocess.read.format import (
    DocumentBatch,
    Format,
    Reading,
    Start,
    no_documents,
    one_left_out,
    starts_among,
)
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.long_documents import LONG_BYTES, MOST_HELD_BYTES, LongDocument
from preprocess.read.text_changes import change_text
from preprocess.read.text_fields import UnusableText
from shardprep.command_line import needs
from shardprep.errors import BadInput, UsageError
from shardprep.format.digests import DIGEST, DIGEST_BYTES
from shardprep.format.document_names import DocumentNames, keys_of_ids
from shardprep.format.input_formats import input_kind, place_text
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange


def read_documents(
    ranges: list[ByteRange],
    reading: Reading,
    *,
    digest: hashlib._Hash | None = None,
    most_documents: int | None = None,
) -> Generator[DocumentBatch | LongDocument, None, None]:
    """Yield the documents of byte ranges in order, in batches of about ``reading.batch_bytes``.

    A document of more than LONG_BYTES comes alone, as a LongDocument. ``digest`` is told all bytes of the
    ranges, in their order. Reading ends behind ``most_documents`` of them.

    Ranges begin and end where their format allows it. Raises NotFound where a file cannot be opened,
    ReadWriteError where reading fails, BadInput where a file is not of its format, Refused where a file was
    written to while it was read and nobody hashes it.
    """
    items = _items(ranges, reading, digest)
    if reading.changes is not None:
        changes = reading.changes
        items = (_changed(item, changes) for item in items)
    if reading.chat is not None:
        template = reading.chat
        names = {part.input_number: part.path.name for part in ranges}
        items = (_conversations(item, template, names) for item in items)
    if reading.excluded is not None:
        excluded = reading.excluded
        items = (_without_named(item, excluded) for item in items)
    yield from items if most_documents is None else _first_ones(ranges, items, most_documents)


_EXCLUDED = UnusableText("excluded", "--exclude names it")


def find_names(item: DocumentBatch | LongDocument, names: DocumentNames) -> npt.NDArray[np.intp]:
    """Return the name of each document of a batch, or of the one long document: intp[n], -1 for none."""
    ids = item.told.ids if isinstance(item, LongDocument) else item.ids
    by_id = None if ids is None or not names.has_ids else names.find(keys_of_ids(ids))
    if not names.has_texts and by_id is not None:
        return by_id
    by_text = names.find(_digest_of(item) if isinstance(item, LongDocument) else item.digests())
    return by_text if by_id is None else np.maximum(by_id, by_text)


def _without_named(item: DocumentBatch | LongDocument, names: DocumentNames) -> DocumentBatch | LongDocument:
    """Leave out the documents that are named; the quarantine file lists them as ``excluded``."""
    is_named = find_names(item, names) >= 0
    if not is_named.any():
        return item
    if isinstance(item, LongDocument):
        return one_left_out(item.place, _EXCLUDED)
    texts = [_EXCLUDED if named else text for named, text in zip(is_named.tolist(), item.texts, strict=True)]
    return item.sorted_out(texts)[0]


def _digest_of(document: LongDocument) -> npt.NDArray[np.void]:
    digest = hashlib.sha256()
    with contextlib.suppress(UnicodeDecodeError):  # it is left out for that
        for piece in document.text():
            digest.update(piece.encode())
    return np.frombuffer(digest.digest()[:DIGEST_BYTES], DIGEST)


def starts_in(file: OpenInput, stretches: Sequence[tuple[int, int]], reading: Reading) -> list[Start | None]:
    """See ``Format.starts``; a format that the registry knows as whole is not asked."""
    if not input_kind(file.path.name).format.cut_at:
        return starts_among((), file, stretches)
    return format_of(file.path.name).starts(file, stretches, reading)


def format_of(name: str) -> Format:
    """What reads a file of this name. Its module is imported when it is first needed.

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


def _conversations(
    item: DocumentBatch | LongDocument, template: ChatTemplate, names: Mapping[int, str]
) -> DocumentBatch:
    if isinstance(item, LongDocument):
        why = UnusableText("too_long", f"its messages have more than {LONG_BYTES} bytes")
        return one_left_out(item.place, why)
    if not item.texts:
        return item
    try:
        found = render_conversations(template, item.texts)
    except TooCostly as error:
        place = place_text(names[item.input_number], int(item.input_offsets[error.number]))
        raise BadInput(
            f"{error}, for the conversation of {place}; change that conversation, or plan anew with another "
            "template as --chat_template_file"
        ) from None
    batch, rendered = item.sorted_out(found)
    return dataclasses.replace(
        batch,
        texts=[one.text for one in rendered],
        spans=[one.spans for one in rendered],
        conversations=batch.texts,
    )


def _items(
    ranges: list[ByteRange], reading: Reading, digest: hashlib._Hash | None
) -> Iterator[DocumentBatch | LongDocument]:
    line = 0
    for part in ranges:
        reader = RangeReader(part, digest)
        for item in format_of(part.path.name).read(reader, reading, line):
            line += item.num_lines
            yield item
        reader.hash_rest()
        # Where all bytes were hashed as they were read, the hash tells, and a touch does no harm.
        if digest is None or not input_kind(part.path.name).is_in_bytes:
            reader.file.check_unchanged()


def _changed(item: DocumentBatch | LongDocument, changes: PlanOptions) -> DocumentBatch | LongDocument:
    """The same with the user's changes done to its texts; a long document is held whole for them."""
    if isinstance(item, DocumentBatch):
        texts = (change_text(text, changes) for text in item.texts)
        if item.keeps_space:
            texts = (text.strip() if isinstance(text, str) else text for text in texts)
        batch, changed = item.sorted_out(texts)
        return dataclasses.replace(batch, texts=changed)
    place = item.place
    if item.held is None and place.end - place.start > MOST_HELD_BYTES:
        why = UnusableText("too_long", f"it has more than {MOST_HELD_BYTES} bytes to be changed")
        return one_left_out(place, why)
    try:
        text = change_text("".join(item.text()), changes)
    except UnicodeDecodeError as error:
        return dataclasses.replace(no_documents(place), num_lines=1, bad=[place.undecodable(error)])
    return dataclasses.replace(item, held=text) if isinstance(text, str) else one_left_out(place, text)


def _first_ones(
    ranges: list[ByteRange], items: Iterator[DocumentBatch | LongDocument], most_documents: int
) -> Iterator[DocumentBatch | LongDocument]:
    """The items up to the last document of a trial, which accounts for all bytes behind it, too."""
    num_left, bytes_left = most_documents, sum(part.end - part.start for part in ranges)
    if not num_left and ranges:
        place = RangeReader(ranges[0], None).place(0, line=0)
        yield no_documents(dataclasses.replace(place, num_bytes=bytes_left))
        return
    for item in items:
        num_documents = 1 if isinstance(item, LongDocument) else len(item.texts)
        if num_documents < num_left:
            num_left -= num_documents
            bytes_left -= item.num_bytes
            yield item
        elif isinstance(item, LongDocument):
            yield dataclasses.replace(item, place=dataclasses.replace(item.place, num_bytes=bytes_left))
            return
        else:
            end = int(item.lines[num_left - 1]) + 1  # of the lines
            yield dataclasses.replace(
                item.only(np.arange(num_left)),
                num_lines=end - item.first_line,
                num_bytes=bytes_left,
                bad=[one for one in item.bad if one.line < end],
                filtered=[line for line in item.filtered if line < end],
            )
            return
