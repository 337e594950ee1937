"""``blank``: a data set without some documents, in which everything else keeps its place.

Only the shards that hold one of them are made again, of the input, as their plan says: where a blanked
document's ids stood stand as many BLANKs, and its text, id and digest are gone. The other shards are second
names of the same files, or copies. The new data set has the plan's id, so a training run goes on with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from preprocess.make.resources import InputSettings
from preprocess.read.documents import DocumentReader
from shardprep.console import counted, print_lines, say, with_progress
from shardprep.errors import NotFound, Refused
from shardprep.files import make_folder, publish_link, sync_folder
from shardprep.format import documents
from shardprep.format.manifest import done_manifest, done_manifests, read_manifest, shard_files
from shardprep.format.names import EXCLUDED_NAME, TOKENIZER_DIR, id_ranges, ids_of_ranges, manifest_path
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan, publish_plan, read_plan

_MOST_TOLD = 20  # names that were not found


def take_over(folder: Path, new: Path, ids_file: Path, where: InputSettings) -> tuple[Plan, list[int], bool]:
    """Begin the new data set: find the documents, publish its plan, and take over the untouched shards.

    Returns its plan, the shards that are to be made again, and whether each document that the list names was
    found. Raises NotFound where none was, Refused where the new folder was begun otherwise, and what reading
    and writing raise.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)  # which are copied
    for _ in done_manifests(folder, plan.plan_id, range(plan.num_shards)):
        pass
    names = documents.read_names(ids_file, id_field=plan.options.id_field)
    found = np.zeros(len(names.keys), np.bool_)
    reader = DocumentReader.of_plan(folder, plan.options, where.transform)
    blanked_in: dict[int, documents.BlankedDocuments] = {}  # by shard
    moved = plan.at(where.input_dir)
    for number in with_progress("looking for documents", range(plan.num_shards)):
        shard, manifest = moved.shard(number), read_manifest(folder, number)
        parts = [np.empty((0, 2), np.int64)]  # of documents: number of the input, and where one begins in it
        if "id" in names.kinds:
            kept = list(documents.kept_ids(folder, number))
            places = np.array([place for *place, _ in kept], np.int64).reshape(-1, 2)
            of = names.find(documents.keys_of_ids(name for *_, name in kept))
            parts.append(places[of >= 0])
            found[of[of >= 0]] = True
        # The input is read only where it may have what is named by its text or its place.
        if names.may_be_in(folder, shard, manifest.digests):
            for batch in reader.of_shard(shard):
                ids = batch.columns.get("id")
                of = names.of_documents(batch.input_path, batch.offsets, ids, batch.digests)
                found[of[of >= 0]] = True
                offsets = batch.offsets[(of >= 0).any(axis=0)]
                parts.append(np.stack([np.full_like(offsets, batch.input_number), offsets], axis=1))
        if not sum(map(len, parts)):
            continue
        if manifest.made_from is not None:  # with what was blanked before
            before = documents.read_blanked(folder, plan.plan_id, number)
            parts.append(np.array([before.inputs, before.offsets]).T)
        inputs, offsets = np.unique(np.concatenate(parts), axis=0).T.tolist()
        blanked_in[number] = documents.BlankedDocuments(
            plan_id=plan.plan_id,
            shard_id=number,
            made_from=manifest.made_from or manifest.tar.sha256,
            inputs=inputs,
            offsets=offsets,
        )
    touched = sorted(blanked_in)
    if missing := int((~found).sum()):
        lines = documents.lines_of(ids_file, names, ~found, id_field=plan.options.id_field)
        print_lines(*(f"not found: {line}" for line in itertools.islice(lines, _MOST_TOLD)))
        say(f"{missing} of {counted(len(found), 'name')} in {ids_file} were not found")
    if not touched:
        expected = f"some of {folder}; nothing was made"
        raise NotFound(path=ids_file, found="names of no document", expected=expected)
    for number in ids_of_ranges(plan.options.blanked) if plan.options.blanked else ():
        blanked_in.setdefault(number, documents.read_blanked(folder, plan.plan_id, number))
    blanked = id_ranges(blanked_in)
    planned = dataclasses.replace(plan, options=dataclasses.replace(plan.options, blanked=blanked))
    # What the shards are made by is written, the plan last, unless an earlier attempt wrote the same.
    if (begun := read_plan(new)) is None:
        make_folder(new, parents=True)
        for each in blanked_in.values():
            documents.publish_blanked(new, each)
        excluded = [folder / EXCLUDED_NAME] if plan.options.excluded else []
        _take(folder, new, [*excluded, *(folder / TOKENIZER_DIR / name for name in plan.tokenizer_files)])
        publish_plan(planned, new)
    elif (begun.plan_id, begun.options) != (planned.plan_id, planned.options) or any(
        documents.read_blanked(new, plan.plan_id, number) != each for number, each in blanked_in.items()
    ):
        found_there = f"a data set that was not begun by blanking these documents of {folder}"
        expected = "a new folder, as blanking goes on only with the list that it began with"
        raise Refused(path=new, found=found_there, expected=expected)
    untouched = sorted({*range(plan.num_shards)} - {*touched})
    for number in with_progress("taking over", untouched):
        if done_manifest(new, number, plan.plan_id) is None:
            paths = [path for path, _ in shard_files(folder, read_manifest(folder, number))]
            _take(folder, new, [*paths, manifest_path(folder, number)])  # the manifest last
    return planned, touched, not missing


def _take(folder: Path, new: Path, paths: Iterable[Path]) -> None:
    """Give files of a data set a second name in another one, or copy them, one after another."""
    for path in paths:
        target = new / path.relative_to(folder)
        make_folder(target.parent)
        publish_link(target, path)
        sync_folder(target.parent)


def check_places(folder: Path, new: Path, shard_ids: Iterable[int]) -> None:
    """Refuse shards that were made again and hold less or more than before, so that something moved."""
    for number in shard_ids:
        before, now = read_manifest(folder, number).counts, read_manifest(new, number).counts
        if before != now:
            names = [name for name, value in vars(now).items() if getattr(before, name) != value]
            found = f"shard {number:05d}, made again, with other {', '.join(names)} than in {folder}"
            expected = "the same: bring back input and libraries, remove this folder, and run this again"
            raise Refused(path=new, found=found, expected=expected)
