"""``stage``: verified copies of shards on a node's own disk.

Stages shards: every one of a list ends up copied by this process, or by another that stages them, too.

A copy is verified: its tar and idx have the sha256 that the manifest says. There are no locks. A process
skips what is staged, leaves to others what they are copying while that grows, and copies the rest. Where two
processes begin one shard at once, both copy it, and the first to finish removes what the others have begun:
that costs a copy.

Which shards to stage on a node: all of a data set, those its ranks read, or as many of them as fit.

``python -m loader stage DATA --to DIR``: copies of the shards on this node's own disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loader.find_shards import DatasetShards, ShardSet, find_shards
from loader.reading import ReaderIndex, opening_order
from loader.staged_copies import is_staged, staged_folder
from shardprep.command_line import parse_size
from shardprep.console import Progress, print_lines
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
    file_sha256,
    open_regular,
    remove_temporaries,
    sync_folder,
)
from shardprep.format.manifest import Manifest, read_manifest
from shardprep.format.names import (
    ids_of_ranges,
    idx_path,
    manifest_path,
    remake_command,
    shard_name,
    tar_path,
)
from shardprep.signals import raise_on_stop_signals

READ_BYTES = 4 << 20
NUM_ATTEMPTS = 2

Say = Callable[[str], None]
CountBytes = Callable[[int], None]


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
        """Of both files."""
        return self.tar_bytes + self.idx_bytes

    @property
    def is_staged(self) -> bool:
        """Whether its copy is there, by names and sizes."""
        return is_staged(self.folder, self.shard_id, self.tar_bytes, self.idx_bytes)


class CannotReadSource(ReadWriteError):
    """The data set's file cannot be read; others may be."""


def copy_shard(shard: ShardToStage, progress: CountBytes, say: Say) -> bool:
    """Copy a shard unless another process did meanwhile; whether the copy is this one's.

    sha256 is computed of what is read, so a GiB costs 1.3-2.1 s of CPU (one core with SHA instructions, from
    disk to disk); what is wrong is read once more. ``progress`` is told bytes as they are written.
    Leaves the whole pair, or an idx at most. Raises MissingShard, OtherPlan or BrokenShard where the
    source is wrong, CannotReadSource where it cannot be read, and CannotWrite or ReadWriteError of the copy.
    """
    manifest = _manifest(shard)
    files = ((idx_path, manifest.idx), (tar_path, manifest.tar))  # in the order of their appearance
    with contextlib.ExitStack() as held:
        copies = []
        for path_of, stamp in files:
            source = path_of(shard.source, shard.shard_id)
            target = path_of(shard.folder, shard.shard_id)
            copies.append(_verified(source, target, stamp, shard, progress, say, held))
        try:
            for copy in copies:
                copy.publish()
        except ReadWriteError:
            if shard.is_staged:  # whoever finished first removed what the others had begun
                return False
            raise
        sync_folder(shard.folder)
        remove_temporaries(shard.folder, shard_name(shard.shard_id), older_than_s=0)
    return True


def check_copy(shard: ShardToStage) -> str:
    """What is wrong with a copy that is there, by reading it whole; empty where nothing is."""
    manifest = _manifest(shard)
    for path_of, stamp in ((tar_path, manifest.tar), (idx_path, manifest.idx)):
        path = path_of(shard.folder, shard.shard_id)
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                found = file_sha256(file)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found != stamp.sha256:
            return f"{path} has sha256 {found[:12]}, its manifest says {stamp.sha256[:12]}"
    return ""


def _manifest(shard: ShardToStage) -> Manifest:
    """The manifest in the data set's folder, which must be of the plan and sizes that the index has."""
    try:
        manifest = read_manifest(shard.source, shard.shard_id)
    except ReadWriteError as error:
        raise CannotReadSource(str(error)) from None
    found = manifest.spec.plan_id, manifest.tar.num_bytes, manifest.idx.num_bytes
    expected = shard.plan_id, shard.tar_bytes, shard.idx_bytes
    if found != expected:
        raise OtherPlan(
            f"{manifest_path(shard.source, shard.shard_id)} is of plan {found[0][:12]}, a tar of {found[1]} "
            f"and an idx of {found[2]} bytes; the data set's index says {expected[0][:12]}, {expected[1]} "
            f"and {expected[2]}; run: python -m preprocess verify {shard.source}"
        )
    return manifest


def _verified(
    source: Path,
    target: Path,
    stamp: FileStamp,
    shard: ShardToStage,
    progress: CountBytes,
    say: Say,
    held: contextlib.ExitStack,
) -> PublishedFile:
    """A synced copy under its temporary name, of the right content; ``held`` discards it."""
    seen: list[str] = []
    for attempt in range(NUM_ATTEMPTS):
        copy = PublishedFile(target)
        held.callback(copy.discard)
        try:
            for block in _blocks(source):
                copy.write(block)
                progress(len(block))
        except CannotReadSource as error:
            if attempt + 1 == NUM_ATTEMPTS:
                raise
            say(f"warning: {error}; trying once more")
        else:
            found = copy.sync()
            if found == stamp:
                return copy
            seen.append(f"{found.num_bytes} bytes of sha256 {found.sha256[:12]}")
            say(f"warning: {source} was read as {seen[-1]}, expected {stamp.sha256[:12]}")
        progress(-copy.num_bytes)
        copy.discard()
    raise BrokenShard(_blame(source, seen, stamp, shard))


def _blame(source: Path, seen: list[str], stamp: FileStamp, shard: ShardToStage) -> str:
    """Who is at fault: the file where it is read alike, else what lies between it and here."""
    expected = f"its manifest says {stamp.num_bytes} bytes of {stamp.sha256[:12]}"
    if len(seen) == NUM_ATTEMPTS and len(set(seen)) == 1:
        return (
            f"the source is broken, not the copy: {source} is {seen[0]} in {NUM_ATTEMPTS} reads, {expected}; "
            f"run: {remake_command(shard.shard_id, shard.source)}"
        )
    return (
        f"{source} is read differently each time ({', then '.join(seen)}), {expected}; the way to it or this "
        f"node's memory is at fault: try on another node, then: python -m preprocess verify {shard.source}"
    )


def _blocks(path: Path) -> Iterator[memoryview]:
    """A file in blocks of READ_BYTES; each is overwritten by the next. What was read is not kept cached."""
    buffer = memoryview(bytearray(READ_BYTES))
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        raise MissingShard(f"{path} is missing; run: python -m preprocess verify {path.parent}") from None
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


STALLED_S = 30.0  # another's copy that did not grow for so long is not waited for
POLL_S = 0.2

_TEMPORARY = re.compile(r"\.(shard-\d{5})\.(?:tar|idx)\.(.+)-(\d+)-[0-9a-f]{8}\.tmp")  # of PublishedFile
_SOURCE_FAULTS = (BrokenShard, NotFound, Refused, CannotReadSource)


@dataclass(kw_only=True)
class Staged:
    """What became of a list of shards."""

    num_found: int = 0  # there before, or copied by others
    num_copied: int = 0
    failures: list[ShardprepError] = field(default_factory=list)  # a shard each, of a bad source


def stage_shards(
    shards: list[ShardToStage], staged_dir: Path, *, recheck: bool, progress: CountBytes, say: Say
) -> Staged:
    """Copy the shards that are not staged, in their order; a bad source is noted and the others go on.

    ``recheck`` reads what is there, too, and copies anew what differs. Raises CannotWrite where there is
    no room for all of them, before anything is copied, and CannotWrite or ReadWriteError where writing
    fails. Whatever happens, each file under a shard's name is whole; ``kill -9`` leaves temporary files
    as well, which the next run on this node removes.
    """
    staged = Staged()
    if not shards:
        return staged
    for folder in {shard.folder for shard in shards}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{folder} cannot be made: {error.strerror}; choose another --to") from None
        _remove_dead(folder)
    if recheck:
        for shard in shards:
            _recheck(shard, staged, say)
    _check_room(shards, staged_dir)
    todo = shards
    try:
        while todo:
            left = _one_pass(todo, staged_dir, staged, progress, say)
            if len(left) == len(todo):
                time.sleep(POLL_S)
                for folder in {shard.folder for shard in left}:
                    _remove_dead(folder)
            todo = left
    finally:  # a signal can come right after a file was made, before anything knows of it
        for folder in {shard.folder for shard in shards}:
            with contextlib.suppress(OSError):  # of more weight is what ended the staging
                _remove_dead(folder, and_own=True)
    return staged


def _one_pass(
    todo: list[ShardToStage], staged_dir: Path, staged: Staged, progress: CountBytes, say: Say
) -> list[ShardToStage]:
    """Deal with each shard once; those that others are copying are left."""
    begun = {folder: set(_temporaries(folder)) for folder in {shard.folder for shard in todo}}
    left: list[ShardToStage] = []
    for shard in todo:
        stem = shard_name(shard.shard_id)
        if shard.is_staged:
            staged.num_found += 1
            progress(shard.num_bytes)
            if stem in begun[shard.folder]:
                remove_temporaries(shard.folder, stem, older_than_s=0)
        elif _grows(_temporaries(shard.folder).get(stem, [])):
            left.append(shard)
        else:
            try:
                if copy_shard(shard, progress, say):
                    staged.num_copied += 1
                else:
                    staged.num_found += 1
            except _SOURCE_FAULTS as error:
                staged.failures.append(error)
                say(f"error: {error}")
            except (CannotWrite, ReadWriteError) as error:
                raise type(error)(f"{error}; {_room_text(todo, staged_dir)}") from None
    return left


def _recheck(shard: ShardToStage, staged: Staged, say: Say) -> None:
    """Take a copy that is not what its manifest says out of use."""
    if not shard.is_staged:
        return
    try:
        wrong = check_copy(shard)
    except _SOURCE_FAULTS as error:
        staged.failures.append(error)
        say(f"error: {error}")
        return
    if wrong:
        say(f"warning: the copy is broken, not the source: {wrong}; it is copied anew")
        path = tar_path(shard.folder, shard.shard_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ReadWriteError(f"the broken copy {path} cannot be removed: {error.strerror}") from None


def _check_room(shards: list[ShardToStage], staged_dir: Path) -> None:
    needed_bytes, free_bytes, text = _room(shards, staged_dir)
    if needed_bytes > free_bytes:
        raise CannotWrite(
            f"{text}; nothing was copied: make room, or pass --limit_bytes to stage as many as fit; "
            "the loader reads the others where they are"
        )


def _room(shards: list[ShardToStage], staged_dir: Path) -> tuple[int, int, str]:
    """Bytes of what is not yet staged, bytes free for it, and both in words.

    What unfinished copies hold counts as free: each becomes a shard or goes. The order of the three looks
    matters, as others copy meanwhile: what they finish between them must not count as needed, or twice.
    """
    found = os.statvfs(staged_dir)
    free_bytes = found.f_bavail * found.f_frsize
    for folder in {shard.folder for shard in shards}:
        for paths in _temporaries(folder).values():
            for path in paths:
                with contextlib.suppress(OSError):
                    free_bytes += path.stat().st_blocks * 512
    missing = [shard.num_bytes for shard in shards if not shard.is_staged]
    text = (
        f"{len(missing)} shards of {size_text(sum(missing))} are still to be staged, {staged_dir} has "
        f"{size_text(free_bytes)} free; what is staged stays valid"
    )
    return sum(missing), free_bytes, text


def _room_text(shards: list[ShardToStage], staged_dir: Path) -> str:
    try:
        return _room(shards, staged_dir)[2]
    except OSError as error:
        return f"what room {staged_dir} has cannot be seen ({error.strerror}); what is staged stays valid"


def size_text(num_bytes: int) -> str:
    """``24.1 GB``, decimal; MB below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def _temporaries(folder: Path) -> dict[str, list[Path]]:
    """Unfinished copies in a folder, whosever they are: ``shard-00017`` -> paths."""
    found: dict[str, list[Path]] = {}
    for entry in os.scandir(folder):
        if match := _TEMPORARY.fullmatch(entry.name):
            found.setdefault(match[1], []).append(Path(entry.path))
    return found


def _grows(paths: list[Path]) -> bool:
    """Whether one of some unfinished copies was written to lately."""
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STALLED_S:
                return True
    return False


def _remove_dead(folder: Path, *, and_own: bool = False) -> None:
    """Remove unfinished copies of processes of this node that have ended, those a day old, and one's own.

    One that lives in another PID namespace under this host's name would be taken for dead. It loses its
    copy and ends with 74; nothing wrong comes of it.
    """
    for paths in _temporaries(folder).values():
        for path in paths:
            match = _TEMPORARY.fullmatch(path.name)
            assert match is not None
            lives = Path("/proc", match[3]).exists() and not (and_own and int(match[3]) == os.getpid())
            ended = match[2] == socket.gethostname() and not lives
            with contextlib.suppress(OSError):
                if ended or time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a node and what fixes their order; names as in ``get_llama3_dataloader``."""

    world_size: int
    ranks: tuple[int, ...]
    batch_size: int
    global_batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    seq_len: int | None = None
    max_length: int | None = None
    long_documents: str = "truncate"
    group_by_length: bool | int = False
    first_step: int = 0  # global batch, counted through all epochs
    num_steps: int | None = None  # to the end of the epoch, if not given
    num_epochs: int = 1  # with the one of first_step

    def __post_init__(self) -> None:
        beyond = [rank for rank in self.ranks if not 0 <= rank < self.world_size]
        if beyond or not self.ranks:
            raise UsageError(f"the ranks are {self.ranks}, expected some of 0 to {self.world_size - 1}")
        if self.first_step < 0 or self.num_epochs < 1 or (self.num_steps is not None and self.num_steps < 1):
            raise UsageError(
                f"first_step={self.first_step}, num_steps={self.num_steps}, num_epochs={self.num_epochs}; "
                "expected 0 or more of the first, 1 or more of the others"
            )


@dataclass(frozen=True, kw_only=True)
class ShardsToStage:
    """The choice, in the order to copy it in, and what it was chosen from."""

    chosen: list[ShardToStage]
    num_shards: int
    num_bytes: int  # of all shards, tar and idx
    num_read: int  # shards that the ranks read; all where none were named
    read_bytes: int


def choose_shards(
    input_shards: tuple[str, ...],
    staged_dir: str | os.PathLike[str],
    *,
    exclude_shards: tuple[int | str, ...] = (),
    node_ranks: NodeRanks | None = None,
    limit_bytes: int | None = None,
    reader_index: ReaderIndex,
) -> ShardsToStage:
    """Of the shards named those that the ranks read, and of these what ``limit_bytes`` hold.

    Those of which the ranks read the largest part are taken then. ``reader_index``: which of all that
    stage this process is, so that each begins with another shard. Raises what ``find_shards`` does, and
    UsageError for tars without a manifest: nothing could vouch for their copies.
    """
    if node_ranks is None:
        shards, parts = find_data_sets(input_shards, exclude_shards), None
    else:
        from loader.parts_read import parts_of_ranks  # its imports have torch: seconds

        shards, parts = parts_of_ranks(input_shards, exclude_shards, node_ranks)
    every = [_to_stage(shards, number, staged_dir) for number in range(shards.num_shards)]
    read = np.arange(len(every)) if parts is None else np.flatnonzero(parts)
    kept = read
    if limit_bytes is not None:
        by_part = read if parts is None else read[np.argsort(-parts[read], kind="stable")]
        sums = np.cumsum([every[number].num_bytes for number in by_part.tolist()])
        kept = np.sort(by_part[: np.searchsorted(sums, limit_bytes, side="right")])
    kept = opening_order(kept, reader_index, None if shards.osts is None else shards.osts[kept])
    return ShardsToStage(
        chosen=[every[number] for number in kept.tolist()],
        num_shards=len(every),
        num_bytes=sum(shard.num_bytes for shard in every),
        num_read=len(read),
        read_bytes=sum(every[number].num_bytes for number in read.tolist()),
    )


def find_data_sets(
    input_shards: tuple[str, ...], exclude_shards: tuple[int | str, ...], *, count_tokens: bool = False
) -> ShardSet:
    """The shards named, as ``find_shards`` finds them. Raises UsageError for a tar without a manifest."""
    shards = find_shards(input_shards, exclude_shards=exclude_shards, count_tokens=count_tokens)
    external = [source.path_of(0) for source in shards.sources if not isinstance(source, DatasetShards)]
    if external:
        raise UsageError(
            f"{external[0]} is a tar that shardprep did not write: no manifest says what its copy must be; "
            "copy such tars yourself and give the loader the copies"
        )
    return shards


def _to_stage(shards: ShardSet, number: int, staged_dir: str | os.PathLike[str]) -> ShardToStage:
    source, row = shards.locate(number)
    assert isinstance(source, DatasetShards)
    return ShardToStage(
        source=source.folder,
        folder=staged_folder(staged_dir, source.spec),
        plan_id=source.spec.plan_id,
        shard_id=int(source.shard_ids[row]),
        tar_bytes=int(source.tar_bytes[row]),
        idx_bytes=int(source.idx_bytes[row]),
    )


_NUM_PLACES = 1 << 16  # in the list, for processes that Slurm did not number


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where every shard chosen is staged.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    raise_on_stop_signals("what is staged is whole")
    node_ranks = _node_ranks(args, os.environ)
    try:
        chosen = choose_shards(
            tuple(args.input_shards),
            args.to,
            exclude_shards=tuple(int(name) if name.isdecimal() else name for name in args.exclude_shards),
            node_ranks=node_ranks,
            limit_bytes=_limit_bytes(args),
            reader_index=reader_index_of(os.environ),
        )
    except OSError as error:
        raise ReadWriteError(f"{' '.join(args.input_shards)} cannot be looked at: {error}") from None
    print_lines(*_choice_lines(chosen, node_ranks))
    with Progress("staging", sum(shard.num_bytes for shard in chosen.chosen)) as progress:
        try:
            staged = stage_shards(
                chosen.chosen, Path(args.to), recheck=args.recheck, progress=progress.add, say=progress.say
            )
        except OSError as error:  # of looking around in it; copying has its own
            raise ReadWriteError(f"{args.to} cannot be staged to: {error}") from None
    print_lines(_end_line(staged, len(chosen.chosen), args.to))
    return staged.failures[0].exit_code if staged.failures else 0


def reader_index_of(environ: Mapping[str, str]) -> ReaderIndex:
    """Where in the list this process begins.

    Of Slurm's tasks: those of a node far apart, those of other nodes between them. Else by host and pid.
    """
    local, node = environ.get("SLURM_LOCALID", ""), environ.get("SLURM_NODEID", "")
    if not (local.isdecimal() and node.isdecimal()):
        place = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % _NUM_PLACES
        return ReaderIndex(number=place, count=_NUM_PLACES)
    num_nodes = _count(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", at_least=int(node) + 1)
    num_tasks = _count(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", at_least=1)
    num_local = max(-(-num_tasks // num_nodes), int(local) + 1)
    return ReaderIndex(number=int(local) * num_nodes + int(node), count=num_local * num_nodes)


def _count(environ: Mapping[str, str], *names: str, at_least: int) -> int:
    found = next((environ[name] for name in names if environ.get(name, "").isdecimal()), "1")
    return max(int(found), at_least)


def _node_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> NodeRanks | None:
    """The ranks of this node, where a world is given, with all that fixes their order."""
    given = {name: getattr(args, name) for name in _ORDER_FLAGS if hasattr(args, name)}
    if args.world_size is None:
        if given or args.ranks or args.ranks_per_node is not None:
            flags = ", ".join(f"--{name}" for name in (*given, *(["ranks"] if args.ranks else [])))
            raise UsageError(f"{flags or '--ranks_per_node'} choose shards for ranks; add --world_size")
        return None
    if bool(args.ranks) == (args.ranks_per_node is not None):
        raise UsageError(
            "--world_size needs either --ranks or --ranks_per_node, to know which are this node's"
        )
    if "batch_size" not in given:
        raise UsageError(
            "--world_size needs --batch_size: it fixes which rank reads what, as does all below it"
        )
    if args.ranks:
        ranks = _parse_ranks(args.ranks)
    else:
        node = environ.get("SLURM_NODEID", "")
        if not node.isdecimal():
            raise UsageError("--ranks_per_node needs SLURM_NODEID: start this with srun, or pass --ranks")
        first = int(node) * args.ranks_per_node
        ranks = tuple(range(first, first + args.ranks_per_node))
    return NodeRanks(world_size=args.world_size, ranks=ranks, **given)


def _parse_ranks(text: str) -> tuple[int, ...]:
    """``8-15,20`` -> numbers."""
    try:
        return tuple(ids_of_ranges(text))
    except ValueError:
        raise UsageError(f"--ranks is {text!r}, expected numbers such as 8-15 or 0,4") from None


def _limit_bytes(args: argparse.Namespace) -> int | None:
    if args.limit_bytes is None:
        return None
    return parse_size(args.limit_bytes, "--limit_bytes", such_as="800M or 500G")


def _choice_lines(choice: ShardsToStage, node: NodeRanks | None) -> list[str]:
    """What was chosen, and why."""
    lines = []
    if node is not None:
        last = "" if node.num_steps is None else f", {node.num_steps} steps"
        epochs = f", {node.num_epochs} epoch(s)" if node.num_steps is None else ""
        all_read = node.shuffle and choice.num_read == choice.num_shards
        why = ": all of them, as shuffled ranks read blocks of every shard" if all_read else ""
        lines.append(
            f"{choice.num_read} of {choice.num_shards} shards, {size_text(choice.read_bytes)} of "
            f"{size_text(choice.num_bytes)}, are read by {len(set(node.ranks))} of {node.world_size} ranks "
            f"from step {node.first_step}{last}{epochs}{why}"
        )
    chosen_bytes = sum(shard.num_bytes for shard in choice.chosen)
    lines.append(f"to stage: {len(choice.chosen)} shards of {size_text(chosen_bytes)}")
    left = choice.num_read - len(choice.chosen)
    if left:
        over = size_text(choice.read_bytes - chosen_bytes)
        lines.append(f"{left} shards of {over} are over --limit_bytes and will be read where they are")
    return lines


def _end_line(staged: Staged, num_chosen: int, to: str) -> str:
    failed = f", {len(staged.failures)} failed" if staged.failures else ""
    return (
        f"staged {num_chosen - len(staged.failures)} of {num_chosen} shards: {staged.num_copied} copied, "
        f"{staged.num_found} there before or copied by others{failed}; load them with staged_dir={to!r}"
    )


_ORDER_FLAGS = {
    "batch_size": "samples per batch on each rank",
    "global_batch_size": "samples of an optimizer's step (default batch_size x world_size)",
    "seed": "of the shuffle (default 0)",
    "seq_len": "tokens of rows that documents are packed into at load",
    "max_length": "tokens at which documents are cut",
    "long_documents": "what happens to longer ones (default truncate)",
    "group_by_length": "documents of like length side by side, in groups of so many (default batch_size)",
    "first_step": "global batch from which on, counted through all epochs (default 0)",
    "num_steps": "global batches (default: to the end of --num_epochs)",
    "num_epochs": "epochs, that of --first_step included (default 1)",
    "shuffle": "as the loader is told",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy shards to a disk of this node, verified, for the loader's staged_dir. Any "
        "number of processes may do so at once; each begins elsewhere and skips what is there."
    )
    parser.add_argument(
        "input_shards", nargs="+", help="as the loader takes them; data sets of shardprep only"
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="folder on this node; made if it is missing"
    )
    parser.add_argument(
        "--limit_bytes", help="stage as many shards as fit, such as 500G; those read most first"
    )
    parser.add_argument(
        "--recheck", action="store_true", help="read what is staged, too, and mend what differs"
    )
    parser.add_argument("--exclude_shards", nargs="+", default=[], help="as the loader's exclude_shards")
    world = parser.add_argument_group(
        "only what this node's ranks will read", "the numbers that get_llama3_dataloader is given"
    )
    world.add_argument("--world_size", type=int, help="ranks of data parallelism, of all nodes")
    world.add_argument("--ranks", help="those of this node, such as 8-15")
    world.add_argument("--ranks_per_node", type=int, help="instead of --ranks: by SLURM_NODEID, in its order")
    for name, text in _ORDER_FLAGS.items():
        settings: dict[str, Any] = {"type": int}
        if name == "shuffle":
            settings = {"action": argparse.BooleanOptionalAction}
        elif name == "long_documents":
            settings = {"choices": ("truncate", "split", "error")}
        elif name == "group_by_length":
            settings = {"type": int, "nargs": "?", "const": True}
        world.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **settings)
