"""Documents and their ids -> bytes of tar members and idx records, a batch at a time.

A data set has one of two forms: a sample per document, or groups of packed rows of seq_len tokens, each of
which becomes one member. What is behind them knows neither. The tar equals the one of webdataset's TarWriter,
to the byte. Nothing here loops over tokens, and over documents only to copy slices.

ConcatRows joins all documents and splits them wherever a row ends; BestFitRows keeps each document whole in
one row where it fits. Both hold at most one group and the open rows, about 8 MiB, beside what they are given.
The groups depend on the documents alone, never on how these were batched.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.make.engines import NO_LOSS, Ids, Numbers, TokenBatch
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
    PACKED_MEMBER_BYTES,
    ROW_TOKENS_FIELD,
    TEXT_FIELD,
    DatasetSpec,
    document_key,
    npy_header,
    rows_key,
    token_field,
)
from shardprep.format.plan import PlanOptions

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


# Rows. -------------------------------------------------------------------------------------------------

# A document: where it begins, in tokens, the input that it came from, and its digest, zeros without one.
START = np.dtype([("position", "<i8"), ("source", "<u4"), ("source_offset", "<u8"), ("digest", DIGEST)])
Starts = npt.NDArray[np.void]  # START[documents]


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of one member."""

    rows: npt.NDArray[Any]  # token ids [num_rows, seq_len], of row_dtype, padded
    row_tokens: npt.NDArray[np.uint32]  # uint32[num_rows]: tokens that are no padding
    starts: Starts  # START of the documents that begin here, by position in rows.ravel()
    firsts: Starts  # START[num_rows] of the document of each row's first token


def rows_per_member(spec: DatasetSpec) -> int:
    """Rows of a full member: about PACKED_MEMBER_BYTES of ids, at least one."""
    return max(1, PACKED_MEMBER_BYTES // (spec.seq_len * spec.dtype.itemsize))


def pad_id(spec: DatasetSpec) -> int:
    """Return what fills rows that are not full."""
    pad = spec.tokenizer.pad_token_id or 0
    return pad | int(NO_LOSS) if spec.record == "chat" else pad


def row_dtype(spec: DatasetSpec) -> np.dtype[Any]:
    """Of ids while they are packed: those of conversations carry NO_LOSS."""
    return np.dtype(np.uint32) if spec.record == "chat" else spec.dtype


class Packer(Protocol):
    """Takes documents in order and yields row groups as they fill; the groups do not depend on batches."""

    num_split: int  # documents that do not lie whole in one row

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        """Take documents, with START[documents] that names their provenance."""

    def finish(self) -> Iterator[RowGroup]:
        """Yield what is left."""


class ConcatRows:
    """Joins all documents and cuts at every seq_len-th token (``--pack concat``).

    No padding but in the shard's last row; documents are cut at row ends.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._group_tokens = rows_per_member(spec) * spec.seq_len
        self._ids: list[Ids] = []  # not yet in a group
        self._starts: list[Starts] = []  # START of the documents in them
        self._num_held = 0
        self._open = np.zeros(1, START)  # the document that the next group begins in
        self.num_split = 0

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        lengths, seq_len = np.diff(tokens.offsets), self._spec.seq_len
        first = tokens.offsets[:-1] + self._num_held  # the groups before are whole rows
        has_tokens = lengths > 0
        if not has_tokens.all():
            starts, first, lengths = starts[has_tokens], first[has_tokens], lengths[has_tokens]
        last = first + lengths - 1
        self.num_split += int((first // seq_len != last // seq_len).sum())
        starts["position"] = first
        self._starts.append(starts)
        self._ids.append(tokens.ids)
        self._num_held += len(tokens.ids)
        while self._num_held >= self._group_tokens:
            yield self._take(self._group_tokens)

    def finish(self) -> Iterator[RowGroup]:
        if self._num_held:
            yield self._take(self._num_held)

    def _take(self, num_tokens: int) -> RowGroup:
        """Return a group of the first ``num_tokens`` tokens held."""
        ids = self._ids[0] if len(self._ids) == 1 else np.concatenate(self._ids)
        starts = self._starts[0] if len(self._starts) == 1 else np.concatenate(self._starts)
        self._ids, ids = [ids[num_tokens:]], ids[:num_tokens]
        num_here = int(np.searchsorted(starts["position"], num_tokens))
        later = starts[num_here:].copy()
        later["position"] -= num_tokens
        self._starts, starts = [later], starts[:num_here]
        self._num_held -= num_tokens
        seq_len = self._spec.seq_len
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = ids.astype(row_dtype(self._spec), copy=False)
        if num_padding:
            rows = np.pad(rows, (0, num_padding), constant_values=pad_id(self._spec))
        open_before = np.concatenate((self._open, starts))
        self._open = open_before[-1:]
        row_begins = np.arange(num_rows) * seq_len
        return RowGroup(
            rows=rows.reshape(num_rows, seq_len),
            row_tokens=row_tokens,
            starts=starts,
            firsts=open_before[np.searchsorted(starts["position"], row_begins, side="right")],
        )


Provenance = tuple[int, int, bytes]  # input number, byte in it, and digest


class _Row:
    """A row that is filled."""

    def __init__(self, spec: DatasetSpec, first: Provenance) -> None:
        self.ids = np.full(spec.seq_len, pad_id(spec), row_dtype(spec))
        self.num_tokens = 0
        self.starts: list[tuple[int, Provenance]] = []  # where documents begin
        self.first = first  # of the first token


class BestFitRows:
    """Keeps documents whole where they fit into a row (``--pack best_fit``).

    Each document goes into the open row in which it leaves the least space, as in Ding et al. 2024,
    "Fewer Truncations Improve Language Modeling", but over a window of open rows rather than the
    whole shard, so that memory is bounded; the fullest row is closed when another must be opened. A
    document longer than a row fills rows of its own, and its rest opens one. The price: padding, and
    about 1.5 us of Python per document.
    """

    _OPEN_BYTES = 8 << 20

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._most_open = min(1024, max(16, self._OPEN_BYTES // (spec.seq_len * spec.dtype.itemsize)))
        self._open: list[tuple[int, int, _Row]] = []  # space, turn, row; ascending
        self._turn = 0  # of equal spaces the one that is there longest comes first
        self._closed: list[_Row] = []
        self._group_rows = rows_per_member(spec)
        self.num_split = 0

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        seq_len, bounds = self._spec.seq_len, itertools.pairwise(tokens.offsets.tolist())
        facts = (starts[name].tolist() for name in ("source", "source_offset", "digest"))
        provenances = zip(*facts, strict=True)
        ids = tokens.ids.astype(row_dtype(self._spec))
        for (begin, end), provenance in zip(bounds, provenances, strict=True):
            self.num_split += end - begin > seq_len
            for first in range(begin, end, seq_len):
                part = ids[first : min(first + seq_len, end)]
                # What goes on from another row always opens one.
                place = bisect.bisect_left(self._open, (len(part),)) if first == begin else len(self._open)
                if place < len(self._open):
                    _, _, row = self._open.pop(place)
                else:
                    if len(self._open) == self._most_open:
                        self._closed.append(self._open.pop(0)[2])  # the fullest
                    row = _Row(self._spec, provenance)
                if first == begin:
                    row.starts.append((row.num_tokens, provenance))
                row.ids[row.num_tokens : row.num_tokens + len(part)] = part
                row.num_tokens += len(part)
                if row.num_tokens == seq_len:
                    self._closed.append(row)
                else:
                    self._turn += 1
                    bisect.insort(self._open, (seq_len - row.num_tokens, self._turn, row))
            if len(self._closed) >= self._group_rows:
                yield from self._groups()

    def finish(self) -> Iterator[RowGroup]:
        self._closed += [row for _, _, row in self._open]
        self._open = []
        yield from self._groups(last=True)

    def _groups(self, *, last: bool = False) -> Iterator[RowGroup]:
        while len(self._closed) >= self._group_rows or (last and self._closed):
            taken, self._closed = self._closed[: self._group_rows], self._closed[self._group_rows :]
            starts = [
                (number * self._spec.seq_len + position, *document)
                for number, row in enumerate(taken)
                for position, document in row.starts
            ]
            yield RowGroup(
                rows=np.stack([row.ids for row in taken]),
                row_tokens=np.array([row.num_tokens for row in taken], np.uint32),
                starts=np.array(starts, START),
                firsts=np.array([(0, *row.first) for row in taken], START),
            )


# By --pack; a record whose rows are formed in a way of its own, by its name.
_PACKERS: dict[str, Callable[[DatasetSpec], Packer]] = {"concat": ConcatRows, "best_fit": BestFitRows}


def packer_of(spec: DatasetSpec, pack: str) -> Packer:
    """Return what forms the rows of a data set."""
    return _PACKERS.get(spec.record, _PACKERS[pack])(spec)


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
