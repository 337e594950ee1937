"""One shard on disk: its tar and idx, its quarantine file, and its manifest last, with the counts of all.

It writes and counts what Members lays out, and commits. Files have temporary names until all of them are
synced; a shard costs four syncs of files and three of folders at most, once, at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from preprocess.make.engines import Numbers
from preprocess.make.members import Batch, Members, Piece, members_of
from preprocess.read.documents import BadDocument, Documents
from preprocess.read.format import Texts
from shardprep.errors import BadInput
from shardprep.files import (
    STALE_AFTER_S,
    PublishedFile,
    make_subfolder,
    publish_bytes,
    remove_temporaries,
    size_of_file,
    sync_folder,
)
from shardprep.format.index import ChunkCrcs, idx_dtype, idx_header
from shardprep.format.manifest import (
    LENGTH_BITS,
    Manifest,
    ShardCounts,
    SourceCounts,
    ValidationCounts,
)
from shardprep.format.names import (
    DIGESTS_DIR,
    IDS_DIR,
    QUARANTINE_DIR,
    TAR_END,
    VOUCHED_PATHS,
    idx_path,
    is_chosen,
    manifest_path,
    quarantine_path,
    shard_name,
    source_of_path,
    tar_path,
)
from shardprep.format.plan import Plan

_MOST_SOURCES = 1000  # of one shard: its manifest names each
_MOST_LENGTHS = 64 << (LENGTH_BITS - 1)


class _Source:
    """What one source gave."""

    def __init__(self) -> None:
        self.num_quarantined = 0
        self.num_bytes = 0  # of the input files; where records name the source, of their texts
        self.num_text_bytes = self.num_chars = 0
        self._lengths = np.zeros((2, _MOST_LENGTHS), np.int64)  # documents and tokens

    def add_texts(self, texts: Texts, num_tokens: Numbers) -> None:
        self.num_text_bytes += texts.num_bytes
        # The bytes of UTF-8 that go on with a character are 10xxxxxx.
        is_inside = np.frombuffer(texts.joined, np.int8) < -64
        self.num_chars += texts.num_bytes - int(np.count_nonzero(is_inside))
        dropped = np.maximum(np.frexp(num_tokens)[1] - LENGTH_BITS, 0)
        place = (dropped << (LENGTH_BITS - 1)) + (num_tokens >> dropped)
        self._lengths[0] += np.bincount(place, minlength=_MOST_LENGTHS)
        self._lengths[1] += np.bincount(place, num_tokens, _MOST_LENGTHS).astype(np.int64)

    def lengths(self) -> dict[int, list[int]]:
        """Return documents and tokens by length, see TextCounts."""
        found = {}
        for place in np.flatnonzero(self._lengths[0]).tolist():
            dropped = max((place >> (LENGTH_BITS - 1)) - 1, 0)
            found[(place - (dropped << (LENGTH_BITS - 1))) << dropped] = self._lengths[:, place].tolist()
        return found


class Counting:
    """The counts of a shard so far."""

    def __init__(self, plan: Plan, shard_id: int) -> None:
        self._plan = plan
        self._shard_id = shard_id
        self.num_documents = self.num_tokens = 0  # without padding
        self._num_lines = self._input_bytes = 0
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
        number = documents.input_number
        self.num_documents += len(documents.lines)
        self.num_tokens += int(num_tokens.sum())
        self._num_lines += documents.num_lines
        self._input_bytes += documents.num_bytes
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
                source, texts = self._source(name, number), documents.texts.only(of_source)
                source.num_bytes += texts.num_bytes
                source.add_texts(texts, num_tokens[of_source])
        self.bad += documents.bad
        for bad in documents.bad:
            self._source(bad.named, number).num_quarantined += 1

    def _source(self, name: str, input_number: int) -> _Source:
        """Return a source by the name that a record gives; without one it is the file's."""
        name = name or source_of_path(self._plan.inputs[input_number].path)
        source = self._sources[name]
        if len(self._sources) > _MOST_SOURCES:
            raise BadInput(
                found=f"shard {self._shard_id:05d} has documents of more than {_MOST_SOURCES} sources, such "
                f"as {name[:60]!r}",
                expected="a --source_field with fewer values, or none",
            )
        return source

    def counts(
        self, num_samples: int, members: Members, validation: ValidationCounts | None
    ) -> tuple[ShardCounts, dict[str, Any]]:
        """Return the counts of the shard, and the TextCounts of each source with texts, as JSON has them."""
        histogram = [0] * 64
        sources, texts = {}, {}
        for name, source in sorted(self._sources.items()):
            lengths = source.lengths()
            for low, (num_documents, _) in lengths.items():
                histogram[low.bit_length()] += num_documents
            num_documents, num_tokens = map(sum, zip((0, 0), *lengths.values(), strict=True))
            sources[name] = SourceCounts(
                num_documents=num_documents,
                num_tokens=num_tokens,
                num_bytes=source.num_bytes,
                num_quarantined=source.num_quarantined,
            )
            if lengths:
                texts[name] = {
                    "num_bytes": source.num_text_bytes,
                    "num_chars": source.num_chars,
                    "lengths": {str(low): both for low, both in lengths.items()},
                }
        while histogram and not histogram[-1]:
            histogram.pop()
        counts = ShardCounts(
            num_samples=num_samples,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_lines=self._num_lines,
            num_empty_lines=self._num_lines - self.num_documents - len(self.bad),
            input_bytes=self._input_bytes,
            num_pad_tokens=members.num_padding,
            num_documents_across_rows=members.num_split,
            quarantined=dict(sorted(Counter(bad.reason for bad in self.bad).items())),
            length_histogram=histogram,
            sources=sources,
            validation=validation,
        )
        return counts, texts


def _marks(folder: Path, shard_id: int) -> tuple[Path, Path]:
    """Return two files whose names are known, so that no task lists DATA to find what other attempts left.

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

    def __init__(self, folder: Path, plan: Plan, shard_id: int) -> None:
        """``folder``: where the files appear, the plan's or another one."""
        self._folder, self._plan, self._shard_id = folder, plan, shard_id
        self._spec = plan.spec
        self.members = members_of(plan.spec, shard_id, plan.options)
        self.counting = Counting(plan, shard_id)
        self._num_samples = 0
        self._crcs = ChunkCrcs(idx_dtype(plan.spec.kind))
        self._validation: list[Piece] = []  # whose records and digests come behind all others
        self._files = contextlib.ExitStack()

    def __enter__(self) -> ShardWriter:
        folder, shard_id = self._folder, self._shard_id
        side_files = self._plan.options.side_files()
        begun, self._again = _marks(folder, shard_id)
        ours = [begun]  # held before it is made: a signal may come in between
        with self._files as files:
            files.callback(weakref.finalize(self, _unlink, ours, os.getpid()))
            self._is_alone = _is_new(begun)
            if not self._is_alone:
                ours.clear()
                _is_new(self._again)
                remove_temporaries_of([shard_id], folder, older_than_s=STALE_AFTER_S)
            self._tar = self._file(tar_path(folder, shard_id))
            self._idx = self._file(idx_path(folder, shard_id))
            self._ids, self._digests = (
                self._file(VOUCHED_PATHS[name](folder, shard_id)) if name in side_files else None
                for name in ("ids", "digests")
            )
            self._idx.write(idx_header(self._spec, shard_id))
            self._files = files.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _file(self, path: Path) -> PublishedFile:
        if path.parent != self._folder:
            make_subfolder(self._folder, path.parent.name)
        return self._files.enter_context(PublishedFile(path))

    def append(self, batch: Batch) -> None:
        """Add documents, in the order of the input."""
        self.counting.add(batch.documents, np.diff(batch.tokens.offsets))
        if self._ids is not None:
            # A line of JSON for each document: its input, its place there, its id; lines of text have none.
            documents = batch.documents
            ids = documents.columns.get("id") or [""] * len(documents.lines)
            rows = [
                orjson.dumps([documents.input_number, offset, name], option=orjson.OPT_APPEND_NEWLINE)
                for offset, name in zip(documents.offsets.tolist(), ids, strict=True)
            ]
            self._ids.write(b"".join(rows))
        self._write(self.members.pieces(batch))

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
            self._num_samples += len(piece.records)
        if self._digests is not None and len(piece.digests):
            self._digests.write(piece.digests.tobytes())

    def commit(self, run: dict[str, Any], *, made_from: str | None = None) -> Manifest:
        """Publish the shard: last its manifest, with ``run`` and ``made_from`` in it."""
        self._write(self.members.rest())
        for piece in self._validation:
            self._note(piece)
        self._tar.write(TAR_END)
        self._idx.write(self._crcs.table())
        files = {"tar": self._tar, "idx": self._idx}
        others = {"quarantine": self.quarantine(), "ids": self._ids, "digests": self._digests}
        files |= {name: file for name, file in others.items() if file is not None}
        stamps: dict[str, Any] = dict.fromkeys(others) | {name: file.sync() for name, file in files.items()}
        validation = None
        if self._spec.validation_fraction:
            validation = ValidationCounts(
                num_samples=sum(len(piece.records) for piece in self._validation),
                num_documents=sum(len(piece.digests) for piece in self._validation),
                num_tokens=sum(int(piece.records["num_tokens"].sum()) for piece in self._validation),
            )
        counts, texts = self.counting.counts(self._num_samples, self.members, validation)
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=counts,
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
        """Return the unpublished quarantine file, where documents were left out."""
        if not self.counting.bad:
            return None
        file = self._file(quarantine_path(self._folder, self._shard_id))
        for bad in self.counting.bad:
            entry = {**dataclasses.asdict(bad), "source": self._plan.inputs[bad.source].path}
            del entry["named"]
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file
