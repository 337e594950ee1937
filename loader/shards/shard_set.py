"""All shards of a run as one sequence of samples: which tar holds sample g, and where in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loader.shards.tar_samples import TarSamples
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import idx_num_bytes
from shardprep.format.names import tar_path


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """Shards of one of our data sets, all or some; the arrays have a row a shard."""

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

    @property
    def idx_bytes(self) -> npt.NDArray[np.int64]:
        """int64[shards]: of each idx."""
        return idx_num_bytes(self.spec.kind, self.num_samples)

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.spec.seq_len

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
        """As DatasetShards has it: a row a shard, and this is one."""
        return np.array([len(self.samples.offset)])

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Where they were counted; else a guess of 4 bytes a token."""
        counted = self.samples.num_tokens
        return np.array([counted.sum() if (counted >= 0).all() else self.tar_bytes // 4])

    def path_of(self, _row: int) -> Path:
        """The tar."""
        return self.path

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.samples.row_tokens

    @property
    def fingerprint(self) -> str:
        """Of sizes, places and some of the content; the path is outside it."""
        return self.samples.fingerprint


class ShardSet:
    """Shards in the order they were named; sample g is counted through all of them."""

    def __init__(self, sources: Iterable[DatasetShards | ExternalTar]) -> None:
        self.sources = tuple(sources)
        counts = [np.zeros(0, np.int64), *(source.num_samples for source in self.sources)]
        # Shard s is row s - source_first[i] of source i.
        self.source_first = np.cumsum(list(map(len, counts)))
        self.first_sample = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)

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
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    @property
    def num_shards(self) -> int:
        return len(self.first_sample) - 1

    @property
    def tar_bytes(self) -> int:
        return sum(int(np.sum(source.tar_bytes)) for source in self.sources)

    @property
    def datasets(self) -> list[DatasetShards]:
        """Those sources that are data sets of ours."""
        return [source for source in self.sources if isinstance(source, DatasetShards)]

    @property
    def has_external(self) -> bool:
        """Whether some shards are external tars."""
        return len(self.datasets) < len(self.sources)

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where all are packed rows of one length, else 0."""
        lengths = {source.row_tokens for source in self.sources}
        return lengths.pop() if len(lengths) == 1 else 0

    @property
    def has_rows(self) -> bool:
        """Whether some samples are packed rows."""
        return any(source.row_tokens for source in self.sources)

    @property
    def mean_tokens(self) -> float:
        """Tokens a sample, roughly."""
        num_tokens = sum(int(source.num_tokens.sum()) for source in self.sources)
        return max(num_tokens / max(self.num_samples, 1), 1.0)

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
        return f"sample {sample - int(self.first_sample[shard])} of {source.path_of(row)}"
