"""The counts of a shard: documents, tokens and lengths by source, and documents that were left out."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from preprocess.read.documents import BadDocument, DocumentBatch
from preprocess.read.formats import Numbers, Texts
from shardprep.errors import BadInput
from shardprep.format import manifest as manifests
from shardprep.format import names
from shardprep.format.manifest import LENGTH_BITS, ValidationCounts

_MAX_SOURCES = 1000  # per shard: its manifest lists them
_NUM_LENGTH_BINS = 64 << (LENGTH_BITS - 1)  # for the lengths in TextCounts


class _Source:
    """The counts of one source."""

    def __init__(self) -> None:
        self.num_quarantined = 0
        self.num_bytes = 0  # of the input files, or of the texts if records name the source
        self.num_text_bytes = self.num_chars = 0
        self.num_learnt_tokens: int | None = None  # of conversations
        self._lengths = np.zeros((2, _NUM_LENGTH_BINS), np.int64)  # documents and tokens

    def add(self, texts: Texts, num_tokens: Numbers, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_text_bytes += texts.num_bytes
        # Continuation bytes of UTF-8 are 10xxxxxx.
        is_inside = np.frombuffer(texts.joined, np.int8) < -64
        self.num_chars += texts.num_bytes - int(np.count_nonzero(is_inside))
        dropped = np.maximum(np.frexp(num_tokens)[1] - LENGTH_BITS, 0)  # bits after the first LENGTH_BITS
        place = (dropped << (LENGTH_BITS - 1)) + (num_tokens >> dropped)
        self._lengths[0] += np.bincount(place, minlength=_NUM_LENGTH_BINS)
        self._lengths[1] += np.bincount(place, num_tokens, _NUM_LENGTH_BINS).astype(np.int64)

    def add_learnt(self, num_tokens: int) -> None:
        self.num_learnt_tokens = num_tokens + (self.num_learnt_tokens or 0)

    def merge(self, other: _Source) -> None:
        self.num_quarantined += other.num_quarantined
        self.num_bytes += other.num_bytes
        self.num_text_bytes += other.num_text_bytes
        self.num_chars += other.num_chars
        self._lengths += other._lengths
        if other.num_learnt_tokens is not None:
            self.add_learnt(other.num_learnt_tokens)

    def lengths(self) -> dict[int, list[int]]:
        """Return documents and tokens by length, as TextCounts has them."""
        found = {}
        for place in np.flatnonzero(self._lengths[0]).tolist():
            dropped = max((place >> (LENGTH_BITS - 1)) - 1, 0)
            found[(place - (dropped << (LENGTH_BITS - 1))) << dropped] = self._lengths[:, place].tolist()
        return found


class Counting:
    """The counts of a shard so far."""

    def __init__(self, shard_id: int) -> None:
        self._shard_id = shard_id
        self.num_documents = self.num_tokens = 0  # without padding
        self._num_lines = self._num_used_lines = 0
        self.num_bytes = 0  # of the input
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)
        self.num_of_field: Counter[str] = Counter()  # documents by the field of their text, if several may be
        self.bad: list[BadDocument] = []  # left out, for any reason

    @property
    def unusable(self) -> list[BadDocument]:
        """Return the documents that were left out, without those that the user chose to leave out."""
        return [each for each in self.bad if not names.is_chosen(each.reason)]

    @property
    def bad_fraction(self) -> float:
        """Return the share of unusable documents so far."""
        num_bad = len(self.unusable)
        return num_bad / max(1, num_bad + self.num_documents)

    @property
    def bad_reasons(self) -> set[str]:
        """Return the reasons why documents were unusable."""
        return {each.reason for each in self.unusable}

    def add(self, documents: DocumentBatch, num_tokens: Numbers, num_learnt: Numbers | None = None) -> None:
        """Count a batch, given the tokens of each document, and of a conversation those with labels."""
        file_source = names.source_of_path(documents.input_path)
        self.num_documents += len(documents.lines)
        self.num_tokens += int(num_tokens.sum())
        self._num_lines += documents.num_lines
        # Several documents of a conversation have one line.
        self._num_used_lines += len(documents.lines) - int(np.count_nonzero(np.diff(documents.lines) == 0))
        self.num_bytes += documents.num_bytes
        if "source" not in documents.columns:
            self._sources[file_source].add(documents.texts, num_tokens, documents.num_bytes)
            if num_learnt is not None:
                self._sources[file_source].add_learnt(int(num_learnt.sum()))
        self.num_of_field.update(documents.columns.get("field", ()))
        numbers_of = defaultdict[str, list[int]](list)  # documents of each source that records name
        for number, name in enumerate(documents.columns.get("source", ())):
            numbers_of[name or file_source].append(number)
        for name, numbers in numbers_of.items():
            texts = documents.texts.only(numbers)
            self._sources[name].add(texts, num_tokens[numbers], texts.num_bytes)
            if num_learnt is not None:
                self._sources[name].add_learnt(int(num_learnt[numbers].sum()))
        self.bad += documents.bad
        for bad in documents.bad:
            self._sources[bad.source or file_source].num_quarantined += 1

    def merge(self, other: Counting) -> None:
        """Add the counts of the next documents. Raises BadInput for too many sources."""
        self.num_documents += other.num_documents
        self.num_tokens += other.num_tokens
        self._num_lines += other._num_lines
        self._num_used_lines += other._num_used_lines
        self.num_bytes += other.num_bytes
        for name, source in other._sources.items():
            self._source(name).merge(source)
        self.num_of_field.update(other.num_of_field)
        self.bad += other.bad

    def _source(self, name: str) -> _Source:
        source = self._sources[name]
        if len(self._sources) > _MAX_SOURCES:
            found = f"documents of more than {_MAX_SOURCES} sources in shard {self._shard_id:05d}, such as "
            expected = "a --source_field with fewer values, or none"
            raise BadInput(found=f"{found}{name[:60]!r}", expected=expected)
        return source

    def counts(
        self, num_samples: int, *, num_padding: int, num_split: int, validation: ValidationCounts | None
    ) -> tuple[manifests.ShardCounts, dict[str, manifests.TextCounts]]:
        """Return the counts of the shard, and the counts of texts by source."""
        histogram = [0] * 64
        sources, texts = {}, {}
        for name, source in sorted(self._sources.items()):
            lengths = source.lengths()
            for low, (num_documents, _) in lengths.items():
                histogram[low.bit_length()] += num_documents
            sources[name] = manifests.SourceCounts(
                num_documents=sum(both[0] for both in lengths.values()),
                num_tokens=sum(both[1] for both in lengths.values()),
                num_bytes=source.num_bytes,
                num_quarantined=source.num_quarantined,
                num_learnt_tokens=source.num_learnt_tokens,
            )
            if lengths:
                texts[name] = manifests.TextCounts(
                    num_bytes=source.num_text_bytes,
                    num_chars=source.num_chars,
                    lengths={str(low): both for low, both in lengths.items()},
                )
        while histogram and not histogram[-1]:
            histogram.pop()
        counts = manifests.ShardCounts(
            num_samples=num_samples,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_lines=self._num_lines,
            num_empty_lines=self._num_lines - self._num_used_lines - len(self.bad),
            input_bytes=self.num_bytes,
            num_pad_tokens=num_padding,
            num_documents_across_rows=num_split,
            quarantined=dict(sorted(Counter(bad.reason for bad in self.bad).items())),
            length_histogram=histogram,
            sources=sources,
            validation=validation,
            num_of_field=dict(sorted(self.num_of_field.items())),
        )
        return counts, texts
