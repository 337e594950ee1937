"""The shards of a source, whose samples are numbered as one sequence.

Shards are known from their manifests, and opened when their samples are read (reading.py). Here only
``Origin`` opens an idx, and a split reads a plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loader.order.hashes import Int64s
from shardprep.errors import NotFound, UsageError
from shardprep.files import NOT_THERE, ReadFile
from shardprep.format import names
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import IdxRecords, read_idx
from shardprep.format.inputs import name_of_input, place_text
from shardprep.format.plan import read_input_names, read_plan
from shardprep.format.spec import DatasetSpec, blank_id

SplitName = Literal["train", "validation"]
VALIDATION = "validation"  # the name of a source that is for validation as a whole
# A data set is for validation, too, if its folder's name has one of these words.
_VALIDATION_WORDS = {
    "dev", "eval", "evaluation", "heldout", "holdout", "test", "val", "valid", "validation",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """All or some shards of one data set, or one tar of another tool. The arrays have a value per shard.

    ``shard_index``: of a shard in these arrays.
    """

    folder: DataFolder
    spec: DatasetSpec
    shard_ids: Int64s
    num_samples: Int64s
    num_tokens: Int64s
    tar_bytes: Int64s
    tar_sha256: npt.NDArray[np.str_]  # the first 16 hex digits
    num_validation: Int64s  # samples for validation; all samples if the plan holds none out
    has_blanks: bool = False  # whether some documents are blanked
    scanned_tar: Path | None = None  # the tar of another tool
    records: Any = None  # of the samples in this tar, instead of an idx

    def path_of(self, shard_index: int) -> Path:
        """Return the path of a shard's tar."""
        return self.scanned_tar or self.folder.path_of(names.tar_name(int(self.shard_ids[shard_index])))

    def open_tar(self, shard_index: int) -> ReadFile:
        """Open a shard's tar. Raises FileNotFoundError, BrokenShard or OSError."""
        if self.scanned_tar is not None:
            return ReadFile(self.scanned_tar)
        return self.folder.open(names.tar_name(int(self.shard_ids[shard_index])))

    @property
    def fingerprint(self) -> str:
        """Hash the plan, the shards and their content, but not the folder: a data set may be moved."""
        ids = self.shard_ids.astype("<i8").tobytes()
        hashes = ",".join(self.tar_sha256.tolist())
        return hashlib.sha256(b"|".join([self.spec.plan_id.encode(), ids, hashes.encode()])).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a document is stored."""

    source: str  # name of its source; "all" if sources have no names
    tar: Path
    sample: int  # its number in the tar, from 0
    document: int  # its number in a packed row, from 0; 0 for a document that is a sample
    place: str  # input and its byte or row, where the document (a row: its first one) begins; "" if unknown
    address: str  # for ``shardprep peek DATA``, such as "3:17:2"; "" for tars of other tools


# A loop may look up each document of each batch.
@lru_cache(maxsize=4)
def _cached_input_names(folder: DataFolder) -> list[str]:
    found = read_input_names(folder)
    folder.close()
    return found


@lru_cache(maxsize=16)
def _cached_idx(folder: DataFolder, spec: DatasetSpec, shard_id: int) -> IdxRecords:
    found = read_idx(folder, spec, shard_id)
    folder.close()
    return found


class ShardSet:
    """Shards with numbers from 0, and their samples, numbered through all of them from 0.

    The order of shards: folders, index.json and tars of other tools as they were named, each with its shards
    by number; then the shards of ours that were named one by one, folder by folder, in the order in which
    their folders were first named, and each folder's as they were named. Within a shard the samples have the
    order of its idx, which is that of the tar. With a split, training has the first records of each idx and
    validation the last ones, so training samples have the same record numbers as without a split.
    """

    def __init__(self, datasets: Iterable[DatasetShards], split: SplitName | None = None) -> None:
        self.datasets = tuple(datasets)
        self.with_idx = [each for each in self.datasets if each.records is None]
        self.has_external = len(self.with_idx) < len(self.datasets)
        # Shard s has the index s - first_of_dataset[i] in data set i: int64[data sets + 1].
        self.first_of_dataset = np.cumsum([0, *(len(each.num_samples) for each in self.datasets)])
        # Whether some plan holds documents out. All samples of other data sets are for validation.
        self.has_planned = any(each.spec.validation_fraction > 0 for each in self.datasets)
        self.split = split if self.has_planned else None  # None: the samples of both sides
        # Of each shard: all records, those for validation, and the first of these: int64[shards].
        self.num_records = np.concatenate([each.num_samples for each in self.datasets])
        num_held_out = np.concatenate([each.num_validation for each in self.datasets])
        self.first_held_out = self.num_records - num_held_out
        # The samples of this side: how many of each shard, and the record of the first one: int64[shards].
        num_of_side = self.num_records
        self._first_of_side = np.zeros(len(self.num_records), np.int64)
        if self.split == "train":
            num_of_side = self.first_held_out
        elif self.split == "validation":
            num_of_side = num_held_out
            self._first_of_side = self.first_held_out
        # Shard s has the samples first_sample[s] to first_sample[s + 1]: int64[shards + 1].
        self.first_sample = np.concatenate([[0], np.cumsum(num_of_side)]).astype(np.int64)
        self.num_shards = len(num_of_side)
        self.num_samples = int(self.first_sample[-1])
        lengths = {each.spec.seq_len for each in self.datasets}  # 0 for documents
        self.has_rows = any(lengths)  # whether some samples are packed rows
        self.row_tokens = lengths.pop() if len(lengths) == 1 else 0  # 0 unless all are rows of one length
        self.has_masks = any(each.spec.record == "chat" for each in self.datasets)
        num_tokens = sum(int(each.num_tokens.sum()) for each in self.datasets)
        self.mean_tokens = max(num_tokens / max(int(self.num_records.sum()), 1), 1.0)  # approximate

    def record_numbers(self, samples: Int64s, shard: Int64s | int) -> Int64s:
        """Return the record numbers of samples in their shards: int64[n] -> int64[n]."""
        return samples - self.first_sample[shard] + self._first_of_side[shard]

    def shard_of(self, samples: Int64s) -> Int64s:
        """Return the shard of each sample, counted through all data sets, in the same shape."""
        return np.searchsorted(self.first_sample, samples, side="right") - 1

    def locate(self, shard: int) -> tuple[DatasetShards, int]:
        """Return the data set of a shard, counted through all data sets, and the shard's index in it."""
        number = int(np.searchsorted(self.first_of_dataset, shard, side="right")) - 1
        return self.datasets[number], shard - int(self.first_of_dataset[number])

    def origin(self, name: str, shard: int, sample: int, document: int) -> Origin:
        """Return where a document of ``batch["origins"]`` is stored. Raises UsageError."""
        if not 0 <= shard < self.num_shards or not 0 <= sample < self.num_records[shard]:
            expected = f'batch["origins"][n, 2:] of this loader, whose source has {self.num_shards:,} shards'
            raise UsageError(found=f"shard {shard}, sample {sample} of the source {name}", expected=expected)
        data, shard_index = self.locate(shard)
        place = address = ""
        if data.records is None:
            shard_id = int(data.shard_ids[shard_index])
            address = f"{shard_id}:{sample}:{document}" if data.spec.has_rows else f"{shard_id}:{sample}"
            with contextlib.suppress(NotFound, *NOT_THERE):  # a copy may lack its idx or its plan
                record = _cached_idx(data.folder, data.spec, shard_id)[sample]
                name_of = name_of_input(_cached_input_names(data.folder), int(record["input_number"]))
                place = place_text(name_of, int(record["input_offset"]))
        tar = data.path_of(shard_index)
        return Origin(source=name, tar=tar, sample=sample, document=document, place=place, address=address)

    def refuse_unplanned(self) -> None:
        """Raise UsageError if a data set has no documents that are held out. For ``split="train"``."""
        if all(each.spec.validation_fraction > 0 for each in self.datasets):
            return
        path = next((each.folder for each in self.with_idx if not each.spec.validation_fraction), None)
        remedy = "--validation_fraction"
        expected = f"data sets that were planned with {remedy}; plan the data with it, or omit split"
        raise UsageError(path=path, found='split="train"', expected=expected, remedy=remedy)

    def refuse_training_sets(self) -> None:
        """Raise UsageError for a data set that holds nothing out and is not for validation as a whole."""
        for dataset in self.with_idx:
            if dataset.spec.validation_fraction > 0 or _is_for_validation(dataset.folder):
                continue
            remedy = f'input_shards={{"{VALIDATION}": {str(dataset.folder)!r}}}'
            expected = (
                "a data set that was planned with --validation_fraction or --split validation; if all its "
                f"documents are for validation, name it so: {remedy}"
            )
            found = 'split="validation" of a data set that holds no document out'
            raise UsageError(path=dataset.folder, found=found, expected=expected, remedy=remedy)

    @property
    def split_text(self) -> str:
        """Describe the split, or return "" if no document is held out."""
        if not self.has_planned:
            return ""
        if self.split is None:
            return "split: none, so documents that are held out for validation are included"
        fractions = {each.spec.validation_fraction for each in self.with_idx} - {0}
        percents = ", ".join(f"{100 * fraction:g}%" for fraction in sorted(fractions))
        return f"split: {self.split}; {percents} of the documents are held out for validation"

    @property
    def blank_id(self) -> int | None:
        """Return the binary id of blanked documents, or None if no document is blanked."""
        found = [blank_id(each.spec.tokenizer.vocab_size) for each in self.with_idx if each.has_blanks]
        return found[0] if found else None

    @property
    def tar_bytes(self) -> int:
        """Return the bytes of all tars, for a split in proportion to its number of samples."""
        num_bytes = sum(int(np.sum(each.tar_bytes)) for each in self.datasets)
        return num_bytes * self.num_samples // max(int(self.num_records.sum()), 1)

    @property
    def fingerprint(self) -> str:
        """Hash all data sets in their order: sha256."""
        return hashlib.sha256("".join(each.fingerprint for each in self.datasets).encode()).hexdigest()


def _is_for_validation(folder: DataFolder) -> bool:
    """Return whether a data set's folder is named as validation, or only such inputs were planned."""
    if not _VALIDATION_WORDS.isdisjoint(re.split(r"[^a-z]+", folder.path.name.lower())):
        return True
    plan = read_plan(folder)
    planned = set() if plan is None else {name.strip() for name in plan.options.split.split(",")}
    return bool(planned - {""}) and planned <= _VALIDATION_WORDS
