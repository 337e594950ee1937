"""The command ``duplicates``: list the documents of one or several data sets that equal an earlier one.

It keeps the first of equal documents, by the order of data sets, then of their inputs. Digests are compared
in parts, by their first bits, so memory does not grow with the number of documents: 1 GB, plus 50 bytes per
group of equal documents. All digests are read once for each 8 million of them. The input is read, too, since
it has the offsets of documents.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from preprocess.given_inputs import GivenInputs, add_given_inputs, blank_command, unblanked_documents
from preprocess.make.settings import InputSettings
from preprocess.read.documents import DocumentReader
from shardprep import files, publishing
from shardprep.console import Progress, counted, print_exactly, print_lines, quoted, with_progress
from shardprep.errors import Refused, UsageError
from shardprep.format import names
from shardprep.format.blanked import blank_digests
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import DocumentNames, name_of_place, read_digests
from shardprep.format.done import done_manifests
from shardprep.format.plan import Plan, need_plan
from shardprep.output_folder import claim_file

_LIST_BEGINS = re.compile(rb'"?at:')  # of a list of ``duplicates``
_PART_DOCUMENTS = 1 << 23  # digests that are compared at once
_HALF = np.uint64(32)  # bits


def duplicates_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find equal documents in one or several data sets, and list those to remove from each data set, for "
        "'plan --exclude' and 'blank --ids'. The first of equal documents is kept, by the order of the data "
        "sets, then of their inputs. Plans must have --digests. Inputs of shards with duplicates are read."
    )
    add = parser.add_argument
    add("data_dirs", metavar="DATA", nargs="+", type=Path, help="folder of a data set, complete")
    text = "list for the first data set; the second one's has .2 before the suffix, and so on"
    add("--output", metavar="FILE", type=Path, required=True, help=text)
    add_given_inputs(parser)
    add("--json", action="store_true", help="print JSON for programs")


class _Shard(NamedTuple):
    folder: DataFolder
    plan: Plan
    reader: DocumentReader
    shard_id: int
    stamp: files.FileStamp  # of its digests


def duplicates(args: argparse.Namespace) -> int:
    """Find the documents to remove, write the lists, and print the totals. Return the exit code."""
    plans = dict[str, DataFolder]()
    given = GivenInputs(args.transform, args.input_dir)
    shards: list[_Shard] = []
    lists: dict[DataFolder, publishing.PublishedFile] = {}  # by data set
    inputs: dict[DataFolder, InputSettings] = {}  # by data set
    removed = Counter[tuple[DataFolder, str]]()  # documents, by data set and source
    with contextlib.ExitStack() as opened:
        for number, folder in enumerate(map(DataFolder, args.data_dirs), 1):
            plan = need_plan(folder)
            other = plans.setdefault(plan.plan_id, folder)
            if other is not folder:
                same = f"{other} and {folder}, whose plan is the same"
                raise UsageError(found=same, expected="each data set once")
            path = args.output if number == 1 else args.output.with_suffix(f".{number}{args.output.suffix}")
            claim_file(path, _LIST_BEGINS)
            # Open the list now, so that an error of its folder comes before the work.
            lists[folder] = opened.enter_context(publishing.PublishedFile(path))
            where = given.of(folder, plan)
            inputs[folder] = where
            reader = DocumentReader.open_for_plan(folder, plan.options, where.transform)
            if plan.options.learn == "each":
                expected = "--learn all, as documents of one conversation have equal digests"
                advice = "plan the same input so into another folder; its list fits this one, too"
                raise UsageError(path=folder, found="--learn each", expected=expected, advice=advice)
            for manifest in done_manifests(folder, plan.plan_id, range(plan.num_shards)):
                stamp = manifest.digests
                if stamp is None:
                    expected = "those of plan --digests"
                    advice = "plan again with it, into a new folder"
                    raise UsageError(
                        path=folder, found="no digests", expected=expected, advice=advice, remedy="--digests"
                    )
                shards.append(_Shard(folder, plan.at(where.input_dir), reader, manifest.shard_id, stamp))
        given.check_all_used()
        # Find the groups of equal documents, one part of the digests at a time.
        num_all = sum(shard.stamp.num_bytes // names.DIGEST_BYTES for shard in shards)
        num_parts = 1 + num_all // _PART_DOCUMENTS
        blanks = blank_digests(np.array([False, True]))
        keys = [blanks[:0]]
        first_shards = [np.zeros(0, np.int64)]
        num_documents = 0
        num_copies = 0
        has_copies = np.zeros(len(shards), np.bool_)  # bool[shards]: whether it has documents to remove
        progress = Progress("comparing digests", num_parts * num_all, unit="documents")
        for part in range(num_parts):
            digests = []
            counts = []
            for shard in shards:
                digests_here = read_digests(shard.folder, shard.shard_id, shard.stamp)
                first_bits = digests_here.view(">u8")[::2].astype(np.uint64) >> _HALF
                here = digests_here[first_bits * np.uint64(num_parts) >> _HALF == part]
                digests.append(here[(here != blanks[0]) & (here != blanks[1])])
                counts.append(len(digests[-1]))
                progress.add(len(digests_here))
            shard_of = np.repeat(np.arange(len(shards)), counts)
            unique, first, count = np.unique(np.concatenate(digests), return_index=True, return_counts=True)
            num_documents += len(shard_of)
            num_copies += len(shard_of) - len(unique)
            keys.append(unique[count > 1])
            first_shards.append(shard_of[first[count > 1]])
            has_copies[np.delete(shard_of, first)] = True
        # Digests ascend, across parts and within each.
        groups = DocumentNames(keys=np.concatenate(keys))
        first_shard = np.concatenate(first_shards)
        for number in with_progress("writing the lists", np.flatnonzero(has_copies).tolist()):
            shard = shards[number]
            kept = set[int]()
            for documents in unblanked_documents(shard.plan, shard.folder, shard.shard_id, shard.reader):
                path = documents.input_path
                group_of = groups.find(documents.digests())
                for document in np.flatnonzero(group_of >= 0).tolist():
                    group = int(group_of[document])
                    if first_shard[group] == number and group not in kept:
                        kept.add(group)  # this is the first one
                        continue
                    name = name_of_place(path, int(documents.offsets[document]))
                    lists[shard.folder].write(f"{name}\n".encode())
                    removed[shard.folder, names.source_of_path(path)] += 1
        if removed.total() != num_copies:
            expected = f"{num_copies} by the same input, --transform and libraries that made the data"
            raise Refused(found=f"{removed.total()} duplicates in the input", expected=expected)
        for file in lists.values():
            file.sync()
            file.rename_into_place()
        publishing.sync_folder(args.output.parent)
    data_sets: list[dict[str, Any]] = []
    for folder, file in lists.items():
        sources = {source: count for (owner, source), count in removed.most_common() if owner == folder}
        data_sets.append({"data_dir": str(folder), "list": str(file.path), "sources": sources})
    if args.json:
        sums = {"num_documents": num_documents, "num_groups": len(groups.keys), "num_duplicates": num_copies}
        print_exactly(json.dumps({**sums, "data_sets": data_sets}))
        return 0
    total = counted(num_documents, "document")
    print_lines(f"{num_copies:,} of {total} are duplicates of {len(groups.keys):,} others")
    for each in data_sets:
        count = sum(each["sources"].values())
        data_dir = DataFolder(each["data_dir"])
        list_path = quoted(each["list"])
        print_lines(f"{quoted(data_dir)}: {counted(count, 'document')} to remove; list: {list_path}")
        print_lines(*(f"  {source}: {counted(num, 'document')}" for source, num in each["sources"].items()))
        if count:
            blank = blank_command(data_dir, lists[data_dir].path, inputs[data_dir])
            print_lines(f"  next: {blank}  # or plan again with --exclude {list_path}")
    return 0
