"""``withdraw``: name documents that no training may see any more, in a list (withdrawn/NNNN.json).

The shards stay as they are. A document is named by its number in its shard, 0 for the first one that the
shard's input has and that was not left out. Of packed rows a list also has where its tokens lie in them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.formats.documents import read_documents, without
from preprocess.formats.format import DocumentBatch, reading_of
from preprocess.formats.inputs import BadDocument
from preprocess.formats.long_documents import LongDocument
from preprocess.make.engines import TokenBatch
from preprocess.make.packing import START, RowGroup, packer_of
from preprocess.make.worker import load_worker
from preprocess.options import WorkerSettings
from preprocess.plan.plan_file import Plan, need_plan
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import BadInput, NotFound, ReadWriteError, Refused, UsageError
from shardprep.files import NOT_THERE, ReadFile, errors_named, open_regular
from shardprep.format.idx import read_idx
from shardprep.format.manifest import Manifest, check_shard
from shardprep.format.names import BLOCK_BYTES, ids_path, npy_header, tar_path
from shardprep.format.shards import ShardSamples
from shardprep.format.withdrawals import (
    publish_withdrawal,
    read_left_out,
    read_withdrawals,
    withdrawal_path,
)

DIGEST_BYTES = 16  # of a text's sha256 that tell it from all others
Numbers = npt.NDArray[np.int64]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Name documents that no training may see any more. Every loader that opens the data set from then on "
        "masks them where they stand; its order, and running states, stay."
    )
    parser.add_argument("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--ids", metavar="FILE", type=Path, help="ids of --id_field, one per line (default: none)"
    )
    what.add_argument(
        "--sha256",
        metavar="FILE",
        type=Path,
        help="sha256 of texts, one per line in hex digits (default: none)",
    )
    what.add_argument("--source", metavar="NAME", help="all documents of this source (default: none)")
    parser.add_argument("--reason", metavar="TEXT", default="", help="kept with the list (default: none)")
    parser.add_argument(
        "--input_dir",
        metavar="PATH",
        type=Path,
        help="folder of the input, if it moved (default: the plan's)",
    )


def withdraw(args: argparse.Namespace) -> int:
    """``withdraw DATA``: find the documents and publish the list; 66 where some asked for are not there."""
    folder: Path = args.data_dir
    plan = need_plan(folder).at(args.input_dir)
    before = read_withdrawals(folder, plan.plan_id)
    question = _question(args, folder, plan)
    found: dict[int, Numbers] = {}
    with Progress("looking for documents", plan.num_shards, unit="shards") as progress:
        for shard_id in range(plan.num_shards):
            manifest = check_shard(folder, shard_id, plan.plan_id)
            if len(numbers := question.numbers_in(shard_id, manifest)):
                found[shard_id] = numbers
            progress.add(1)
    num_found = sum(map(len, found.values()))
    withdrawal = None
    while withdrawal is None:
        new = {shard: np.setdiff1d(numbers, before.documents_of(shard)) for shard, numbers in found.items()}
        new = {shard: numbers for shard, numbers in new.items() if len(numbers)}
        if not new:
            break
        withdrawal = publish_withdrawal(
            folder,
            before,
            plan_id=plan.plan_id,
            asked=question.asked,
            reason=args.reason,
            documents=new,
            spans=_spans_of_rows(folder, plan, new) if plan.spec.has_rows else {},
        )
        if withdrawal is None:  # another one came first
            before = read_withdrawals(folder, plan.plan_id)
    print_lines(
        f"{counted(num_found, 'document')} found in {counted(len(found), 'shard')}",
        "all of them were withdrawn before, if any; no list was written"
        if withdrawal is None
        else f"{counted(withdrawal.num_documents, 'document')} withdrawn by "
        f"{withdrawal_path(folder, withdrawal.number)} (sha256 {withdrawal.sha256[:12]}); "
        "loaders that are made from now on mask them",
    )
    missing = question.not_found()
    print_lines(*(f"not found: {name}" for name in missing))
    if missing:
        say(f"{len(missing)} of {question.num_asked} were not found; the others are withdrawn")
    return NotFound.exit_code if missing else 0


class _Question(ABC):
    """What documents are asked for."""

    def __init__(self, folder: Path, plan: Plan, asked: str) -> None:
        self.folder, self.plan, self.asked = folder, plan, asked

    @abstractmethod
    def numbers_in(self, shard_id: int, manifest: Manifest) -> Numbers:
        """Those of a shard, by their numbers, ascending: int64[n]."""

    @property
    @abstractmethod
    def num_asked(self) -> int:
        """How many ids, texts or sources were asked for."""

    @abstractmethod
    def not_found(self) -> list[str]:
        """Those that no shard had so far."""


class _Listed(_Question):
    """Documents whose key, an id or the digest of the text, is in a file."""

    def __init__(self, folder: Path, plan: Plan, path: Path, *, by_id: bool) -> None:
        super().__init__(folder, plan, f"{'--ids' if by_id else '--sha256'} {path.name}")
        self._by_id = by_id
        self._is_found: dict[str | bytes, bool] = dict.fromkeys(_keys_in(path, by_id=by_id), False)

    def numbers_in(self, shard_id: int, manifest: Manifest) -> Numbers:
        keys: Iterable[str | bytes]
        if self._by_id:
            keys = (id_ for _, id_ in _ids_kept(self.folder, shard_id))
        else:
            keys = itertools.chain.from_iterable(document_digests(self.folder, self.plan, shard_id, manifest))
        found = []
        for number, key in enumerate(keys):
            if key in self._is_found:
                self._is_found[key] = True
                found.append(number)
        return np.array(found, np.int64)

    @property
    def num_asked(self) -> int:
        return len(self._is_found)

    def not_found(self) -> list[str]:
        missing = (key for key, is_found in self._is_found.items() if not is_found)
        return [key if isinstance(key, str) else f"{key.hex()}..." for key in missing]


class _OfSource(_Question):
    """The documents of one source. Shards that have none of it, or nothing else, are not read."""

    def __init__(self, folder: Path, plan: Plan, name: str) -> None:
        super().__init__(folder, plan, f"--source {name}")
        self._name = name
        self._is_known = False

    def numbers_in(self, shard_id: int, manifest: Manifest) -> Numbers:
        by_source, counts = manifest.counts.sources, manifest.counts
        if self._name not in by_source:
            return np.empty(0, np.int64)
        self._is_known = True
        if by_source[self._name].num_documents == counts.num_documents:
            return np.arange(counts.num_documents)
        if self.plan.options.source_field:
            read = _documents(self.folder, self.plan, shard_id, counts.num_documents)
            labels = [(item.input_number, item.source) for item in read]
            names = [label or self.plan.source_of(number) for number, label in labels]
            return np.flatnonzero(np.array(names) == self._name)
        numbers: Sequence[int]
        if not self.plan.spec.has_rows:
            numbers = read_idx(self.folder, self.plan.spec, shard_id)["source"].tolist()
        elif self.plan.options.id_field:
            numbers = [number for number, _ in _ids_kept(self.folder, shard_id)]
        else:
            numbers = [
                item.input_number
                for item in _documents(self.folder, self.plan, shard_id, counts.num_documents)
            ]
        wanted = {number for number in set(numbers) if self.plan.source_of(number) == self._name}
        return np.flatnonzero(np.isin(numbers, sorted(wanted)))

    num_asked = 1

    def not_found(self) -> list[str]:
        return [] if self._is_known else [self._name]


def _question(args: argparse.Namespace, folder: Path, plan: Plan) -> _Question:
    """Raises UsageError, NotFound, BadInput."""
    if args.source is not None:
        return _OfSource(folder, plan, args.source)
    if args.ids is not None and not plan.options.id_field:
        raise UsageError(
            f"{folder} keeps no ids of its documents, as its plan has no --id_field; name them by --sha256"
        )
    return _Listed(folder, plan, args.ids or args.sha256, by_id=args.ids is not None)


def _keys_in(path: Path, *, by_id: bool) -> Iterator[str | bytes]:
    """The keys in a file that a user wrote, line by line. Raises NotFound, BadInput, ReadWriteError."""
    try:
        with errors_named(path), os.fdopen(open_regular(path), encoding="utf-8") as lines:
            for number, line in enumerate(map(str.strip, lines), 1):
                if by_id and line:
                    yield line
                elif line:
                    try:
                        digest = bytes.fromhex(line.split()[0])
                    except ValueError:
                        digest = b""
                    if len(digest) != hashlib.sha256().digest_size:
                        raise BadInput(f"{path}:{number} begins {line[:60]!r}, expected 64 hex digits")
                    yield digest[:DIGEST_BYTES]
    except NOT_THERE:
        raise NotFound(f"{path} is no file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 ({error.reason}); write it anew, a line for each") from None


def _ids_kept(folder: Path, shard_id: int) -> Iterator[tuple[int, str]]:
    """The input number and the id of each document of a shard, as --id_field keeps them."""
    path = ids_path(folder, shard_id)
    with errors_named(path), os.fdopen(open_regular(path), "rb") as lines:
        for line in lines:
            input_number, _, kept = orjson.loads(line)
            yield input_number, kept


class _Document:
    """A document that is read again: what tells it from others, and how long it is."""

    def __init__(self, input_number: int, source: str, text: Iterable[str]) -> None:
        self.input_number, self.source, self.text = input_number, source, text


def _items(folder: Path, plan: Plan, shard_id: int, expected: int) -> Iterator[DocumentBatch | LongDocument]:
    """The documents of a shard's input as its worker read them; nothing that was left out.

    Raises Refused where the input is not as it was, and what reading raises.
    """
    shard = plan.shard(shard_id)
    digest = None if shard.sha256 is None else hashlib.sha256()
    reading = reading_of(plan.options, WorkerSettings().batch_bytes)
    num_read = 0
    items: Iterator[DocumentBatch | LongDocument]
    items = read_documents(shard.ranges, reading, digest=digest, most_documents=shard.most_documents)
    if len(left_out := read_left_out(folder, plan.options.rewritten).documents_of(shard_id)):
        items = without(items, left_out, can_be_cut=plan.can_be_cut)
    for item in items:
        if isinstance(item, DocumentBatch):
            num_read += len(item.texts)
            yield item
            continue
        num_bytes = item.text_bytes(can_be_cut=plan.can_be_cut)
        if num_bytes and not isinstance(num_bytes, BadDocument):
            num_read += 1
            yield item
    if num_read != expected or (digest is not None and digest.hexdigest() != shard.sha256):
        raise Refused(
            f"the input of shard {shard_id:05d} in {plan.input_dir} changed since the shard was made: it has "
            f"{counted(num_read, 'document')}, the manifest says {expected}; bring it back, or name its "
            "folder by --input_dir"
        )


def _documents(folder: Path, plan: Plan, shard_id: int, expected: int) -> Iterator[_Document]:
    for item in _items(folder, plan, shard_id, expected):
        if isinstance(item, LongDocument):
            yield _Document(item.place.input_number, item.source, item.text())
            continue
        sources = item.sources or itertools.repeat("")
        for text, source in zip(item.texts, sources, strict=False):
            yield _Document(item.input_number, source, [text])


def document_digests(folder: Path, plan: Plan, shard_id: int, manifest: Manifest) -> Iterator[list[bytes]]:
    """Of each document of a shard, in order, the first DIGEST_BYTES of the sha256 of its text; in groups.

    By the texts in the shard, or where it has none by those of the input.
    """
    if plan.options.keep_text and not plan.spec.has_rows:
        yield from _stored_digests(folder, plan, shard_id)
        return
    for document in _documents(folder, plan, shard_id, manifest.counts.num_documents):
        digest = hashlib.sha256()
        for piece in document.text:
            digest.update(piece.encode())
        yield [digest.digest()[:DIGEST_BYTES]]


def _stored_digests(folder: Path, plan: Plan, shard_id: int) -> Iterator[list[bytes]]:
    """The same of the texts in the tar: each stands before the ids of its sample."""
    records, path = read_idx(folder, plan.spec, shard_id), tar_path(folder, shard_id)
    head = BLOCK_BYTES + (0 if plan.spec.kind == "json" else len(npy_header(plan.spec.dtype, (1,))))
    ends = records["offset"].astype(np.int64) - head
    begins = -(-(records["offset"].astype(np.int64) + records["num_bytes"]) // BLOCK_BYTES) * BLOCK_BYTES
    begins = np.concatenate([[0], begins[:-1]])[: len(records)]
    try:
        with errors_named(path), ReadFile(path) as tar:
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                member = memoryview(tar.read(begin, end - begin))
                size = int(bytes(member[124:135]), 8)
                text = member[BLOCK_BYTES : BLOCK_BYTES + size]
                yield [hashlib.sha256(text).digest()[:DIGEST_BYTES]]
    except (*NOT_THERE, ValueError) as error:
        raise ReadWriteError(f"{path} cannot be read: {error}") from None


def _spans_of_rows(folder: Path, plan: Plan, documents: dict[int, Numbers]) -> dict[int, Numbers]:
    """Where documents of packed rows lie: by shard, begins and ends, ascending, row x seq_len + place."""
    with Progress("finding their tokens", len(documents), unit="shards") as progress:
        spans = {}
        for shard_id, numbers in documents.items():
            begins, ends, number = _stretches(folder, plan, shard_id)
            wanted = np.isin(number, numbers)
            spans[shard_id] = np.stack([begins[wanted], ends[wanted]], axis=1).reshape(-1)
            progress.add(1)
    return spans


def _stretches(folder: Path, plan: Plan, shard_id: int) -> tuple[Numbers, Numbers, Numbers]:
    """Begins and ends of the documents' tokens in a shard's rows, and whose they are: int64[n] each."""
    num_documents = check_shard(folder, shard_id, plan.plan_id).counts.num_documents
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        records, seq_len = samples.records, plan.spec.seq_len
        every = [row * seq_len + samples.starts(row) for row in range(len(records))]
        starts = np.concatenate([np.empty(0, np.int64), *every])
    end = (len(records) - 1) * seq_len + int(records["num_tokens"][-1]) if len(records) else 0
    if plan.options.pack == "concat" and len(starts) == num_documents:
        return starts, np.append(starts[1:], end), np.arange(num_documents)
    begins, ends, number, is_start = _packed_anew(folder, plan, shard_id, num_documents)
    if begins[is_start].tolist() != starts.tolist():
        raise Refused(
            f"the documents of shard {shard_id:05d}, packed anew, begin at other places of its rows; was its "
            "input or a library changed? Name documents by what the plan was made with"
        )
    return begins, ends, number


def _packed_anew(
    folder: Path, plan: Plan, shard_id: int, num_documents: int
) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.bool_]]:
    """The same of rows that are packed again, and which stretches begin a document."""
    worker = load_worker(plan, folder, WorkerSettings(), num_cpus=1, warn=say, shard=plan.shard(shard_id))
    packer, seq_len = packer_of(plan.spec, plan.options.pack), plan.spec.seq_len
    parts: list[npt.NDArray[np.int64]] = []
    num_read = num_rows = 0

    def lengths_of(item: DocumentBatch | LongDocument) -> Numbers:
        if isinstance(item, DocumentBatch):
            tokens = worker.engine.encode_documents(
                item.texts, batch_size=None, end_id=plan.end_id, spans=item.spans
            )
            return np.diff(tokens.offsets)
        pieces = worker.engine.encode_long(item.text(), can_be_cut=plan.can_be_cut, end_id=plan.end_id)
        return np.array([sum(map(len, pieces))])

    def groups() -> Iterator[RowGroup]:
        nonlocal num_read
        for item in _items(folder, plan, shard_id, num_documents):
            lengths = lengths_of(item)
            starts = np.zeros(len(lengths), START)
            starts["source_offset"] = num_read + np.arange(len(lengths))
            num_read += len(lengths)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            yield from packer.append(
                TokenBatch(ids=np.zeros(offsets[-1], np.uint32), offsets=offsets), starts
            )
        yield from packer.finish()

    for group in groups():
        row_begins = np.arange(len(group.row_tokens)) * seq_len
        position = group.starts["position"].astype(np.int64)
        goes_on = ~np.isin(row_begins, position)  # with a document of an earlier row
        begins = np.concatenate([position, row_begins[goes_on]])
        whose = np.concatenate([group.starts["source_offset"], group.firsts["source_offset"][goes_on]])
        is_start = np.arange(len(begins)) < len(position)
        order = np.argsort(begins)
        begins = begins[order]
        row_ends = row_begins + group.row_tokens
        ends = np.minimum(np.append(begins[1:], row_ends[-1]), row_ends[begins // seq_len])
        columns = begins + num_rows * seq_len, ends + num_rows * seq_len, whose[order], is_start[order]
        parts.append(np.stack([column.astype(np.int64) for column in columns]))
        num_rows += len(row_begins)
    begins, ends, whose, is_start = np.concatenate(parts, axis=1)
    return begins, ends, whose, is_start.astype(np.bool_)
