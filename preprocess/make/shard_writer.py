"""One shard on disk: its tar and idx, its quarantine file, and its manifest last.

It writes what Members lays out, counts, and commits. Files have temporary names until all of them are synced;
a shard costs four syncs of files and three of folders at most, once, at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson

from preprocess.make.engines import Ids, Numbers, TokenBatch
from preprocess.make.members import Digests, Members, Piece, Prepared
from preprocess.read.format import DocumentBatch, SourceTexts
from preprocess.read.inputs import BadDocument
from preprocess.read.long_documents import LongDocument
from shardprep.errors import BadInput, CannotWrite
from shardprep.files import (
    STALE_AFTER_S,
    PublishedFile,
    make_subfolder,
    publish_bytes,
    remove_temporaries,
    size_of_file,
    sync_folder,
)
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import ChunkCrcs, idx_dtype, idx_header
from shardprep.format.manifest import Manifest, ShardCounts, ValidationCounts
from shardprep.format.names import (
    CHOSEN_REASONS,
    DIGESTS_DIR,
    IDS_DIR,
    QUARANTINE_DIR,
    TAR_END,
    VOUCHED_PATHS,
    idx_path,
    manifest_path,
    quarantine_path,
    shard_name,
    source_of_path,
    tar_path,
)
from shardprep.format.shard_making import LENGTH_BITS, SourceCounts, TextCounts

_MOST_SOURCES = 1000  # of one shard: its manifest names each
_MOST_LENGTHS = 64 << (LENGTH_BITS - 1)
# What of ShardCounts and of SourceCounts is added up.
_COUNTS = ("num_samples", "num_documents", "num_tokens", "num_lines", "num_empty_lines", "num_filtered")
_SOURCE_COUNTS = ("num_documents", "num_tokens", "num_bytes", "num_quarantined")


class TextSums:
    """Adds up the texts of one source."""

    def __init__(self) -> None:
        self._num_bytes = self._num_chars = 0
        self._lengths = np.zeros((2, _MOST_LENGTHS), np.int64)  # documents and tokens

    def add(self, num_bytes: int, num_chars: int, num_tokens: Numbers) -> None:
        """Count documents, given the tokens of each: int64[documents]."""
        self._num_bytes += num_bytes
        self._num_chars += num_chars
        dropped = np.maximum(np.frexp(num_tokens)[1] - LENGTH_BITS, 0)
        place = (dropped << (LENGTH_BITS - 1)) + (num_tokens >> dropped)
        self._lengths[0] += np.bincount(place, minlength=_MOST_LENGTHS)
        self._lengths[1] += np.bincount(place, num_tokens, _MOST_LENGTHS).astype(np.int64)

    def counts(self) -> TextCounts:
        """What was added."""
        lengths: dict[str, list[int]] = {}
        for place in np.flatnonzero(self._lengths[0]).tolist():
            dropped = max((place >> (LENGTH_BITS - 1)) - 1, 0)
            low = (place - (dropped << (LENGTH_BITS - 1))) << dropped
            lengths[str(low)] = self._lengths[:, place].tolist()
        return TextCounts(num_bytes=self._num_bytes, num_chars=self._num_chars, lengths=lengths)


def _marks(folder: Path, shard_id: int) -> tuple[Path, Path]:
    """Two files whose names are known, so that no task lists DATA to find what other attempts left.

    The first stands while an attempt works, and stays where one was killed. Who finds it makes the second.
    """
    first, second = (folder / f".{shard_name(shard_id)}.{word}.tmp" for word in ("begun", "again"))
    return first, second


def _is_new(mark: Path) -> bool:
    """Make a mark; False where it was there. Where the folder cannot be written to, the tar will say so."""
    with contextlib.suppress(OSError):
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _unlink(marks: list[Path], owner: int) -> None:
    """Remove the mark of an attempt that ends; also where a second signal cuts its clearing up short."""
    if owner == os.getpid():
        for mark in marks:
            with contextlib.suppress(OSError):
                mark.unlink()


def remove_temporaries_of(shard_ids: Iterable[int], folder: Path, *, older_than_s: float = 0) -> None:
    """Remove what attempts at some shards left, by one look at the folder."""
    subfolders = [QUARANTINE_DIR, IDS_DIR, DIGESTS_DIR]
    remove_temporaries(folder, *map(shard_name, shard_ids), older_than_s=older_than_s, subfolders=subfolders)


def remove_leftovers(folder: Path, shard_id: int) -> None:
    """Remove what attempts at a shard that is done left, where a mark tells of any."""
    if any(size_of_file(mark) is not None for mark in _marks(folder, shard_id)):
        remove_temporaries_of([shard_id], folder)


class ShardWriter:
    """Writes one shard. Within ``with``; only ``commit`` makes it count, and a failure leaves nothing."""

    def __init__(
        self,
        folder: Path,
        spec: DatasetSpec,
        shard_id: int,
        members: Members,
        *,
        input_paths: Mapping[int, str],
        side_files: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._shard_id = shard_id
        self._members = members
        self._input_paths = input_paths  # by their position in the plan, for the quarantine file
        self._counts = Counter(dict.fromkeys((*_COUNTS, "input_bytes"), 0))
        self._histogram = np.zeros(64, np.int64)
        self.bad: list[BadDocument] = []
        self._sources: defaultdict[str, Counter[str]] = defaultdict(
            lambda: Counter(dict.fromkeys(_SOURCE_COUNTS, 0))
        )
        self._texts: defaultdict[str, TextSums] = defaultdict(TextSums)
        begun, self._again = _marks(folder, shard_id)
        ours = [begun]  # held before it is made: a signal may come in between
        self._end = weakref.finalize(self, _unlink, ours, os.getpid())
        self._is_alone = _is_new(begun)
        if not self._is_alone:
            ours.clear()
            _is_new(self._again)
            remove_temporaries_of([shard_id], folder, older_than_s=STALE_AFTER_S)
        self._tar = PublishedFile(tar_path(folder, shard_id))
        self._files = [self._tar]
        try:
            self._idx = PublishedFile(idx_path(folder, shard_id))
            self._files.append(self._idx)
            self._ids, self._digests = (
                self._subfolder_file(VOUCHED_PATHS[name](folder, shard_id)) if name in side_files else None
                for name in ("ids", "digests")
            )
        except CannotWrite:
            self.__exit__(None, None, None)
            raise
        self._idx.write(idx_header(spec, shard_id))
        self._crcs = ChunkCrcs(idx_dtype(spec.kind))
        self._validation: list[Piece] = []  # whose records and digests come behind all others

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.discard()
        self._end()

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return self._counts["num_documents"]

    @property
    def num_tokens(self) -> int:
        """Their tokens, without padding."""
        return self._counts["num_tokens"]

    @property
    def bad_fraction(self) -> float:
        """Share of the documents so far that could not be used; those that the user left out do not count."""
        num_bad = sum(bad.reason not in CHOSEN_REASONS for bad in self.bad)
        return num_bad / max(1, num_bad + self.num_documents)

    @property
    def bad_reasons(self) -> set[str]:
        """Why documents were left out."""
        return {bad.reason for bad in self.bad}

    def append(
        self, documents: DocumentBatch, tokens: TokenBatch, texts: Sequence[SourceTexts], prepared: Prepared
    ) -> None:
        """Add a batch of documents, in the order of the input: their ids, and what Members made of both."""
        num_left_out = len(documents.bad) + len(documents.filtered)
        self._counts.update(
            num_lines=documents.num_lines,
            num_empty_lines=documents.num_lines - len(documents.texts) - num_left_out,
            num_filtered=len(documents.filtered),
            input_bytes=documents.num_bytes,
        )
        num_tokens = np.diff(tokens.offsets)
        self._count_documents(num_tokens)
        self.bad += documents.bad
        self._count_sources(documents, texts, num_tokens)
        self._write_ids(documents.input_number, documents.input_offsets.tolist(), documents.ids)
        self._write(prepared())

    def append_long(
        self, document: LongDocument, num_text_bytes: int, num_chars: int, ids: Ids, digest: Digests
    ) -> None:
        """Add a document that is read in pieces; one without text, and so without ids, is an empty line."""
        place, num_tokens = document.place, np.array([len(ids)] if num_text_bytes else [], np.int64)
        self._counts.update(
            num_lines=1, num_empty_lines=int(not num_text_bytes), input_bytes=document.num_bytes
        )
        self._count_documents(num_tokens)
        name = self._count_source(
            place.input_number,
            document.source,
            num_documents=len(num_tokens),
            num_tokens=len(ids),
            num_bytes=num_text_bytes if document.source else document.num_bytes,
        )
        if num_text_bytes:
            self._texts[name].add(num_text_bytes, num_chars, num_tokens)
            self._write_ids(place.input_number, [place.start], document.told.ids)
            self._write(self._members.long_document(document, num_text_bytes, ids, digest))

    def leave_out(self, document: LongDocument, bad: BadDocument) -> None:
        """Count a document that cannot be used; its line goes to the quarantine file."""
        self._counts.update(num_lines=1, input_bytes=document.num_bytes)
        self.bad.append(bad)
        self._count_source(
            document.place.input_number, document.source, num_bytes=document.num_bytes, num_quarantined=1
        )

    def _count_sources(
        self, documents: DocumentBatch, texts: Sequence[SourceTexts], num_tokens: Numbers
    ) -> None:
        """Count a batch by source; one whose records name theirs, per record."""
        number = documents.input_number
        if documents.sources is None:
            self._count_source(number, "", num_bytes=documents.num_bytes)
        for of in texts:
            lengths = num_tokens[of.positions]
            name = self._count_source(
                number,
                of.name,
                num_documents=len(lengths),
                num_tokens=int(lengths.sum()),
                num_bytes=0 if documents.sources is None else of.num_bytes,
            )
            if len(lengths):
                self._texts[name].add(of.num_bytes, of.num_chars, lengths)
        for name, num_bad in Counter(bad.named for bad in documents.bad).items():
            self._count_source(number, name, num_quarantined=num_bad)

    def _count_source(self, input_number: int, name: str, **counts: int) -> str:
        """Count what a source gave, and return its name; without one it is the file's.

        Raises BadInput for too many sources.
        """
        name = name or source_of_path(self._input_paths[input_number])
        self._sources[name].update(counts)
        if len(self._sources) > _MOST_SOURCES:
            raise BadInput(
                f"shard {self._shard_id:05d} has documents of more than {_MOST_SOURCES} sources, such as "
                f"{name[:60]!r}; choose a --source_field with fewer values, or leave it out"
            )
        return name

    def _write_ids(self, input_number: int, offsets: list[int], ids: list[str] | None) -> None:
        """Write the ids of documents of an input, given where they begin; lines of text have none."""
        if self._ids is not None:
            named = zip(offsets, ids or [""] * len(offsets), strict=True)
            rows = [orjson.dumps([input_number, offset, name]) for offset, name in named]
            self._ids.write(b"\n".join([*rows, b""]))

    def _count_documents(self, num_tokens: Numbers) -> None:
        """Count documents, given the tokens of each."""
        self._counts.update(num_documents=len(num_tokens), num_tokens=int(num_tokens.sum()))
        self._histogram += np.bincount(np.frexp(num_tokens)[1], minlength=64)

    def _write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._tar.write(piece.data)
            if piece.is_validation:
                self._validation.append(piece._replace(data=b""))
            else:
                self._note(piece)

    def _note(self, piece: Piece) -> None:
        """Write what is said of a piece's samples beside the tar."""
        if len(piece.records):
            raw = piece.records.tobytes()
            self._idx.write(raw)
            self._crcs.add(raw)
            self._counts["num_samples"] += len(piece.records)
        if self._digests is not None and len(piece.digests):
            self._digests.write(piece.digests.tobytes())

    def commit(self, run: dict[str, Any], *, made_from: str | None = None) -> Manifest:
        """Publish the shard; its manifest, with ``run`` and ``made_from`` in it, comes last."""
        self._write(self._members.rest())
        for piece in self._validation:
            self._note(piece)
        self._tar.write(TAR_END)
        self._idx.write(self._crcs.table())
        files = {"tar": self._tar, "idx": self._idx}
        others = {"quarantine": self.quarantine(), "ids": self._ids, "digests": self._digests}
        files |= {name: file for name, file in others.items() if file is not None}
        stamps: dict[str, Any] = dict.fromkeys(others) | {name: file.sync() for name, file in files.items()}
        # For reports. They stand in ``run``, so that every shardprep reads what any of them wrote.
        texts = {name: dataclasses.asdict(sums.counts()) for name, sums in sorted(self._texts.items())}
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=self._shard_counts(),
            run={**run, "texts": texts},
            made_from=made_from,
            **stamps,
        )
        for file in files.values():
            file.publish()
            if file.path.parent != self._folder:
                sync_folder(file.path.parent)
        sync_folder(self._folder)
        publish_bytes(manifest_path(self._folder, self._shard_id), manifest.to_json())
        if not self._is_alone or size_of_file(self._again) is not None:
            remove_temporaries_of([self._shard_id], self._folder)
        return manifest

    def quarantine(self) -> PublishedFile | None:
        """The unpublished quarantine file, where documents were left out."""
        if not self.bad:
            return None
        file = self._subfolder_file(quarantine_path(self._folder, self._shard_id))
        for bad in self.bad:
            entry = {**dataclasses.asdict(bad), "source": self._input_paths[bad.source]}
            del entry["named"]
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file

    def _subfolder_file(self, path: Path) -> PublishedFile:
        make_subfolder(self._folder, path.parent.name)
        file = PublishedFile(path)
        self._files.append(file)
        return file

    def _shard_counts(self) -> ShardCounts:
        used = np.flatnonzero(self._histogram)
        validation = None
        if self._spec.validation_fraction:
            validation = ValidationCounts(
                num_samples=sum(len(piece.records) for piece in self._validation),
                num_documents=sum(len(piece.digests) for piece in self._validation),
                num_tokens=sum(int(piece.records["num_tokens"].sum()) for piece in self._validation),
            )
        return ShardCounts(
            **self._counts,
            num_pad_tokens=self._members.num_padding,
            num_documents_across_rows=self._members.num_split,
            quarantined=dict(sorted(Counter(bad.reason for bad in self.bad).items())),
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
            sources={name: SourceCounts(**counts) for name, counts in sorted(self._sources.items())},
            validation=validation,
        )
