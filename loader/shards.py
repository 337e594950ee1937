"""The shards of a run, their samples numbered as one sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.order import Int64s
from shardprep.errors import UsageError
from shardprep.format.names import DatasetSpec, blank_id, tar_path

SplitName = Literal["train", "validation"]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise UsageError for a value of an argument that is none of a Literal's."""
    if value not in get_args(choices):
        raise UsageError.of_value(name, value, " or ".join(map(repr, get_args(choices))))


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """All or some shards of one data set, or one tar that others wrote; the arrays have a row per shard."""

    folder: Path
    spec: DatasetSpec
    shard_ids: Int64s
    num_samples: Int64s
    num_tokens: Int64s
    tar_bytes: Int64s
    tar_sha256: npt.NDArray[np.str_]  # the first 16 hex digits
    num_validation: Int64s | None = None  # samples, where the plan has a fraction for it
    has_blanks: bool = False  # documents of some shards are blanked
    scanned_tar: Path | None = None  # the one tar, where others wrote it
    records: Any = None  # of its samples, in place of an idx

    def path_of(self, row: int) -> Path:
        """Return the tar of a shard."""
        return self.scanned_tar or tar_path(self.folder, int(self.shard_ids[row]))

    @property
    def row_tokens(self) -> int:
        """Return the tokens of every sample where they are packed rows, else 0."""
        return self.spec.seq_len

    @property
    def has_mask(self) -> bool:
        """Return whether rows say which of their tokens have a label."""
        return self.spec.record == "chat"

    @property
    def fingerprint(self) -> str:
        """Hash plan, shards and content. A data set may move: its folder is outside it."""
        parts = [self.shard_ids.astype("<i8").tobytes(), ",".join(self.tar_sha256.tolist()).encode()]
        return hashlib.sha256(b"|".join([self.spec.plan_id.encode(), *parts])).hexdigest()


class ShardSet:
    """Shards in the order they were named; sample g is counted through all of them.

    A *record* is a sample as its shard counts it. Of a split, training has the first records of each shard
    and validation the last ones, so for training nothing moves.
    """

    def __init__(self, sources: Iterable[DatasetShards], split: SplitName | None = None) -> None:
        self.sources = tuple(sources)
        self.datasets = [source for source in self.sources if source.records is None]
        self.has_external = len(self.datasets) < len(self.sources)
        # Shard s is row s - source_first[i] of source i.
        self.source_first = np.cumsum([0, *(len(source.num_samples) for source in self.sources)])
        none = np.zeros(0, np.int64)
        self.num_records = np.concatenate([none, *(source.num_samples for source in self.sources)])
        # Whether some plan holds documents out; of the others all samples are on either side.
        is_planned = [source.num_validation is not None for source in self.sources]
        self.has_planned = any(is_planned)
        if split == "train" and not all(is_planned):
            path = next((each.folder for each in self.datasets if not each.spec.validation_fraction), None)
            remedy = "--validation_fraction"
            expected = f"data sets that were planned with {remedy}; plan one with it, or leave split out"
            raise UsageError(path=path, found='split="train"', expected=expected, remedy=remedy)
        self.split = split if self.has_planned else None  # None: the samples of both sides
        held_out = [
            source.num_samples if source.num_validation is None else source.num_validation
            for source in self.sources
        ]
        # Where samples for validation begin in each shard.
        self.first_held_out = self.num_records - np.concatenate([none, *held_out])
        counts, self._first_of_side = self.num_records, np.zeros(len(self.num_records), np.int64)
        if self.split == "train":
            counts = self.first_held_out
        elif self.split == "validation":
            counts, self._first_of_side = self.num_records - self.first_held_out, self.first_held_out
        self.first_sample = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_shards = len(counts)
        self.num_samples = int(self.first_sample[-1])
        lengths = {source.row_tokens for source in self.sources}
        self.has_rows = any(lengths)  # whether some samples are packed rows
        # Tokens of every sample where all are packed rows of one length, else 0.
        self.row_tokens = lengths.pop() if len(lengths) == 1 else 0
        self.has_masks = any(source.has_mask for source in self.sources)
        num_tokens = sum(int(source.num_tokens.sum()) for source in self.sources)
        self.mean_tokens = max(num_tokens / max(int(self.num_records.sum()), 1), 1.0)  # of a sample, roughly

    def records_of(self, samples: Int64s, shard: Int64s | int) -> Int64s:
        """Return where samples stand in their shards: int64[n] -> int64[n]."""
        return samples - self.first_sample[shard] + self._first_of_side[shard]

    def shard_of(self, samples: Int64s) -> Int64s:
        """Return the shard of each sample, counted through all sources, in the same shape."""
        return np.searchsorted(self.first_sample, samples, side="right") - 1

    def locate(self, shard: int) -> tuple[DatasetShards, int]:
        """Return the source of a shard, counted through all sources, and its row there."""
        number = int(np.searchsorted(self.source_first, shard, side="right")) - 1
        return self.sources[number], shard - int(self.source_first[number])

    def path_and_record(self, sample: int) -> tuple[Path, int]:
        """Return the tar that holds a sample, and its number in it."""
        shard = int(self.shard_of(np.array(sample)))
        source, row = self.locate(shard)
        return source.path_of(row), int(self.records_of(np.array(sample), shard))

    @property
    def split_words(self) -> str:
        """Say which side this is and by which rule, or "" where no document is held out."""
        if self.split is not None:
            fractions = dict.fromkeys(data.spec.validation_fraction for data in self.datasets)
            rules = [f"{fraction:g} of the documents by their content" for fraction in fractions if fraction]
            return f"split: {self.split}, by plan, {', '.join(rules)}"
        if self.has_planned:
            return "split: none, with the documents that the plan holds out for validation"
        return ""

    @property
    def blank_id(self) -> int | None:
        """Return what binary ids of blanked documents are; None where no document is blanked."""
        blanks = [blank_id(data.spec.tokenizer.vocab_size) for data in self.sources if data.has_blanks]
        return blanks[0] if blanks else None

    @property
    def tar_bytes(self) -> int:
        """Return the bytes of all tars, of a split its part as by the number of samples."""
        num_bytes = sum(int(np.sum(source.tar_bytes)) for source in self.sources)
        if self.split is None:
            return num_bytes
        return num_bytes * self.num_samples // int(self.num_records.sum())

    @property
    def fingerprint(self) -> str:
        """Hash all sources in their order: sha256."""
        return hashlib.sha256("".join(source.fingerprint for source in self.sources).encode()).hexdigest()
