"""The folders: on what they lie, whether they can be read and written, and whether the shards will fit."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from lustre import Need, file_system_of, space_lines
from preprocess.cost_estimate import CostEstimate
from preprocess.doctor.findings import Finding, bad, good, warning
from shardprep.console import short_bytes, short_number
from shardprep.errors import CannotWrite, NotFound
from shardprep.regular_files import is_folder, size_of_file

_BLOCK_BYTES = 1 << 20
_FILES_PER_SHARD = 4  # tar, idx, manifest, and perhaps quarantine
_ROOM = 1.2  # of what is estimated: an estimate is one
_POOR = {
    "tmpfs": ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk"),
    "ramfs": ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk"),
    "overlay": ("it lies in a container's own layer, and is gone with it", "bind a folder of the host"),
    "nfs": ("many tasks at once are slow on NFS", "choose the cluster's parallel file system"),
    "nfs4": ("many tasks at once are slow on NFS", "choose the cluster's parallel file system"),
}


def file_system_finding(topic: str, path: Path, *, is_written: bool) -> Finding:
    """On which file system a folder lies, or would lie."""
    mount = file_system_of(path)
    if mount is None:
        return warning(
            topic, f"{path}: its file system is not in the table of mounts", "look at it by hand: df"
        )
    text = f"{path} is on {mount.fs_type}, mounted at {mount.mount_point}"
    if is_written and mount.fs_type in _POOR:
        what, todo = _POOR[mount.fs_type]
        return warning(topic, f"{text}: {what}", todo)
    return good(topic, text)


def output_findings(folder: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """Whether a data set can be written there, past the page cache or not, and whether it will fit."""
    places = (folder.absolute(), *folder.absolute().parents)
    there = next(place for place in places if size_of_file(place) is not None)
    if not is_folder(there):
        text = f"{there} is no folder"
        return [bad("output", text, "choose another --output_dir, or move it away", CannotWrite)]
    findings = [file_system_finding("output", folder, is_written=True), _written(there, folder)]
    if findings[-1].level == "bad":
        return findings
    return [*findings, *_room(there, cost, num_shards), *_room_on_lustre(folder, cost, num_shards)]


_MENDED_BY = {
    errno.ENOSPC: "free some space, or choose another --output_dir",
    errno.EDQUOT: "free some space, or choose another --output_dir",
    errno.EROFS: "mount it for writing, or choose another --output_dir",
}


def _written(there: Path, folder: Path) -> Finding:
    """Write a block into an unnamed file of the folder, past the page cache where that is possible."""
    made = "" if there == folder.absolute() else f" (it will be made in {there})"
    try:
        is_direct = _write_block(there)
    except OSError as error:
        text = f"{folder}{made} cannot be written: {error.strerror}"
        todo = _MENDED_BY.get(error.errno or 0, "chmod, or another --output_dir")
        return bad("output", text, todo, CannotWrite)
    how = (
        "past the page cache (O_DIRECT)"
        if is_direct
        else "through the page cache: no O_DIRECT here, a little slower"
    )
    return good("output", f"{folder}{made} can be written, {how}")


def _write_block(folder: Path) -> bool:
    """Write and sync a block, and remove it; whether O_DIRECT took it. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=".shardprep-doctor-", dir=folder)
    os.close(handle)
    try:
        try:
            _write(name, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return True
        _write(name, 0)
        return False
    finally:
        with suppress(OSError):
            Path(name).unlink()


def _write(name: str, flags: int) -> None:
    handle = os.open(name, os.O_WRONLY | flags)
    try:
        os.write(handle, mmap.mmap(-1, _BLOCK_BYTES))  # aligned, as O_DIRECT wants
        os.fsync(handle)
    finally:
        os.close(handle)


def _room(there: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """Free bytes and inodes against the estimate."""
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    text = f"{short_bytes(free)} are free"
    if cost is None:
        return [good("space", f"{text}; with --input_dir and --model_id they are compared with the estimate")]
    needed = f"{text}, the shards will take about {short_bytes(cost.output_bytes)}"
    todo = "free some space, choose another --output_dir, or --no-keep_text, --token_format npy or packed"
    if free < cost.output_bytes:
        findings = [bad("space", needed, todo, CannotWrite)]
    elif free < cost.output_bytes * _ROOM:
        findings = [warning("space", f"{needed}: hardly enough", todo)]
    else:
        findings = [good("space", needed)]
    if status.f_files:  # 0: the file system makes them as they are needed
        files = f"{short_number(status.f_favail)} inodes are free, {num_shards} shards take up to "
        files += short_number(_FILES_PER_SHARD * num_shards)
        if status.f_favail < _FILES_PER_SHARD * num_shards:
            findings.append(bad("space", files, "plan fewer shards: --num_shards", CannotWrite))
        else:
            findings.append(good("space", files))
    return findings


def _room_on_lustre(folder: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """What quotas, pools and each OST and MDT leave, which statvfs does not tell; nothing off Lustre."""
    if cost is None:
        return []
    lines = space_lines(folder, Need(num_bytes=cost.output_bytes, num_files=3 * num_shards))
    todo = "free some space, ask for more quota, or choose another --output_dir"
    return [
        good("space", line)
        if line.startswith("it needs")
        else warning("space", line.partition(": ")[2], todo)
        for line in lines
    ]


def input_finding(folder: Path) -> Finding:
    """On what the input lies; that it can be listed is the plan's to say."""
    if not is_folder(folder):
        return bad("input", f"{folder} is no folder", "name the folder of the raw files", NotFound)
    return file_system_finding("input", folder, is_written=False)
