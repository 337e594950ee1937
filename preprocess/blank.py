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
import numpy.typing as npt

from preprocess.read.documents import ShardReader
from shardprep.console import Progress, counted, print_lines, say
from shardprep.errors import NotFound, Refused
from shardprep.files import PublishedFolder, make_folder, publish_link, read_regular, sync_folder
from shardprep.format import documents
from shardprep.format.manifest import done_manifest, done_manifests, read_manifest, shard_files
from shardprep.format.names import EXCLUDED_NAME, TOKENIZER_DIR, id_ranges, ids_of_ranges, manifest_path
from shardprep.format.plan import Plan, check_tokenizer_files, need_plan, publish_plan, read_plan

Places = npt.NDArray[np.int64]  # int64[documents, 2]: number of the input, and where in it a document begins
_MOST_TOLD = 20  # names that were not found


def take_over(
    folder: Path, new: Path, ids_file: Path, *, input_dir: Path | None, transform_file: Path | None
) -> tuple[Plan, list[int], bool]:
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
    reader = ShardReader(folder, plan.options, transform_file)
    named: dict[int, Places] = {}
    progress = Progress("looking for documents", plan.num_shards, unit="shards")
    for number in range(plan.num_shards):
        places = _named_places(folder, plan.at(input_dir), number, names, found, reader)
        if len(places):
            named[number] = places
        progress.add(1)
    if missing := int((~found).sum()):
        lines = documents.lines_of(ids_file, names, ~found, id_field=plan.options.id_field)
        print_lines(*(f"not found: {line}" for line in itertools.islice(lines, _MOST_TOLD)))
        say(f"{missing} of {counted(len(found), 'name')} in {ids_file} were not found")
    if not named:
        raise NotFound(f"{folder} has no document that {ids_file} names; nothing was made", path=ids_file)
    blanked_in = {number: _blanked(folder, plan, number, places) for number, places in named.items()}
    for number in ids_of_ranges(plan.options.blanked) if plan.options.blanked else ():
        blanked_in.setdefault(number, documents.read_blanked(folder, plan.plan_id, number))
    blanked = id_ranges(blanked_in)
    planned = dataclasses.replace(plan, options=dataclasses.replace(plan.options, blanked=blanked))
    _begin(folder, new, planned, blanked_in)
    untouched = [number for number in range(plan.num_shards) if number not in named]
    progress = Progress("taking over", len(untouched), unit="shards")
    for number in untouched:
        if done_manifest(new, number, plan.plan_id) is None:
            # The files of the shard get a second name, the manifest last.
            for path, _ in shard_files(folder, read_manifest(folder, number)):
                target = new / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                publish_link(target, path)
                if target.parent != new:
                    sync_folder(target.parent)
            sync_folder(new)
            publish_link(manifest_path(new, number), manifest_path(folder, number))
            sync_folder(new)
        progress.add(1)
    return planned, sorted(named), not missing


def check_places(folder: Path, new: Path, shard_ids: Iterable[int]) -> None:
    """Refuse shards that were made again and hold less or more than before, so that something moved."""
    for number in shard_ids:
        before, now = read_manifest(folder, number).counts, read_manifest(new, number).counts
        if before != now:
            names = [name for name, value in vars(now).items() if getattr(before, name) != value]
            found = f"shard {number:05d}, made again, with other {', '.join(names)} than in {folder}"
            expected = "the same: bring back input and libraries, remove this folder, and run this again"
            raise Refused(path=new, found=found, expected=expected)


def _named_places(
    folder: Path,
    plan: Plan,
    shard_id: int,
    names: documents.DocumentNames,
    found: npt.NDArray[np.bool_],
    reader: ShardReader,
) -> Places:
    """Return where the named documents of a shard begin, ascending. Note in ``found`` which these are.

    The input is read only where it may have what is named by its text or its place.
    """
    shard = plan.shard(shard_id)
    parts = [np.empty((0, 2), np.int64)]
    if "id" in names.kinds:
        kept = list(documents.kept_ids(folder, shard_id))
        places = np.array([place for *place, _ in kept], np.int64).reshape(-1, 2)
        of = names.find(documents.keys_of_ids(name for *_, name in kept))
        parts.append(places[of >= 0])
        found[of[of >= 0]] = True
    if names.may_be_in(folder, shard, read_manifest(folder, shard_id).digests):
        for batch in reader.documents(shard):
            ids = batch.columns.get("id")
            of = names.of_documents(batch.input_path, batch.offsets, ids, batch.digests)
            found[of[of >= 0]] = True
            offsets = batch.offsets[(of >= 0).any(axis=0)]
            parts.append(np.stack([np.full_like(offsets, batch.input_number), offsets], axis=1))
    return np.unique(np.concatenate(parts), axis=0)


def _blanked(folder: Path, plan: Plan, shard_id: int, places: Places) -> documents.BlankedDocuments:
    """Return what is blanked of a shard from now on, with what was before."""
    manifest = read_manifest(folder, shard_id)
    if manifest.made_from is not None:
        before = documents.read_blanked(folder, plan.plan_id, shard_id)
        places = np.unique(np.concatenate([places, np.array([before.inputs, before.offsets]).T]), axis=0)
    inputs, offsets = places.T.tolist()
    return documents.BlankedDocuments(
        plan_id=plan.plan_id,
        shard_id=shard_id,
        made_from=manifest.made_from or manifest.tar.sha256,
        inputs=inputs,
        offsets=offsets,
    )


def _begin(folder: Path, new: Path, planned: Plan, blanked_in: dict[int, documents.BlankedDocuments]) -> None:
    """Write what the shards are made by, the plan last, or check that an earlier attempt wrote the same."""
    if (begun := read_plan(new)) is not None:
        is_ours = (begun.plan_id, begun.options) == (planned.plan_id, planned.options)
        if not is_ours or blanked_in != {
            each: documents.read_blanked(new, begun.plan_id, each) for each in blanked_in
        }:
            found = f"a data set that was not begun by blanking these documents of {folder}"
            expected = "a new folder, as blanking goes on only with the list that it began with"
            raise Refused(path=new, found=found, expected=expected)
        return
    make_folder(new, parents=True)
    for each in blanked_in.values():
        documents.publish_blanked(new, each)
    if planned.options.excluded:
        publish_link(new / EXCLUDED_NAME, folder / EXCLUDED_NAME)
    with PublishedFolder(new / TOKENIZER_DIR) as tokenizer:
        for name, stamp in planned.tokenizer_files.items():
            content = read_regular(folder / TOKENIZER_DIR / name, max_bytes=stamp.num_bytes)
            (tokenizer.temporary / name).write_bytes(content)
        tokenizer.publish_first()
    publish_plan(planned, new)
