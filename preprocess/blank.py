"""``blank``: make a copy of a data set without some documents, in which all others keep their places.

Only the shards with one of these documents are made again, from the input, by the same plan. Each token id of
a blanked document becomes BLANK; its text, id and digest are removed. Other shards are hard links or copies.
The new data set has the same plan id, so a training run can continue with it.
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

_MAX_PRINTED = 20  # names that were not found


def start(folder: Path, new: Path, ids_file: Path, settings: InputSettings) -> tuple[Plan, list[int], bool]:
    """Find the documents, publish the plan of the new data set, and link or copy the untouched shards.

    Returns the plan, the shards to make again, and whether all names in the list were found. Raises NotFound
    if none was, Refused if the new folder was made for another list or data set, and errors of the files.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)
    for _ in done_manifests(folder, plan.plan_id, range(plan.num_shards)):
        pass  # it raises for a shard that is not done
    names = documents.read_names(ids_file, id_field=plan.options.id_field)
    found = np.zeros(len(names.keys), np.bool_)
    reader = DocumentReader.of_plan(folder, plan.options, settings.transform)
    blanked_in: dict[int, documents.BlankedDocuments] = {}  # by shard
    moved = plan.at(settings.input_dir)
    for number in with_progress("looking for documents", range(plan.num_shards)):
        shard, manifest = moved.shard(number), read_manifest(folder, number)
        parts = [np.empty((0, 2), np.int64)]  # input number and offset of the documents that were found
        if "id" in names.kinds:
            kept = list(documents.kept_ids(folder, number))
            places = np.array([place for *place, _ in kept], np.int64).reshape(-1, 2)
            matches = names.find(documents.keys_of_ids(name for *_, name in kept))
            parts.append(places[matches >= 0])
            found[matches[matches >= 0]] = True
        # Read the input only if it may have a document that is named by its text or its place.
        if names.may_be_in(folder, shard, manifest.digests):
            for batch in reader.of_shard(shard):
                ids = batch.columns.get("id")
                matches = names.of_documents(batch.input_path, batch.offsets, ids, batch.digests)
                found[matches[matches >= 0]] = True
                offsets = batch.offsets[(matches >= 0).any(axis=0)]  # by a name of any kind
                parts.append(np.stack([np.full_like(offsets, batch.input_number), offsets], axis=1))
        if not any(map(len, parts)):
            continue
        if manifest.made_from is not None:  # add what was blanked before
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
        print_lines(*(f"not found: {line}" for line in itertools.islice(lines, _MAX_PRINTED)))
        say(f"not found: {missing} of {counted(len(found), 'name')} in {ids_file}")
    if not touched:
        expected = f"names of documents in {folder}; nothing was made"
        raise NotFound(path=ids_file, found="no document has one of these names", expected=expected)
    if plan.options.blanked:
        for number in ids_of_ranges(plan.options.blanked):
            blanked_in.setdefault(number, documents.read_blanked(folder, plan.plan_id, number))
    blanked = id_ranges(blanked_in)
    planned = dataclasses.replace(plan, options=dataclasses.replace(plan.options, blanked=blanked))
    # Write what a worker needs, the plan last. If an earlier attempt wrote it, it must be the same.
    if (begun := read_plan(new)) is None:
        make_folder(new, parents=True)
        for each in blanked_in.values():
            documents.publish_blanked(new, each)
        excluded = [folder / EXCLUDED_NAME] if plan.options.excluded else []
        _link(folder, new, [*excluded, *(folder / TOKENIZER_DIR / name for name in plan.tokenizer_files)])
        if reader.transform is not None:
            reader.transform.publish_copy(new)
        publish_plan(planned, new)
    elif (begun.plan_id, begun.options) != (planned.plan_id, planned.options) or any(
        documents.read_blanked(new, plan.plan_id, number) != each for number, each in blanked_in.items()
    ):
        other = f"a data set that was not started by blanking these documents of {folder}"
        expected = "a new folder, as blanking continues only with the list it started with"
        raise Refused(path=new, found=other, expected=expected)
    untouched = sorted({*range(plan.num_shards)} - {*touched})
    for number in with_progress("linking or copying", untouched):
        if done_manifest(new, number, plan.plan_id) is None:
            paths = [path for path, _ in shard_files(folder, read_manifest(folder, number))]
            _link(folder, new, [*paths, manifest_path(folder, number)])  # the manifest last
    return planned, touched, not missing


def _link(folder: Path, new: Path, paths: Iterable[Path]) -> None:
    """Make hard links or copies of files in another data set, in order."""
    for path in paths:
        target = new / path.relative_to(folder)
        make_folder(target.parent)
        publish_link(target, path)
        sync_folder(target.parent)


def check_places(folder: Path, new: Path, shard_ids: Iterable[int]) -> None:
    """Raise Refused if a shard that was made again has other counts than before, so documents moved."""
    for number in shard_ids:
        before, now = read_manifest(folder, number).counts, read_manifest(new, number).counts
        if before != now:
            names = [each.name for each in dataclasses.fields(now)]
            names = [name for name in names if getattr(before, name) != getattr(now, name)]
            found = f"shard {number:05d}, made again, has another {', another '.join(names)} than in {folder}"
            expected = "the same: restore input and libraries, remove this folder, and run this again"
            raise Refused(path=new, found=found, expected=expected)
