"""Documents' ids -> one shard on disk: tar, idx, quarantine, and the manifest last."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from preprocess.documents import DocumentBatch
from preprocess.engines import TokenBatch
from preprocess.long_documents import BadDocument, LongDocument, UncuttableText, encodable_pieces
from preprocess.members import DocumentMembers
from preprocess.packing import START, BestFitRows, ConcatRows, Packer, RowGroup, RowMembers, append_token
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

EncodePieces = Callable[[Iterator[str]], Iterator[npt.NDArray[np.uint32]]]


class ShardWriter:
    """Writes one shard. Within ``with``; only ``commit`` makes it count, and a failure leaves nothing."""

    def __init__(
        self,
        folder: Path,
        spec: DatasetSpec,
        shard_id: int,
        *,
        options: dict[str, Any],
        sources: list[str],
        batch_size: int | None = None,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._shard_id = shard_id
        self._encoding = options["encoding"]
        self._sources = sources  # paths of the plan's inputs, for the quarantine file
        self._documents: DocumentMembers | None = None
        self._packer: Packer | None = None
        if spec.record == "documents":
            self._documents = DocumentMembers(
                spec, shard_id, keep_text=options["keep_text"], batch_size=batch_size
            )
        else:
            self._packer = BestFitRows(spec) if options["pack"] == "best_fit" else ConcatRows(spec)
        self._rows = RowMembers(spec, shard_id)
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
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def bad_fraction(self) -> float:
        """Share of the documents so far that were left out."""
        return len(self._bad) / max(1, len(self._bad) + self._num_documents)

    @property
    def why_bad(self) -> str:
        """What is wrong with the documents that were left out."""
        reasons = {bad.reason for bad in self._bad}
        words = []
        if "undecodable" in reasons:
            words.append(f"cannot be decoded as {self._encoding}")
        if "uncuttable" in reasons:
            words.append("are too long for this tokenizer to be encoded in pieces")
        return " or ".join(words)

    def append(self, documents: DocumentBatch, tokens: TokenBatch) -> None:
        """Add a batch of documents with their ids, in the order of the input."""
        if self._spec.append_eos:
            assert self._spec.tokenizer.eos_token_id is not None
            tokens = append_token(tokens, self._spec.tokenizer.eos_token_id)
        self._count_input(documents.num_lines, documents.num_empty, documents.num_bytes)
        self._count_documents(tokens.lengths)
        self._bad += documents.bad
        if self._documents:
            for member in self._documents.members(documents, tokens, self._tar.num_bytes):
                self._write(member)
            return
        assert self._packer
        starts = np.zeros(len(tokens.lengths), START)
        starts["source"] = documents.source
        starts["source_offset"] = documents.source_offsets
        self._write_rows(self._packer.append(tokens, starts))

    def append_long(self, document: LongDocument, encode: EncodePieces, *, can_be_cut: bool) -> None:
        """Add a document in pieces. One that cannot be decoded, or encoded in pieces, is left out."""
        try:
            pieces = encodable_pieces(document.text(), can_be_cut=can_be_cut)
            num_text_bytes = sum(len(piece.encode()) for piece in pieces)
        except (UnicodeDecodeError, UncuttableText) as error:
            self._count_input(1, 0, document.num_bytes)
            if isinstance(error, UnicodeDecodeError):
                self._bad.append(document.undecodable(error))
            else:
                self._bad.append(document.uncuttable())
            return
        self._count_input(1, int(num_text_bytes == 0), document.num_bytes)
        if not num_text_bytes:
            return
        ids = encode(document.text())
        if self._spec.append_eos:
            eos = np.array([self._spec.tokenizer.eos_token_id], np.uint32)
            ids = itertools.chain(ids, [eos])
        if self._documents:
            entries = self._documents.write_long(document, num_text_bytes, ids, self._tar)
            self._write((b"", entries))
            num_tokens = int(entries["num_tokens"][0])
        else:
            num_tokens = self._pack_pieces(document, ids)
        self._count_documents(np.array([num_tokens]))

    def _pack_pieces(self, document: LongDocument, pieces: Iterable[npt.NDArray[np.uint32]]) -> int:
        assert self._packer
        start: npt.NDArray[np.void] | None = np.array([(0, document.source, document.start)], START)
        num_tokens = 0
        for ids in pieces:
            self._write_rows(self._packer.append_piece(ids, start))
            start = None
            num_tokens += len(ids)
        self._write_rows(self._packer.end_document())
        return num_tokens

    def _count_input(self, num_lines: int, num_empty: int, num_bytes: int) -> None:
        self._num_lines += num_lines
        self._num_empty += num_empty
        self._input_bytes += num_bytes

    def _count_documents(self, num_tokens: npt.NDArray[np.int64]) -> None:
        """Count documents, given the tokens of each."""
        self._num_documents += len(num_tokens)
        self._num_tokens += int(num_tokens.sum())
        self._histogram += np.bincount(np.frexp(num_tokens)[1], minlength=64)

    def _write_rows(self, groups: Iterable[RowGroup]) -> None:
        for group in groups:
            self._write(self._rows.member(group, self._tar.num_bytes))

    def _write(self, member: tuple[bytes | memoryview, npt.NDArray[np.void]]) -> None:
        data, entries = member
        self._tar.write(data)
        records = entries.tobytes()
        self._idx.write(records)
        self._crcs.add(records)
        self._num_samples += len(entries)

    def commit(self, run: dict[str, Any]) -> Manifest:
        """Publish the shard; its manifest, with ``run`` in it, comes last."""
        if self._packer:
            self._write_rows(self._packer.finish())
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
            entry = {**dataclasses.asdict(bad), "source": self._sources[bad.source]}
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
            num_pad_tokens=self._rows.num_padding,
            num_documents_across_rows=self._packer.num_cut if self._packer else 0,
            input_bytes=self._input_bytes,
            quarantined={reason: sum(bad.reason == reason for bad in self._bad) for reason in reasons},
            length_histogram=self._histogram[: used[-1] + 1].tolist() if len(used) else [],
        )
