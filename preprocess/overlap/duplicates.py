"""``shardprep duplicates``: equal documents, across shards and data sets, by the digests that plans keep.

Of equal documents the first one stays, by the order of data sets, then of their inputs. Digests are compared
in parts, by their first bits, so memory does not grow with the number of documents: 1 GB, and 50 bytes for
each group of equal ones. All digests, 16 bytes a document, are read once for each 8 million of them: 120
times 16 GB of 10^9 documents, which the page cache may hold. Where the documents that go begin is read from
the input of their shards, at 1 us a document and 3 ns a byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from preprocess.read.documents import Documents, documents_of_shard
from preprocess.read.transform import Transform, transform_of
from shardprep.console import Progress, counted, print_lines, quoted
from shardprep.errors import Refused, UsageError
from shardprep.files import FileStamp, PublishedFile, sync_folder
from shardprep.format.documents import (
    DIGEST,
    DocumentNames,
    blank_digests,
    name_of_place,
    read_blanked,
    read_digests,
)
from shardprep.format.manifest import check_done, read_findings
from shardprep.format.names import DIGEST_BYTES, ids_of_ranges, source_of_path
from shardprep.format.plan import Plan, need_plan

Numbers = npt.NDArray[np.int64]
_PART_DOCUMENTS = 1 << 23  # whose digests are compared at once
_HALF = np.uint64(32)  # bits


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find equal documents across the shards of one or several data sets, and write for each a list of "
        "those that go, which 'plan --exclude' and 'blank --ids' take. The first one stays: by the order in "
        "which the data sets are named, then of their inputs. Plans must keep digests. Of shards with copies "
        "the input is read."
    )
    add = parser.add_argument
    add("data_dirs", metavar="DATA", nargs="+", type=Path, help="folder of a data set, complete")
    text = "list of what goes of the first data set; the second one's has .2 before the suffix, and so on"
    add("--output", metavar="FILE", type=Path, required=True, help=text)
    add_input_flags(parser)
    add("--json", action="store_true", help="print JSON for programs")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    text = "folder of the inputs, if they moved (default: the plan's)"
    parser.add_argument("--input_dir", metavar="PATH", type=Path, help=text)
    text = "the file of the plan's --transform (default: none)"
    parser.add_argument("--transform", metavar="PATH", type=Path, help=text)


class _Shard(NamedTuple):
    folder: Path
    plan: Plan
    transform: Transform | None
    shard_id: int
    stamp: FileStamp  # of its digests


def duplicates(args: argparse.Namespace) -> int:
    """Find the documents that go, write the lists, and print the sums. Raises what reading and writing do."""
    plans: dict[str, Path] = {}
    shards: list[_Shard] = []
    lists: dict[Path, PublishedFile] = {}  # by data set
    going = Counter[tuple[Path, str]]()  # documents, by data set and source
    with contextlib.ExitStack() as opened:
        for number, folder in enumerate(args.data_dirs, 1):
            plan = need_plan(folder)
            if (other := plans.setdefault(plan.plan_id, folder)) is not folder:
                found = f"{other} and {folder}, whose plan is the same"
                raise UsageError(found=found, expected="each data set once")
            path = args.output if number == 1 else args.output.with_suffix(f".{number}{args.output.suffix}")
            # Before the work, so that a folder that cannot be written to is told at once.
            lists[folder] = opened.enter_context(PublishedFile(path))
            findings = read_findings(folder, plan.plan_id)
            transform = transform_of(plan.options, args.transform)
            for shard_id in range(plan.num_shards):
                stamp = check_done(folder, shard_id, plan.plan_id, findings).digests
                if stamp is None:
                    expected = "a data set of plan --digests; plan anew with it, into a new folder"
                    raise UsageError(path=folder, found="no digests", expected=expected, remedy="--digests")
                shards.append(_Shard(folder, plan.at(args.input_dir), transform, shard_id, stamp))
        names, first_shard, has_copies, num_documents, num_copies = _find(shards)
        with_copies = np.flatnonzero(has_copies).tolist()
        progress = Progress("writing the lists", len(with_copies), unit="shards")
        for number in with_copies:
            shard, kept = shards[number], set[int]()
            for documents in documents_left(shard.plan, shard.folder, shard.shard_id, shard.transform):
                path = shard.plan.inputs[documents.input_number].path
                group_of = names.find(documents.digests())
                for document in np.flatnonzero(group_of >= 0).tolist():
                    group = int(group_of[document])
                    if first_shard[group] == number and group not in kept:
                        kept.add(group)  # this is the first one
                        continue
                    name = name_of_place(path, int(documents.offsets[document]))
                    lists[shard.folder].write(f"{name}\n".encode())
                    going[shard.folder, source_of_path(path)] += 1
            progress.add(1)
        if going.total() != num_copies:
            found = f"{going.total()} of {num_copies} duplicates in the input"
            expected = "the input, the function and the libraries that made the data"
            raise Refused(found=found, expected=expected)
        for file in lists.values():
            file.sync()
            file.publish()
        sync_folder(args.output.parent)
    told: list[dict[str, Any]] = []
    for folder, file in lists.items():
        sources = {source: count for (of, source), count in going.most_common() if of == folder}
        told.append({"data_dir": str(folder), "list": str(file.path), "sources": sources})
    if args.json:
        sums = {"num_documents": num_documents, "num_groups": len(names.keys), "num_duplicates": num_copies}
        print_lines(json.dumps({**sums, "data_sets": told}))
        return 0
    total = counted(num_documents, "document")
    print_lines(f"{num_copies:,} of {total} are copies of {len(names.keys):,} others")
    for each in told:
        count, folder, path = sum(each["sources"].values()), quoted(each["data_dir"]), quoted(each["list"])
        print_lines(f"{folder}: {counted(count, 'document')}; list: {path}")
        print_lines(*(f"  {source}: {of:,} documents" for source, of in each["sources"].items()))
        if count:
            blank = f"shardprep blank {folder} --ids {path} --output NEW"
            print_lines(f"  next: shardprep plan --exclude {path} ...  # or: {blank}")
    return 0


def _find(shards: list[_Shard]) -> tuple[DocumentNames, Numbers, npt.NDArray[np.bool_], int, int]:
    """Find the groups of equal documents, a part of the digests at a time.

    Returns their digests, the shard that has the first one of each, which of all shards have others, the
    number of documents in groups or alone, and of those that go.
    """
    num_all = sum(shard.stamp.num_bytes // DIGEST_BYTES for shard in shards)
    num_parts, blanks = 1 + num_all // _PART_DOCUMENTS, blank_digests(np.array([False, True]))
    groups, firsts = [np.zeros(0, DIGEST)], [np.zeros(0, np.int64)]
    has_copies, num_documents, num_copies = np.zeros(len(shards), np.bool_), 0, 0
    progress = Progress("comparing digests", num_parts * num_all, unit="documents")
    for part in range(num_parts):
        digests, counts = [], []
        for shard in shards:
            found = read_digests(shard.folder, shard.shard_id, shard.stamp, is_checked=part > 0)
            first_bits = found.view(">u8")[::2].astype(np.uint64) >> _HALF
            here = found[first_bits * np.uint64(num_parts) >> _HALF == part]
            digests.append(here[(here != blanks[0]) & (here != blanks[1])])
            counts.append(len(digests[-1]))
            progress.add(len(found))
        shard_of = np.repeat(np.arange(len(shards)), counts)
        unique, first, count = np.unique(np.concatenate(digests), return_index=True, return_counts=True)
        num_documents += len(shard_of)
        num_copies += len(shard_of) - len(unique)
        groups.append(unique[count > 1])
        firsts.append(shard_of[first[count > 1]])
        has_copies[np.delete(shard_of, first)] = True
    # Parts ascend, and within them digests do.
    names = DocumentNames(keys=np.concatenate(groups))
    return names, np.concatenate(firsts), has_copies, num_documents, num_copies


def documents_left(
    plan: Plan, folder: Path, shard_id: int, transform: Transform | None
) -> Iterator[Documents]:
    """Yield the documents of a shard's input that are not blanked. Raises what reading the input does."""
    blanked = None
    if plan.options.blanked and shard_id in ids_of_ranges(plan.options.blanked):
        blanked = read_blanked(folder, plan.plan_id, shard_id)
    for documents in documents_of_shard(plan, folder, plan.shard(shard_id), transform=transform):
        if blanked is not None:
            is_gone = blanked.are_at(documents.input_number, documents.offsets)
            documents = documents.only(np.flatnonzero(~is_gone))
        yield documents
