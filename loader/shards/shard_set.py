"""All shards of a run as one sequence of samples: which tar holds sample g, and where in it.

``SizeCheck`` looks at the size of every tar once, on rank 0, while the loader is made: what is missing is
known at the start, not hours later. ``check_read_check`` says whether the crc32s of samples can be compared.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.shards.document_split import DocumentSplit
from loader.shards.tar_samples import TarSamples
from shardprep.errors import BrokenShard, MissingShard, ShardprepError, UsageError
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import idx_num_bytes
from shardprep.format.names import (
    CRCS_DIR,
    crcs_command,
    crcs_path,
    id_ranges,
    rerun_command,
    shard_name,
    tar_path,
)
from shardprep.regular_files import names_in, with_retries


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """Shards of one of our data sets, all or some; the arrays have a row per shard."""

    folder: Path
    spec: DatasetSpec
    shard_ids: npt.NDArray[np.int64]
    num_samples: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    tar_bytes: npt.NDArray[np.int64]
    tar_sha256: npt.NDArray[np.str_]  # the first 16 hex digits
    osts: npt.NDArray[np.int64] | None = None  # each begins on, where it is known; outside the fingerprint

    def path_of(self, row: int) -> Path:
        """The tar of a row."""
        return tar_path(self.folder, int(self.shard_ids[row]))

    def remedy_of(self, row: int) -> str:
        """What to do about a row that cannot be read."""
        return f"run: {rerun_command(int(self.shard_ids[row]), self.folder)}"

    @property
    def idx_bytes(self) -> npt.NDArray[np.int64]:
        """int64[shards]: of each idx."""
        return idx_num_bytes(self.spec.kind, self.num_samples)

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.spec.seq_len

    @property
    def has_mask(self) -> bool:
        """Whether rows say which of their tokens have a label."""
        return self.spec.record == "chat"

    @property
    def fingerprint(self) -> str:
        """Of plan, shards and content; the folder is outside it, so that a data set may move."""
        parts = [self.shard_ids.astype("<i8").tobytes(), ",".join(self.tar_sha256.tolist()).encode()]
        return hashlib.sha256(b"|".join([self.spec.plan_id.encode(), *parts])).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ExternalTar:
    """A tar without a manifest, as others write them, with its headers scanned."""

    path: Path
    samples: TarSamples
    tar_bytes: int

    @property
    def num_samples(self) -> npt.NDArray[np.int64]:
        """As DatasetShards has it: a row per shard, and this is one."""
        return np.array([len(self.samples.offset)])

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Where they were counted; else a guess of 4 bytes per token."""
        counted = self.samples.num_tokens
        return np.array([counted.sum() if (counted >= 0).all() else self.tar_bytes // 4])

    def path_of(self, _row: int) -> Path:
        """The tar."""
        return self.path

    def remedy_of(self, _row: int) -> str:
        """What to do where it cannot be read."""
        return "it changed since it was scanned: copy it again, and start anew"

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.samples.row_tokens

    @property
    def has_mask(self) -> bool:
        """Whether rows say which of their tokens have a label."""
        return bool(self.samples.mask_offset.any())

    @property
    def fingerprint(self) -> str:
        """Of sizes, places and some of the content; the path is outside it."""
        return self.samples.fingerprint


class ShardSet:
    """Shards in the order they were named; sample g is counted through all of them."""

    def __init__(
        self, sources: Iterable[DatasetShards | ExternalTar], split: DocumentSplit | None = None
    ) -> None:
        self.sources = tuple(sources)
        self.split = split
        parts = [np.zeros(0, np.int64), *(source.num_samples for source in self.sources)]
        # Shard s is row s - source_first[i] of source i.
        self.source_first = np.cumsum(list(map(len, parts)))
        self.num_records = np.concatenate(parts).astype(np.int64)  # of each shard, on both sides of a split
        counts = self.num_records
        if split is not None:
            counts = split.num_documents(self._split_keys, counts)
        self.first_sample = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_shards = len(self.first_sample) - 1
        self.num_samples = int(self.first_sample[-1])
        lengths = {source.row_tokens for source in self.sources}
        # Tokens of every sample where all are packed rows of one length, else 0.
        self.row_tokens = lengths.pop() if len(lengths) == 1 else 0
        num_tokens = sum(int(source.num_tokens.sum()) for source in self.sources)
        self.mean_tokens = max(num_tokens / max(int(self.num_records.sum()), 1), 1.0)  # of a sample, roughly

    @cached_property
    def _split_keys(self) -> npt.NDArray[np.uint64]:
        """uint64[shards]: of each shard's content."""
        keys = [
            [source.fingerprint] if isinstance(source, ExternalTar) else source.tar_sha256.tolist()
            for source in self.sources
        ]
        return np.array([int(key[:16], 16) for of_source in keys for key in of_source], np.uint64)

    def rows_of(self, shard: int, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where samples of one shard stand in it: int64[n] -> int64[n]."""
        local = samples - self.first_sample[shard]
        return local if self.split is None else self.split.rows(self._split_keys[shard], local)

    @cached_property
    def osts(self) -> npt.NDArray[np.int64] | None:
        """The storage target (OST) that each shard begins on, -1 where it is not known; None if none is."""
        known = [source.osts for source in self.datasets if source.osts is not None]
        if not known:
            return None
        parts = [
            np.full(len(source.num_samples), -1)
            if isinstance(source, ExternalTar) or source.osts is None
            else source.osts
            for source in self.sources
        ]
        return np.concatenate(parts).astype(np.int64)

    @property
    def tar_bytes(self) -> int:
        """Bytes of all tars; of a split its part, as by the number of samples."""
        num_bytes = sum(int(np.sum(source.tar_bytes)) for source in self.sources)
        return (
            num_bytes if self.split is None else num_bytes * self.num_samples // int(self.num_records.sum())
        )

    @property
    def datasets(self) -> list[DatasetShards]:
        """Those sources that are data sets of ours."""
        return [source for source in self.sources if isinstance(source, DatasetShards)]

    @property
    def has_external(self) -> bool:
        """Whether some shards are external tars."""
        return len(self.datasets) < len(self.sources)

    @property
    def has_rows(self) -> bool:
        """Whether some samples are packed rows."""
        return any(source.row_tokens for source in self.sources)

    @property
    def has_masks(self) -> bool:
        """Whether some rows say which of their tokens have a label."""
        return any(source.has_mask for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """sha256 of all sources, in their order."""
        return hashlib.sha256("".join(source.fingerprint for source in self.sources).encode()).hexdigest()

    def locate(self, shard: int) -> tuple[DatasetShards | ExternalTar, int]:
        """The source of a shard, counted through all sources, and its row there."""
        number = int(np.searchsorted(self.source_first, shard, side="right")) - 1
        return self.sources[number], shard - int(self.source_first[number])

    def shard_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The shard of each sample, counted through all sources; same shape."""
        return np.searchsorted(self.first_sample, samples, side="right") - 1

    def describe(self, sample: int) -> str:
        """``sample 17 of DATA/shard-00003.tar``, for messages."""
        shard = int(self.shard_of(np.array(sample)))
        source, row = self.locate(shard)
        record = int(self.rows_of(shard, np.array(sample)))
        return f"sample {record} of {source.path_of(row)}"


logger = logging.getLogger(__name__)

WAIT_S = 0.5
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A tar that is not there, or has not the bytes that its manifest says."""

    path: Path
    shard_id: int
    found_bytes: int | None  # None: not there
    expected_bytes: int


class SizeCheck:
    """Compares every tar of our data sets with its manifest's size, in a thread of its own.

    For rank 0 alone: a look at 99,999 files costs 1 s on a local disk, but a call of a metadata server
    each on Lustre, which all ranks together would swamp. ``wait`` takes half a second at most, so that a
    loader is made quickly; what is found later is raised where the next run of batches is fetched. The
    other ranks learn nothing of it: they wait in their next collective, until the launcher, which sees rank
    0 end, ends them (torchrun and ``srun --kill-on-bad-exit`` do). External tars were scanned already.
    """

    def __init__(self, shards: ShardSet) -> None:
        self._datasets = shards.datasets
        self.error: ShardprepError | None = None  # set once a tar was found missing or of a wrong size
        self._thread = threading.Thread(target=self._look, name="size check", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Give it a moment to end; raise MissingShard or BrokenShard where it found one by then."""
        self._thread.join(WAIT_S)
        if self.error is not None:
            raise self.error

    def _look(self) -> None:
        for source in self._datasets:
            try:
                misfits = find_misfits(source)
            except OSError as error:  # reading tries again, and will tell
                logger.warning("the sizes of the tars in %s cannot be looked at: %s", source.folder, error)
                continue
            if misfits:
                self.error = _refusal(source, misfits)
                return


def find_misfits(source: DatasetShards) -> list[Misfit]:
    """The tars of a data set's shards that are missing or of a wrong size, in their order.

    One listing of the folder, whose order a Lustre client reads attributes ahead in, and a stat per file.
    """
    names = [f"{shard_name(shard_id)}.tar" for shard_id in source.shard_ids.tolist()]
    expected = dict(zip(names, source.tar_bytes.tolist(), strict=True))
    folder = os.open(source.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(folder) as entries:
            found = {entry.name: _size(entry.name, folder) for entry in entries if entry.name in expected}
    finally:
        os.close(folder)
    if found == expected:
        return []
    return [
        Misfit(
            path=source.folder / name,
            shard_id=shard_id,
            found_bytes=None if found.get(name, -1) < 0 else found[name],
            expected_bytes=expected[name],
        )
        for name, shard_id in zip(names, source.shard_ids.tolist(), strict=True)
        if found.get(name, -1) != expected[name]
    ]


def _size(name: str, folder: int) -> int:
    """Bytes of a file; -1 where it is gone, or a link to nothing."""
    try:
        return os.stat(name, dir_fd=folder).st_size
    except FileNotFoundError:
        return -1


def _refusal(source: DatasetShards, misfits: list[Misfit]) -> ShardprepError:
    missing = [misfit for misfit in misfits if misfit.found_bytes is None]
    named = (missing or misfits)[:_NUM_NAMED]
    lines = "; ".join(map(_line, named))
    kind = MissingShard if missing else BrokenShard
    ids = id_ranges(misfit.shard_id for misfit in misfits)
    folder = shlex.quote(str(source.folder))
    return kind(
        f"{source.folder}: of {len(source.shard_ids)} tars {len(missing)} are missing and "
        f"{len(misfits) - len(missing)} have not their manifest's size: {lines}"
        f"{'; ...' if len(misfits) > len(named) else ''}; copy them anew, or make them again: "
        f"python -m preprocess run {folder}{f' --shards {ids}' if len(ids) <= 200 else ''}"
    )


def _line(misfit: Misfit) -> str:
    if misfit.found_bytes is None:
        return f"{misfit.path.name} is missing"
    return f"{misfit.path.name} has {misfit.found_bytes} of {misfit.expected_bytes} bytes"


ReadCheck = Literal["none", "crc"]


def check_read_check(read_check: ReadCheck, shards: ShardSet, *, looks: bool) -> bool:
    """Whether crc32s are to be compared.

    ``looks``: list the folders of crc32s, so that missing ones are known at the start; one rank is enough.
    Raises UsageError for another value, and for external tars, of which there are none; MissingShard;
    ReadWriteError.
    """
    if read_check not in get_args(ReadCheck):
        raise UsageError(f"read_check is {read_check!r}, expected {' or '.join(get_args(ReadCheck))}")
    if read_check == "none":
        return False
    for source in shards.sources:
        if isinstance(source, ExternalTar):
            raise UsageError(
                f'{source.path} is a tar of others, of which there are no crc32s; read_check="crc" is for '
                "data sets that shardprep wrote"
            )
        if looks:
            _look(source)
    return True


def _look(source: DatasetShards) -> None:
    folder = source.folder / CRCS_DIR
    found = set(with_retries(f"{folder} cannot be listed", lambda: names_in(folder)))
    missing = [
        shard_id
        for shard_id in source.shard_ids.tolist()
        if crcs_path(source.folder, shard_id).name not in found
    ]
    if missing:
        raise MissingShard(
            f'read_check is "crc", and {len(missing)} of {len(source.shard_ids)} shards have no crc32s in '
            f"{folder}, such as {crcs_path(source.folder, missing[0]).name}; run: "
            f"{crcs_command(source.folder)}, where the data set lies on disk"
        )
