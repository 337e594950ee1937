"""``shardprep duplicates``: equal documents, across shards and data sets, by the digests that plans keep.

Of equal documents the first one stays, by the order of data sets, then of their inputs. Digests are compared
in parts, by their first bits, so memory does not grow with the number of documents. The price: 0.5 GB, and 50
bytes for each document that goes. All digests, 16 bytes a document, are read once for each 8 million of them:
120 times 16 GB of 10^9 documents, which the page cache may hold.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.make.worker import documents_of_shard
from preprocess.read.transform import transform_of
from shardprep.console import Progress, counted, print_lines, quoted, say
from shardprep.errors import BrokenShard, Refused, UsageError
from shardprep.files import FileStamp, PublishedFile, sync_folder
from shardprep.format.documents import (
    DIGEST,
    MOST_NAMES,
    DocumentNames,
    name_of_place,
    pieces_of,
    read_blanked,
    read_digests,
)
from shardprep.format.index import ShardSamples, read_idx
from shardprep.format.input_formats import name_of_input
from shardprep.format.manifest import check_done, read_findings, read_manifest
from shardprep.format.names import DIGEST_BYTES, digests_path, remake_command, source_of_path
from shardprep.format.plan import Plan, need_plan

Digests = npt.NDArray[np.uint64]  # uint64[documents, 2]: 16 bytes as two numbers
_PART_DOCUMENTS = 1 << 23  # whose digests are compared at once
_HALF = np.uint64(32)  # bits


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find equal documents across the shards of one or several data sets, and write for each a list of "
        "those that go, which 'plan --exclude' and 'blank --ids' take. The first one stays: by the order in "
        "which the data sets are named, then of their inputs. Plans must keep digests."
    )
    add = parser.add_argument
    add("data_dirs", metavar="DATA", nargs="+", type=Path, help="folder of a data set, complete")
    text = "list of what goes of the first data set; the second one's has .2 before the suffix, and so on"
    add("--output", metavar="FILE", type=Path, required=True, help=text)
    text = "of packed rows, folder of the inputs, if they moved (default: the plans')"
    add("--input_dir", metavar="PATH", type=Path, help=text)
    text = "of packed rows, the file of the plans' --transform (default: none)"
    add("--transform", metavar="PATH", type=Path, help=text)
    add("--json", action="store_true", help="print JSON for programs")


@dataclass(eq=False)
class _DataSet:
    """A data set, and what goes of it."""

    folder: Path
    plan: Plan
    list_file: PublishedFile
    num_documents: int = 0  # that are not blanked
    num_duplicates: int = 0
    num_tokens: int = 0  # of these
    sources: dict[str, Counter[str]] = field(default_factory=dict)

    def write(self, going: Iterable[tuple[str, int, int]]) -> None:
        """List and count documents that go: input, place there and tokens of each."""
        for path, offset, num_tokens in going:
            self.list_file.write(f"{name_of_place(path, offset)}\n".encode())
            self.num_duplicates += 1
            self.num_tokens += num_tokens
            of_source = self.sources.setdefault(source_of_path(path), Counter())
            of_source.update(num_duplicates=1, num_tokens=num_tokens)


class _Shard(NamedTuple):
    data_set: _DataSet
    shard_id: int
    stamp: FileStamp  # of its digests

    def digests(self, *, is_checked: bool) -> Digests:
        """Read its digests. Raises MissingShard, BrokenShard."""
        found = read_digests(self.data_set.folder, self.shard_id, self.stamp, is_checked=is_checked)
        return found.view(">u8").reshape(-1, 2).astype(np.uint64)


class _Copies(NamedTuple):
    """Documents of one shard that go, in the order of its digests."""

    digests: Digests
    positions: npt.NDArray[np.int64]  # among the shard's digests
    is_first_here: npt.NDArray[np.bool_]  # whether the one that stays is of this shard, too


def duplicates(args: argparse.Namespace) -> int:
    """Find the documents that go, write the lists, and print the sums. Raises what reading and writing do."""
    output: Path = args.output
    data_sets: list[_DataSet] = []
    with contextlib.ExitStack() as opened:
        for number, folder in enumerate(args.data_dirs, 1):
            plan = need_plan(folder)
            for other in data_sets:
                if other.plan.plan_id == plan.plan_id:
                    found = f"{other.folder} and {folder}, whose plan is the same"
                    raise UsageError(found=found, expected="each data set once")
            path = output if number == 1 else output.with_suffix(f".{number}{output.suffix}")
            # Before the work, so that a folder that cannot be written to is told at once.
            data_sets.append(_DataSet(folder, plan, opened.enter_context(PublishedFile(path))))
        shards = [shard for each in data_sets for shard in _shards_of(each)]
        num_groups, copies = _find(shards)
        progress = Progress("writing the lists", len(copies), unit="shards")
        for number, of_shard in copies.items():
            shards[number].data_set.write(_going(shards[number], of_shard, args))
            progress.add(1)
        for each in data_sets:
            each.list_file.sync()
        for each in data_sets:
            each.list_file.publish()
        sync_folder(output.parent)
    counts = ("num_documents", "num_duplicates", "num_tokens")
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in data_sets) for name in counts}
    if args.json:
        told = [{name: getattr(each, name) for name in (*counts, "sources")} for each in data_sets]
        for each, answer in zip(data_sets, told, strict=True):
            answer |= {"data_dir": str(each.folder), "list": str(each.list_file.path)}
        print_lines(json.dumps({**sums, "num_groups": num_groups, "data_sets": told}))
        return 0
    total = counted(sums["num_documents"], "document")
    print_lines(f"{sums['num_duplicates']:,} of {total} are copies of {num_groups:,} others")
    for each in data_sets:
        list_path = quoted(each.list_file.path)
        going = f"{counted(each.num_duplicates, 'document')}, {counted(each.num_tokens, 'token')}"
        print_lines(f"{each.folder}: {going} of {each.num_documents:,} documents; list: {list_path}")
        for source, of in sorted(each.sources.items(), key=lambda item: -item[1]["num_tokens"]):
            print_lines(f"  {source}: {of['num_duplicates']:,} documents, {of['num_tokens']:,} tokens")
        if each.num_duplicates > MOST_NAMES:
            say(f"warning: {list_path} has more than {MOST_NAMES:,} names, and no command takes it")
        elif each.num_duplicates:
            blank = f"shardprep blank {quoted(each.folder)} --ids {list_path} --output NEW"
            print_lines(f"  next: shardprep plan --exclude {list_path} ...  # or: {blank}")
    return 0


def _shards_of(data_set: _DataSet) -> Iterator[_Shard]:
    """Yield the shards. Raises UsageError where no digests are kept, and what ``check_done`` raises."""
    folder, plan = data_set.folder, data_set.plan
    findings = read_findings(folder, plan.plan_id)
    for shard_id in range(plan.num_shards):
        stamp = check_done(folder, shard_id, plan.plan_id, findings).digests
        if stamp is None:
            raise UsageError(
                path=folder,
                found="no digests of its documents",
                expected="a data set of plan --digests; plan anew with it, into a new folder",
                remedy="--digests",
            )
        yield _Shard(data_set, shard_id, stamp)


def _find(shards: list[_Shard]) -> tuple[int, dict[int, _Copies]]:
    """Return the number of groups of equal documents, and what goes of shards, by their place in the list."""
    counts = [shard.stamp.num_bytes // DIGEST_BYTES for shard in shards]
    firsts = np.cumsum([0, *counts])  # a document's number: those of the shards before it, and its place
    num_parts, num_groups = 1 + sum(counts) // _PART_DOCUMENTS, 0
    going = [(np.zeros((0, 2), np.uint64), np.zeros(0, np.int64), np.zeros(0, np.bool_))]
    progress = Progress("comparing digests", num_parts * sum(counts), unit="documents")
    for part in range(num_parts):
        found, numbers = [], []
        for shard, first, count in zip(shards, firsts.tolist(), counts, strict=False):
            pairs = shard.digests(is_checked=part > 0)
            # Of a blanked document all bits of the digest are 0, or 1.
            is_here = (pairs[:, 0] != pairs[:, 1]) | ((pairs[:, 0] + np.uint64(1)) > 1)
            is_here &= (pairs[:, 0] >> _HALF) * np.uint64(num_parts) >> _HALF == part
            here = np.flatnonzero(is_here)
            found.append(pairs[here])
            numbers.append(first + here)
            shard.data_set.num_documents += len(here)
            progress.add(count)
        digests, number = np.concatenate(found), np.concatenate(numbers)
        del found, numbers
        # Most documents are alone, and to sort numbers costs a tenth of sorting pairs.
        high = np.sort(digests[:, 0])
        twice = np.append(high[1:][high[1:] == high[:-1]], np.uint64(0))
        at = np.flatnonzero(twice[np.searchsorted(twice[:-1], digests[:, 0])] == digests[:, 0])
        at = at[np.lexsort((number[at], digests[at, 1], digests[at, 0]))]
        digests, number = digests[at], number[at]
        is_first = np.append(True, (digests[1:] != digests[:-1]).any(axis=1))[: len(at)]
        first_of = np.maximum.accumulate(np.where(is_first, np.arange(len(at)), 0))
        shard_of = np.searchsorted(firsts, number, side="right")
        num_groups += len(np.unique(first_of[~is_first]))
        is_first_here = shard_of == shard_of[first_of]
        going.append((digests[~is_first], number[~is_first], is_first_here[~is_first]))
    digests, number, is_first_here = (np.concatenate(each) for each in zip(*going, strict=True))
    order = np.argsort(number)
    shard_of = np.searchsorted(firsts, number[order], side="right") - 1
    cuts = [*np.flatnonzero(np.diff(shard_of, prepend=-1)).tolist(), len(order)]
    copies = {}
    for begin, end in itertools.pairwise(cuts):
        here, place = order[begin:end], int(shard_of[begin])
        copies[place] = _Copies(digests[here], number[here] - firsts[place], is_first_here[here])
    return num_groups, copies


def _going(shard: _Shard, copies: _Copies, args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Yield input, place there and tokens of each document of a shard that goes.

    An idx has the place of a document that is a sample. Of rows it has not, so these documents are looked for
    in the input, by their digests.
    """
    folder, plan, shard_id = shard.data_set.folder, shard.data_set.plan, shard.shard_id
    paths = [item.path for item in plan.inputs]
    if plan.spec.has_rows:
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            pieces = pieces_of(samples)
        num_tokens = np.bincount(pieces.document, pieces.num_tokens).astype(np.int64)
    else:
        records = read_idx(folder, plan.spec, shard_id)
        num_tokens = records["num_tokens"]
    if len(num_tokens) * DIGEST_BYTES != shard.stamp.num_bytes:
        path, found = digests_path(folder, shard_id), f"{shard.stamp.num_bytes} bytes"
        remedy = remake_command(shard_id, folder)
        raise BrokenShard(path=path, found=found, expected=f"{len(num_tokens)} digests", remedy=remedy)
    num_tokens = num_tokens[copies.positions]
    if not plan.spec.has_rows:
        records = records[copies.positions]
        columns = (each.tolist() for each in (records["source"], records["source_offset"], num_tokens))
        for source, offset, count in zip(*columns, strict=True):
            yield name_of_input(paths, source), offset, count
        return
    keys, place = np.unique(copies.digests.astype(">u8").view(DIGEST).reshape(-1), return_index=True)
    names, tokens = DocumentNames(keys=keys), num_tokens[place].tolist()
    stays = copies.is_first_here[place].tolist()  # whether the next copy with this digest does
    blanked, num_found = None, 0
    if read_manifest(folder, shard_id).made_from is not None:
        blanked = read_blanked(folder, plan.plan_id, shard_id)
    transform = transform_of(plan.options, args.transform)
    planned = plan.at(args.input_dir).shard(shard_id)
    digest = None if planned.sha256 is None else hashlib.sha256()
    for documents in documents_of_shard(plan, folder, planned, digest=digest, transform=transform):
        of = names.find(documents.digests())
        if blanked is not None:
            of[blanked.are_at(documents.input_number, documents.offsets)] = -1
        for offset, number in zip(documents.offsets[of >= 0].tolist(), of[of >= 0].tolist(), strict=True):
            if stays[number]:
                stays[number] = False
            else:
                num_found += 1
                yield paths[documents.input_number], offset, tokens[number]
    if num_found != len(copies.positions):
        raise Refused(
            path=folder,
            found=f"{num_found} of {len(copies.positions)} duplicates of shard {shard_id:05d} in its input",
            expected="the input, the function and the libraries that made it",
        )
