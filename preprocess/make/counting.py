"""Adds up what a manifest says of the documents of a shard."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from preprocess.make.engines import Numbers
from preprocess.read.documents import BadDocument, Documents
from shardprep.errors import BadInput
from shardprep.format.manifest import LENGTH_BITS, ShardCounts, SourceCounts, TextCounts, ValidationCounts
from shardprep.format.names import is_chosen, source_of_path

_MOST_SOURCES = 1000  # of one shard: its manifest names each
_MOST_LENGTHS = 64 << (LENGTH_BITS - 1)


class _Source:
    """What one source gave."""

    def __init__(self) -> None:
        self.num_quarantined = 0
        self.num_bytes = 0  # of the input files; where records name the source, of their texts
        self.num_text_bytes = self.num_chars = 0
        self.lengths = np.zeros((2, _MOST_LENGTHS), np.int64)  # documents and tokens, see TextCounts

    def add_texts(self, texts: list[bytes], num_tokens: Numbers) -> None:
        joined = b"".join(texts)
        self.num_text_bytes += len(joined)
        # The bytes of UTF-8 that go on with a character are 10xxxxxx.
        self.num_chars += int(np.count_nonzero(np.frombuffer(joined, np.int8) >= -64))
        dropped = np.maximum(np.frexp(num_tokens)[1] - LENGTH_BITS, 0)
        place = (dropped << (LENGTH_BITS - 1)) + (num_tokens >> dropped)
        self.lengths[0] += np.bincount(place, minlength=_MOST_LENGTHS)
        self.lengths[1] += np.bincount(place, num_tokens, _MOST_LENGTHS).astype(np.int64)

    def source_counts(self) -> SourceCounts:
        num_documents, num_tokens = self.lengths.sum(axis=1).tolist()
        return SourceCounts(
            num_documents=num_documents,
            num_tokens=num_tokens,
            num_bytes=self.num_bytes,
            num_quarantined=self.num_quarantined,
        )

    def text_counts(self) -> TextCounts:
        lengths: dict[str, list[int]] = {}
        for place in np.flatnonzero(self.lengths[0]).tolist():
            dropped = max((place >> (LENGTH_BITS - 1)) - 1, 0)
            low = (place - (dropped << (LENGTH_BITS - 1))) << dropped
            lengths[str(low)] = self.lengths[:, place].tolist()
        return TextCounts(num_bytes=self.num_text_bytes, num_chars=self.num_chars, lengths=lengths)


class Counting:
    """The counts of a shard so far."""

    def __init__(self, shard_id: int, input_paths: Mapping[int, str]) -> None:
        self._shard_id = shard_id
        self._input_paths = input_paths  # by their position in the plan
        self.num_documents = self.num_tokens = 0  # without padding
        self._num_lines = self._num_empty_lines = self._input_bytes = 0
        self._histogram = np.zeros(64, np.int64)
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)
        self.bad: list[BadDocument] = []

    @property
    def bad_fraction(self) -> float:
        """Share of the documents so far that could not be used; those that the user left out do not count."""
        num_bad = sum(not is_chosen(bad.reason) for bad in self.bad)
        return num_bad / max(1, num_bad + self.num_documents)

    @property
    def bad_reasons(self) -> set[str]:
        """Why documents were left out."""
        return {bad.reason for bad in self.bad}

    def add(self, documents: Documents, num_tokens: Numbers) -> None:
        """Count a batch, given the tokens of each document. Raises BadInput for too many sources."""
        num_documents = len(documents.texts)
        self.num_documents += num_documents
        self.num_tokens += int(num_tokens.sum())
        self._num_lines += documents.num_lines
        self._num_empty_lines += documents.num_lines - num_documents - len(documents.bad)
        self._input_bytes += documents.num_bytes
        self._histogram += np.bincount(np.frexp(num_tokens)[1], minlength=64)
        self.bad += documents.bad
        self._add_to_sources(documents, num_tokens)

    def _add_to_sources(self, documents: Documents, num_tokens: Numbers) -> None:
        number = documents.input_number
        names = documents.columns.get("source")
        if names is None:
            source = self._source("", number)
            source.num_bytes += documents.num_bytes
            source.add_texts(documents.texts, num_tokens)
        else:
            places: dict[str, list[int]] = {}
            for place, name in enumerate(names):
                places.setdefault(name, []).append(place)
            for name, of_source in places.items():
                source, before = self._source(name, number), self._source(name, number).num_text_bytes
                source.add_texts([documents.texts[place] for place in of_source], num_tokens[of_source])
                source.num_bytes += source.num_text_bytes - before
        for bad in documents.bad:
            self._source(bad.named, number).num_quarantined += 1

    def _source(self, name: str, input_number: int) -> _Source:
        """Return a source by the name that a record gives; without one it is the file's."""
        name = name or source_of_path(self._input_paths[input_number])
        source = self._sources[name]
        if len(self._sources) > _MOST_SOURCES:
            raise BadInput(
                f"shard {self._shard_id:05d} has documents of more than {_MOST_SOURCES} sources, such as "
                f"{name[:60]!r}; choose a --source_field with fewer values, or leave it out"
            )
        return source

    def shard_counts(
        self, *, num_samples: int, num_padding: int, num_split: int, validation: ValidationCounts | None
    ) -> ShardCounts:
        used = np.flatnonzero(self._histogram)
        return ShardCounts(
            num_samples=num_samples,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_lines=self._num_lines,
            num_empty_lines=self._num_empty_lines,
            input_bytes=self._input_bytes,
            num_pad_tokens=num_padding,
            num_documents_across_rows=num_split,
            quarantined=dict(sorted(Counter(bad.reason for bad in self.bad).items())),
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
            sources={name: source.source_counts() for name, source in sorted(self._sources.items())},
            validation=validation,
        )

    def text_counts(self) -> dict[str, TextCounts]:
        """Return the texts of each source that has any, by name."""
        found = {name: source.text_counts() for name, source in sorted(self._sources.items())}
        return {name: counts for name, counts in found.items() if counts.lengths}
