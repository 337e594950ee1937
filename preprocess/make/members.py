"""Documents and their ids -> bytes of tar members and idx records, a batch at a time.

A data set has one of two forms: a sample per document, or groups of packed rows. What is behind them knows
neither. The tar equals the one of webdataset's TarWriter, to the byte.
Nothing here loops over tokens, and over documents only to copy slices.
"""

from __future__ import annotations

import functools
import itertools
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import NO_LOSS, Ids, Numbers, TokenBatch
from preprocess.make.packing import START, RowGroup, Starts, packer_of, rows_per_member
from preprocess.read.documents import Documents
from shardprep.errors import BadInput
from shardprep.format.documents import DIGEST, are_for_validation
from shardprep.format.index import IDX_DOCUMENT, idx_dtype
from shardprep.format.names import (
    BLANK,
    BLOCK_BYTES,
    DOC_STARTS_FIELD,
    LOSS_MASK_FIELD,
    MAX_MEMBER_BYTES,
    ROW_TOKENS_FIELD,
    TEXT_FIELD,
    DatasetSpec,
    document_key,
    npy_header,
    rows_key,
    token_field,
)
from shardprep.format.options import PlanOptions

_SIZE = slice(124, 135)  # eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits
_SHIFTS = np.arange(30, -1, -3)  # of the bits of eleven octal digits

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


class Batch(NamedTuple):
    """Documents, encoded and laid out as far as no other batch matters."""

    documents: Documents
    tokens: TokenBatch
    digests: Digests  # DIGEST[documents], or none where they are not kept
    # The members, as if the tar began with them: IDX_DOCUMENT[documents]. Rows are formed in their turn.
    piece: Piece | None = None


def _digests(documents: Documents, options: PlanOptions) -> Digests:
    return documents.digests() if options.digests else _NO_DIGESTS


class DocumentMembers:
    """A sample per document: its ``text.txt``, if that is kept, and its ``token_ids``."""

    num_padding = num_split = 0  # tokens, and documents that lie in several rows

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._options = options
        self._tar_bytes = 0
        self._field = token_field("documents", spec.token_format)
        vocab_size, has_blanks = spec.tokenizer.vocab_size, bool(options.blanked)
        self._json = json_ids(vocab_size, has_blanks=has_blanks) if spec.token_format == "json" else None
        self._npy_header_bytes = 0 if self._json else len(npy_header(spec.dtype, (1,)))

    def lay_out(self, documents: Documents, tokens: TokenBatch, digests: Digests | None = None) -> Batch:
        """Lay out a batch; without ``digests`` they are those of the documents, where they are kept.

        Runs in a thread: depends on no other batch. Raises BadInput for a member larger than the idx can say.
        """
        if digests is None:
            digests = _digests(documents, self._options)
        lengths = np.diff(tokens.offsets)
        if self._json:
            id_bytes = self._json.lengths(tokens)
        else:
            id_bytes = lengths * self._spec.dtype.itemsize + self._npy_header_bytes
        texts = documents.texts.each if self._options.keep_text else []
        text_bytes = np.fromiter(map(len, texts), np.int64, len(texts))
        largest = max(id_bytes.max(initial=0), text_bytes.max(initial=0))
        if largest > MAX_MEMBER_BYTES:
            raise BadInput(
                f"a document of input {documents.input_number} makes a member of {largest} bytes, at most "
                f"{MAX_MEMBER_BYTES} are possible; use --record packed, or split the document"
            )
        # Where each member's payload begins, behind its header, as if the tar began with this batch.
        sample_bytes = _padded(id_bytes) + BLOCK_BYTES
        if texts:
            sample_bytes += _padded(text_bytes) + BLOCK_BYTES
        ends = np.cumsum(sample_bytes)
        id_starts, text_starts = ends - _padded(id_bytes), ends - sample_bytes + BLOCK_BYTES
        buffer = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
        blocks = buffer.reshape(-1, BLOCK_BYTES)
        if texts:
            headers = document_headers(self._shard_id, documents.lines, TEXT_FIELD, text_bytes)
            blocks[text_starts // BLOCK_BYTES - 1] = headers
            _place(buffer, text_starts, texts)
        headers = document_headers(self._shard_id, documents.lines, self._field, id_bytes)
        blocks[id_starts // BLOCK_BYTES - 1] = headers
        if self._json:
            written = memoryview(self._json.separated(tokens.ids))
            bounds = np.cumsum(np.where(lengths > 0, id_bytes, 0)).tolist()
            pieces = [written[begin + 1 : end] for begin, end in itertools.pairwise([0, *bounds])]
            _place(buffer, id_starts, pieces)
            buffer[id_starts] = ord("[")
            buffer[id_starts + id_bytes - 1] = ord("]")
        else:
            dtype = self._spec.dtype
            ids = tokens.ids.astype(dtype).view(np.uint8).data
            bounds = (tokens.offsets * dtype.itemsize).tolist()
            _place(buffer, id_starts, [npy_header(dtype, (length,)) for length in lengths.tolist()])
            pieces = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
            _place(buffer, id_starts + self._npy_header_bytes, pieces)
        records = np.empty(len(ends), IDX_DOCUMENT)
        records["offset"] = id_starts + self._npy_header_bytes
        records["num_bytes"] = id_bytes - self._npy_header_bytes
        records["num_tokens"] = lengths
        records["source"] = documents.input_number
        records["source_offset"] = documents.offsets
        return Batch(documents, tokens, digests, Piece(buffer.data, records, digests))

    def pieces(self, batch: Batch) -> Iterator[Piece]:
        """Yield pieces of the tar, with the idx records of the samples that they complete, in turn."""
        piece = batch.piece
        assert piece is not None
        piece.records["offset"] += self._tar_bytes
        self._tar_bytes += len(piece.data)
        if not (fraction := self._spec.validation_fraction):
            yield piece
            return
        # The samples for training, and behind them, of no bytes, those for validation.
        is_validation = are_for_validation(piece.digests, fraction)
        for side, data in ((False, piece.data), (True, b"")):
            here = is_validation == side
            if len(data) or here.any():
                yield Piece(data, piece.records[here], piece.digests[here], side)

    def rest(self) -> Iterator[Piece]:
        """Yield what is held, at the end of the shard."""
        return iter(())


def _place(buffer: Bytes, starts: Numbers, pieces: Sequence[bytes | memoryview]) -> None:
    """Copy each piece to its place: a loop of slices, 0.15 us each, beats a scatter at 4 ns per byte."""
    view = buffer.data
    for start, piece in zip(starts.tolist(), pieces, strict=True):
        view[start : start + len(piece)] = piece


def ustar_header(name: str, num_bytes: int) -> bytes:
    """Return the 512 bytes before a member: mode 0644, owner 0, mtime 0."""
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT)


def _padded(num_bytes: Numbers) -> Numbers:
    """Return sizes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def document_headers(shard_id: int, lines: Numbers, field: str, num_bytes: Numbers) -> Bytes:
    """Return the headers of one field of many documents: uint8[documents, 512].

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
    digits, rest = np.empty((len(lines), 8), np.int64), lines
    for place in range(7, -1, -1):
        digits[:, place], rest = rest - rest // 10 * 10, rest // 10
    octals = num_bytes[:, None] >> _SHIFTS & 7
    headers[:, len(key) - 8 : len(key)] += digits.astype(np.uint8)
    headers[:, _SIZE] += octals.astype(np.uint8)
    checksums = template_sum + digits.sum(axis=1) + octals.sum(axis=1)
    headers[:, _CHECKSUM] = ord("0") + (checksums[:, None] >> _SHIFTS[-6:] & 7)
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

    def separated(self, ids: Ids) -> bytearray:
        """Return all ids, each with ``, `` before it."""
        wide = bytearray(len(ids) * self._table.itemsize)
        np.take(self._table, self._rows(ids), out=np.frombuffer(wide, self._table.dtype))
        return wide.translate(None, b"\0")


class RowMembers:
    """Packed rows: many rows per member, the places where documents begin beside it.

    One packer forms the rows for training, another one those for validation, if any: no row holds both.
    """

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        self._spec = spec
        self._shard_id = shard_id
        self._options = options
        self._packers = [packer_of(spec, options.pack) for _ in range(2 if spec.validation_fraction else 1)]
        self._member_tokens = rows_per_member(spec) * spec.seq_len
        self._held_ids: list[Ids] = []  # of each document for validation that is not yet packed
        self._held_starts: list[Starts] = []
        self._num_held = 0  # tokens in them
        self._num_rows = 0
        self._tar_bytes = 0
        self.num_padding = 0

    @property
    def num_split(self) -> int:
        return sum(packer.num_split for packer in self._packers)

    def lay_out(self, documents: Documents, tokens: TokenBatch, digests: Digests | None = None) -> Batch:
        return Batch(documents, tokens, _digests(documents, self._options) if digests is None else digests)

    def pieces(self, batch: Batch) -> Iterator[Piece]:
        """Yield the members that documents fill.

        Those for validation are held until they fill a member, so that the order of members follows from the
        documents alone, however they are batched, and consecutive ones for training are packed together.
        """
        documents, tokens = batch.documents, batch.tokens
        starts = np.zeros(len(documents.lines), START)
        starts["source"], starts["source_offset"] = documents.input_number, documents.offsets
        if len(batch.digests):
            starts["digest"] = batch.digests
        if not (fraction := self._spec.validation_fraction):
            yield from self._appended(tokens, starts, is_validation=False)
            return
        is_training = ~are_for_validation(starts["digest"], fraction)
        numbers, ids, first = np.arange(len(starts)), tokens.documents(), 0
        for number in np.flatnonzero(~is_training).tolist():
            self._held_ids.append(ids[number])
            self._held_starts.append(starts[number : number + 1])
            self._num_held += len(ids[number])
            if self._num_held >= self._member_tokens:
                here = is_training & (first <= numbers) & (numbers < number)
                yield from self._appended(tokens.only(here), starts[here], is_validation=False)
                yield from self._release()
                first = number
        here = is_training & (first <= numbers)
        yield from self._appended(tokens.only(here), starts[here], is_validation=False)

    def _release(self) -> Iterator[Piece]:
        """Yield the members that the documents held for validation fill."""
        ids, starts = self._held_ids, self._held_starts
        self._held_ids, self._held_starts, self._num_held = [], [], 0
        if ids:
            yield from self._appended(TokenBatch.of(ids), np.concatenate(starts), is_validation=True)

    def _appended(self, tokens: TokenBatch, starts: Starts, *, is_validation: bool) -> Iterator[Piece]:
        for group in self._packers[is_validation].append(tokens, starts):
            yield self._member(group, is_validation=is_validation)

    def rest(self) -> Iterator[Piece]:
        for side, packer in enumerate(self._packers):
            if side:
                yield from self._release()
            for group in packer.finish():
                yield self._member(group, is_validation=side == 1)

    def _member(self, group: RowGroup, *, is_validation: bool) -> Piece:
        """Return one member: its bytes, and the idx records of its rows."""
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
        pieces: list[bytes | memoryview] = []
        end = self._tar_bytes
        payloads = {}  # byte in the tar where each field's numbers begin
        key = rows_key(self._shard_id, self._num_rows)
        for name, array in sorted(fields.items()):
            header = npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = end + BLOCK_BYTES + len(header)
            padding = bytes(-num_bytes % BLOCK_BYTES)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.data, padding]
            end += BLOCK_BYTES + num_bytes + len(padding)
        data = b"".join(pieces)
        self._num_rows += len(group.rows)
        self._tar_bytes = end
        self.num_padding += num_padding
        seq_len, numbers = self._spec.seq_len, np.arange(len(group.rows))
        row_bytes = seq_len * self._spec.dtype.itemsize
        begins = np.searchsorted(group.starts["position"], numbers * seq_len)
        records = np.empty(len(group.rows), idx_dtype(self._spec.kind))
        records["offset"] = payloads[token_field("packed", "npy")] + numbers * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = group.row_tokens
        records["source"] = group.firsts["source"]
        records["source_offset"] = group.firsts["source_offset"]
        records["starts_offset"] = payloads[DOC_STARTS_FIELD] + 4 * begins
        records["num_starts"] = np.diff(begins, append=len(group.starts))
        if LOSS_MASK_FIELD in payloads:
            records["mask_offset"] = payloads[LOSS_MASK_FIELD] + numbers * seq_len
        return Piece(data, records, group.starts["digest"], is_validation)


Members = DocumentMembers | RowMembers


def members_of(spec: DatasetSpec, shard_id: int, options: PlanOptions) -> Members:
    """Return the layout that the options ask for: a sample per document, or packed rows."""
    return RowMembers(spec, shard_id, options) if spec.has_rows else DocumentMembers(spec, shard_id, options)
