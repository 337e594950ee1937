"""Which documents are for validation and which for training: arithmetic, so nothing is listed or held.

Of every ``group`` consecutive documents of a shard one is for validation, chosen by a hash of the group and
of the shard's content. So a sorted data set is split evenly, and a document stays on its side whatever other
shards there are. The price: equal documents at two places may be on two sides. Packed rows are split row by
row, so a document that goes on in another row may be on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.order import hash_array
from shardprep.errors import UsageError

SplitName = Literal["train", "validation"]
LEAST_FRACTION = 1e-6


@dataclass(frozen=True, kw_only=True)
class DocumentSplit:
    """One side of the split."""

    name: SplitName
    group: int  # documents, of which one is for validation

    def num_documents(
        self, keys: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Of shards with these keys and numbers of documents, those of this side: int64[shards]."""
        whole, rest = np.divmod(counts, self.group)
        num_validation = whole + (self._chosen(keys, whole) < rest)
        return num_validation if self.name == "validation" else counts - num_validation

    def rows(self, key: np.uint64, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where documents of this side stand in their shard, ascending as ``numbers`` are: same shape."""
        if self.name == "validation":
            return numbers * self.group + self._chosen(key, numbers)
        group, within = np.divmod(numbers, self.group - 1)
        return group * self.group + within + (within >= self._chosen(key, group))

    def _chosen(
        self, key: npt.NDArray[np.uint64] | np.uint64, group: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Which document of a group is for validation, from 0."""
        hashes = hash_array(np.asarray(key, np.uint64), group)
        return (hashes % np.uint64(self.group)).astype(np.int64)


def document_split(name: SplitName | None, validation_fraction: float | None) -> DocumentSplit | None:
    """The side that a user names; None for all documents. Raises UsageError.

    A fraction is taken as 1/n, n whole. Without one, validation is all of the shards named.
    """
    if name is None or (name == "validation" and validation_fraction is None):
        if validation_fraction is not None:
            raise UsageError(
                f'validation_fraction is {validation_fraction}, and no split is named; pass split="train" or '
                'split="validation"'
            )
        return None
    if name not in get_args(SplitName):
        raise UsageError(f"split is {name!r}, expected {' or '.join(map(repr, get_args(SplitName)))}")
    if validation_fraction is None:
        raise UsageError('split="train" needs validation_fraction, what is left to split="validation"')
    if not LEAST_FRACTION <= validation_fraction <= 0.5:
        raise UsageError(f"validation_fraction is {validation_fraction}, expected {LEAST_FRACTION} to 0.5")
    return DocumentSplit(name=name, group=round(1 / validation_fraction))
