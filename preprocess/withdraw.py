"""``withdraw``: name documents that no training may see any more, in a list (withdrawn/NNNN.json).

The shards stay as they are. A document is named by its number in its shard, 0 for the first one that the
shard's input has and that was not left out. Of packed rows a list also has where its tokens lie in them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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
from shardprep.errors import BadInput, BrokenShard, NotFound, ReadWriteError, Refused, UsageError
from shardprep.files import NOT_THERE, ReadFile, errors_named, open_regular
from shardprep.format.idx import read_idx
from shardprep.format.manifest import Manifest, check_shard
from shardprep.format.names import BLOCK_BYTES, ids_path, npy_header, remake_command, tar_path
from shardprep.format.shards import ShardSamples
from shardprep.format.withdrawals import (
    publish_withdrawal,
    read_left_out,
    read_withdrawals,
    withdrawal_path,
)

DIGEST_BYTES = 16  # of a text's sha256 that tell it from all others
Numbers = npt.NDArray[np.int64]
Key = str | bytes  # an id, a source, or the digest of a text


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
    is_found = dict.fromkeys(_asked_keys(args, plan), False)
    found: dict[int, Numbers] = {}
    with Progress("looking for documents", plan.num_shards, unit="shards") as progress:
        for shard_id in range(plan.num_shards):
            keys = _keys_of_shard(args, plan, check_shard(folder, shard_id, plan.plan_id))
            hits = [(number, key) for number, key in enumerate(keys) if key in is_found]
            is_found.update((key, True) for _, key in hits)
            if hits:
                found[shard_id] = np.array([number for number, _ in hits], np.int64)
            progress.add(1)
    num_found = sum(map(len, found.values()))
    given = {name: getattr(args, name) for name in ("ids", "sha256", "source")}
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
            asked=" ".join(f"--{name} {value}" for name, value in given.items() if value is not None),
            reason=args.reason,
            documents=new,
            places=_places_of(folder, plan, new),
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
    missing = [key for key, was_found in is_found.items() if not was_found]
    print_lines(*(f"not found: {key if isinstance(key, str) else key.hex() + '...'}" for key in missing))
    if missing:
        say(f"{len(missing)} of {len(is_found)} were not found; the others are withdrawn")
    return NotFound.exit_code if missing else 0


def _asked_keys(args: argparse.Namespace, plan: Plan) -> Iterator[Key]:
    """What documents are asked for by. Raises UsageError, NotFound, BadInput."""
    if args.source is not None:
        yield args.source
    elif args.ids is None:
        yield from _keys_in(args.sha256, by_id=False)
    elif plan.options.id_field:
        yield from _keys_in(args.ids, by_id=True)
    else:
        raise UsageError(
            f"{args.data_dir} keeps no ids of its documents: its plan has no --id_field; use --sha256"
        )


def _keys_of_shard(args: argparse.Namespace, plan: Plan, manifest: Manifest) -> Iterable[Key]:
    """What each document of a shard, in order, may be asked for by."""
    folder, shard_id = args.data_dir, manifest.shard_id
    if args.source is not None:
        return _sources_of(folder, plan, manifest, args.source)
    if args.ids is not None:
        return (kept for _, kept in _ids_kept(folder, shard_id))
    return document_digests(folder, plan, manifest)


def _sources_of(folder: Path, plan: Plan, manifest: Manifest, name: str) -> Iterable[str]:
    """The source of each document of a shard; of none where that shard has nothing of the source ``name``.
    A shard that has nothing else is not read."""
    counts, options = manifest.counts, plan.options
    num_documents = counts.sources[name].num_documents if name in counts.sources else 0
    if num_documents in (0, counts.num_documents):
        return [name] * num_documents
    if options.source_field or (plan.spec.has_rows and not options.id_field):
        read = _documents(folder, plan, manifest)
        return (document.source or plan.source_of(document.input_number) for document in read)
    if options.id_field:
        return (plan.source_of(number) for number, _ in _ids_kept(folder, manifest.shard_id))
    records = read_idx(folder, plan.spec, manifest.shard_id)
    return map(plan.source_of, records["source"][_in_order_of_input(records)].tolist())


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
    path, remedy = ids_path(folder, shard_id), f"run: {remake_command(shard_id, folder)}"
    with errors_named(path), os.fdopen(open_regular(path), "rb") as lines:
        for line in lines:
            try:
                input_number, _, kept = orjson.loads(line)
            except (ValueError, TypeError):
                raise BrokenShard(f"{path} has the line {line[:60]!r}; {remedy}") from None
            yield input_number, kept


class _Document(NamedTuple):
    """A document that is read again."""

    input_number: int
    source: str  # of --source_field
    text: Iterable[str]  # in pieces


def _items(folder: Path, plan: Plan, manifest: Manifest) -> Iterator[DocumentBatch | LongDocument]:
    """The documents of a shard's input as its worker read them; nothing that was left out.

    Raises Refused where the input is not as it was, and what reading raises.
    """
    shard_id, expected = manifest.shard_id, manifest.counts.num_documents
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


def _documents(folder: Path, plan: Plan, manifest: Manifest) -> Iterator[_Document]:
    for item in _items(folder, plan, manifest):
        if isinstance(item, LongDocument):
            yield _Document(item.place.input_number, item.source, item.text())
            continue
        sources = item.sources or itertools.repeat("")
        for text, source in zip(item.texts, sources, strict=False):
            yield _Document(item.input_number, source, [text])


def document_digests(folder: Path, plan: Plan, manifest: Manifest) -> Iterator[bytes]:
    """Of each document of a shard, in order, the first DIGEST_BYTES of the sha256 of its text.

    By the texts in the shard, or where it has none by those of the input.
    """
    if plan.options.keep_text and not plan.spec.has_rows:
        yield from _stored_digests(folder, plan, manifest.shard_id)
        return
    for document in _documents(folder, plan, manifest):
        digest = hashlib.sha256()
        for piece in document.text:
            digest.update(piece.encode())
        yield digest.digest()[:DIGEST_BYTES]


def _stored_digests(folder: Path, plan: Plan, shard_id: int) -> Iterator[bytes]:
    """The same of the texts in the tar: each stands before the ids of its sample."""
    records, path = read_idx(folder, plan.spec, shard_id), tar_path(folder, shard_id)
    head = BLOCK_BYTES + (0 if plan.spec.kind == "json" else len(npy_header(plan.spec.dtype, (1,))))
    ends = records["offset"].astype(np.int64) - head
    begins = -(-(records["offset"].astype(np.int64) + records["num_bytes"]) // BLOCK_BYTES) * BLOCK_BYTES
    in_tar, in_input = np.argsort(ends), _in_order_of_input(records)
    begins[in_tar] = np.concatenate([[0], begins[in_tar][:-1]])[: len(records)]
    try:
        with errors_named(path), ReadFile(path) as tar:
            for begin, end in zip(begins[in_input].tolist(), ends[in_input].tolist(), strict=True):
                member = memoryview(tar.read(begin, end - begin))
                size = int(bytes(member[124:135]), 8)
                text = member[BLOCK_BYTES : BLOCK_BYTES + size]
                yield hashlib.sha256(text).digest()[:DIGEST_BYTES]
    except (*NOT_THERE, ValueError) as error:
        raise ReadWriteError(f"{path} cannot be read: {error}") from None


def _places_of(folder: Path, plan: Plan, documents: dict[int, Numbers]) -> dict[int, Numbers]:
    """Where documents lie, by shard, ascending: their samples; of packed rows the begin and the end of each
    stretch of their tokens, row x seq_len + place."""
    places = {}
    with Progress("finding their places", len(documents), unit="shards") as progress:
        for shard_id, numbers in documents.items():
            if plan.spec.has_rows:
                begins, ends, number = _stretches(folder, plan, shard_id)
                wanted = np.isin(number, numbers)
                places[shard_id] = np.stack([begins[wanted], ends[wanted]], axis=1).reshape(-1)
            else:
                places[shard_id] = np.sort(_in_order_of_input(read_idx(folder, plan.spec, shard_id))[numbers])
            progress.add(1)
    return places


def _in_order_of_input(records: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """The samples of a shard in the order in which its input has them, or their first documents."""
    return np.lexsort((records["source_offset"], records["source"]))


def _stretches(folder: Path, plan: Plan, shard_id: int) -> tuple[Numbers, Numbers, Numbers]:
    """Begins and ends of the documents' tokens in a shard's rows, and whose they are: int64[n] each."""
    manifest = check_shard(folder, shard_id, plan.plan_id)
    num_documents = manifest.counts.num_documents
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        records, seq_len = samples.records, plan.spec.seq_len
        every = [row * seq_len + samples.starts(row) for row in range(len(records))]
        starts = np.concatenate([np.empty(0, np.int64), *every])
    end = (len(records) - 1) * seq_len + int(records["num_tokens"][-1]) if len(records) else 0
    is_in_order = (np.diff(_in_order_of_input(records)) == 1).all()
    if plan.options.pack == "concat" and len(starts) == num_documents and is_in_order:
        return starts, np.append(starts[1:], end), np.arange(num_documents)
    begins, ends, number, is_start = _packed_anew(folder, plan, manifest)
    if begins[is_start].tolist() != starts.tolist():
        raise Refused(
            f"the documents of shard {shard_id:05d}, packed anew, begin at other places of its rows; was its "
            "input or a library changed? Name documents by what the plan was made with"
        )
    return begins, ends, number


def _packed_anew(
    folder: Path, plan: Plan, manifest: Manifest
) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.bool_]]:
    """The same of rows that are packed again, and which stretches begin a document."""
    worker = load_worker(
        plan, folder, WorkerSettings(), num_cpus=1, warn=say, shard=plan.shard(manifest.shard_id)
    )
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
        for item in _items(folder, plan, manifest):
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
