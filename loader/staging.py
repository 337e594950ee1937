"""``shardprep stage DATA --to DIR``: verified copies of shards on a node's own disk.

Any number of processes stage at once, without locks. A shard is in one of three states on a node:

- staged: its tar and idx are there with the right sizes; they get their names once verified;
- being copied: a temporary file of another process was written to in the last STALLED_S;
- open: this process copies it.

Where two begin one shard at once, both copy it, and the first to finish removes what the other has begun.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loader.find_shards import DatasetShards, find_shards
from loader.reading import ReaderIndex, opening_order
from loader.staged_copies import is_staged, staged_folder
from shardprep.command_line import parse_size
from shardprep.console import Progress, print_lines, quoted, short_bytes
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    MissingShard,
    NotFound,
    OtherPlan,
    ReadWriteError,
    Refused,
    ShardprepError,
    UsageError,
)
from shardprep.files import (
    STALE_AFTER_S,
    FileStamp,
    PublishedFile,
    close_read,
    open_regular,
    remove_temporaries,
    stamp_file,
    sync_folder,
)
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import idx_path, manifest_path, remake_command, shard_name, tar_path
from shardprep.signals import raise_on_stop_signals

READ_BYTES = 4 << 20
NUM_ATTEMPTS = 2
STALLED_S = 30.0  # another's copy that did not grow for so long is not waited for
POLL_S = 0.2
_TEMPORARY = re.compile(r"\.(shard-\d{5})\.(?:tar|idx)\.(.+)-(\d+)-[0-9a-f]{8}\.tmp")  # of PublishedFile


class CannotReadSource(ReadWriteError):
    """The data set's file cannot be read; others may be."""


@dataclass(frozen=True, kw_only=True)
class ShardToStage:
    """A shard of a data set of ours, and the folder its copy belongs in."""

    source: Path  # the data set's folder
    folder: Path
    plan_id: str
    shard_id: int
    tar_bytes: int
    idx_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.tar_bytes + self.idx_bytes

    @property
    def is_staged(self) -> bool:
        return is_staged(self.folder, self.shard_id, self.tar_bytes, self.idx_bytes)

    def manifest(self) -> Manifest:
        """The manifest in the data set's folder, which must be of the plan and sizes that the index has."""
        try:
            manifest = read_manifest(self.source, self.shard_id)
        except ReadWriteError as error:
            raise CannotReadSource(str(error)) from None
        found = manifest.spec.plan_id, manifest.tar.num_bytes, manifest.idx.num_bytes
        expected = self.plan_id, self.tar_bytes, self.idx_bytes
        if found != expected:
            raise OtherPlan(
                f"{manifest_path(self.source, self.shard_id)} is of plan {found[0][:12]}, a tar of "
                f"{found[1]} and an idx of {found[2]} bytes; the data set's index says {expected[0][:12]}, "
                f"{expected[1]} and {expected[2]}; run: shardprep verify {quoted(self.source)}"
            )
        return manifest


class Staging:
    """The staging of a list of shards by this process, and what became of them so far."""

    def __init__(self, shards: list[ShardToStage], staged_dir: Path, progress: Progress) -> None:
        self.num_found = 0  # there before, or copied by others
        self.num_copied = 0
        self.failures: list[ShardprepError] = []  # a shard each, of a bad source
        self._shards = shards
        self._folders = sorted({shard.folder for shard in shards})
        self._staged_dir = staged_dir
        self._progress = progress

    def run(self, *, recheck: bool) -> None:
        """Stage every shard; a bad source is noted and the others go on.

        ``recheck`` reads what is there, too, and copies anew what differs. Raises CannotWrite where there is
        no room for all of them, before anything is copied.
        """
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CannotWrite(f"{folder} cannot be made: {error.strerror}; choose another --to") from None
            _remove_dead(folder)
        for shard in self._shards if recheck else ():
            with self._source_faults_noted():
                self._remove_if_broken(shard)
        needed_bytes, free_bytes, text = self._room() if self._shards else (0, 0, "")
        if needed_bytes > free_bytes:
            raise CannotWrite(
                f"{text}; nothing was copied: make room, or pass --limit_bytes to stage as many as fit; "
                "the loader reads the others where they are"
            )
        todo = self._shards
        try:
            while todo:
                begun = {
                    path.parent / path.name[1:12] for each in self._folders for path in _temporaries(each)
                }
                left = [shard for shard in todo if not self._is_dealt_with(shard, begun)]
                if len(left) == len(todo):
                    time.sleep(POLL_S)
                    for folder in self._folders:
                        _remove_dead(folder)
                todo = left
        finally:  # a signal can come right after a file was made, before anything knows of it
            for folder in self._folders:
                with contextlib.suppress(OSError):  # of more weight is what ended the staging
                    _remove_dead(folder, and_own=True)

    def _is_dealt_with(self, shard: ShardToStage, begun: set[Path]) -> bool:
        """Copy a shard unless it is there; False while another process copies it.

        ``begun``: ``FOLDER/shard-00017`` of those with unfinished copies, listed once for all shards.
        """
        stem = shard_name(shard.shard_id)
        if shard.is_staged:
            self.num_found += 1
            self._progress.add(shard.num_bytes)
            if shard.folder / stem in begun:
                remove_temporaries(shard.folder, stem, older_than_s=0)
        elif any(_age_s(path) < STALLED_S for path in _temporaries(shard.folder, stem)):
            return False  # another process is at it
        else:
            try:
                with self._source_faults_noted():
                    self._copy(shard)
            except (CannotWrite, ReadWriteError) as error:
                try:
                    room = self._room()[2]
                except OSError as fault:
                    unknown = f"the room in {self._staged_dir} is unknown ({fault.strerror})"
                    room = f"{unknown}; what is staged stays valid"
                raise type(error)(f"{error}; {room}") from None
        return True

    @contextlib.contextmanager
    def _source_faults_noted(self) -> Iterator[None]:
        try:
            yield
        except (BrokenShard, NotFound, Refused, CannotReadSource) as error:
            self.failures.append(error)
            self._progress.say(f"error: {error}")

    def _copy(self, shard: ShardToStage) -> None:
        """Copy a shard, unless another process finishes it first; leave the whole pair, or an idx at most.

        sha256 is computed of what is read: a GiB costs 1.3-2.1 s of CPU (one core with SHA instructions).
        """
        manifest = shard.manifest()
        with contextlib.ExitStack() as held:
            files = ((idx_path, manifest.idx), (tar_path, manifest.tar))  # in the order of their appearance
            copies = [self._verified_copy(shard, *file, held) for file in files]
            try:
                for copy in copies:
                    copy.publish()
            except ReadWriteError:
                if not shard.is_staged:
                    raise
                self.num_found += 1  # whoever finished first removed what the others had begun
                return
            sync_folder(shard.folder)
            remove_temporaries(shard.folder, shard_name(shard.shard_id), older_than_s=0)
        self.num_copied += 1

    def _verified_copy(
        self,
        shard: ShardToStage,
        path_of: Callable[[Path, int], Path],
        stamp: FileStamp,
        held: contextlib.ExitStack,
    ) -> PublishedFile:
        """A synced copy of a file under its temporary name, which ``held`` discards; read twice at most."""
        source, seen = path_of(shard.source, shard.shard_id), []
        for attempt in range(NUM_ATTEMPTS):
            copy = PublishedFile(path_of(shard.folder, shard.shard_id))
            held.callback(copy.discard)
            try:
                for block in _blocks(source):
                    copy.write(block)
                    self._progress.add(len(block))
            except CannotReadSource as error:
                if attempt + 1 == NUM_ATTEMPTS:
                    raise
                self._progress.say(f"warning: {error}; trying once more")
            else:
                found = copy.sync()
                if found == stamp:
                    return copy
                seen.append(f"{found.num_bytes} bytes of sha256 {found.sha256[:12]}")
                self._progress.say(f"warning: {source} was read as {seen[-1]}, expected {stamp.sha256[:12]}")
            self._progress.add(-copy.num_bytes)
            copy.discard()
        expected = f"its manifest says {stamp.num_bytes} bytes of {stamp.sha256[:12]}"
        if len(seen) == NUM_ATTEMPTS and len(set(seen)) == 1:
            raise BrokenShard(
                f"the source is broken, not the copy: {source} is {seen[0]} in {NUM_ATTEMPTS} reads, "
                f"{expected}; run: {remake_command(shard.shard_id, shard.source)}"
            )
        raise BrokenShard(
            f"{source} is read differently each time ({', then '.join(seen)}), {expected}; the way to it or "
            "this node's memory is at fault: try on another node, then: "
            f"shardprep verify {quoted(shard.source)}"
        )

    def _remove_if_broken(self, shard: ShardToStage) -> None:
        """Read a copy whole, and take it out of use if it is not what its manifest says."""
        if not shard.is_staged:
            return
        manifest, wrong = shard.manifest(), ""
        path = tar_path(shard.folder, shard.shard_id)
        for each, stamp in ((idx_path(shard.folder, shard.shard_id), manifest.idx), (path, manifest.tar)):
            try:
                if (found := stamp_file(each).sha256) != stamp.sha256:
                    wrong = f"{each} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}"
            except (OSError, ReadWriteError) as error:
                wrong = str(error)
        if not wrong:
            return
        self._progress.say(f"warning: the copy is broken, not the source: {wrong}; it is copied anew")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ReadWriteError(f"the broken copy {path} cannot be removed: {error.strerror}") from None

    def _room(self) -> tuple[int, int, str]:
        """Bytes of what is not yet staged, bytes free for it, and both in words.

        What unfinished copies hold counts as free. The order of the looks matters, as others copy meanwhile.
        """
        found = os.statvfs(self._staged_dir)
        free_bytes = found.f_bavail * found.f_frsize
        for path in (path for folder in self._folders for path in _temporaries(folder)):
            with contextlib.suppress(OSError):
                free_bytes += path.stat().st_blocks * 512
        missing = [shard.num_bytes for shard in self._shards if not shard.is_staged]
        text = (
            f"{len(missing)} shards of {short_bytes(sum(missing))} are still to be staged, "
            f"{self._staged_dir} has {short_bytes(free_bytes)} free; what is staged stays valid"
        )
        return sum(missing), free_bytes, text


def _blocks(path: Path) -> Iterator[memoryview]:
    """A file in blocks of READ_BYTES; each is overwritten by the next. What was read is not kept cached."""
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        folder = quoted(path.parent)
        raise MissingShard(f"{path} is missing; run: shardprep verify {folder}") from None
    except OSError as error:
        raise CannotReadSource(f"{path} cannot be opened: {error.strerror}") from None
    done = 0
    try:
        while count := os.readv(handle, [buffer]):
            yield buffer[:count]
            done += count
    except OSError as error:
        raise CannotReadSource(f"{path} cannot be read at byte {done}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # a second read is of the disk then
        close_read(handle)


def _temporaries(folder: Path, stem: str = "") -> list[Path]:
    """Unfinished copies in a folder, whosever they are; with ``stem`` those of one shard."""
    found = [(entry.path, _TEMPORARY.fullmatch(entry.name)) for entry in os.scandir(folder)]
    return [Path(path) for path, match in found if match and stem in {"", match[1]}]


def _age_s(path: Path) -> float:
    """Seconds since a file was written to; without end where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _remove_dead(folder: Path, *, and_own: bool = False) -> None:
    """Remove unfinished copies of ended processes of this node, those a day old, and one's own.

    One that lives in another PID namespace loses its copy and ends with 74.
    """
    for path in _temporaries(folder):
        _, host, pid = _TEMPORARY.findall(path.name)[0]
        lives = Path("/proc", pid).exists() and not (and_own and int(pid) == os.getpid())
        ended = host == socket.gethostname() and not lives
        with contextlib.suppress(OSError):
            if ended or _age_s(path) > STALE_AFTER_S:
                path.unlink()


def choose_shards(
    input_shards: Sequence[str],
    staged_dir: str | os.PathLike[str],
    *,
    limit_bytes: int | None = None,
    reader_index: ReaderIndex,
) -> tuple[list[ShardToStage], list[ShardToStage]]:
    """The shards named, and of these what ``limit_bytes`` hold, in the order to copy it in.

    ``reader_index``: which of all that stage this process is, so that each begins with another shard.
    """
    shards = find_shards(input_shards)
    external = [source.path_of(0) for source in shards.sources if not isinstance(source, DatasetShards)]
    if external:
        raise UsageError(
            f"{external[0]} is a tar that shardprep did not write: no manifest says what its copy must be; "
            "copy such tars yourself and give the loader the copies"
        )
    every = [
        ShardToStage(
            source=source.folder,
            folder=staged_folder(staged_dir, source.spec),
            plan_id=source.spec.plan_id,
            shard_id=int(source.shard_ids[row]),
            tar_bytes=int(source.tar_bytes[row]),
            idx_bytes=int(source.idx_bytes[row]),
        )
        for source in shards.datasets
        for row in range(len(source.shard_ids))
    ]
    kept = np.arange(len(every))
    if limit_bytes is not None:
        sums = np.cumsum([shard.num_bytes for shard in every])
        kept = kept[: np.searchsorted(sums, limit_bytes, side="right")]
    kept = opening_order(kept, reader_index)
    return every, [every[number] for number in kept.tolist()]


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where every shard chosen is staged.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    raise_on_stop_signals("what is staged is whole")
    if given := [f"--{name}" for name in _OF_RANKS if getattr(args, name) is not None]:
        print_lines(f"note: {', '.join(given)} choose nothing any more: ranks read blocks of every shard")
    limit = args.limit_bytes
    try:
        every, chosen = choose_shards(
            args.input_shards,
            args.to,
            limit_bytes=limit and parse_size(limit, "--limit_bytes", such_as="800M or 500G"),
            reader_index=reader_index_of(os.environ),
        )
    except OSError as error:
        raise ReadWriteError(f"{' '.join(args.input_shards)} cannot be looked at: {error}") from None
    num_chosen, chosen_bytes = len(chosen), sum(shard.num_bytes for shard in chosen)
    print_lines(f"to stage: {num_chosen} shards of {short_bytes(chosen_bytes)}")
    if left := len(every) - num_chosen:
        over = short_bytes(sum(shard.num_bytes for shard in every) - chosen_bytes)
        print_lines(f"{left} shards of {over} are over --limit_bytes and will be read where they are")
    with Progress("staging", chosen_bytes) as progress:
        staging = Staging(chosen, Path(args.to), progress)
        try:
            staging.run(recheck=args.recheck)
        except OSError as error:  # of looking around in it; copying has its own
            raise ReadWriteError(f"{args.to} cannot be staged to: {error}") from None
    failures = staging.failures
    failed = f", {len(failures)} failed" if failures else ""
    print_lines(
        f"staged {num_chosen - len(failures)} of {num_chosen} shards: {staging.num_copied} copied, "
        f"{staging.num_found} there before or copied by others{failed}; load them with staged_dir={args.to!r}"
    )
    return failures[0].exit_code if failures else 0


def reader_index_of(environ: Mapping[str, str]) -> ReaderIndex:
    """Where in the list this process begins: by its number among Slurm's tasks, else by host and pid."""
    task, num_tasks = environ.get("SLURM_PROCID", ""), environ.get("SLURM_STEP_NUM_TASKS", "")
    if task.isdecimal() and num_tasks.isdecimal() and int(task) < int(num_tasks):
        return ReaderIndex(number=int(task), count=int(num_tasks))
    place = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode())
    return ReaderIndex(number=place, count=1 << 32)


# Flags that once chose shards for the ranks of a node, which with the shuffle were all shards.
_OF_RANKS = (
    *("world_size", "ranks", "ranks_per_node", "batch_size", "global_batch_size", "seed", "seq_len"),
    *("max_length", "long_documents", "group_by_length", "first_step", "num_steps", "num_epochs", "shuffle"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy shards to a disk of this node, verified, for the loader's staged_dir. Any "
        "number of processes may do so at once; each begins elsewhere and skips what is there."
    )
    add = parser.add_argument
    add("input_shards", nargs="+", help="as the loader takes them; data sets of shardprep only")
    add("--to", required=True, metavar="DIR", help="folder on this node; made if it is missing")
    add("--limit_bytes", help="stage as many shards as fit, such as 500G (default: all)")
    again = "also read shards that are staged already, and copy damaged ones again"
    add("--recheck", action="store_true", help=again)
    for name in _OF_RANKS:
        add(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
    add("--no-shuffle", dest="shuffle", action="store_const", const=False, help=argparse.SUPPRESS)
