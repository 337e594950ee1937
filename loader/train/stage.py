"""``stage``: a copy of a data set on a node's own disk.

``shardprep stage DATA --to DIR`` makes a data set in DIR. Pass its path to the loader; ``verify DIR`` checks
it, ``clean DIR`` removes what a killed run left. Each shard's manifest is copied last, and index.json after
all shards, so an incomplete copy is refused. Any number of processes may stage at once, without locks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shardprep import files, publishing
from shardprep.console import Progress, counted, print_lines, quoted, say, short_bytes, with_progress
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    MissingShard,
    Refused,
    Stopped,
    UsageError,
)  # fmt: skip
from shardprep.format import commands, done, names
from shardprep.format import manifest as manifests
from shardprep.format.blanked import blanked_content, is_list_of, read_blanked
from shardprep.format.data_folder import SUBFOLDERS, DataFolder, refuse_foreign_files
from shardprep.format.excluded import read_excluded, stamps_of_excluded
from shardprep.format.index import DatasetIndex, merge_manifests, read_index
from shardprep.format.plan import Plan, read_plan
from shardprep.format.planned_tokenizer import read_tokenizer, refuse_other_tokenizer

_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of a tokenizer's files
_NUM_THREADS = 8  # hashing releases the interpreter's lock
_MARK = ".index.json.claimed.tmp"  # in the folder of a copy that has neither plan nor index yet


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``stage``."""
    parser.description = (
        "Copy a data set to a disk of this node, and compare each shard with its manifest's hash. Pass the "
        "path of the copy to the loader. Any number of processes may stage at once. Shards that are there "
        "are read, and kept if they are equal."
    )
    parser.add_argument("input_shards", metavar="DATA", type=Path, help="the folder of a data set")
    parser.add_argument("--to", required=True, metavar="DIR", type=Path, help="folder, created if missing")


def stage(args: argparse.Namespace) -> int:
    """Copy a data set, and return the exit code: 0 if the copy is complete."""
    source = args.input_shards
    path = args.to
    if files.size_of_file(source) is not None and not files.is_folder(source):
        expected = "the folder of a data set; copy other tars yourself and pass the copies to the loader"
        raise UsageError(path=source, found="not a folder", expected=expected)
    if path.resolve().is_relative_to(source.resolve()):
        raise UsageError.of_value("--to", str(path), f"a folder outside of {source}")
    folder = DataFolder(source)
    target = DataFolder(path)
    index = read_index(folder)
    plan_id = index.spec.plan_id
    num_shards = index.spec.num_shards
    done.refuse_other_plan(folder, plan_id)
    done.refuse_found(folder, done.read_findings(folder, plan_id), range(num_shards))
    target.make_folder()
    done.refuse_other_plan(target, plan_id)
    missing = _missing(folder, target, plan_id, num_shards)
    num_bytes = int((index.column("tar_bytes") + index.column("idx_bytes"))[missing].sum())
    disk = os.statvfs(target)
    free_bytes = disk.f_bavail * disk.f_frsize
    if num_bytes > free_bytes:
        expected = f"{short_bytes(num_bytes)} for {counted(len(missing), 'shard')}, or another --to"
        found = f"{short_bytes(free_bytes)} free"
        raise CannotWrite(path=target, found=found, expected=f"{expected}; nothing was copied")
    plan = read_plan(folder)
    _claim(folder, target, plan_id, plan)
    if plan is not None:  # it is first, since the folder is known by it from then on
        try:
            target.publish_copy(names.PLAN_NAME, folder)
        finally:
            _remove_mark(target)
    target.remove_temporaries(older_than_s=publishing.STALE_AFTER_S, subfolders=SUBFOLDERS)
    # Processes start at different shards, so that nodes do not all read from one storage target.
    first = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % max(1, len(missing))
    failures: list[BrokenShard | MissingShard] = []
    progress = Progress("staging", num_bytes)
    if plan is None:  # a copy of the shards alone
        _copy_tokenizer(folder, target)
    else:
        _copy_files_of_plan(folder, plan, target)
    for shard_id in [*missing[first:], *missing[:first]]:
        try:
            _copy_shard(folder, shard_id, target, progress)
        except (BrokenShard, MissingShard) as error:  # in DATA; go on with the other shards
            failures.append(error)
            say(f"error: {error}")
    if not failures and folder.status_of(names.INDEX_NAME) is not None:
        _refuse_other_index(folder, index, target)
        target.publish(names.INDEX_NAME, index.to_json())
        _remove_mark(target)
    num_copied = len(missing) - len(failures)
    num_kept = num_shards - len(missing)
    counts = f"{num_copied + num_kept} of {num_shards} shards: {num_copied} copied, {num_kept} kept"
    end = f", {len(failures)} failed" if failures else f"; load {quoted(target)}"
    print_lines(f"staged {counts}{end}")
    return failures[0].exit_code if failures else 0


def _missing(folder: DataFolder, target: DataFolder, plan_id: str, num_shards: int) -> list[int]:
    """Return the shards that the copy has not, or not with the bytes of DATA's. Reads those that it has."""
    is_copied = partial(_is_copied, folder, target, plan_id)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            are_copied = pool.map(is_copied, range(num_shards))
            shard_ids = with_progress("comparing", range(num_shards))
            return [shard_id for shard_id in shard_ids if not next(are_copied)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after a stop signal only those begun end


def _is_copied(folder: DataFolder, target: DataFolder, plan_id: str, shard_id: int) -> bool:
    copied = done.done_manifest(target, shard_id, plan_id, {})
    if copied is None:
        return False
    try:
        manifest = manifests.read_manifest(folder, shard_id)
        if replace(copied, run=manifest.run) != manifest:  # such as of the data set before blanking
            return False
        manifests.check_sizes(target, manifest)
        manifests.check_hashes(target, manifest, target.stamp_of(names.tar_name(shard_id)).sha256)
    except (BrokenShard, MissingShard, *files.NOT_THERE):
        return False
    return True


def _refuse_other_index(folder: DataFolder, index: DatasetIndex, target: DataFolder) -> None:
    """Raise BrokenShard if an index has other values than the manifests of the shards that were copied."""
    shard_ids = range(index.spec.num_shards)
    merged = merge_manifests(target, (manifests.read_manifest(target, shard_id) for shard_id in shard_ids))
    if merged.to_json() != index.to_json():
        path = folder.path_of(names.INDEX_NAME)
        remedy = commands.on("verify", folder)
        raise BrokenShard(path=path, found="the index of other shards", remedy=remedy)


def _claim(folder: DataFolder, target: DataFolder, plan_id: str, plan: Plan | None) -> None:
    """Check that a folder is new, or has a copy of this data set, and mark it. Raises Refused."""
    if _is_copy(target, plan_id):
        return
    if target.status_of(names.PLAN_NAME) is not None:
        expected = "no such file, or that of the data set; move it away, or use another folder"
        raise Refused(
            path=target.path_of(names.PLAN_NAME), found="another file, which stays", expected=expected
        )
    own: dict[str, files.FileStamp] = {}
    if plan is not None and plan.options.excluded:
        own = stamps_of_excluded(folder, read_excluded(folder, plan.options.excluded))
    try:
        refuse_foreign_files(target, own)
        if plan is not None:
            refuse_other_tokenizer(target, plan.tokenizer_files)
    except Refused:
        if _is_copy(target, plan_id):  # another process has begun meanwhile
            return
        raise
    try:
        target.create(_MARK, plan_id.encode())
    except FileExistsError:  # by another process, which copies the same
        pass
    except OSError as error:
        raise publishing.not_creatable(target.path_of(_MARK), error) from None
    except Stopped:  # the signal may have come after the file was created
        _remove_mark(target)
        raise


def _is_copy(target: DataFolder, plan_id: str) -> bool:
    """Return whether a folder has a copy of this data set, or another process makes one."""
    mark = plan_id.encode()
    # The mark is read first: where it is gone already, plan or index are there.
    if target.read_beginning(_MARK, len(mark)) == mark or done.refuse_other_plan(target, plan_id):
        return True
    return done.plan_id_in(target, names.INDEX_NAME) == plan_id  # a copy of the shards alone


def _remove_mark(target: DataFolder) -> None:
    with contextlib.suppress(OSError):
        target.remove(_MARK)


def _copy_files_of_plan(folder: DataFolder, plan: Plan, target: DataFolder) -> None:
    """Copy the files that the plan names, but none that somebody else put into DATA."""
    target.sync()
    tokenizer = read_tokenizer(folder, plan)
    target.make_subfolder(names.TOKENIZER_DIR)
    for name, content in tokenizer.items():
        target.publish(f"{names.TOKENIZER_DIR}/{name}", content)
    what = "that of the data set"
    if plan.options.excluded:
        excluded = read_excluded(folder, plan.options.excluded)
        target.publish_equal(names.EXCLUDED_NAME, excluded.keys.tobytes(), what=what)
        with contextlib.suppress(*files.NOT_THERE):  # it is only for people
            target.publish_copy(names.EXCLUDED_LIST_NAME, folder)
    if plan.options.blanked:
        target.make_subfolder(names.BLANKED_DIR)
        for shard_id in names.ids_of_ranges(plan.options.blanked):
            content = blanked_content(read_blanked(folder, plan, shard_id))
            try:
                target.publish_equal(names.blanked_name(shard_id), content, what=what)
            except Refused:
                if not is_list_of(target, plan.plan_id, shard_id):  # from before it was blanked again
                    raise
                target.publish(names.blanked_name(shard_id), content)


def _copy_tokenizer(folder: DataFolder, target: DataFolder) -> None:
    """Copy the tokenizer of a data set without a plan. The loader compares it with the manifests."""
    if not folder.is_subfolder(names.TOKENIZER_DIR):
        return
    target.make_subfolder(names.TOKENIZER_DIR)
    for name in folder.names(names.TOKENIZER_DIR):
        if name.endswith(_TOKENIZER_SUFFIXES) and not name.startswith("."):
            target.publish_copy(f"{names.TOKENIZER_DIR}/{name}", folder)
    target.sync(names.TOKENIZER_DIR)


def _copy_shard(folder: DataFolder, shard_id: int, target: DataFolder, progress: Progress) -> None:
    """Copy a shard's files, its manifest last. Raises BrokenShard if a file differs from the manifest."""
    manifest = manifests.read_manifest(folder, shard_id)
    for name, stamp in manifests.shard_files(manifest):
        subfolder = name.rpartition("/")[0]
        if subfolder:
            target.make_subfolder(subfolder)
        try:
            copied = target.publish_copy(name, folder, stamp)
        except files.NOT_THERE:
            path = folder.path_of(name)
            remedy = commands.on("verify", folder)
            raise MissingShard(f"{path} is missing", path=path, remedy=remedy) from None
        if copied != stamp:
            raise manifests.other_hash(folder, name, shard_id, copied.sha256, stamp)
        target.sync(subfolder)  # the name must survive a power cut before the manifest's does
        if stamp in (manifest.tar, manifest.idx):
            progress.add(stamp.num_bytes)
    # Write the manifest that was compared: DATA's may have changed since.
    target.publish(names.manifest_name(shard_id), manifest.to_json())
