"""Documents and their ids -> bytes of tar members and idx records, a batch at a time.

A data set has one of two forms: a sample per document, or groups of packed rows. What is behind them knows
neither. The tar equals the one of webdataset's TarWriter, to the byte.
Nothing here loops over tokens, and over documents only to copy slices.
"""

from __future__ import annotations

import functools
import itertools
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import NO_LOSS, Ids, Numbers, TokenBatch
from preprocess.make.packing import START, RowGroup, Starts, packer_of, rows_per_member
from preprocess.read.format import DocumentBatch
from preprocess.read.long_documents import LongDocument
from shardprep.errors import BadInput
from shardprep.format.dataset_spec import BLANK, DatasetSpec
from shardprep.format.digests import DIGEST, are_for_validation
from shardprep.format.idx import IDX_DOCUMENT, idx_dtype
from shardprep.format.names import (
    BLOCK_BYTES,
    DOC_STARTS_FIELD,
    LOSS_MASK_FIELD,
    MAX_MEMBER_BYTES,
    ROW_TOKENS_FIELD,
    TEXT_FIELD,
    document_key,
    npy_header,
    rows_key,
    token_field,
)

_SIZE = slice(124, 135)  # eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits
_OCTAL_SIZE = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_OCTAL_CHECKSUM = 8 ** np.arange(5, -1, -1, dtype=np.int64)

_BLOCK_TOKENS = 1 << 16  # of a long document, written at once

Bytes = npt.NDArray[np.uint8]
Records = npt.NDArray[np.void]  # of an idx
Digests = npt.NDArray[np.void]  # DIGEST[documents]
_NO_DIGESTS = np.empty(0, DIGEST)


class Piece(NamedTuple):
    """Bytes of the tar, and of the samples that they complete, all of one side, what idx and digests say."""

    data: bytes | memoryview
    records: Records
    digests: Digests = _NO_DIGESTS  # of the documents that begin in the samples, if any are kept
    is_validation: bool = False


Prepared = Callable[[], Iterator[Piece]]  # to be called in the order of the input


class DocumentMembers:
    """A sample per document: its ``text.txt``, if that is kept, and its ``token_ids``.

    Its methods, all but ``prepare``, are called in the order of the input. They yield pieces of the tar, each
    with the idx records of the samples that it completes, often none. They raise BadInput for a member larger
    than the idx can say.
    """

    num_padding = num_split = 0

    def __init__(
        self,
        spec: DatasetSpec,
        shard_id: int,
        *,
        keep_text: bool,
        batch_size: int | None,
        has_blanks: bool = False,
    ) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._keep_text = keep_text
        self._batch_size = batch_size
        self._tar_bytes = 0
        self._field = token_field("documents", spec.token_format)
        vocab_size = spec.tokenizer.vocab_size
        self._json = json_ids(vocab_size, has_blanks=has_blanks) if spec.token_format == "json" else None
        self._npy_header_bytes = 0 if self._json else len(npy_header(spec.dtype, (1,)))

    def prepare(
        self, documents: DocumentBatch, tokens: TokenBatch, digests: Digests = _NO_DIGESTS
    ) -> Prepared:
        """Lay out a batch as far as no other batch matters, in any thread; the result yields its pieces.

        With ``batch_size`` nothing is laid out before its turn: memory matters more.
        """
        num_documents = len(documents.texts)
        size = self._batch_size or max(1, num_documents)
        parts = [slice(begin, min(begin + size, num_documents)) for begin in range(0, num_documents, size)]
        laid_out = (self._lay_out(documents, tokens, part)._replace(digests=digests[part]) for part in parts)
        return functools.partial(self._placed, laid_out if self._batch_size else list(laid_out))

    def _placed(self, laid_out: Iterable[Piece]) -> Iterator[Piece]:
        """Pieces that begin at byte 0, as they follow what is in the tar already."""
        for piece in laid_out:
            piece.records["offset"] += self._tar_bytes
            self._tar_bytes += len(piece.data)
            yield from self._sides(piece)

    def _sides(self, piece: Piece) -> Iterator[Piece]:
        """The piece with its samples for training, and one of no bytes with those for validation."""
        if not (fraction := self._spec.validation_fraction):
            yield piece
            return
        is_validation = are_for_validation(piece.digests, fraction)
        for side, data in ((False, piece.data), (True, b"")):
            here = is_validation == side
            if len(data) or here.any():
                yield Piece(data, piece.records[here], piece.digests[here], side)

    def rest(self) -> Iterator[Piece]:
        """Yield what is held, at the end of the shard."""
        return iter(())

    def _lay_out(self, documents: DocumentBatch, tokens: TokenBatch, part: slice) -> Piece:
        """The members of part of a batch: their bytes, and IDX_DOCUMENT[documents] as at byte 0."""
        tokens = tokens.part(part.start, part.stop)
        num_tokens, lines = np.diff(tokens.offsets), documents.lines[part]
        id_bytes = self._id_bytes(tokens)
        texts = [text.encode() for text in documents.texts[part]] if self._keep_text else []
        text_bytes = np.fromiter(map(len, texts), np.int64, len(texts))
        self._check_sizes(documents.input_number, id_bytes.max(initial=0), text_bytes.max(initial=0))
        sample_bytes = _padded(id_bytes) + BLOCK_BYTES
        if self._keep_text:
            sample_bytes += _padded(text_bytes) + BLOCK_BYTES
        ends = np.cumsum(sample_bytes)
        buffer = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
        id_starts = ends - _padded(id_bytes) - BLOCK_BYTES
        if self._keep_text:
            text_starts = self._place_headers(buffer, ends - sample_bytes, lines, TEXT_FIELD, text_bytes)
            _place(buffer, text_starts, texts)
        id_starts = self._place_headers(buffer, id_starts, lines, self._field, id_bytes)
        self._place_ids(buffer, id_starts, id_bytes, tokens)
        records = np.empty(len(num_tokens), IDX_DOCUMENT)
        records["offset"] = id_starts + self._npy_header_bytes
        records["num_bytes"] = id_bytes - self._npy_header_bytes
        records["num_tokens"] = num_tokens
        records["source"] = documents.input_number
        records["source_offset"] = documents.input_offsets[part]
        return Piece(buffer.data, records)

    def long_document(
        self, document: LongDocument, num_text_bytes: int, ids: Ids, digest: Digests
    ) -> Iterator[Piece]:
        """Lay out a document whose text, of so many bytes, is read once more. ``digest``: one or none."""
        place, none = document.place, np.empty(0, IDX_DOCUMENT)
        num_bytes = self._json.length(ids) if self._json else int(self._id_bytes(TokenBatch.of_one(ids))[0])
        self._check_sizes(place.input_number, num_bytes, num_text_bytes)
        for data in self._long_pieces(document, num_text_bytes, ids, num_bytes):
            self._tar_bytes += len(data)
            yield Piece(data, none)
        begin = self._tar_bytes - num_bytes + self._npy_header_bytes
        self._tar_bytes += -num_bytes % BLOCK_BYTES
        record = (begin, num_bytes - self._npy_header_bytes, len(ids), place.input_number, place.start)
        records = np.array([record], IDX_DOCUMENT)
        yield from self._sides(Piece(bytes(-num_bytes % BLOCK_BYTES), records, digest))

    def _long_pieces(
        self, document: LongDocument, num_text_bytes: int, ids: Ids, num_bytes: int
    ) -> Iterator[bytes]:
        """The members of a long document, some at a time, all but the zeros at the end."""
        line = np.array([document.place.line])
        if self._keep_text:
            yield document_headers(self._shard_id, line, TEXT_FIELD, np.array([num_text_bytes])).tobytes()
            yield from (text.encode() for text in document.text())
            yield bytes(-num_text_bytes % BLOCK_BYTES)
        yield document_headers(self._shard_id, line, self._field, np.array([num_bytes])).tobytes()
        if not self._json:
            yield npy_header(self._spec.dtype, (len(ids),))
            for begin in range(0, len(ids), _BLOCK_TOKENS):
                yield ids[begin : begin + _BLOCK_TOKENS].astype(self._spec.dtype).tobytes()
            return
        yield b"["
        for begin in range(0, len(ids), _BLOCK_TOKENS):
            written = self._json.separated(ids[begin : begin + _BLOCK_TOKENS])
            yield bytes(written if begin else written[2:])
        yield b"]"

    def _id_bytes(self, tokens: TokenBatch) -> Numbers:
        """int64[documents]: bytes of the member that holds each document's ids."""
        if self._json:
            return self._json.lengths(tokens)
        return np.diff(tokens.offsets) * self._spec.dtype.itemsize + self._npy_header_bytes

    @staticmethod
    def _check_sizes(input_number: int, *num_bytes: int) -> None:
        if (largest := max(num_bytes)) > MAX_MEMBER_BYTES:
            raise BadInput(
                f"a document of input {input_number} makes a member of {largest} bytes, at most "
                f"{MAX_MEMBER_BYTES} are possible; use --record packed, or split the document"
            )

    def _place_headers(
        self, buffer: Bytes, starts: Numbers, lines: Numbers, field: str, num_bytes: Numbers
    ) -> Numbers:
        """Write one header per document at ``starts``; returns where the payloads begin."""
        headers = document_headers(self._shard_id, lines, field, num_bytes)
        buffer.reshape(-1, BLOCK_BYTES)[starts // BLOCK_BYTES] = headers
        return starts + BLOCK_BYTES

    def _place_ids(self, buffer: Bytes, starts: Numbers, num_bytes: Numbers, tokens: TokenBatch) -> None:
        lengths = np.diff(tokens.offsets)
        if self._json:
            written = memoryview(self._json.separated(tokens.ids))
            ends = np.cumsum(np.where(lengths > 0, num_bytes, 0)).tolist()
            pieces = [written[begin + 1 : end] for begin, end in itertools.pairwise([0, *ends])]
            _place(buffer, starts, pieces)
            buffer[starts] = ord("[")
            buffer[starts + num_bytes - 1] = ord("]")
            return
        dtype = self._spec.dtype
        ids = tokens.ids.astype(dtype).view(np.uint8).data
        bounds = (tokens.offsets * dtype.itemsize).tolist()
        pieces = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
        headers = [npy_header(dtype, (length,)) for length in lengths.tolist()]
        _place(buffer, starts, headers)
        _place(buffer, starts + self._npy_header_bytes, pieces)


def _place(buffer: Bytes, starts: Numbers, pieces: Sequence[bytes | memoryview]) -> None:
    """Copy each piece to its place: a loop of slices, 0.15 us each, beats a scatter at 4 ns per byte."""
    view = buffer.data
    for start, piece in zip(starts.tolist(), pieces, strict=True):
        view[start : start + len(piece)] = piece


def ustar_header(name: str, num_bytes: int) -> bytes:
    """The 512 bytes before a member: mode 0644, owner 0, mtime 0."""
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT)


def _padded(num_bytes: Numbers) -> Numbers:
    """Sizes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def document_headers(shard_id: int, lines: Numbers, field: str, num_bytes: Numbers) -> Bytes:
    """Headers of one field of many documents: uint8[documents, 512].

    ``lines`` ascend. Line numbers of more than eight digits, which are rare, are written one by one.
    """
    if len(lines) and lines[-1] >= 10**8:
        sizes = zip(lines.tolist(), num_bytes.tolist(), strict=True)
        long = [ustar_header(f"{document_key(shard_id, line)}.{field}", size) for line, size in sizes]
        return np.frombuffer(b"".join(long), np.uint8).reshape(-1, BLOCK_BYTES)
    key = document_key(shard_id, 0)
    template = np.frombuffer(ustar_header(f"{key}.{field}", 0), np.uint8).copy()
    template_sum = int(template[:148].sum()) + int(template[156:].sum()) + 8 * ord(" ")
    headers = np.broadcast_to(template, (len(lines), BLOCK_BYTES)).copy()
    digits = lines[:, None] // 10 ** np.arange(7, -1, -1, dtype=np.int64) % 10
    octals = num_bytes[:, None] // _OCTAL_SIZE % 8
    headers[:, len(key) - 8 : len(key)] += digits.astype(np.uint8)
    headers[:, _SIZE] += octals.astype(np.uint8)
    checksums = template_sum + digits.sum(axis=1) + octals.sum(axis=1)
    headers[:, _CHECKSUM] = ord("0") + checksums[:, None] // _OCTAL_CHECKSUM % 8
    return headers


@functools.cache
def json_ids(vocab_size: int, *, has_blanks: bool = False) -> JsonIds:
    """Return the table of a vocabulary, made once a process (9 ms for 128,256 tokens)."""
    return JsonIds(vocab_size, has_blanks=has_blanks)


class JsonIds:
    """Writes ids as ``json.dumps`` does, ``[128000, 9906]``: the bytes of webdataset's TarWriter.

    A table holds ``, 9906`` of every id, padded with zero bytes to a fixed width: a batch is one
    look-up and one pass that drops the zeros. About 11 ns per token, against 16 of orjson on short
    arrays (one core), and orjson leaves out the spaces.
    """

    def __init__(self, vocab_size: int, *, has_blanks: bool = False) -> None:
        width = 8 if vocab_size <= 10**6 and not has_blanks else 16
        texts = np.zeros((vocab_size + has_blanks, width), np.uint8)
        texts[:, :2] = list(b", ")
        self._widths = np.empty(len(texts), np.uint8)
        self._row_of_blank = vocab_size if has_blanks else None
        if has_blanks:
            text = b", %d" % BLANK
            texts[-1, : len(text)] = list(text)
            self._widths[-1] = len(text)
        for num_digits in range(1, width - 1):
            first, last = (10 ** (num_digits - 1) if num_digits > 1 else 0), min(10**num_digits, vocab_size)
            if first >= last:
                break
            powers = 10 ** np.arange(num_digits - 1, -1, -1)
            texts[first:last, 2 : 2 + num_digits] = ord("0") + np.arange(first, last)[:, None] // powers % 10
            self._widths[first:last] = 2 + num_digits
        self._table: npt.NDArray[np.void] = texts.view(f"V{width}").ravel()

    def _rows(self, ids: Ids) -> Ids:
        return ids if self._row_of_blank is None else np.where(ids == BLANK, self._row_of_blank, ids)

    def lengths(self, batch: TokenBatch) -> Numbers:
        """int64[documents]: bytes of each document's JSON text."""
        ends = np.zeros(len(batch.ids) + 1, np.int64)
        np.cumsum(self._widths[self._rows(batch.ids)], out=ends[1:])
        # "[" takes the place of the first ", ", and "]" the byte that this saves.
        return np.maximum(np.diff(ends[batch.offsets]), 2)

    def length(self, ids: Ids) -> int:
        """The same of one document, which may be long: looking up takes 16 bytes for each id."""
        blocks = (ids[begin : begin + _BLOCK_TOKENS] for begin in range(0, len(ids), _BLOCK_TOKENS))
        return max(2, sum(int(self._widths[self._rows(block)].sum()) for block in blocks))

    def separated(self, ids: Ids) -> bytearray:
        """All ids, each with ``, `` before it."""
        wide = bytearray(len(ids) * self._table.itemsize)
        np.take(self._table, self._rows(ids), out=np.frombuffer(wide, self._table.dtype))
        return wide.translate(None, b"\0")


def _starts(num: int, source: int, offsets: int | Numbers, digests: Digests) -> Starts:
    """START[num] of documents whose positions are not known yet; zeros for no digests."""
    starts = np.zeros(num, START)
    starts["source"], starts["source_offset"] = source, offsets
    if len(digests):
        starts["digest"] = digests
    return starts


class RowMembers:
    """Packed rows: many rows per member, the places where documents begin beside it; see DocumentMembers.

    One packer forms the rows for training, another one those for validation, if any: no row holds both.
    """

    def __init__(self, spec: DatasetSpec, shard_id: int, pack: str) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._packers = [packer_of(spec, pack) for _ in range(2 if spec.validation_fraction else 1)]
        self._member_tokens = rows_per_member(spec) * spec.seq_len
        self._held: list[tuple[TokenBatch, Starts]] = []  # for validation, not yet packed
        self._num_held = 0  # tokens in them
        self._num_rows = 0
        self._tar_bytes = 0
        self.num_padding = 0

    @property
    def num_split(self) -> int:
        return sum(packer.num_split for packer in self._packers)

    def prepare(
        self, documents: DocumentBatch, tokens: TokenBatch, digests: Digests = _NO_DIGESTS
    ) -> Prepared:
        starts = _starts(len(documents.texts), documents.input_number, documents.input_offsets, digests)
        return lambda: self._packed(tokens, starts)

    def _packed(self, tokens: TokenBatch, starts: Starts) -> Iterator[Piece]:
        """The members that documents fill.

        Those for validation are held until they fill a member, so that the order of members follows from the
        documents alone, however they are batched, and consecutive ones for training are packed together.
        """
        if not (fraction := self._spec.validation_fraction):
            yield from self._appended(tokens, starts, is_validation=False)
            return
        is_validation = are_for_validation(starts["digest"], fraction)
        sums = np.cumsum(np.where(is_validation, np.diff(tokens.offsets), 0))
        first = before = 0
        while first < len(starts):
            wanted = before + self._member_tokens - self._num_held
            end = min(int(np.searchsorted(sums, wanted)) + 1, len(starts))
            part, here = tokens.part(first, end), is_validation[first:end]
            yield from self._appended(part.only(~here), starts[first:end][~here], is_validation=False)
            self._held.append((part.only(here), starts[first:end][here]))
            self._num_held += int(sums[end - 1]) - before
            if self._num_held >= self._member_tokens:
                yield from self._release()
            first, before = end, int(sums[end - 1])

    def _release(self) -> Iterator[Piece]:
        """The members that the documents held for validation fill."""
        held, self._held, self._num_held = self._held, [], 0
        if held:
            tokens = TokenBatch.joined([tokens for tokens, _ in held])
            starts = np.concatenate([starts for _, starts in held])
            yield from self._appended(tokens, starts, is_validation=True)

    def _appended(self, tokens: TokenBatch, starts: Starts, *, is_validation: bool) -> Iterator[Piece]:
        for group in self._packers[is_validation].append(tokens, starts):
            yield self._member(group, is_validation=is_validation)

    def long_document(self, document: LongDocument, _: int, ids: Ids, digest: Digests) -> Iterator[Piece]:
        """Lay out its ids; rows hold no text."""
        place = document.place
        return self._packed(TokenBatch.of_one(ids), _starts(1, place.input_number, place.start, digest))

    def rest(self) -> Iterator[Piece]:
        for side, packer in enumerate(self._packers):
            if side:
                yield from self._release()
            for group in packer.finish():
                yield self._member(group, is_validation=side == 1)

    def _member(self, group: RowGroup, *, is_validation: bool) -> Piece:
        """One member: its bytes, and the idx records of its rows."""
        fields: dict[str, npt.NDArray[Any]] = {
            DOC_STARTS_FIELD: group.starts["position"].astype(np.uint32),
            token_field("packed", "npy"): group.rows,
        }
        if self._spec.record == "chat":
            fields[LOSS_MASK_FIELD] = (group.rows < NO_LOSS).astype(np.uint8)
            fields[token_field("chat", "npy")] = (group.rows & ~NO_LOSS).astype(self._spec.dtype)
        num_padding = group.rows.size - int(group.row_tokens.sum(dtype=np.int64))
        if num_padding:
            fields[ROW_TOKENS_FIELD] = group.row_tokens
        pieces: list[bytes] = []
        payloads = {}  # byte in the tar where each field's numbers begin
        key = rows_key(self._shard_id, self._num_rows)
        for name, array in sorted(fields.items()):
            header = npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = self._tar_bytes + sum(map(len, pieces)) + BLOCK_BYTES + len(header)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.tobytes()]
            pieces.append(bytes(-num_bytes % BLOCK_BYTES))
        data = b"".join(pieces)
        self._num_rows += len(group.rows)
        self._tar_bytes += len(data)
        self.num_padding += num_padding
        return Piece(data, self._records(group, payloads), group.starts["digest"], is_validation)

    def _records(self, group: RowGroup, payloads: dict[str, int]) -> Records:
        row_bytes = self._spec.seq_len * self._spec.dtype.itemsize
        numbers = np.arange(len(group.rows))
        begins = np.searchsorted(group.starts["position"], numbers * self._spec.seq_len)
        records = np.empty(len(group.rows), idx_dtype(self._spec.kind))
        records["offset"] = payloads[token_field("packed", "npy")] + numbers * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = group.row_tokens
        records["source"] = group.firsts["source"]
        records["source_offset"] = group.firsts["source_offset"]
        records["starts_offset"] = payloads[DOC_STARTS_FIELD] + 4 * begins
        records["num_starts"] = np.diff(begins, append=len(group.starts))
        if LOSS_MASK_FIELD in payloads:
            records["mask_offset"] = payloads[LOSS_MASK_FIELD] + numbers * self._spec.seq_len
        return records


Members = DocumentMembers | RowMembers
