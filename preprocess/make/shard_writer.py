"""One shard on disk: its tar and idx, its quarantine file, and its manifest last.

It writes what Members lays out, counts, and commits. Files have temporary names until all of them are synced;
a shard costs four syncs of files and three of folders at most, once, at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.formats.format import DocumentBatch
from preprocess.formats.inputs import BadDocument
from preprocess.formats.long_documents import LongDocument
from preprocess.make.engines import TokenBatch
from preprocess.make.members import Members, Piece, Prepared
from shardprep.errors import BadInput, CannotWrite
from shardprep.files import STALE_AFTER_S, PublishedFile, remove_temporaries, size_of_file, sync_folder
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import ChunkCrcs, idx_dtype, idx_header
from shardprep.format.manifest import Manifest, ShardCounts
from shardprep.format.names import (
    IDS_DIR,
    QUARANTINE_DIR,
    TAR_END,
    ids_path,
    idx_path,
    manifest_path,
    quarantine_path,
    shard_name,
    source_of_path,
    tar_path,
)
from shardprep.format.shard_making import SourceCounts

_MOST_SOURCES = 1000  # of one shard: its manifest names each


def _marks(folder: Path, shard_id: int) -> tuple[Path, Path]:
    """Two files whose names are known, so that no task lists DATA to find what other attempts left.

    The first stands while an attempt works, and stays where one was killed. Who finds it makes the second.
    """
    first, second = (folder / f".{shard_name(shard_id)}.{word}.tmp" for word in ("begun", "again"))
    return first, second


def _is_new(mark: Path) -> bool:
    """Make a mark; False where it was there. Where the folder cannot be written to, the tar will say so."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def _unlink(marks: list[Path], owner: int) -> None:
    """Remove the mark of an attempt that ends; also where a second signal cuts its clearing up short."""
    for mark in marks:
        if owner == os.getpid():
            with contextlib.suppress(OSError):
                mark.unlink()


def remove_temporaries_of(shard_ids: Iterable[int], folder: Path, *, older_than_s: float = 0) -> None:
    """Remove what attempts at some shards left, by one look at the folder."""
    subfolders = [QUARANTINE_DIR, IDS_DIR]
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
        keeps_ids: bool = False,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._shard_id = shard_id
        self._members = members
        self._input_paths = input_paths  # by their position in the plan, for the quarantine file
        self._num_samples = self._num_documents = self._num_tokens = 0
        self._num_lines = self._num_empty = self._num_filtered = self._input_bytes = 0
        self._histogram = np.zeros(64, np.int64)
        self._bad: list[BadDocument] = []
        self._sources: dict[str, SourceCounts] = {}
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
            self._ids = self._subfolder_file(ids_path(folder, shard_id)) if keeps_ids else None
        except CannotWrite:
            self.__exit__(None, None, None)
            raise
        self._idx.write(idx_header(spec, shard_id))
        self._crcs = ChunkCrcs(idx_dtype(spec.kind))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.discard()
        self._end()

    @property
    def num_bad(self) -> int:
        return len(self._bad)

    @property
    def num_documents(self) -> int:
        return self._num_documents

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def bad_fraction(self) -> float:
        """Share of the documents so far that were left out."""
        return len(self._bad) / max(1, len(self._bad) + self._num_documents)

    @property
    def bad_reasons(self) -> set[str]:
        """Why documents were left out."""
        return {bad.reason for bad in self._bad}

    def append(self, documents: DocumentBatch, made: Callable[[], tuple[TokenBatch, Prepared]]) -> None:
        """Add a batch of documents, in the order of the input.

        ``made`` gives their ids, and what ``Members.prepare`` made of both; it may wait for them.
        """
        tokens, prepared = made()
        num_left_out = len(documents.bad) + len(documents.filtered)
        num_empty = documents.num_lines - len(documents.texts) - num_left_out
        self._count_input(documents.num_lines, num_empty, documents.num_bytes)
        self._num_filtered += len(documents.filtered)
        num_tokens = np.diff(tokens.offsets)
        self._count_documents(num_tokens)
        self._bad += documents.bad
        self._count_sources(documents, num_tokens)
        if documents.ids is not None:
            self._keep_ids(documents.input_number, documents.input_offsets.tolist(), documents.ids)
        self._write(prepared())

    def append_long(
        self, document: LongDocument, num_text_bytes: int, ids: Iterable[npt.NDArray[np.uint32]]
    ) -> None:
        """Add a document whose ids come in pieces; one without text counts as an empty line."""
        self._count_input(1, int(num_text_bytes == 0), document.num_bytes)
        lengths: list[int] = []
        if num_text_bytes:

            def counted() -> Iterator[npt.NDArray[np.uint32]]:
                for piece in ids:
                    lengths.append(len(piece))
                    yield piece

            self._write(self._members.long_document(document, num_text_bytes, counted()))
            self._count_documents(np.array([sum(lengths)]))
            self._keep_ids(document.place.input_number, [document.place.start], [document.id])
        num_bytes = num_text_bytes if document.source else document.num_bytes
        self._count_source(
            document.place.input_number,
            document.source,
            SourceCounts(
                num_documents=int(num_text_bytes > 0),
                num_tokens=sum(lengths),
                num_bytes=num_bytes,
                num_quarantined=0,
            ),
        )

    def leave_out(self, document: LongDocument, bad: BadDocument) -> None:
        """Count a document that cannot be used; its line goes to the quarantine file."""
        self._count_input(1, 0, document.num_bytes)
        self._bad.append(bad)
        counts = SourceCounts(num_documents=0, num_tokens=0, num_bytes=document.num_bytes, num_quarantined=1)
        self._count_source(document.place.input_number, document.source, counts)

    def _count_input(self, num_lines: int, num_empty: int, num_bytes: int) -> None:
        self._num_lines += num_lines
        self._num_empty += num_empty
        self._input_bytes += num_bytes

    def _count_sources(self, documents: DocumentBatch, num_tokens: npt.NDArray[np.int64]) -> None:
        """Count a batch by source; one whose records name theirs, per record."""
        number = documents.input_number
        names = documents.sources or []
        by_name: dict[str, list[int]] = {}
        for position, name in enumerate(names):
            by_name.setdefault(name, []).append(position)
        for name, positions in by_name.items():
            counts = SourceCounts(
                num_documents=len(positions),
                num_tokens=int(num_tokens[positions].sum()),
                num_bytes=sum(len(documents.texts[position].encode()) for position in positions),
                num_quarantined=0,
            )
            self._count_source(number, name, counts)
        if documents.sources is None:
            rest = SourceCounts(
                num_documents=len(documents.texts),
                num_tokens=int(num_tokens.sum()),
                num_bytes=documents.num_bytes,
                num_quarantined=0,
            )
            self._count_source(number, "", rest)
        for name, num_bad in Counter(bad.named for bad in documents.bad).items():
            counts = SourceCounts(num_documents=0, num_tokens=0, num_bytes=0, num_quarantined=num_bad)
            self._count_source(number, name, counts)

    def _count_source(self, input_number: int, name: str, counts: SourceCounts) -> None:
        """Count what a source gave; without a name it is the file's. Raises BadInput for too many sources."""
        name = name or source_of_path(self._input_paths[input_number])
        before = self._sources.get(name)
        self._sources[name] = counts if before is None else before + counts
        if len(self._sources) > _MOST_SOURCES:
            raise BadInput(
                f"shard {self._shard_id:05d} has documents of more than {_MOST_SOURCES} sources, such as "
                f"{name[:60]!r}; choose a --source_field with fewer values, or leave it out"
            )

    def _keep_ids(self, input_number: int, offsets: list[int], ids: list[str]) -> None:
        if self._ids is not None:
            rows = [orjson.dumps([input_number, *row]) for row in zip(offsets, ids, strict=True)]
            self._ids.write(b"\n".join([*rows, b""]))

    def _count_documents(self, num_tokens: npt.NDArray[np.int64]) -> None:
        """Count documents, given the tokens of each."""
        self._num_documents += len(num_tokens)
        self._num_tokens += int(num_tokens.sum())
        self._histogram += np.bincount(np.frexp(num_tokens)[1], minlength=64)

    def _write(self, pieces: Iterable[Piece]) -> None:
        for data, records in pieces:
            self._tar.write(data)
            if len(records):
                raw = records.tobytes()
                self._idx.write(raw)
                self._crcs.add(raw)
                self._num_samples += len(records)

    def commit(self, run: dict[str, Any]) -> Manifest:
        """Publish the shard; its manifest, with ``run`` in it, comes last."""
        self._write(self._members.rest())
        self._tar.write(TAR_END)
        self._idx.write(self._crcs.table())
        stamps = {"tar": self._tar.sync(), "idx": self._idx.sync()}
        quarantine = self.quarantine()
        manifest = Manifest(
            spec=self._spec,
            shard_id=self._shard_id,
            counts=self._counts(),
            quarantine=None if quarantine is None else quarantine.sync(),
            ids=None if self._ids is None else self._ids.sync(),
            run=run,
            **stamps,
        )
        self._tar.publish()
        self._idx.publish()
        for file in (quarantine, self._ids):
            if file is not None:
                file.publish()
                sync_folder(file.path.parent)
        sync_folder(self._folder)
        vouching = PublishedFile(manifest_path(self._folder, self._shard_id))
        self._files.append(vouching)
        vouching.write(manifest.to_json())
        vouching.sync()
        vouching.publish()
        sync_folder(self._folder)
        if not self._is_alone or size_of_file(self._again) is not None:
            remove_temporaries_of([self._shard_id], self._folder)
        return manifest

    def quarantine(self) -> PublishedFile | None:
        """The unpublished quarantine file, where documents were left out."""
        if not self._bad:
            return None
        file = self._subfolder_file(quarantine_path(self._folder, self._shard_id))
        for bad in self._bad:
            entry = {**dataclasses.asdict(bad), "source": self._input_paths[bad.source]}
            del entry["named"]
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
        return file

    def _subfolder_file(self, path: Path) -> PublishedFile:
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
        file = PublishedFile(path)
        self._files.append(file)
        return file

    def _counts(self) -> ShardCounts:
        reasons = sorted({bad.reason for bad in self._bad})
        used = np.flatnonzero(self._histogram)
        return ShardCounts(
            num_samples=self._num_samples,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_lines=self._num_lines,
            num_empty_lines=self._num_empty,
            num_filtered=self._num_filtered,
            num_pad_tokens=self._members.num_padding,
            num_documents_across_rows=self._members.num_split,
            input_bytes=self._input_bytes,
            quarantined={reason: sum(bad.reason == reason for bad in self._bad) for reason in reasons},
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
            sources=dict(sorted(self._sources.items())),
        )
