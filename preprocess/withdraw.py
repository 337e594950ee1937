"""``withdraw``: name documents that no training may see any more, in a list (withdrawn/NNNN.json).

The shards stay as they are. A document is named by its number in its shard, 0 for the first one that the
shard's input has and that was not left out. Of packed rows a list also has where its tokens lie in them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from preprocess.look.addresses import (
    InInput,
    InShard,
    find_address,
    ids_kept,
    no_document_at,
    samples_at,
    shards_of_input,
)
from preprocess.look.left_out import left_out_at
from preprocess.make.engines import Numbers, TokenBatch
from preprocess.make.members import Piece, RowMembers
from preprocess.make.packing import START, RowGroup
from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import documents_of_shard, load_worker
from preprocess.read.documents import Documents
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import BadInput, NotFound, Refused, UsageError
from shardprep.files import NOT_THERE, errors_named, open_regular, read_regular
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.digests import DIGEST, DIGEST_BYTES
from shardprep.format.done import check_done, read_findings
from shardprep.format.idx import read_idx
from shardprep.format.input_formats import place_text
from shardprep.format.manifest import Manifest
from shardprep.format.names import TEXT_FIELD, digests_path, ids_path, remake_command, tar_path
from shardprep.format.options import PlanOptions
from shardprep.format.plan import Plan, need_plan
from shardprep.format.shards import ShardSamples
from shardprep.format.withdrawals import publish_withdrawal, read_withdrawals, withdrawal_path

Records = npt.NDArray[np.void]
Key = str | bytes  # an id, a source, or the digest of a text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Name documents that no training may see any more. Every loader that opens the data set from then on "
        "masks them where they stand; its order, and running states, stay."
    )
    parser.add_argument("data_dir", metavar="DATA", type=Path, help="folder of the data set, complete")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--ids", metavar="FILE", type=Path, help="ids of --id_field, one per line (default: none)")
    text = "sha256 of texts, one per line in hex digits (default: none)"
    add("--sha256", metavar="FILE", type=Path, help=text)
    add("--source", metavar="NAME", help="all documents of this source (default: none)")
    text = (
        "the documents at these addresses, as peek, where and loader.origin print them: SHARD:SAMPLE, "
        "SHARD:ROW:DOCUMENT (without DOCUMENT all of a row), FILE:BYTE of an input, or id:ID (default: none)"
    )
    add("--at", metavar="ADDRESS", nargs="+", help=text)
    parser.add_argument("--reason", metavar="TEXT", default="", help="kept with the list (default: none)")
    text = "folder of the input, if it moved (default: the plan's)"
    parser.add_argument("--input_dir", metavar="PATH", type=Path, help=text)


def withdraw(args: argparse.Namespace) -> int:
    """``withdraw DATA``: find the documents and publish the list; 66 where some asked for are not there."""
    folder: Path = args.data_dir
    plan = need_plan(folder).at(args.input_dir)
    before = read_withdrawals(folder, plan.plan_id)
    is_found: dict[Key, bool] = {}
    found: dict[int, Numbers] = {}
    if args.at is not None:
        found = _documents_at(folder, plan, args.at)
    else:
        is_found = dict.fromkeys(_asked_keys(args, plan), False)
        with Progress("looking for documents", plan.num_shards, unit="shards") as progress:
            for shard_id in range(plan.num_shards):
                keys = _keys_of_shard(
                    args,
                    plan,
                    check_done(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id)),
                )
                hits = [(number, key) for number, key in enumerate(keys) if key in is_found]
                is_found.update((key, True) for _, key in hits)
                if hits:
                    found[shard_id] = np.array([number for number, _ in hits], np.int64)
                progress.add(1)
    num_found = sum(map(len, found.values()))
    given = {name: getattr(args, name) for name in ("ids", "sha256", "source")}
    given["at"] = args.at and " ".join(args.at)
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


def _documents_at(folder: Path, plan: Plan, addresses: Sequence[str]) -> dict[int, Numbers]:
    """The documents at some addresses, by shard. Raises NotFound, UsageError, and what reading raises."""
    asked: dict[int, list[InShard]] = {}
    found: dict[int, set[int]] = {}
    for address in addresses:
        place = find_address(folder, plan, address)
        if isinstance(place, InShard):
            asked.setdefault(place.shard_id, []).append(place)
            continue
        if lines := left_out_at(folder, plan, place):
            raise NotFound(f"{lines[0]}; no training sees it, so there is nothing to withdraw")
        if plan.spec.has_rows:
            begin, shard_id, number = _document_in_input(folder, plan, place)
            found.setdefault(shard_id, set()).add(number)
        else:
            shard_id, sample = samples_at(folder, plan, place)[-1]
            asked.setdefault(shard_id, []).append(InShard(shard_id, sample, None))
            begin = int(read_idx(folder, plan.spec, shard_id)["source_offset"][sample])
        if begin != place.offset:
            nearest = place_text(plan.inputs[place.input_number].path, begin)
            say(f"no document begins at {address}: the last one before is taken, at {nearest}")
    for shard_id, places in asked.items():
        check_done(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id))
        numbers = _in_rows(folder, plan, places) if plan.spec.has_rows else _of_samples(folder, plan, places)
        found.setdefault(shard_id, set()).update(numbers)
    return {shard_id: np.array(sorted(numbers), np.int64) for shard_id, numbers in sorted(found.items())}


def _of_samples(folder: Path, plan: Plan, places: Sequence[InShard]) -> list[int]:
    """The numbers of the documents that are samples of one shard."""
    numbers = np.argsort(_in_order_of_input(read_idx(folder, plan.spec, places[0].shard_id)))
    for place in places:
        if place.document:
            raise NotFound(f"{_address(place)}: a sample of this data set is one document, 0")
    return [int(numbers[place.sample]) for place in places]


def _in_rows(folder: Path, plan: Plan, places: Sequence[InShard]) -> list[int]:
    """The numbers of the documents whose tokens are at these places of one shard's rows."""
    shard_id, seq_len = places[0].shard_id, plan.spec.seq_len
    begins, ends, number = _stretches(folder, plan, shard_id)
    order = np.argsort(begins)
    found: list[int] = []
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        for place in places:
            cuts = np.unique([0, *samples.starts(place.sample).tolist()])
            if (place.document or 0) >= len(cuts):
                raise NotFound(f"{_address(place)}: that row has documents 0 to {len(cuts) - 1}")
            first = place.sample * seq_len + (cuts if place.document is None else cuts[[place.document]])
            nearest = order[np.searchsorted(begins[order], first, side="right") - 1]
            found += number[nearest[first < ends[nearest]]].tolist()
    return found


def _address(place: InShard) -> str:
    return ":".join(str(part) for part in place if part is not None)


def _document_in_input(folder: Path, plan: Plan, place: InInput) -> tuple[int, int, int]:
    """Where the document at a place of an input begins, its shard and number; the input is read again."""
    nearest: tuple[int, int, int] | None = None  # offset, shard, number
    shards = shards_of_input(folder, plan, place.input_number)
    with Progress("looking for a document", sum(shard.num_bytes for shard in shards)) as progress:
        for shard_id in (shard.shard_id for shard in shards):
            num_read = 0
            for item in _items(
                folder, plan, check_done(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id))
            ):
                input_number, offsets = item.input_number, item.offsets
                before = np.flatnonzero(offsets <= place.offset)
                if input_number == place.input_number and len(before):
                    last = int(before[-1])
                    nearest = max(nearest or (-1, 0, 0), (int(offsets[last]), shard_id, num_read + last))
                num_read += len(offsets)
                progress.add(item.num_bytes)
    if nearest is None:
        raise no_document_at(plan, place)
    return nearest


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
    folder: Path = args.data_dir
    if args.source is not None:
        return _sources_of(folder, plan, manifest, args.source)
    if args.ids is not None:
        return [kept for _, kept in _ids_of_all(folder, manifest)]
    return document_digests(folder, plan, manifest)


def _ids_of_all(folder: Path, manifest: Manifest) -> list[tuple[InInput, str]]:
    """Place and id of each document of a shard, if each has one. Raises Refused, and what reading raises."""
    shard_id, num_documents = manifest.shard_id, manifest.counts.num_documents
    found = list(ids_kept(folder, shard_id))
    if len(found) != num_documents:  # earlier versions wrote no line for those of .txt
        raise Refused(
            f"{ids_path(folder, shard_id)} has {counted(len(found), 'line')}, expected one for each of "
            f"{num_documents} documents; run: {remake_command(shard_id, folder)}, then this again"
        )
    return found


def _sources_of(folder: Path, plan: Plan, manifest: Manifest, name: str) -> Iterable[str]:
    """The source of each document of a shard; of none where that shard has nothing of the source ``name``.
    A shard that has nothing else is not read."""
    counts, options = manifest.counts, plan.options
    num_documents = counts.sources[name].num_documents if name in counts.sources else 0
    if num_documents in (0, counts.num_documents):
        return [name] * num_documents
    if options.source_field or (plan.spec.has_rows and not options.id_field):
        items = _items(folder, plan, manifest)
        return itertools.chain.from_iterable(_named_sources(plan, item) for item in items)
    if options.id_field:
        return [plan.source_of(place.input_number) for place, _ in _ids_of_all(folder, manifest)]
    records = read_idx(folder, plan.spec, manifest.shard_id)
    return map(plan.source_of, records["source"][_in_order_of_input(records)].tolist())


def _named_sources(plan: Plan, item: Documents) -> Iterable[str]:
    of_file = plan.source_of(item.input_number)
    return [name or of_file for name in item.columns.get("source") or [""] * len(item.texts)]


def _keys_in(path: Path, *, by_id: bool) -> Iterator[str | bytes]:
    """The keys in a file that a user wrote, line by line. Raises NotFound, BadInput, ReadWriteError."""
    try:
        with errors_named(path), os.fdopen(open_regular(path), encoding="utf-8") as lines:
            for number, line in enumerate(map(str.strip, lines), 1):
                if by_id and line:
                    yield line
                elif line:
                    digits = line.split()[0]
                    if not re.fullmatch("[0-9a-fA-F]{64}", digits):
                        raise BadInput(f"{path}:{number} begins {line[:60]!r}, expected 64 hex digits")
                    yield bytes.fromhex(digits)[:DIGEST_BYTES]
    except NOT_THERE:
        raise NotFound(f"{path} is no file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 ({error.reason}); write it anew, a line for each") from None


def _items(folder: Path, plan: Plan, manifest: Manifest) -> Iterator[Documents]:
    """The documents of a shard's input as its worker read them; nothing that was left out.

    Raises Refused where the input is not as it was, and what reading raises.
    """
    shard_id, expected = manifest.shard_id, manifest.counts.num_documents
    shard = plan.shard(shard_id)
    digest = None if shard.sha256 is None else hashlib.sha256()
    num_read = 0
    for item in documents_of_shard(plan, folder, shard, digest=digest):
        num_read += len(item.texts)
        yield item
    if num_read != expected or (digest is not None and digest.hexdigest() != shard.sha256):
        raise Refused(
            f"the input of shard {shard_id:05d} in {plan.input_dir} changed since the shard was made: it has "
            f"{counted(num_read, 'document')}, the manifest says {expected}; bring it back, or name its "
            "folder by --input_dir"
        )


def document_digests(folder: Path, plan: Plan, manifest: Manifest) -> Iterator[bytes]:
    """The digest of each document of a shard, in the order of the input; see shardprep/format/digests.py.

    As the shard keeps them, else by the texts that it keeps, else by the input's.
    """
    options = plan.options
    if plan.spec.has_rows or not (options.digests or (options.keep_text and not options.is_chat)):
        for item in _items(folder, plan, manifest):
            yield from item.digests().tolist()
        return
    records = read_idx(folder, plan.spec, manifest.shard_id)
    digests = np.empty(len(records), DIGEST)
    if options.digests:
        path = digests_path(folder, manifest.shard_id)
        digests[:] = np.frombuffer(read_regular(path, max_bytes=digests.nbytes), DIGEST)
    else:
        digests[np.argsort(records["offset"])] = _digests_of_tar(tar_path(folder, manifest.shard_id))
    yield from digests[_in_order_of_input(records)].tolist()


def _digests_of_tar(path: Path) -> Records:
    """Those of the texts in a tar, in its order."""
    with errors_named(path), os.fdopen(open_regular(path), "rb") as file, tarfile.open(fileobj=file) as tar:
        texts = (tar.extractfile(member) for member in tar if member.name.endswith(f".{TEXT_FIELD}"))
        found = [hashlib.sha256(text.read()).digest()[:DIGEST_BYTES] for text in texts if text]
    return np.frombuffer(b"".join(found), DIGEST)


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


def _in_order_of_input(records: Records) -> npt.NDArray[np.intp]:
    """The samples of a shard in the order in which its input has them, or their first documents."""
    return np.lexsort((records["source_offset"], records["source"]))


def _stretches(folder: Path, plan: Plan, shard_id: int) -> tuple[Numbers, Numbers, Numbers]:
    """Begins and ends of the documents' tokens in a shard's rows, and whose they are: int64[n] each."""
    manifest = check_done(folder, shard_id, plan.plan_id, read_findings(folder, plan.plan_id))
    num_documents = manifest.counts.num_documents
    with ShardSamples(folder, plan.spec, shard_id) as samples:
        records, seq_len = samples.records, plan.spec.seq_len
        every = [row * seq_len + samples.starts(row) for row in range(len(records))]
        starts = np.concatenate([np.empty(0, np.int64), *every])
    end = (len(records) - 1) * seq_len + int(records["num_tokens"][-1]) if len(records) else 0
    is_in_order = (np.diff(_in_order_of_input(records)) == 1).all() and not plan.options.validation_fraction
    if plan.options.pack == "concat" and len(starts) == num_documents and is_in_order:
        return starts, np.append(starts[1:], end), np.arange(num_documents)
    begins, ends, number, is_start = _packed_anew(folder, plan, manifest).T
    is_start = is_start.astype(np.bool_)
    if begins[is_start].tolist() != starts.tolist():
        raise Refused(
            f"the documents of shard {shard_id:05d}, packed anew, begin at other places of its rows; was its "
            "input or a library changed? Name documents by what the plan was made with"
        )
    return begins, ends, number


def _packed_anew(folder: Path, plan: Plan, manifest: Manifest) -> Numbers:
    """The same of rows that are packed again, and which stretches begin a document: int64[n, 4]."""
    worker = load_worker(
        plan, folder, WorkerSettings(), num_cpus=1, warn=say, shard=plan.shard(manifest.shard_id)
    )
    rows = _PlacedRows(plan.spec, manifest.shard_id, plan.options)
    num_read = 0
    for item in _items(folder, plan, manifest):
        tokens = worker.engine.encode_documents(
            item, end_id=plan.end_id, mask_rule=plan.options.chat_mask_rule
        )
        # The first half of a digest tells the side; the number of the document takes the other's place.
        names = np.zeros((len(tokens.offsets) - 1, 2), np.int64)
        if plan.options.validation_fraction:
            names[:, 0] = item.digests().view(np.int64)[::2]
        names[:, 1] = num_read + np.arange(len(names))
        rows.add(tokens, names.view(DIGEST)[:, 0])
        num_read += len(names)
    return rows.placed()


class _PlacedRows(RowMembers):
    """Rows of which only is kept where documents lie in them."""

    def __init__(self, spec: DatasetSpec, shard_id: int, options: PlanOptions) -> None:
        super().__init__(spec, shard_id, options)
        self._sides: tuple[list[Numbers], list[Numbers]] = ([], [])  # begin, end, number, whether it begins
        self._ends = [0, 0]  # where the rows of each side end, in tokens

    def add(self, tokens: TokenBatch, names: Records) -> None:
        """Take documents, named by what stands for their digests."""
        starts = np.zeros(len(names), START)
        starts["digest"] = names
        for _ in self._packed(tokens, starts):
            pass

    def placed(self) -> Numbers:
        """All stretches, those for validation behind the others, as the idx has their rows."""
        for _ in self.rest():
            pass
        train, validation = (np.concatenate([np.empty((0, 4), np.int64), *side]) for side in self._sides)
        validation[:, :2] += self._ends[0]
        return np.concatenate([train, validation])

    def _member(self, group: RowGroup, *, is_validation: bool) -> Piece:
        seq_len = self._spec.seq_len
        row_begins = np.arange(len(group.row_tokens)) * seq_len
        position = group.starts["position"].astype(np.int64)
        goes_on = ~np.isin(row_begins, position)  # with a document of an earlier row
        begins = np.concatenate([position, row_begins[goes_on]])
        names = np.concatenate([group.starts["digest"], group.firsts["digest"][goes_on]])
        order = np.argsort(begins)
        begins = begins[order]
        row_ends = row_begins + group.row_tokens
        ends = np.minimum(np.append(begins[1:], row_ends[-1]), row_ends[begins // seq_len])
        before = self._ends[is_validation]
        self._ends[is_validation] += len(row_begins) * seq_len
        numbers, is_start = names.view(np.int64)[1::2][order], order < len(position)
        self._sides[is_validation].append(
            np.stack([before + begins, before + ends, numbers, is_start], axis=1).astype(np.int64)
        )
        return Piece(b"", group.starts[:0])
