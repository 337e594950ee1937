"""Write one shard: documents and their ids become a tar, its idx, a quarantine file and, last, a manifest.

A data set has one of two forms: a sample per document, or packed rows of seq_len tokens, of which a group
becomes one member. The groups depend on the documents alone, not on how they are batched. The tar has the
same bytes as from webdataset's TarWriter. No Python code here loops over tokens.

Files have temporary names until all of them are synced, once, at the end: at most six files (tar, idx,
quarantine, ids, digests, manifest) and their folders.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import tarfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.make.engines import NO_LOSS, Ids, TokenBatch
from preprocess.read.documents import BadDocument, DocumentBatch
from preprocess.read.formats import Numbers, Texts
from shardprep import files
from shardprep.errors import BadInput, CannotWrite, OtherTokenizer
from shardprep.format import manifest as manifests
from shardprep.format import names
from shardprep.format.data_folder import SHARD_FOLDERS, DataFolder
from shardprep.format.documents import DIGEST, are_for_validation
from shardprep.format.index import IDX_DOCUMENT, IDX_DTYPES, ChunkCrcs, IdxRecords, idx_header
from shardprep.format.manifest import LENGTH_BITS, Manifest, RunFacts, ValidationCounts, done_manifest
from shardprep.format.names import DatasetSpec
from shardprep.format.plan import PlanOptions

_SIZE = slice(124, 135)  # of a tar header: eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits
_SHIFTS = np.arange(30, -1, -3)  # to the bits of eleven octal digits

Digests = npt.NDArray[np.void]  # DIGEST[documents]
_NO_DIGESTS = np.empty(0, DIGEST)
_MAX_SOURCES = 1000  # per shard: its manifest lists them
_NUM_LENGTH_BINS = 64 << (LENGTH_BITS - 1)  # for the lengths in TextCounts


class TarPiece(NamedTuple):
    """Consecutive bytes of the tar, with the idx records and digests of the samples that end in them.

    The samples are all for training, or all for validation.
    """

    data: bytes | memoryview
    records: IdxRecords
    digests: Digests = _NO_DIGESTS  # of the documents that begin in the samples, if digests are kept
    is_validation: bool = False


class EncodedBatch(NamedTuple):
    """Encoded documents, and their members of the tar if these depend on this batch alone."""

    documents: DocumentBatch
    tokens: TokenBatch
    digests: Digests  # DIGEST[documents], or empty if digests are not kept
    piece: TarPiece | None  # members, with offsets from 0; None for rows, which are packed in order


class DocumentMembers:
    """One sample per document: its ``text.txt``, if texts are kept, and its ``token_ids``."""

    num_padding = num_split = 0  # RowMembers counts padding, and documents split over rows

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        self._spec, self._shard_id, self._options = spec, shard_id, options
        self._tar_bytes = 0
        self._field = f"token_ids.{spec.token_format}"
        vocab_size, has_blanks = spec.tokenizer.vocab_size, bool(options.blanked)
        self._json = json_ids(vocab_size, has_blanks=has_blanks) if spec.token_format == "json" else None
        self._npy_header_bytes = 0 if self._json else len(names.npy_header(spec.dtype, (1,)))

    def lay_out(self, documents: DocumentBatch, tokens: TokenBatch, digests: Digests) -> TarPiece:
        """Return the members of a batch, with offsets from 0. Runs in a thread.

        Raises BadInput if a member is too large for the idx.
        """
        lengths, dtype = np.diff(tokens.offsets), self._spec.dtype
        encoded: Sequence[bytes | memoryview]  # the ids of each document
        if self._json:
            id_bytes = self._json.lengths(tokens)
            written = memoryview(self._json.separated(tokens.ids))
            bounds = np.cumsum(np.where(lengths > 0, id_bytes, 0)).tolist()
            encoded = [written[begin + 1 : end] for begin, end in itertools.pairwise([0, *bounds])]
        else:
            id_bytes = lengths * dtype.itemsize + self._npy_header_bytes
            parts = zip(lengths.tolist(), tokens.documents(), strict=True)
            encoded = [names.npy_header(dtype, (num,)) + part.astype(dtype).tobytes() for num, part in parts]
        fields: list[tuple[str, Numbers, Sequence[bytes | memoryview]]] = [(self._field, id_bytes, encoded)]
        if self._options.keep_text:
            texts = documents.texts.each
            fields.insert(0, (names.TEXT_FIELD, np.fromiter(map(len, texts), np.int64, len(texts)), texts))
        sizes = np.stack([num_bytes for _, num_bytes, _ in fields], axis=1)
        if (largest := sizes.max(initial=0)) > names.MAX_MEMBER_BYTES:
            found = f"a document of {documents.input_path} whose member has {largest} bytes"
            expected = f"at most {names.MAX_MEMBER_BYTES}; use --record packed, or split the document"
            raise BadInput(found=found, expected=expected)
        # Each payload follows its header and fills whole blocks: int64[documents, fields].
        padded = -(-sizes // names.BLOCK_BYTES) * names.BLOCK_BYTES
        ends = np.cumsum(padded + names.BLOCK_BYTES).reshape(padded.shape)
        starts = ends - padded
        buffer = np.zeros(int(ends[-1, -1]) if len(ends) else 0, np.uint8)
        for (name, num_bytes, payloads), begins in zip(fields, starts.T, strict=True):
            headers = document_headers(self._shard_id, documents.lines, name, num_bytes)
            buffer.reshape(-1, names.BLOCK_BYTES)[begins // names.BLOCK_BYTES - 1] = headers
            # A loop over slices, at 0.15 us each, beats a scatter at 4 ns per byte.
            view = buffer.data
            for begin, payload in zip(begins.tolist(), payloads, strict=True):
                view[begin : begin + len(payload)] = payload
        id_starts = starts[:, -1]
        if self._json:
            buffer[id_starts] = ord("[")
            buffer[id_starts + id_bytes - 1] = ord("]")
        records = np.empty(len(lengths), IDX_DOCUMENT)
        records["offset"] = id_starts + self._npy_header_bytes
        records["num_bytes"] = id_bytes - self._npy_header_bytes
        records["num_tokens"] = lengths
        records["input_number"] = documents.input_number
        records["input_offset"] = documents.offsets
        return TarPiece(buffer.data, records, digests)

    def pieces(self, batch: EncodedBatch) -> Iterator[TarPiece]:
        """Yield pieces of the tar in order, with the idx records of the samples that they complete."""
        piece = batch.piece
        assert piece is not None  # it is from ``lay_out``
        piece.records["offset"] += self._tar_bytes
        self._tar_bytes += len(piece.data)
        if not (fraction := self._spec.validation_fraction):
            yield piece
            return
        # The piece for training has all bytes, so the tar has the order of the input. The one for validation
        # has only records and digests, which come last in their files.
        is_validation = are_for_validation(piece.digests, fraction)
        yield TarPiece(piece.data, piece.records[~is_validation], piece.digests[~is_validation])
        if is_validation.any():
            yield TarPiece(
                b"", piece.records[is_validation], piece.digests[is_validation], is_validation=True
            )

    def rest(self) -> Iterator[TarPiece]:
        """Yield the pieces left at the end of the shard: none, as each batch is complete."""
        return iter(())


def ustar_header(name: str, num_bytes: int) -> bytes:
    """Return the 512 bytes before a member: mode 0644, owner 0, mtime 0."""
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT)


def document_headers(shard_id: int, lines: Numbers, field: str, num_bytes: Numbers) -> npt.NDArray[np.uint8]:
    """Return the headers of one field of many documents: uint8[documents, 512].

    ``lines`` ascend. Headers for line numbers of more than eight digits, which are rare, are made one by one.
    """
    if len(lines) and lines[-1] >= 10**8:
        sizes = zip(lines.tolist(), num_bytes.tolist(), strict=True)
        long = [ustar_header(f"{names.document_key(shard_id, line)}.{field}", size) for line, size in sizes]
        return np.frombuffer(b"".join(long), np.uint8).reshape(-1, names.BLOCK_BYTES)
    key = names.document_key(shard_id, 0)
    template = np.frombuffer(ustar_header(f"{key}.{field}", 0), np.uint8).copy()
    template_sum = int(template[:148].sum()) + int(template[156:].sum()) + 8 * ord(" ")
    headers = np.broadcast_to(template, (len(lines), names.BLOCK_BYTES)).copy()
    digits, rest = np.empty((len(lines), 8), np.int64), lines
    for place in range(7, -1, -1):
        digits[:, place], rest = rest - rest // 10 * 10, rest // 10
    octals = num_bytes[:, None] >> _SHIFTS & 7
    headers[:, len(key) - 8 : len(key)] += digits.astype(np.uint8)
    headers[:, _SIZE] += octals.astype(np.uint8)
    checksums = template_sum + digits.sum(axis=1) + octals.sum(axis=1)
    headers[:, _CHECKSUM] = ord("0") + (checksums[:, None] >> _SHIFTS[-6:] & 7)
    return headers


class JsonIds:
    """Writes ids as ``json.dumps`` does, ``[128000, 9906]``, for the same bytes as webdataset's TarWriter.

    A table has the text ``, 9906`` of every id, padded with zero bytes to a fixed width. A batch takes one
    look-up, and one pass that drops the zeros. The look-up clips ids: in numpy this takes a tenth of the time
    of checking them. The table takes 12 ms for 128,256 tokens.
    """

    def __init__(self, vocab_size: int, *, has_blanks: bool = False) -> None:
        numbers, self._vocab_size, self._has_blanks = np.arange(vocab_size), vocab_size, has_blanks
        if has_blanks:
            numbers = np.append(numbers, names.BLANK)  # it is clipped to this last row
        num_digits = 6 if vocab_size <= 10**6 and not has_blanks else 14
        texts = np.char.add(b", ", numbers.astype(f"S{num_digits}"))
        self._table: npt.NDArray[np.void] = texts.view(f"V{texts.itemsize}")
        num_digits_of = 1 + np.searchsorted(10 ** np.arange(1, 14), numbers, side="right")
        self._widths = (2 + num_digits_of).astype(np.uint8)

    def lengths(self, batch: TokenBatch) -> Numbers:
        """Return int64[documents]: the bytes of each JSON text. Raises OtherTokenizer for an unknown id."""
        is_unknown = batch.ids >= self._vocab_size
        if self._has_blanks:
            is_unknown &= batch.ids != names.BLANK
        if is_unknown.any():
            found, expected = batch.ids[is_unknown][0], f"less than {self._vocab_size}; plan again"
            raise OtherTokenizer(found=f"the tokenizer gives the id {found}", expected=expected)
        ends = np.zeros(len(batch.ids) + 1, np.int64)
        np.cumsum(self._widths.take(batch.ids, mode="clip"), out=ends[1:])
        # "[" takes the place of the first ", ", and "]" the byte that this saves.
        return np.maximum(np.diff(ends[batch.offsets]), 2)

    def separated(self, ids: Ids) -> bytearray:
        """Return the text of all ids, each with ``, `` before it."""
        wide = bytearray(len(ids) * self._table.itemsize)
        self._table.take(ids, out=np.frombuffer(wide, self._table.dtype), mode="clip")
        return wide.translate(None, b"\0")


json_ids = functools.cache(JsonIds)  # one table per vocabulary


# Rows. -------------------------------------------------------------------------------------------------

# Where a document begins: position in tokens, input number, byte in the input; with its digest, or zeros.
START = np.dtype([("position", "<i8"), ("input_number", "<u4"), ("input_offset", "<u8"), ("digest", DIGEST)])
Starts = npt.NDArray[np.void]  # START[documents]


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows of one member."""

    rows: npt.NDArray[Any]  # token ids [num_rows, seq_len], of row_dtype, padded
    row_tokens: npt.NDArray[np.uint32]  # uint32[num_rows]: tokens of each row without padding
    starts: Starts  # of the documents that begin in the group, by position in rows.ravel()
    firsts: Starts  # START[num_rows]: the document of each row's first token


class Packer:
    """Packs documents into rows, in order."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.seq_len, self.num_split = spec.seq_len, 0  # documents that are not whole in one row
        self.group_rows = max(1, names.PACKED_MEMBER_BYTES // (spec.seq_len * spec.dtype.itemsize))
        is_chat = spec.record == "chat"  # then ids carry NO_LOSS while they are packed
        self.dtype = np.dtype(np.uint32) if is_chat else spec.dtype
        self.pad_id = (spec.tokenizer.pad_token_id or 0) | (int(NO_LOSS) if is_chat else 0)

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        """Add documents, whose origins are in ``starts``, and yield the groups that they fill."""
        raise NotImplementedError

    def finish(self) -> Iterator[RowGroup]:
        """Yield the groups of the documents left at the end."""
        raise NotImplementedError


class ConcatRows(Packer):
    """Joins all documents and cuts them into rows of seq_len tokens (``--pack concat``).

    Documents are cut at row ends. Only the shard's last row has padding.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self._ids: Ids = np.empty(0, np.uint32)  # not yet in a group
        self._starts: Starts = np.empty(0, START)  # of the documents that begin in them
        self._open = np.zeros(1, START)  # of the document in which the next group begins

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        has_tokens = np.diff(tokens.offsets) > 0
        # Positions in the tokens that are not yet in a group, the first of which begins a row.
        first = tokens.offsets[:-1][has_tokens] + len(self._ids)
        last = tokens.offsets[1:][has_tokens] + len(self._ids) - 1
        self.num_split += int((first // self.seq_len != last // self.seq_len).sum())
        starts = starts[has_tokens]
        starts["position"] = first
        self._ids = np.concatenate([self._ids, tokens.ids])
        self._starts = np.concatenate([self._starts, starts])
        group_tokens = self.group_rows * self.seq_len
        while len(self._ids) >= group_tokens:
            yield self._take(group_tokens)

    def finish(self) -> Iterator[RowGroup]:
        if len(self._ids):
            yield self._take(len(self._ids))

    def _take(self, num_tokens: int) -> RowGroup:
        """Return a group of the first ``num_tokens`` of these tokens."""
        seq_len, num_here = self.seq_len, np.searchsorted(self._starts["position"], num_tokens)
        ids, self._ids = self._ids[:num_tokens], self._ids[num_tokens:]
        starts, self._starts = self._starts[:num_here], self._starts[num_here:].copy()
        self._starts["position"] -= num_tokens
        num_rows = -(-len(ids) // seq_len)
        num_padding = num_rows * seq_len - len(ids)
        row_tokens = np.full(num_rows, seq_len, np.uint32)
        row_tokens[-1] -= num_padding
        rows = np.pad(ids.astype(self.dtype, copy=False), (0, num_padding), constant_values=self.pad_id)
        open_before = np.concatenate((self._open, starts))
        self._open = open_before[-1:]
        firsts = open_before[np.searchsorted(starts["position"], np.arange(num_rows) * seq_len, side="right")]
        rows = rows.reshape(num_rows, seq_len)
        return RowGroup(rows=rows, row_tokens=row_tokens, starts=starts, firsts=firsts)


Provenance = tuple[int, int, bytes]  # input number, byte in it, and digest


@dataclass(kw_only=True)
class _Row:
    """A row that is being filled."""

    ids: Ids
    first: Provenance  # of the first token's document
    num_tokens: int = 0
    starts: list[tuple[int, Provenance]] = field(default_factory=list)  # where documents begin


class BestFitRows(Packer):
    """Keeps documents whole if they fit into a row (``--pack best_fit``).

    Each document goes into the open row in which it leaves the least space, as in Ding et al. 2024, "Fewer
    Truncations Improve Language Modeling". To bound memory, the number of open rows is limited: the fullest
    one is closed when another must be opened. A document longer than a row fills rows of its own, and its
    rest opens another one. The price is padding, and about 1.5 us of Python per document.
    """

    _OPEN_BYTES = 8 << 20

    def __init__(self, spec: DatasetSpec) -> None:
        super().__init__(spec)
        self._max_open = min(1024, max(16, self._OPEN_BYTES // (spec.seq_len * spec.dtype.itemsize)))
        self._open: list[tuple[int, int, _Row]] = []  # space, turn, row; ascending
        self._turn = 0  # among rows of equal space the oldest comes first
        self._closed: list[_Row] = []

    def append(self, tokens: TokenBatch, starts: Starts) -> Iterator[RowGroup]:
        seq_len, bounds = self.seq_len, itertools.pairwise(tokens.offsets.tolist())
        columns = (starts[name].tolist() for name in ("input_number", "input_offset", "digest"))
        provenances = zip(*columns, strict=True)
        ids = tokens.ids.astype(self.dtype)
        for (begin, end), provenance in zip(bounds, provenances, strict=True):
            self.num_split += end - begin > seq_len
            for first in range(begin, end, seq_len):
                part = ids[first : min(first + seq_len, end)]
                # The next part of a long document always opens a row.
                place = bisect.bisect_left(self._open, (len(part),)) if first == begin else len(self._open)
                if place < len(self._open):
                    _, _, row = self._open.pop(place)
                else:
                    if len(self._open) == self._max_open:
                        self._closed.append(self._open.pop(0)[2])  # the fullest
                    row = _Row(ids=np.full(seq_len, self.pad_id, self.dtype), first=provenance)
                if first == begin:
                    row.starts.append((row.num_tokens, provenance))
                row.ids[row.num_tokens : row.num_tokens + len(part)] = part
                row.num_tokens += len(part)
                if row.num_tokens == seq_len:
                    self._closed.append(row)
                else:
                    self._turn += 1
                    bisect.insort(self._open, (seq_len - row.num_tokens, self._turn, row))
            if len(self._closed) >= self.group_rows:
                yield from self._groups(least=self.group_rows)

    def finish(self) -> Iterator[RowGroup]:
        self._closed += [row for _, _, row in self._open]
        yield from self._groups(least=1)

    def _groups(self, least: int) -> Iterator[RowGroup]:
        while len(self._closed) >= least:
            taken, self._closed = self._closed[: self.group_rows], self._closed[self.group_rows :]
            starts = [
                (number * self.seq_len + position, *document)
                for number, row in enumerate(taken)
                for position, document in row.starts
            ]
            yield RowGroup(
                rows=np.stack([row.ids for row in taken]),
                row_tokens=np.array([row.num_tokens for row in taken], np.uint32),
                starts=np.array(starts, START),
                firsts=np.array([(0, *row.first) for row in taken], START),
            )


# By --pack, or by the name of a record that has a packer of its own.
_PACKERS: dict[str, Callable[[DatasetSpec], Packer]] = {"concat": ConcatRows, "best_fit": BestFitRows}


def packer_of(spec: DatasetSpec, pack: str) -> Packer:
    """Return a new packer for the rows of a data set."""
    return _PACKERS.get(spec.record, _PACKERS[pack])(spec)


class RowMembers:
    """Packed rows: many rows per member, and beside it the positions where documents begin.

    Rows for training and rows for validation have a packer each, so no row has documents of both.
    """

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        self._spec, self._shard_id = spec, shard_id
        self._packers = [packer_of(spec, options.pack) for _ in range(2 if spec.validation_fraction else 1)]
        self._member_tokens = self._packers[0].group_rows * spec.seq_len
        self._held: list[tuple[Ids, Starts]] = []  # documents for validation that are not packed yet
        self._num_held_tokens = 0
        self._num_rows = 0
        self._tar_bytes = 0
        self.num_padding = 0

    @property
    def num_split(self) -> int:
        return sum(packer.num_split for packer in self._packers)

    def lay_out(self, documents: DocumentBatch, tokens: TokenBatch, digests: Digests) -> None:
        """Do nothing: rows are packed in order."""

    def pieces(self, batch: EncodedBatch) -> Iterator[TarPiece]:
        """Yield the members that a batch fills.

        Documents for validation are held until they fill a member. So the order of members depends on the
        documents alone, not on batches, and consecutive documents for training are packed together.
        """
        documents, tokens = batch.documents, batch.tokens
        starts = np.zeros(len(documents.lines), START)
        starts["input_number"], starts["input_offset"] = documents.input_number, documents.offsets
        if len(batch.digests):
            starts["digest"] = batch.digests
        if not (fraction := self._spec.validation_fraction):
            yield from map(self._member, self._packers[0].append(tokens, starts))
            return
        is_training = ~are_for_validation(starts["digest"], fraction)
        numbers, ids, first = np.arange(len(starts)), tokens.documents(), 0
        for number in np.flatnonzero(~is_training).tolist():
            self._held.append((ids[number], starts[number : number + 1]))
            self._num_held_tokens += len(ids[number])
            if self._num_held_tokens >= self._member_tokens:
                here = is_training & (first <= numbers) & (numbers < number)
                yield from map(self._member, self._packers[0].append(tokens.only(here), starts[here]))
                yield from self._release()
                first = number
        here = is_training & (first <= numbers)
        yield from map(self._member, self._packers[0].append(tokens.only(here), starts[here]))

    def _release(self) -> Iterator[TarPiece]:
        """Pack the documents that are held for validation, and yield the members that they fill."""
        held, self._held, self._num_held_tokens = self._held, [], 0
        if held:
            tokens, starts = TokenBatch.of([ids for ids, _ in held]), [start for _, start in held]
            for group in self._packers[1].append(tokens, np.concatenate(starts)):
                yield self._member(group, is_validation=True)

    def rest(self) -> Iterator[TarPiece]:
        yield from map(self._member, self._packers[0].finish())
        if self._spec.validation_fraction:
            yield from self._release()
            for group in self._packers[1].finish():
                yield self._member(group, is_validation=True)

    def _member(self, group: RowGroup, *, is_validation: bool = False) -> TarPiece:
        """Return the bytes of one member, with the idx records of its rows."""
        fields: dict[str, npt.NDArray[Any]] = {
            names.DOC_STARTS_FIELD: group.starts["position"].astype(np.uint32),
            names.ROW_IDS_FIELD: group.rows,
        }
        if self._spec.record == "chat":
            fields[names.LOSS_MASK_FIELD] = (group.rows < NO_LOSS).astype(np.uint8)
            fields[names.ROW_IDS_FIELD] = (group.rows & ~NO_LOSS).astype(self._spec.dtype)
        num_padding = group.rows.size - int(group.row_tokens.sum(dtype=np.int64))
        if num_padding:
            fields[names.ROW_TOKENS_FIELD] = group.row_tokens
        pieces: list[bytes | memoryview] = []
        end = self._tar_bytes
        payloads = {}  # byte in the tar where each field's numbers begin
        key = f"rows_{self._shard_id}_{self._num_rows:08d}"  # the number of the first row
        for name, array in sorted(fields.items()):
            header = names.npy_header(array.dtype, array.shape)
            num_bytes = len(header) + array.nbytes
            payloads[name] = end + names.BLOCK_BYTES + len(header)
            padding = bytes(-num_bytes % names.BLOCK_BYTES)
            pieces += [ustar_header(f"{key}.{name}", num_bytes), header, array.data, padding]
            end += names.BLOCK_BYTES + num_bytes + len(padding)
        data = b"".join(pieces)
        self._num_rows += len(group.rows)
        self._tar_bytes = end
        self.num_padding += num_padding
        seq_len, numbers = self._spec.seq_len, np.arange(len(group.rows))
        row_bytes = seq_len * self._spec.dtype.itemsize
        begins = np.searchsorted(group.starts["position"], numbers * seq_len)
        records = np.empty(len(group.rows), IDX_DTYPES[self._spec.kind])
        records["offset"] = payloads[names.ROW_IDS_FIELD] + numbers * row_bytes
        records["num_bytes"] = row_bytes
        records["num_tokens"] = group.row_tokens
        records["input_number"] = group.firsts["input_number"]
        records["input_offset"] = group.firsts["input_offset"]
        records["starts_offset"] = payloads[names.DOC_STARTS_FIELD] + 4 * begins
        records["num_starts"] = np.diff(begins, append=len(group.starts))
        if names.LOSS_MASK_FIELD in payloads:
            records["mask_offset"] = payloads[names.LOSS_MASK_FIELD] + numbers * seq_len
        return TarPiece(data, records, group.starts["digest"], is_validation)


# Counts. ------------------------------------------------------------------------------------------------


class _Source:
    """The counts of one source."""

    def __init__(self) -> None:
        self.num_quarantined = 0
        self.num_bytes = 0  # of the input files, or of the texts if records name the source
        self.num_text_bytes = self.num_chars = 0
        self._lengths = np.zeros((2, _NUM_LENGTH_BINS), np.int64)  # documents and tokens

    def add(self, texts: Texts, num_tokens: Numbers, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_text_bytes += texts.num_bytes
        # Continuation bytes of UTF-8 are 10xxxxxx.
        is_inside = np.frombuffer(texts.joined, np.int8) < -64
        self.num_chars += texts.num_bytes - int(np.count_nonzero(is_inside))
        dropped = np.maximum(np.frexp(num_tokens)[1] - LENGTH_BITS, 0)  # bits after the first LENGTH_BITS
        place = (dropped << (LENGTH_BITS - 1)) + (num_tokens >> dropped)
        self._lengths[0] += np.bincount(place, minlength=_NUM_LENGTH_BINS)
        self._lengths[1] += np.bincount(place, num_tokens, _NUM_LENGTH_BINS).astype(np.int64)

    def lengths(self) -> dict[int, list[int]]:
        """Return documents and tokens by length, as TextCounts has them."""
        found = {}
        for place in np.flatnonzero(self._lengths[0]).tolist():
            dropped = max((place >> (LENGTH_BITS - 1)) - 1, 0)
            found[(place - (dropped << (LENGTH_BITS - 1))) << dropped] = self._lengths[:, place].tolist()
        return found


class Counting:
    """The counts of a shard so far."""

    def __init__(self, shard_id: int) -> None:
        self._shard_id = shard_id
        self.num_documents = self.num_tokens = 0  # without padding
        self._num_lines = self._num_used_lines = self._input_bytes = 0
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)
        self.bad: list[BadDocument] = []

    @property
    def bad_fraction(self) -> float:
        """Return the share of unusable documents so far, without those that the user chose to leave out."""
        num_bad = sum(not names.is_chosen(bad.reason) for bad in self.bad)
        return num_bad / max(1, num_bad + self.num_documents)

    @property
    def bad_reasons(self) -> set[str]:
        """Return the reasons why documents were left out."""
        return {bad.reason for bad in self.bad}

    def add(self, documents: DocumentBatch, num_tokens: Numbers) -> None:
        """Count a batch, given the tokens of each document. Raises BadInput for too many sources."""
        file_source = names.source_of_path(documents.input_path)
        self.num_documents += len(documents.lines)
        self.num_tokens += int(num_tokens.sum())
        self._num_lines += documents.num_lines
        # Several documents of a conversation have one line.
        self._num_used_lines += len(documents.lines) - int(np.count_nonzero(np.diff(documents.lines) == 0))
        self._input_bytes += documents.num_bytes
        if "source" not in documents.columns:
            self._source(file_source).add(documents.texts, num_tokens, documents.num_bytes)
        numbers_of = defaultdict[str, list[int]](list)  # documents of each source that records name
        for number, name in enumerate(documents.columns.get("source", ())):
            numbers_of[name or file_source].append(number)
        for name, numbers in numbers_of.items():
            texts = documents.texts.only(numbers)
            self._source(name).add(texts, num_tokens[numbers], texts.num_bytes)
        self.bad += documents.bad
        for bad in documents.bad:
            self._source(bad.source or file_source).num_quarantined += 1

    def _source(self, name: str) -> _Source:
        source = self._sources[name]
        if len(self._sources) > _MAX_SOURCES:
            found = f"documents of more than {_MAX_SOURCES} sources in shard {self._shard_id:05d}, such as "
            expected = "a --source_field with fewer values, or none"
            raise BadInput(found=f"{found}{name[:60]!r}", expected=expected)
        return source

    def counts(
        self, num_samples: int, members: RowMembers | DocumentMembers, validation: ValidationCounts | None
    ) -> tuple[manifests.ShardCounts, dict[str, manifests.TextCounts]]:
        """Return the counts of the shard, and the counts of texts by source."""
        histogram = [0] * 64
        sources, texts = {}, {}
        for name, source in sorted(self._sources.items()):
            lengths = source.lengths()
            for low, (num_documents, _) in lengths.items():
                histogram[low.bit_length()] += num_documents
            sources[name] = manifests.SourceCounts(
                num_documents=sum(both[0] for both in lengths.values()),
                num_tokens=sum(both[1] for both in lengths.values()),
                num_bytes=source.num_bytes,
                num_quarantined=source.num_quarantined,
            )
            if lengths:
                texts[name] = manifests.TextCounts(
                    num_bytes=source.num_text_bytes,
                    num_chars=source.num_chars,
                    lengths={str(low): both for low, both in lengths.items()},
                )
        while histogram and not histogram[-1]:
            histogram.pop()
        counts = manifests.ShardCounts(
            num_samples=num_samples,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_lines=self._num_lines,
            num_empty_lines=self._num_lines - self._num_used_lines - len(self.bad),
            input_bytes=self._input_bytes,
            num_pad_tokens=members.num_padding,
            num_documents_across_rows=members.num_split,
            quarantined=dict(sorted(Counter(bad.reason for bad in self.bad).items())),
            length_histogram=histogram,
            sources=sources,
            validation=validation,
        )
        return counts, texts


def _marks(shard_id: int) -> tuple[str, str]:
    """Return the names of two marks, which show other attempts at a shard without a listing of DATA.

    The first exists during an attempt, and stays if that is killed. An attempt that finds it adds the second.
    """
    stem = f".{names.shard_name(shard_id)}"
    return f"{stem}.begun.tmp", f"{stem}.again.tmp"


def _make_mark(folder: DataFolder, mark: str) -> bool:
    """Create a mark. Return False if it exists. If it cannot be created, the tar's error will say why."""
    try:
        folder.create(mark)
    except (OSError, CannotWrite) as error:
        return not isinstance(error, FileExistsError)
    return True


def _remove_marks(folder: DataFolder, marks: list[str]) -> None:
    """Remove the marks of an attempt. Runs as a finalizer, in case a second signal interrupts the cleanup."""
    for mark in marks:
        with contextlib.suppress(OSError, CannotWrite):
            folder.remove(mark)


def remove_temporaries_of(shard_ids: Iterable[int], folder: DataFolder, *, older_than_s: float = 0) -> None:
    """Remove the temporary files and marks of attempts at some shards, with one listing of the folder."""
    stems = map(names.shard_name, shard_ids)
    folder.remove_temporaries(*stems, older_than_s=older_than_s, subfolders=SHARD_FOLDERS)


def finished_manifest(folder: DataFolder, plan_id: str, shard_id: int) -> Manifest | None:
    """Return the manifest of a shard if it is done, and remove temporary files of other attempts at it."""
    manifest = done_manifest(folder, shard_id, plan_id)
    if manifest and any(folder.status_of(mark) is not None for mark in _marks(shard_id)):
        remove_temporaries_of([shard_id], folder)
    return manifest


def missing_shards(folder: DataFolder, plan_id: str, shard_ids: Collection[int]) -> list[int]:
    """Return the shards that are not done. Remove temporary files of those that are, with one listing."""
    findings = manifests.read_findings(folder, plan_id)
    done = [number for number in shard_ids if done_manifest(folder, number, plan_id, findings)]
    if done:
        remove_temporaries_of(done, folder)
    return sorted({*shard_ids} - {*done})


class ShardWriter:
    """Writes one shard, as a context manager. Only ``commit`` publishes it; a failure leaves nothing."""

    def __init__(self, folder: DataFolder, spec: DatasetSpec, options: PlanOptions, shard_id: int) -> None:
        """Write into ``folder``, the plan's or another one."""
        self._folder, self._spec, self._options, self._shard_id = folder, spec, options, shard_id
        members = RowMembers if spec.has_rows else DocumentMembers
        self._members: RowMembers | DocumentMembers = members(spec, shard_id, options)
        self.counting = Counting(shard_id)
        self._num_samples = 0
        self._crcs = ChunkCrcs(IDX_DTYPES[spec.kind])
        self._side_files: dict[str, files.PublishedFile] = {}  # ids and digests, if they are kept
        self._validation: list[TarPiece] = []  # their records and digests come after all others
        self._files = contextlib.ExitStack()

    def __enter__(self) -> ShardWriter:
        folder, shard_id = self._folder, self._shard_id
        begun, self._again = _marks(shard_id)
        ours = [begun]  # before it is created: a signal may come in between
        with self._files as opened:
            opened.callback(weakref.finalize(self, _remove_marks, folder, ours))
            self._found_no_mark = _make_mark(folder, begun)
            if not self._found_no_mark:
                ours.clear()
                _make_mark(folder, self._again)
                remove_temporaries_of([shard_id], folder, older_than_s=files.STALE_AFTER_S)
            self._tar = self._file(names.tar_name(shard_id))
            self._idx = self._file(names.idx_name(shard_id))
            if self._options.id_field:
                self._side_files["ids"] = self._file(names.ids_name(shard_id))
            if self._options.digests:
                self._side_files["digests"] = self._file(names.digests_name(shard_id))
            self._idx.write(idx_header(self._spec, shard_id))
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _file(self, name: str) -> files.PublishedFile:
        subfolder = name.rpartition("/")[0]
        if subfolder:
            self._folder.make_subfolder(subfolder)
        return self._files.enter_context(self._folder.new_file(name))

    def lay_out(
        self, documents: DocumentBatch, tokens: TokenBatch, digests: Digests | None = None
    ) -> EncodedBatch:
        """Lay out the members of a batch if they depend on it alone. Runs in a thread.

        ``digests`` default to those of the documents, if digests are kept. Raises BadInput, OtherTokenizer.
        """
        if digests is None:
            digests = documents.digests() if self._options.digests else _NO_DIGESTS
        return EncodedBatch(documents, tokens, digests, self._members.lay_out(documents, tokens, digests))

    def append(self, batch: EncodedBatch) -> None:
        """Add documents, in the order of the input."""
        self.counting.add(batch.documents, np.diff(batch.tokens.offsets))
        if "ids" in self._side_files:
            # One line of JSON per document: input number, place in it, id. Lines of text have no id.
            documents = batch.documents
            ids = documents.columns.get("id") or [""] * len(documents.lines)
            lines = [
                orjson.dumps([documents.input_number, *place], option=orjson.OPT_APPEND_NEWLINE)
                for place in zip(documents.offsets.tolist(), ids, strict=True)
            ]
            self._side_files["ids"].write(b"".join(lines))
        self._write(self._members.pieces(batch))

    def _write(self, pieces: Iterable[TarPiece]) -> None:
        for piece in pieces:
            self._tar.write(piece.data)
            if piece.is_validation:
                self._validation.append(piece._replace(data=b""))
            else:
                self._write_records(piece)

    def _write_records(self, piece: TarPiece) -> None:
        """Write the idx records and digests of a piece."""
        raw = piece.records.tobytes()
        self._idx.write(raw)
        self._crcs.add(raw)
        self._num_samples += len(piece.records)
        if "digests" in self._side_files:
            self._side_files["digests"].write(piece.digests.tobytes())

    def commit(self, run: RunFacts, *, unblanked_sha256: str | None = None) -> Manifest:
        """Publish the files of the shard. The manifest, which has the arguments, is the last."""
        self._write(self._members.rest())
        for piece in self._validation:
            self._write_records(piece)
        self._tar.write(names.TAR_END)
        self._idx.write(self._crcs.table())
        written = {"tar": self._tar, "idx": self._idx, **self._side_files}
        if (quarantine := self.quarantine()) is not None:
            written["quarantine"] = quarantine
        stamps: dict[str, Any] = dict.fromkeys(names.STAMPED_NAMES)
        stamps |= {name: file.sync() for name, file in written.items()}
        validation = None
        if self._spec.validation_fraction:
            validation = ValidationCounts(
                num_samples=sum(len(piece.records) for piece in self._validation),
                num_documents=sum(len(piece.digests) for piece in self._validation),
                num_tokens=sum(int(piece.records["num_tokens"].sum()) for piece in self._validation),
            )
        counts, texts = self.counting.counts(self._num_samples, self._members, validation)
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=counts,
            run=replace(run, texts=texts),
            unblanked_sha256=unblanked_sha256,
            **stamps,
        )
        for key, file in written.items():
            file.publish()
            subfolder = names.STAMPED_NAMES[key](self._shard_id).rpartition("/")[0]
            if subfolder:
                self._folder.sync(subfolder)
        self._folder.sync()
        self._folder.publish(names.manifest_name(self._shard_id), manifest.to_json())
        if not self._found_no_mark or self._folder.status_of(self._again) is not None:
            remove_temporaries_of([self._shard_id], self._folder)
        return manifest

    def quarantine(self) -> files.PublishedFile | None:
        """Write a quarantine file if documents were left out, and return it before it is published."""
        if not self.counting.bad:
            return None
        file = self._file(names.quarantine_name(self._shard_id))
        for bad in self.counting.bad:
            entry = asdict(bad)
            del entry["source"]
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file
