"""``shardprep stage DATA --to DIR``: verified copies of shards on a node's own disk.

Any number of processes stage at once, without locks. A shard is in one of three states on a node:

- staged: its tar and idx are there with the right sizes; they get their names once verified;
- being copied: a temporary file of another process was written to in the last STALLED_S;
- open: this process copies it.

A process goes through its list until every shard is staged, or its source has failed. Where two begin one
shard at once, both copy it, and the first to finish removes what the other has begun: that costs a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from loader.find_shards import DatasetShards, ShardSet, find_shards
from loader.order import Order
from loader.reading import ReaderIndex, opening_order
from loader.staged_copies import is_staged, staged_folder
from shardprep.command_line import add_flags_of, given_of, option, parse_size
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

if TYPE_CHECKING:
    from loader.samples import Samples

READ_BYTES = 4 << 20
NUM_ATTEMPTS = 2
STALLED_S = 30.0  # another's copy that did not grow for so long is not waited for
POLL_S = 0.2
_TEMPORARY = re.compile(r"\.(shard-\d{5})\.(?:tar|idx)\.(.+)-(\d+)-[0-9a-f]{8}\.tmp")  # of PublishedFile


class CannotReadSource(ReadWriteError):
    """The data set's file cannot be read; others may be."""


_SOURCE_FAULTS = (BrokenShard, NotFound, Refused, CannotReadSource)


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
        no room for all of them, before anything is copied, and CannotWrite or ReadWriteError where writing
        fails.
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
                left = self._one_pass(todo)
                if len(left) == len(todo):
                    time.sleep(POLL_S)
                    for folder in self._folders:
                        _remove_dead(folder)
                todo = left
        finally:  # a signal can come right after a file was made, before anything knows of it
            for folder in self._folders:
                with contextlib.suppress(OSError):  # of more weight is what ended the staging
                    _remove_dead(folder, and_own=True)

    def _one_pass(self, todo: list[ShardToStage]) -> list[ShardToStage]:
        """Deal with each shard once; return those that others are copying."""
        begun = {folder: set(_temporaries(folder)) for folder in self._folders}
        left: list[ShardToStage] = []
        for shard in todo:
            stem = shard_name(shard.shard_id)
            if shard.is_staged:
                self.num_found += 1
                self._progress.add(shard.num_bytes)
                if stem in begun[shard.folder]:
                    remove_temporaries(shard.folder, stem, older_than_s=0)
            elif _grows(_temporaries(shard.folder).get(stem, [])):
                left.append(shard)
            else:
                try:
                    with self._source_faults_noted():
                        self._copy(shard)
                except (CannotWrite, ReadWriteError) as error:
                    raise type(error)(f"{error}; {self._room_text()}") from None
        return left

    @contextlib.contextmanager
    def _source_faults_noted(self) -> Iterator[None]:
        try:
            yield
        except _SOURCE_FAULTS as error:
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
        self, shard: ShardToStage, path_of: Any, stamp: FileStamp, held: contextlib.ExitStack
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
        if not shard.is_staged or not (wrong := _copy_fault(shard)):
            return
        self._progress.say(f"warning: the copy is broken, not the source: {wrong}; it is copied anew")
        path = tar_path(shard.folder, shard.shard_id)
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
        for folder in self._folders:
            for path in (path for paths in _temporaries(folder).values() for path in paths):
                with contextlib.suppress(OSError):
                    free_bytes += path.stat().st_blocks * 512
        missing = [shard.num_bytes for shard in self._shards if not shard.is_staged]
        text = (
            f"{len(missing)} shards of {short_bytes(sum(missing))} are still to be staged, "
            f"{self._staged_dir} has {short_bytes(free_bytes)} free; what is staged stays valid"
        )
        return sum(missing), free_bytes, text

    def _room_text(self) -> str:
        try:
            return self._room()[2]
        except OSError as error:
            return f"the room in {self._staged_dir} is unknown ({error.strerror}); what is staged stays valid"


def _copy_fault(shard: ShardToStage) -> str:
    """What is wrong with a copy that is there, by reading it whole; empty where nothing is."""
    manifest = shard.manifest()
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
    """Remove unfinished copies of ended processes of this node, those a day old, and one's own.

    One that lives in another PID namespace loses its copy and ends with 74.
    """
    for path in (path for paths in _temporaries(folder).values() for path in paths):
        match = _TEMPORARY.fullmatch(path.name)
        assert match is not None
        lives = Path("/proc", match[3]).exists() and not (and_own and int(match[3]) == os.getpid())
        ended = match[2] == socket.gethostname() and not lives
        with contextlib.suppress(OSError):
            if ended or time.time() - path.stat().st_mtime > STALE_AFTER_S:
                path.unlink()


# Which shards: all, those that the ranks of a node read, or as many of them as fit.


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a node and what fixes their order; names as in ``get_llama3_dataloader``."""

    world_size: int
    ranks: tuple[int, ...]
    batch_size: int
    global_batch_size: int | None = option(
        None, "samples of an optimizer step", shown="batch_size x world_size"
    )
    seed: int = option(0, "of the shuffle", shown="0")
    seq_len: int | None = option(None, "documents packed into rows of so many tokens at load")
    max_length: int | None = option(None, "tokens at which documents are cut")
    long_documents: Literal["truncate", "split", "error"] = option(
        "truncate", "what the loader does with documents over --max_length"
    )
    group_by_length: bool | int = option(
        False, "documents of similar length side by side, in groups of so many; alone: of batch_size"
    )
    first_step: int = option(0, "global batch to begin at, counted through all epochs", shown="0")
    num_steps: int | None = option(None, "global batches", shown="to the end of --num_epochs")
    num_epochs: int = option(1, "epochs, that of --first_step included")
    shuffle: bool = option(True, "as the loader is told")

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
    """Of the shards named those that the ranks read, and of these what ``limit_bytes`` hold, most read first.

    ``reader_index``: which of all that stage this process is, so that each begins with another shard. Raises
    UsageError for tars without a manifest, which says what their copies must be.
    """
    if node_ranks is None:
        shards, parts = _find_data_sets(input_shards, exclude_shards, count_tokens=False), None
    else:
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


def _find_data_sets(
    input_shards: tuple[str, ...], exclude_shards: tuple[int | str, ...], *, count_tokens: bool
) -> ShardSet:
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


# How much of each shard ranks read, by the sampling order alone: no sample is read, and nothing as large as
# the data set is held. The first and the last window count whole, as they are read whole.

NUM_AT_ONCE = 1 << 18  # intervals at a time: some 30 MB

Intervals = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # firsts, ends


def parts_of_ranks(
    input_shards: tuple[str, ...], exclude_shards: tuple[int | str, ...], node: NodeRanks
) -> tuple[ShardSet, npt.NDArray[np.float64]]:
    """The shards, and how much of each the ranks read: what their loaders' own Order says."""
    # Imported here, as both have torch: seconds that staging a whole data set does not pay.
    from loader.samples import SampleRules, make_samples
    from loader.workers import check_batch, group_size, make_order, rank_slots

    global_batch_size = check_batch(node.batch_size, node.global_batch_size, node.world_size)
    rules = SampleRules(
        seq_len=node.seq_len,
        max_length=node.max_length,
        long_documents=node.long_documents,
        group=group_size(node.group_by_length, node.batch_size),
    )
    if rules.long_documents != "truncate" and rules.max_length is None:
        raise UsageError(f"long_documents={rules.long_documents!r} needs max_length")
    shards = _find_data_sets(input_shards, exclude_shards, count_tokens=rules.needs_lengths)
    samples = make_samples(shards, rules, eos_token_id=shards.datasets[0].spec.tokenizer.eos_token_id)
    order = make_order(samples, shards, global_batch_size, rules.group, seed=node.seed, shuffle=node.shuffle)
    steps = order.steps_per_epoch
    end_step = (node.first_step // steps + node.num_epochs) * steps
    if node.num_steps is not None:
        end_step = node.first_step + node.num_steps
    parts = np.zeros(shards.num_shards)
    ranks = sorted(set(node.ranks))
    for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0]):  # consecutive ones at once
        of_run = [rank_slots(order, rank, node.world_size) for _, rank in run]
        slots = range(of_run[0].start, of_run[-1].stop)
        parts += parts_read(order, samples, slots, node.first_step, end_step)
    return shards, parts


def parts_read(
    order: Order, samples: Samples, slots: range, first_step: int, end_step: int
) -> npt.NDArray[np.float64]:
    """How much of each shard slots read in steps ``first_step`` up to ``end_step``: float64[num_shards].

    Steps are counted through all epochs. 0: the shard is not opened; 1: as much as all of it, once.
    ``slots`` are consecutive, of one rank or of several. 10^6 blocks take 0.3 s, one core.
    """
    from loader.samples import JoinedRows

    if isinstance(samples, JoinedRows):
        edges, unit = samples.first_token, samples.seq_len  # of shards, in tokens; tokens of a sample
    else:
        edges, unit = samples.first_samples, 1
    num_units = int(edges[-1])
    read = np.zeros(len(edges) - 1, np.int64)
    steps = order.steps_per_epoch
    for epoch in range(first_step // steps, -(-end_step // steps)):
        offset = order.offset(epoch, samples.offsets)
        begin, end = max(first_step - epoch * steps, 0), min(end_step - epoch * steps, steps)
        for firsts, ends in _epoch_samples(order, epoch, slots, begin, end):
            firsts, ends = _unwrapped(firsts, ends, order.num_samples)
            begins = (offset + firsts * unit) % num_units
            read += _overlaps(edges, *_unwrapped(begins, begins + (ends - firsts) * unit, num_units))
    return read / np.maximum(np.diff(edges), 1)


def _epoch_samples(order: Order, epoch: int, slots: range, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of the samples that slots read in steps of one epoch; they may go beyond N, and wrap."""
    size = order.window_steps
    start, end = begin // size * size, min(-(-end // size) * size, order.steps_per_epoch)
    if not order.shuffle:
        for first in range(start, end, NUM_AT_ONCE):
            steps = np.arange(first, min(first + NUM_AT_ONCE, end), dtype=np.int64) * order.global_batch_size
            yield steps + slots.start, steps + slots.stop
        return
    per_slot = order.steps_per_epoch * order.group
    if (start, end) == (0, order.steps_per_epoch):
        yield from _block_intervals(order, epoch, slots.start * per_slot, slots.stop * per_slot)
        return
    held: list[Intervals] = []  # thousands of slots give few each
    for slot in slots:
        first = slot * per_slot
        held += _block_intervals(order, epoch, first + start * order.group, first + end * order.group)
        if slot + 1 == slots.stop or sum(len(firsts) for firsts, _ in held) >= NUM_AT_ONCE:
            yield np.concatenate([firsts for firsts, _ in held]), np.concatenate([ends for _, ends in held])
            held = []


def _block_intervals(order: Order, epoch: int, begin: int, end: int) -> Iterator[Intervals]:
    """Intervals of samples at consecutive positions, one per block; the outer blocks may be cut."""
    size = order.block_samples
    for first in range(begin // size, -(-end // size), NUM_AT_ONCE):
        positions = np.arange(first, min(first + NUM_AT_ONCE, -(-end // size)), dtype=np.int64) * size
        starts = order.samples_at(epoch, positions)
        yield starts + np.maximum(begin - positions, 0), starts + np.minimum(end - positions, size)


def _unwrapped(firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], total: int) -> Intervals:
    """Intervals modulo ``total``, none longer than it, as intervals below it."""
    firsts, ends = np.where(firsts >= total, [firsts - total, ends - total], [firsts, ends])
    beyond = ends[ends > total] - total
    return np.concatenate([firsts, np.zeros_like(beyond)]), np.concatenate([np.minimum(ends, total), beyond])


def _overlaps(
    edges: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """How much of each stretch between edges the intervals cover, counted as often as they do."""

    def covered_below(begins: npt.NDArray[np.int64]) -> Any:  # at each edge the sum of edge - begin
        begins = np.sort(begins)
        below = np.searchsorted(begins, edges)
        return edges * below - np.concatenate([[0], np.cumsum(begins)])[below]

    covered: npt.NDArray[np.int64] = np.diff(covered_below(firsts) - covered_below(ends))
    return covered


# The command


def stage(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, 0 where every shard chosen is staged.

    Raises ShardprepErrors, and Stopped on TERM, USR1 and INT, which leaves no temporary file.
    """
    raise_on_stop_signals("what is staged is whole")
    node = _node_ranks(args, os.environ)
    limit = args.limit_bytes
    try:
        choice = choose_shards(
            tuple(args.input_shards),
            args.to,
            exclude_shards=tuple(int(name) if name.isdecimal() else name for name in args.exclude_shards),
            node_ranks=node,
            limit_bytes=limit and parse_size(limit, "--limit_bytes", such_as="800M or 500G"),
            reader_index=reader_index_of(os.environ),
        )
    except OSError as error:
        raise ReadWriteError(f"{' '.join(args.input_shards)} cannot be looked at: {error}") from None
    print_lines(*_choice_lines(choice, node))
    with Progress("staging", sum(shard.num_bytes for shard in choice.chosen)) as progress:
        staging = Staging(choice.chosen, Path(args.to), progress)
        try:
            staging.run(recheck=args.recheck)
        except OSError as error:  # of looking around in it; copying has its own
            raise ReadWriteError(f"{args.to} cannot be staged to: {error}") from None
    num_chosen, failures = len(choice.chosen), staging.failures
    failed = f", {len(failures)} failed" if failures else ""
    print_lines(
        f"staged {num_chosen - len(failures)} of {num_chosen} shards: {staging.num_copied} copied, "
        f"{staging.num_found} there before or copied by others{failed}; load them with staged_dir={args.to!r}"
    )
    return failures[0].exit_code if failures else 0


_NUM_PLACES = 1 << 16  # in the list, for processes that Slurm did not number


def reader_index_of(environ: Mapping[str, str]) -> ReaderIndex:
    """Where in the list this process begins.

    Of Slurm's tasks: those of a node far apart, those of other nodes between them. Else by host and pid.
    """
    local, node = environ.get("SLURM_LOCALID", ""), environ.get("SLURM_NODEID", "")
    if not (local.isdecimal() and node.isdecimal()):
        place = zlib.crc32(f"{socket.gethostname()}:{os.getpid()}".encode()) % _NUM_PLACES
        return ReaderIndex(number=place, count=_NUM_PLACES)

    def count(*names: str, at_least: int) -> int:
        found = next((environ[name] for name in names if environ.get(name, "").isdecimal()), "1")
        return max(int(found), at_least)

    num_nodes = count("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", at_least=int(node) + 1)
    num_tasks = count("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", at_least=1)
    num_local = max(-(-num_tasks // num_nodes), int(local) + 1)
    return ReaderIndex(number=int(local) * num_nodes + int(node), count=num_local * num_nodes)


def _node_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> NodeRanks | None:
    """The ranks of this node, where a world is given, with all that fixes their order."""
    given = given_of(args, NodeRanks)
    ranks_text, world_size = given.pop("ranks"), given.pop("world_size")
    if world_size is None:
        if given or ranks_text or args.ranks_per_node is not None:
            flags = ", ".join(f"--{name}" for name in (*given, *(["ranks"] if ranks_text else [])))
            raise UsageError(f"{flags or '--ranks_per_node'} choose shards for ranks; add --world_size")
        return None
    if bool(ranks_text) == (args.ranks_per_node is not None):
        raise UsageError(
            "--world_size needs either --ranks or --ranks_per_node, to know which are this node's"
        )
    if "batch_size" not in given:
        raise UsageError(
            "--world_size needs --batch_size: it fixes which rank reads what, as does all below it"
        )
    if ranks_text:
        try:
            ranks = tuple(ids_of_ranges(ranks_text))
        except ValueError:
            raise UsageError(f"--ranks is {ranks_text!r}, expected numbers such as 8-15 or 0,4") from None
    else:
        node = environ.get("SLURM_NODEID", "")
        if not node.isdecimal():
            raise UsageError("--ranks_per_node needs SLURM_NODEID: start this with srun, or pass --ranks")
        first = int(node) * args.ranks_per_node
        ranks = tuple(range(first, first + args.ranks_per_node))
    return NodeRanks(world_size=world_size, ranks=ranks, **given)


def _choice_lines(choice: ShardsToStage, node: NodeRanks | None) -> list[str]:
    """What was chosen, and why."""
    lines = []
    if node is not None:
        steps = f", {node.num_epochs} epoch(s)" if node.num_steps is None else f", {node.num_steps} steps"
        all_read = node.shuffle and choice.num_read == choice.num_shards
        why = ": all of them, as shuffled ranks read blocks of every shard" if all_read else ""
        lines.append(
            f"{choice.num_read} of {choice.num_shards} shards, {short_bytes(choice.read_bytes)} of "
            f"{short_bytes(choice.num_bytes)}, are read by {len(set(node.ranks))} of {node.world_size} ranks "
            f"from step {node.first_step}{steps}{why}"
        )
    chosen_bytes = sum(shard.num_bytes for shard in choice.chosen)
    lines.append(f"to stage: {len(choice.chosen)} shards of {short_bytes(chosen_bytes)}")
    left = choice.num_read - len(choice.chosen)
    if left:
        over = short_bytes(choice.read_bytes - chosen_bytes)
        lines.append(f"{left} shards of {over} are over --limit_bytes and will be read where they are")
    return lines


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``stage`` takes what the parser makes of them."""
    parser.description = (
        "Copy shards to a disk of this node, verified, for the loader's staged_dir. Any "
        "number of processes may do so at once; each begins elsewhere and skips what is there."
    )
    add = parser.add_argument
    add("input_shards", nargs="+", help="as the loader takes them; data sets of shardprep only")
    add("--to", required=True, metavar="DIR", help="folder on this node; made if it is missing")
    add(
        "--limit_bytes",
        help="stage as many shards as fit, such as 500G; those read most first (default: all)",
    )
    add("--recheck", action="store_true", help="read what is staged, too, and mend what differs")
    add("--exclude_shards", nargs="+", default=[], help="as the loader's exclude_shards (default: none)")
    world = parser.add_argument_group(
        "only what this node's ranks will read", "the numbers that get_llama3_dataloader is given"
    )
    world.add_argument(
        "--world_size", type=int, help="ranks of data parallelism, of all nodes (default: stage all shards)"
    )
    world.add_argument("--ranks", help="those of this node, such as 8-15 (default: all)")
    world.add_argument(
        "--ranks_per_node", type=int, help="instead of --ranks: by SLURM_NODEID (default: none)"
    )
    world.add_argument(
        "--batch_size",
        type=int,
        default=argparse.SUPPRESS,
        help="samples per batch on each rank (default: unknown)",
    )
    add_flags_of(world, NodeRanks, but=("world_size", "ranks", "batch_size"))
