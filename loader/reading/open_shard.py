"""Open shards: of each its tar, and its idx, which says where each sample lies in it.

Opening checks the size of the tar and the header and size of the idx. A small idx is read at once, of a large
one only the parts that are asked for. Without an idx the headers of the tar are scanned instead.
``OpenShards`` holds what a process has open, reads bytes, and tries again after errors; ``StallWatch`` logs
which shard a read hangs in.

``opening_order`` chooses with which shard a process begins. If every rank and worker began with the lowest,
the start of a job would be as slow as the one storage target (OST) that holds it. Batches do not depend on
this order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loader.shards.shard_set import DatasetShards, ExternalTar, ShardSet
from loader.shards.tar_samples import JSON, RAW, TarSamples, scan_tar
from loader.staging.staged_copies import StagedCopies, recheck_command
from shardprep.errors import BrokenShard, MissingShard, ReadWriteError, ShardprepError, UsageError
from shardprep.format.idx import IdxFile, RecordFile, open_crcs, open_idx
from shardprep.format.names import idx_path
from shardprep.regular_files import (
    NOT_THERE,
    RETRY_DELAYS_S,
    close_read,
    open_regular,
    wait_to_retry,
)

logger = logging.getLogger(__name__)

Part = Literal["tar", "idx", "crcs"]  # a file of a shard
MAX_OPEN_SHARDS = 128
STALL_WARNING_S = 60.0
HELD_IDX_BYTES = 256 << 10  # an idx up to this is read at opening, else what is asked for


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """One tar, open for reading. Its samples' records are in memory, or to be read from its open idx."""

    path: Path
    handle: int
    num_bytes: int
    idx: IdxFile | None  # open, where the records are not held
    held: Any  # columns as in the idx, a row per sample; None where there is ``idx``
    encoding: npt.NDArray[np.int8]  # JSON, NPY or RAW; one, or one per sample
    token_bytes: int  # of a RAW id
    row_tokens: int  # of a packed row, else 0
    has_mask: bool  # a byte per token of each row says which have a label
    remedy: str
    crcs: RecordFile | None  # open, where they are to be compared
    is_copy: bool = False  # staged, so the data set has the same bytes
    sums: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # what its readers keep with it

    def records_of(self, part: Part) -> RecordFile | None:
        """The idx that is read in parts, or the crc32s; None where there is none, and of the tar."""
        return {"tar": None, "idx": self.idx, "crcs": self.crcs}[part]

    def file(self, part: Part) -> tuple[Path, int]:
        """Path and handle of a part that is open; else of the tar."""
        records = self.records_of(part)
        return (self.path, self.handle) if records is None else (records.path, records.handle)

    def close(self) -> None:
        """Close every file."""
        close_read(self.handle)
        for records in (self.idx, self.crcs):
            if records is not None:
                close_read(records.handle)


def open_shard(source: DatasetShards | ExternalTar, row: int, *, crcs_from: Path | None = None) -> OpenShard:
    """Open one shard of a source; with ``crcs_from``, the crc32s that lie in this data set, too.

    Raises MissingShard, BrokenShard, UnknownVersion or OtherPlan with the command that mends it; OSError
    where the file system fails.
    """
    path, remedy = source.path_of(row), source.remedy_of(row)
    expected = source.tar_bytes if isinstance(source, ExternalTar) else int(source.tar_bytes[row])
    with contextlib.ExitStack() as opened:  # closes what is open where something fails
        handle = _open_file(path, remedy)
        opened.callback(close_read, handle)
        _check_size(path, handle, expected, remedy)
        found: TarSamples | None
        idx, held, crcs = None, None, None
        if isinstance(source, ExternalTar):
            found = source.samples
        else:
            found, idx, held = _records(source, row, needs_idx=crcs_from is not None)
            if idx is not None:
                opened.callback(close_read, idx.handle)
            crcs = None if crcs_from is None else _crcs(source, row, crcs_from)
        opened.pop_all()
    is_json = isinstance(source, DatasetShards) and source.spec.kind == "json"
    return OpenShard(
        path=path,
        handle=handle,
        num_bytes=expected,
        idx=idx,
        held=held if found is None else vars(found),
        encoding=np.array([JSON if is_json else RAW], np.int8) if found is None else found.encoding,
        token_bytes=_token_bytes(source, found),
        row_tokens=source.row_tokens,
        has_mask=source.has_mask,
        remedy=remedy,
        crcs=crcs,
    )


def _token_bytes(source: DatasetShards | ExternalTar, found: TarSamples | None) -> int:
    if found is not None:
        return found.token_bytes
    assert isinstance(source, DatasetShards)
    return 0 if source.spec.kind == "json" else source.spec.token_bytes


def _crcs(source: DatasetShards, row: int, folder: Path) -> RecordFile:
    """The crc32s of a shard's samples, open. Raises BrokenShard where they are of another number of them."""
    shard_id = int(source.shard_ids[row])
    crcs = open_crcs(folder, source.spec, shard_id, str(source.tar_sha256[row]))
    if crcs.num_samples != source.num_samples[row]:
        close_read(crcs.handle)
        raise BrokenShard(
            f"{crcs.path} has the crc32s of {crcs.num_samples} of {source.num_samples[row]} samples; "
            f"{crcs.remedy}"
        )
    return crcs


def _records(
    source: DatasetShards, row: int, *, needs_idx: bool
) -> tuple[TarSamples | None, IdxFile | None, Any]:
    """What the tar itself tells, read once, where there is no idx; else the idx, or all of it if small."""
    shard_id = int(source.shard_ids[row])
    try:
        idx = open_idx(source.folder, source.spec, shard_id)
    except MissingShard:
        if needs_idx:  # its places are what the crc32s are of
            raise
        path = idx_path(source.folder, shard_id)
        logger.warning("%s is missing; its tar is scanned instead, as each process that opens it must", path)
        samples = scan_tar(source.path_of(row), count_tokens=True)
        if samples.row_tokens != source.row_tokens:
            raise BrokenShard(
                f"{source.path_of(row)} has rows of {samples.row_tokens} tokens, its manifest says "
                f"{source.row_tokens}"
            ) from None
        _check_num_samples(source, row, path, len(samples.offset))
        return samples, None, None
    keep = False
    try:
        _check_num_samples(source, row, idx.path, idx.num_samples)
        if idx.num_samples * idx.dtype.itemsize <= HELD_IDX_BYTES:
            return None, None, idx.read_all()
        keep = True
        return None, idx, None
    finally:
        if not keep:
            close_read(idx.handle)


def _check_num_samples(source: DatasetShards, row: int, path: Path, found: int) -> None:
    if found != source.num_samples[row]:
        raise BrokenShard(f"{path} has {found} of {source.num_samples[row]} samples; {source.remedy_of(row)}")


def _open_file(path: Path, remedy: str) -> int:
    try:
        return open_regular(path)
    except NOT_THERE:
        raise MissingShard(f"{path} is missing; {remedy}") from None


def _check_size(path: Path, handle: int, expected: int, remedy: str) -> None:
    num_bytes = os.fstat(handle).st_size
    if num_bytes != expected:
        raise BrokenShard(f"{path} has {num_bytes} of {expected} bytes; {remedy}")


def open_copy(
    copies: StagedCopies, source: DatasetShards, row: int, *, crcs_from: Path | None = None
) -> OpenShard | None:
    """The staged copy of one shard, opened; None where there is none, or it cannot be opened."""
    found = copies.find(source, row)
    if found is None:
        return None
    try:
        shard = open_shard(found, row, crcs_from=crcs_from)
    except (OSError, ShardprepError) as error:
        copies.leave(found.folder, error)
        return None
    return replace(shard, is_copy=True, remedy=f"run: {recheck_command(source, found.folder)}")


class OpenShards:
    """The shards that a process has open, by their number through all sources: the latest ones.

    At most MAX_OPEN_SHARDS, and an eighth of the process's handles: an open shard holds three at most. What
    fails is tried again; a copy that cannot be read is left, and the shard opened in its data set.
    """

    def __init__(
        self, shards: ShardSet, *, copies: StagedCopies | None, compares_crcs: bool, stall_warning_s: float
    ) -> None:
        self._shards = shards
        self._copies = copies
        self._compares_crcs = compares_crcs
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self.max_open = min(MAX_OPEN_SHARDS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8, 1))
        self._watch = StallWatch(stall_warning_s)

    def opened(self, number: int) -> OpenShard:
        """A shard, opened if it is not; counted through all sources."""
        shard = self._open.get(number)
        if shard is not None:
            self._open.move_to_end(number)
            return shard
        while len(self._open) >= self.max_open:
            self._open.popitem(last=False)[1].close()
        source, row = self._shards.locate(number)
        path = source.path_of(row)
        for delay_s in (*RETRY_DELAYS_S, None):
            self._watch.begin(path, 0)
            try:
                self._open[number] = self._copy(source, row) or open_shard(
                    source, row, crcs_from=self._crcs_from(source)
                )
                break
            except (OSError, BrokenShard, ReadWriteError) as error:
                self._watch.end()
                wait_to_retry(f"{path} cannot be opened", error, delay_s)
            finally:
                self._watch.end()
        return self._open[number]

    def _copy(self, source: DatasetShards | ExternalTar, row: int) -> OpenShard | None:
        if self._copies is None or isinstance(source, ExternalTar):
            return None
        return open_copy(self._copies, source, row, crcs_from=self._crcs_from(source))

    def _crcs_from(self, source: DatasetShards | ExternalTar) -> Path | None:
        """The data set whose crc32s are compared; copies have none of their own."""
        return source.folder if self._compares_crcs and isinstance(source, DatasetShards) else None

    def fill(self, number: int, offset: int, target: memoryview, part: Part = "tar") -> None:
        """Read bytes of a shard's file, all; those of one that is not open after all are left unread."""
        done = 0
        for delay_s in (*RETRY_DELAYS_S, None):
            shard = self.opened(number)
            if part != "tar" and shard.records_of(part) is None:
                return
            path, handle = shard.file(part)
            self._watch.begin(path, offset + done)
            try:
                while done < len(target):
                    done += _read_some(path, handle, target[done:], offset + done)
            except (OSError, BrokenShard) as error:
                if part == "crcs" or not self.leave_copy(shard, error):
                    wait_to_retry(f"{path} cannot be read at byte {offset + done}", error, delay_s)
                self.drop(number)  # a stale handle stays stale
            else:
                return
            finally:
                self._watch.end()

    def leave_copy(self, shard: OpenShard, error: Exception) -> bool:
        """Leave a shard that cannot be read if it is a copy; whether it was: opening it anew helps then."""
        if shard.is_copy and self._copies is not None:
            self._copies.leave(shard.path.parent, error)
        return shard.is_copy

    def drop(self, number: int) -> None:
        """Close a shard; it is opened anew when it is needed."""
        self._open.pop(number).close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()
        self._watch.close()


class StallWatch:
    """A thread that logs a warning for every ``limit_s`` that one read goes on. 0.3 us per read.

    A server of a parallel file system that is gone blocks a read for minutes and without an error;
    all other ranks then wait in a collective, and only this line tells where.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reading: tuple[float, Path, int] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, path: Path, offset: int) -> None:
        """A read begins; the thread starts with the first one, in the process that reads."""
        self._reading = (time.monotonic(), path, offset)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """It is over."""
        self._reading = None

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        said = 0.0
        while not self._ended.wait(self._limit_s / 4):
            reading, now = self._reading, time.monotonic()
            if reading is None or now - max(reading[0], said) < self._limit_s:
                continue
            said = now
            logger.warning(
                "%s: reading at byte %d has taken %.0f s and goes on; is the file system of this shard up?",
                reading[1], reading[2], now - reading[0],
            )  # fmt: skip


def _read_some(path: Path, handle: int, target: memoryview, offset: int) -> int:
    """Bytes read into ``target``: some, as reads may be short."""
    count = os.preadv(handle, [target], offset)
    if count == 0:
        raise BrokenShard(f"{path} ended at byte {offset} while it was read; was it replaced?")
    return count


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which of all processes that read one data set this one is: ``number`` of ``count``."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(f"turn {self.number} of {self.count}: expected 0 <= number < count")

    def of_worker(self, worker: int, num_workers: int) -> Turn:
        """The turn of one of a rank's workers, where this is the rank's."""
        return Turn(number=self.number * num_workers + worker, count=self.count * num_workers)


def opening_order(
    shards: npt.NDArray[np.int64], turn: Turn, osts: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """The same shards in the order to open them in: int64[n] -> int64[n], a permutation.

    ``shards``: different numbers, ascending. ``osts``: the OST of each, int64[n]; -1 stands for one that
    is not known. Without them the list is rotated by the turn's part of its length. With them the OSTs
    take turns, each by its share of the shards; T processes on O OSTs begin on min(T, O) of them, and
    those that begin on one OST in different parts of its list. 10 us for 300 shards, 110 us
    with OSTs.
    """
    if osts is None:
        first = len(shards) * turn.number // turn.count
        return np.concatenate([shards[first:], shards[:first]])
    _, ost, size = np.unique(osts, return_inverse=True, return_counts=True)
    num_osts = len(size)
    first_ost, rest = divmod(turn.number * num_osts, turn.count)
    by_ost = np.argsort(ost, kind="stable")
    place = np.empty(len(shards), np.int64)  # in the list of its OST
    place[by_ost] = np.arange(len(shards)) - np.repeat(np.cumsum(size) - size, size)
    rotated = (place - (size * rest // turn.count)[ost]) % size[ost]
    return shards[np.lexsort(((ost - first_ost) % num_osts, rotated / size[ost]))]
