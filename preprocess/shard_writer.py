"""One shard on disk: its tar and idx, its quarantine file, and its manifest last.

It writes what Members lays out, counts, and commits. Files have temporary names until all of them are synced;
a shard costs four syncs of files and three of folders at most, once, at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.documents import DocumentBatch
from preprocess.engines import TokenBatch
from preprocess.inputs import BadDocument
from preprocess.long_documents import LongDocument
from preprocess.members import Members, Piece, Prepared
from shardprep.atomic_files import STALE_AFTER_S, PublishedFile, remove_temporaries, sync_folder
from shardprep.errors import CannotWrite
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.idx import ChunkCrcs, idx_dtype, idx_header
from shardprep.format.manifest import Manifest, ShardCounts
from shardprep.format.names import (
    QUARANTINE_DIR,
    TAR_END,
    idx_path,
    manifest_path,
    quarantine_path,
    shard_name,
    tar_path,
)


class ShardWriter:
    """Writes one shard. Within ``with``; only ``commit`` makes it count, and a failure leaves nothing."""

    def __init__(
        self, folder: Path, spec: DatasetSpec, shard_id: int, members: Members, *, input_paths: list[str]
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._shard_id = shard_id
        self._members = members
        self._input_paths = input_paths  # of the plan, for the quarantine file
        self._num_samples = self._num_documents = self._num_tokens = 0
        self._num_lines = self._num_empty = self._input_bytes = 0
        self._histogram = np.zeros(64, np.int64)
        self._bad: list[BadDocument] = []
        remove_temporaries(
            folder, shard_name(shard_id), older_than_s=STALE_AFTER_S, subfolders=[QUARANTINE_DIR]
        )
        self._tar = PublishedFile(tar_path(folder, shard_id))
        try:
            self._idx = PublishedFile(idx_path(folder, shard_id))
        except CannotWrite:
            self._tar.discard()
            raise
        self._files = [self._tar, self._idx]
        self._idx.write(idx_header(spec, shard_id))
        self._crcs = ChunkCrcs(idx_dtype(spec.kind))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.discard()

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

    def append(
        self,
        documents: DocumentBatch,
        tokens: TokenBatch,
        prepared: Callable[[], Prepared] | None = None,
    ) -> None:
        """Add a batch of documents with their ids, in the order of the input.

        ``prepared`` gives what ``Members.prepare`` made of it; without it, that is done here.
        """
        num_empty = documents.num_lines - len(documents.texts) - len(documents.bad)
        self._count_input(documents.num_lines, num_empty, documents.num_bytes)
        self._count_documents(np.diff(tokens.offsets))
        self._bad += documents.bad
        pieces = prepared() if prepared else self._members.prepare(documents, tokens)
        self._write(pieces())

    def append_long(
        self, document: LongDocument, num_text_bytes: int, ids: Iterable[npt.NDArray[np.uint32]]
    ) -> None:
        """Add a document whose ids come in pieces; one without text counts as an empty line."""
        self._count_input(1, int(num_text_bytes == 0), document.num_bytes)
        if num_text_bytes:
            lengths: list[int] = []

            def counted() -> Iterator[npt.NDArray[np.uint32]]:
                for piece in ids:
                    lengths.append(len(piece))
                    yield piece

            self._write(self._members.long_document(document, num_text_bytes, counted()))
            self._count_documents(np.array([sum(lengths)]))

    def leave_out(self, document: LongDocument, bad: BadDocument) -> None:
        """Count a document that cannot be used; its line goes to the quarantine file."""
        self._count_input(1, 0, document.num_bytes)
        self._bad.append(bad)

    def _count_input(self, num_lines: int, num_empty: int, num_bytes: int) -> None:
        self._num_lines += num_lines
        self._num_empty += num_empty
        self._input_bytes += num_bytes

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
            run=run,
            **stamps,
        )
        self._tar.publish()
        self._idx.publish()
        if quarantine is not None:
            quarantine.publish()
            sync_folder(quarantine.path.parent)
        sync_folder(self._folder)
        vouching = PublishedFile(manifest_path(self._folder, self._shard_id))
        self._files.append(vouching)
        vouching.write(manifest.to_json())
        vouching.sync()
        vouching.publish()
        sync_folder(self._folder)
        remove_temporaries(
            self._folder, shard_name(self._shard_id), older_than_s=0, subfolders=[QUARANTINE_DIR]
        )
        return manifest

    def quarantine(self) -> PublishedFile | None:
        """The unpublished quarantine file, where documents were left out."""
        if not self._bad:
            return None
        path = quarantine_path(self._folder, self._shard_id)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
        file = PublishedFile(path)
        self._files.append(file)
        for bad in self._bad:
            entry = {**dataclasses.asdict(bad), "source": self._input_paths[bad.source]}
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
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
            num_pad_tokens=self._members.num_padding,
            num_documents_across_rows=self._members.num_split,
            input_bytes=self._input_bytes,
            quarantined={reason: sum(bad.reason == reason for bad in self._bad) for reason in reasons},
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
        )
