"""``blank``: make a copy of a data set without some documents, in which all others keep their places.

Only the shards with one of these documents are made again, from the input, by the same plan. Each token id of
a blanked document becomes BLANK; its text, id and digest are removed. Other shards are hard links or copies,
compared with their manifests: 1 to 2 s of CPU per gigabyte, in four threads. So are those of an earlier run.
The new data set has the same plan id, so a training run can continue with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from preprocess.make.settings import InputSettings
from preprocess.read.documents import DocumentReader
from preprocess.read.transform import Transform
from shardprep.console import counted, print_lines, say, with_progress
from shardprep.errors import NotFound, Refused
from shardprep.files import NOT_THERE
from shardprep.format import blanked, commands, documents, excluded
from shardprep.format.blanked import BlankedDocuments
from shardprep.format.data_folder import OF_THIS_COMMAND, SUBFOLDERS, DataFolder, refuse_foreign_files
from shardprep.format.done import done_manifest, done_manifests
from shardprep.format.manifest import check_hashes, other_hash, read_manifest, shard_files
from shardprep.format.names import (
    BLANKED_DIR,
    EXCLUDED_LIST_NAME,
    EXCLUDED_NAME,
    TOKENIZER_DIR,
    blanked_name,
    id_ranges,
    ids_of_ranges,
    manifest_name,
    tar_name,
)  # fmt: skip
from shardprep.format.plan import Plan, need_plan, publish_plan, read_plan  # fmt: skip
from shardprep.format.planned_tokenizer import read_tokenizer, refuse_other_tokenizer  # fmt: skip
from shardprep.publishing import STALE_AFTER_S

_NUM_THREADS = 4  # hashing releases the interpreter's lock
_MAX_PRINTED = 20  # names that were not found
_MAX_IDS = 100_000  # of a shard, in memory at once


@dataclass(frozen=True, kw_only=True)
class Blanking:
    """What ``blank`` does: the plan of the new data set, and how its shards come about."""

    plan: Plan
    touched: list[int]  # shards that have to be made again
    are_all_found: bool  # whether all names in the list were found


def start(folder: DataFolder, new: DataFolder, ids_file: Path, settings: InputSettings) -> Blanking:
    """Find the documents, publish the plan of the new data set, and link or copy the untouched shards.

    Raises NotFound if no name in the list was found, Refused if the new folder was made for another list or
    data set, or has files of somebody else, and errors of the files.
    """
    plan = need_plan(folder)
    tokenizer = read_tokenizer(folder, plan)
    for _ in done_manifests(folder, plan.plan_id, range(plan.num_shards)):
        pass  # it raises for a shard that is not done
    names = documents.read_names(ids_file, id_field=plan.options.id_field)
    is_found = np.zeros(len(names.keys), np.bool_)
    reader = DocumentReader.open_for_plan(folder, plan.options, settings.transform)
    blanked_in: dict[int, BlankedDocuments] = {}  # by shard
    moved = plan.at(settings.input_dir)
    for number in with_progress("looking for documents", range(plan.num_shards)):
        places = _places_in_shard(folder, moved, number, names, reader, is_found)
        if not len(places):
            continue
        manifest = read_manifest(folder, number)
        if manifest.unblanked_sha256 is not None:  # add what was blanked before
            before = blanked.read_blanked(folder, plan, number)
            places = np.concatenate([places, np.array([before.input_numbers, before.input_offsets]).T])
        input_numbers, input_offsets = np.unique(places, axis=0).T.tolist()
        blanked_in[number] = BlankedDocuments(
            plan_id=plan.plan_id,
            shard_id=number,
            unblanked_sha256=manifest.unblanked_sha256 or manifest.tar.sha256,
            input_numbers=input_numbers,
            input_offsets=input_offsets,
        )
    touched = sorted(blanked_in)
    num_missing = int((~is_found).sum())
    if num_missing:
        lines = documents.lines_of(ids_file, names, ~is_found, id_field=plan.options.id_field)
        print_lines(*(f"not found: {line}" for line in itertools.islice(lines, _MAX_PRINTED)))
        say(f"not found: {num_missing} of {counted(len(is_found), 'name')} in {ids_file}")
    if not touched:
        expected = f"names of documents in {folder}; nothing was made"
        raise NotFound(path=ids_file, found="no document has one of these names", expected=expected)
    if plan.options.blanked:
        for number in ids_of_ranges(plan.options.blanked):
            blanked_in.setdefault(number, blanked.read_blanked(folder, plan, number))
    lists_sha256, blanked_in = blanked.with_hash_of_all(blanked_in)
    options = dataclasses.replace(plan.options, blanked=id_ranges(blanked_in), blanked_lists=lists_sha256)
    planned = dataclasses.replace(plan, options=options)
    begun = read_plan(new)
    if begun is None:
        _begin(folder, new, planned, tokenizer, blanked_in, reader.transform)
    elif not _is_same(new, begun, planned, blanked_in):
        other = f"a data set that was not started by blanking these documents of {folder}"
        expected = "a new folder, as blanking continues only with the list it started with"
        raise Refused(path=new, found=other, expected=expected)
    new.remove_temporaries(older_than_s=STALE_AFTER_S, subfolders=SUBFOLDERS)
    if begun is not None:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            compared = pool.map(partial(_compare_shard, new, plan.plan_id), range(plan.num_shards))
            for _ in zip(with_progress("comparing", range(plan.num_shards)), compared, strict=True):
                pass
    untouched = sorted({*range(plan.num_shards)} - {*touched})
    todo = [number for number in untouched if done_manifest(new, number, plan.plan_id) is None]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        linked = pool.map(partial(_link_shard, folder, new), todo)
        for _ in zip(with_progress("linking or copying", todo), linked, strict=True):
            pass
    return Blanking(plan=planned, touched=touched, are_all_found=not num_missing)


def _places_in_shard(
    folder: DataFolder,
    plan: Plan,
    shard_id: int,
    names: documents.DocumentNames,
    reader: DocumentReader,
    is_found: npt.NDArray[np.bool_],
) -> documents.Numbers:
    """Return the places of the listed documents in a shard: int64[documents, 2], input number and offset.

    Sets ``is_found``, bool[names], for the names of these documents.
    """
    shard = plan.shard(shard_id)
    manifest = read_manifest(folder, shard_id)
    places = [np.empty((0, 2), np.int64)]
    if "id" in names.kinds and manifest.ids is not None:
        ids = documents.kept_ids(folder, shard_id, manifest.ids)
        while kept := list(itertools.islice(ids, _MAX_IDS)):
            of_ids = np.array([place for *place, _ in kept], np.int64).reshape(-1, 2)
            matches = names.find(documents.keys_of_ids(name for *_, name in kept))
            places.append(of_ids[matches >= 0])
            is_found[matches[matches >= 0]] = True
    # Read the input only if it may have a document that is named by its text or its place.
    if names.may_be_in(folder, shard, manifest.digests):
        for batch in reader.read_shard(shard):
            ids_of_batch = batch.columns.get("id")
            matches = names.of_documents(batch.input_path, batch.offsets, ids_of_batch, batch.digests)
            is_found[matches[matches >= 0]] = True
            offsets = batch.offsets[(matches >= 0).any(axis=0)]  # by a name of any kind
            places.append(np.stack([np.full_like(offsets, batch.input_number), offsets], axis=1))
    return np.concatenate(places)


def _begin(
    folder: DataFolder,
    new: DataFolder,
    plan: Plan,
    tokenizer: dict[str, bytes],
    blanked_in: dict[int, BlankedDocuments],
    transform: Transform | None,
) -> None:
    """Write what a worker needs into the new folder, the plan last. Raises Refused for files of others."""
    own = {} if transform is None else transform.stamps_of_copy()
    listed = None
    if plan.options.excluded:
        listed = excluded.read_excluded(folder, plan.options.excluded)
        own |= excluded.stamps_of_excluded(folder, listed)
    new.make_folder()
    refuse_foreign_files(new, own)
    refuse_other_tokenizer(new, plan.tokenizer_files)
    new.make_subfolder(BLANKED_DIR)
    for number, each in blanked_in.items():
        new.publish_equal(blanked_name(number), blanked.blanked_content(each), what=OF_THIS_COMMAND)
    if listed is not None:
        new.publish_equal(EXCLUDED_NAME, listed.keys.tobytes(), what=OF_THIS_COMMAND)
        with contextlib.suppress(*NOT_THERE):  # it is only for people
            new.publish_copy(EXCLUDED_LIST_NAME, folder)
    if not new.publish_folder(TOKENIZER_DIR, tokenizer):
        refuse_other_tokenizer(new, plan.tokenizer_files)
    if transform is not None:
        transform.publish_copy(new)
    publish_plan(plan, new)


def _is_same(new: DataFolder, begun: Plan, planned: Plan, blanked_in: dict[int, BlankedDocuments]) -> bool:
    """Return whether an earlier attempt began the new data set with the same list."""
    if (begun.plan_id, begun.options) != (planned.plan_id, planned.options):
        return False
    are_same = [blanked.read_blanked(new, planned, number) == each for number, each in blanked_in.items()]
    return all(are_same)


def _compare_shard(new: DataFolder, plan_id: str, shard_id: int) -> None:
    """Raise BrokenShard or MissingShard if a shard of an earlier run was altered since. Reads all of it."""
    manifest = done_manifest(new, shard_id, plan_id)
    if manifest is not None:
        check_hashes(new, manifest, new.stamp_of(tar_name(shard_id)).sha256)


def _link_shard(folder: DataFolder, new: DataFolder, shard_id: int) -> None:
    """Link or copy the files of a shard, its manifest last. Raises BrokenShard for a damaged file."""
    manifest = read_manifest(folder, shard_id)
    for name, stamp in shard_files(manifest):
        subfolder = name.rpartition("/")[0]
        if subfolder:
            new.make_subfolder(subfolder)
        # A link is read, too: the damage of the old data set must not count as right in the new one.
        is_link = new.publish_link(name, folder)
        try:
            stamp_here = new.stamp_of(name) if is_link else new.publish_copy(name, folder, stamp)
        except NOT_THERE:
            raise commands.missing_file(folder, name, shard_id) from None
        if stamp_here != stamp:
            raise other_hash(folder, name, shard_id, stamp_here.sha256, stamp)
        new.sync(subfolder)
    new.publish(manifest_name(shard_id), manifest.to_json())


def check_places(folder: DataFolder, new: DataFolder, shard_ids: Iterable[int]) -> None:
    """Raise Refused if a shard that was made again has other counts than before, so documents moved."""
    for number in shard_ids:
        before = read_manifest(folder, number).counts
        now = read_manifest(new, number).counts
        if before != now:
            names = [each.name for each in msgspec.structs.fields(now)]
            names = [name for name in names if getattr(before, name) != getattr(now, name)]
            found = f"shard {number:05d}, made again, has another {', another '.join(names)} than in {folder}"
            expected = "the same: restore input and libraries, remove this folder, and run this again"
            raise Refused(path=new, found=found, expected=expected)
